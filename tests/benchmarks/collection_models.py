"""Small models that are in use, of timm, transformers and peft, with random weights, a batch each and ten classes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from tests.benchmarks.timed_models import Built
from tests.collections.comparison import calm

__all__ = ["COLLECTIONS", "missing"]


class Classified(nn.Module):
    """Scores of the ten classes alone, in place of what a model of transformers gives.

    Args:
        inner: the model.
        width: of its last hidden states, over whose mean a head is put; None for a model that has one.
    """

    def __init__(self, inner: nn.Module, width: int | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.head = None if width is None else nn.Linear(width, 10)

    def forward(self, index: Tensor) -> Tensor:
        found = self.inner(input_ids=index)
        return found.logits if self.head is None else self.head(found.last_hidden_state.mean(1))


def _ready(module: nn.Module) -> nn.Module:
    """In float32, and calm: a batch norm that learns from the batch leaves no sample a gradient of its own."""
    return calm(module).float()


def bert(batch_size: int = 8, tokens: int = 64) -> Built:
    import transformers

    shape = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    config = transformers.BertConfig(**shape, num_labels=10)
    model = _ready(transformers.BertForSequenceClassification(config))
    return Classified(model), torch.randint(0, config.vocab_size, (batch_size, tokens))


def llama(batch_size: int = 8, tokens: int = 64) -> Built:
    import peft
    import transformers

    shape = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(**shape, intermediate_size=688, vocab_size=8192, use_cache=False)
    lora = peft.LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"])
    adapted = _ready(peft.get_peft_model(transformers.LlamaModel(config), lora))
    return Classified(adapted, config.hidden_size), torch.randint(0, config.vocab_size, (batch_size, tokens))


def images(name: str, size: int, batch_size: int, **options: Any) -> Built:
    import timm

    module = _ready(timm.create_model(name, pretrained=False, num_classes=10, **options))
    return module, torch.randn(batch_size, 3, size, size)


# dm_nfnet_f0 with a quarter of its channels; the depths are its own.
_QUARTER = {"channels": (64, 128, 384, 384), "stem_chs": 32, "num_features": 768, "group_size": 32}
COLLECTIONS: dict[str, tuple[str, Callable[[], Built]]] = {
    "bert": ("BERT-mini, batch 8 x 64 tokens", bert),
    "mobilenet": ("MobileNetV3-small, batch 8 x 3x96x96", partial(images, "mobilenetv3_small_100", 96, 8)),
    "convnext": ("ConvNeXt-atto, batch 8 x 3x64x64", partial(images, "convnext_atto", 64, 8)),
    "nfnet": ("NFNet-F0, a quarter wide, batch 8 x 3x64x64", partial(images, "dm_nfnet_f0", 64, 8, **_QUARTER)),
    "llama": ("LoRA on a Llama of 4 layers, batch 8 x 64 tokens", llama),
}
_NEEDS = {"bert": ("transformers",), "llama": ("transformers", "peft")}


def missing(model: str) -> list[str]:
    """The packages that the model needs and that are not installed."""
    return [package for package in _NEEDS.get(model, ("timm",)) if find_spec(package) is None]
