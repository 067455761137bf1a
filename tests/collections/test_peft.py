"""Adapters of peft on a small Llama of transformers, with padding and token weights."""

from __future__ import annotations

import pytest
from torch import nn

from tests.collections.comparison import Case, Trial, calm, check, needs
from tests.collections.test_transformers import GROUPED, T5, between, text

LINEAR = ["q_proj", "v_proj", "down_proj"]


def adapted(config: str, targets=LINEAR, use_reentrant: bool | None = None, base=None, **options) -> Trial:
    import peft

    trial = text("LlamaConfig", "LlamaForCausalLM", GROUPED) if base is None else base()
    kind = "SEQ_2_SEQ_LM" if base is not None else "CAUSAL_LM"
    parts = {} if targets is None else {"target_modules": targets}
    module = calm(peft.get_peft_model(trial.module, getattr(peft, config)(task_type=kind, **parts, **options)))
    if use_reentrant is not None:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        module.config.use_cache = False
        module.enable_input_require_grads()
    trial.module = module
    assert any(not p.requires_grad for p in module.parameters())
    return trial


def between_adapted(**options) -> Trial:
    return adapted(
        "LoraConfig",
        ["q", "v"],
        base=lambda: between("T5Config", "T5ForConditionalGeneration", T5),
        r=4,
        **options,
    )


def case(name: str, config: str, targets=LINEAR, named: str | None = None, **options) -> Case:
    return Case(name, lambda: adapted(config, targets, **options), named)


CASES = [
    case("LoRA", "LoraConfig", r=4),
    case("LoRA-with-embedding", "LoraConfig", ["embed_tokens", "q_proj"], r=4),
    case("LoRA-rank-stabilised", "LoraConfig", r=4, use_rslora=True),
    case("LoRA-with-trained-head", "LoraConfig", r=4, modules_to_save=["lm_head"]),
    case("LoRA-with-biases", "LoraConfig", r=4, bias="lora_only", lora_bias=True),
    case("LoRA-checkpointed", "LoraConfig", r=4, use_reentrant=False),
    case("LoRA-checkpointed-reentrant", "LoraConfig", r=4, use_reentrant=True),
    case("DoRA", "LoraConfig", r=4, use_dora=True),
    case("DoRA-checkpointed", "LoraConfig", r=4, use_dora=True, use_reentrant=False),
    case("DoRA-checkpointed-reentrant", "LoraConfig", r=4, use_dora=True, use_reentrant=True),
    case("AdaLoRA", "AdaLoraConfig", init_r=4, target_r=2, total_step=10, orth_reg_weight=0.1),
    case("LoHa", "LoHaConfig", r=4, named="HadaWeight.apply, a custom autograd function"),
    case("LoKr", "LoKrConfig", r=4),
    case("IA3", "IA3Config", feedforward_modules=["down_proj"]),
    case("OFT", "OFTConfig", oft_block_size=4),
    case("BOFT", "BOFTConfig", boft_block_size=4),
    case("HRA", "HRAConfig", r=4),
    case("VeRA", "VeraConfig", ["q_proj"], r=4),
    case("FourierFT", "FourierFTConfig", n_frequency=20),
    case("VB-LoRA", "VBLoRAConfig", ["q_proj"], r=2, num_vectors=8, vector_length=4, topk=2),
    case("LN-tuning", "LNTuningConfig", ["input_layernorm"]),
    case("Bone", "MissConfig", r=4),
    case("prompt-tuning", "PromptTuningConfig", None, num_virtual_tokens=4),
    case("prefix-tuning", "PrefixTuningConfig", None, num_virtual_tokens=4),
    case("p-tuning", "PromptEncoderConfig", None, num_virtual_tokens=4, encoder_hidden_size=8),
    Case("LoRA-of-T5", between_adapted),
    Case("DoRA-of-T5", lambda: between_adapted(use_dora=True)),
]


def test_an_adapter_that_begins_at_zero_does_not_hide_what_it_multiplies():
    module = nn.Linear(3, 2)
    nn.init.zeros_(module.weight)
    assert calm(module).weight.any()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_adapters(case):
    needs("transformers", "peft")
    check(case)
