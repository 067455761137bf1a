"""Models of transformers made of tiny random configurations."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.collections.comparison import B, Case, Trial, calm, check, distance, needs

V, T = 37, 8  # vocabulary, length
IN_FLOAT32 = 1e-6  # norms, rotations and softmax of many models are in float32, whatever the dtype of the model
TEXT = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TEXT |= {"max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = TEXT | {"num_key_value_heads": 1, "head_dim": 8}
GPT = {"vocab_size": V, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "bos_token_id": 1}
GPT |= {"eos_token_id": 2, "pad_token_id": 0}
BETWEEN = {"vocab_size": V, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2}
BETWEEN |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32}
BETWEEN |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
T5 = {"vocab_size": V, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
PICTURE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
PICTURE |= {"image_size": 32, "patch_size": 8, "num_labels": 5}
SPEECH = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
SPEECH |= {"conv_dim": (8, 8), "conv_kernel": (4, 3), "conv_stride": (2, 2), "num_conv_pos_embeddings": 4}
SPEECH |= {
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
    "vocab_size": V,
    "apply_spec_augment": False,
}
SPEECH |= {"feat_extract_norm": "layer", "do_stable_layer_norm": True}


def model(
    config: str, head: str, options: dict[str, Any], attention: str = "eager", experts=None, **calls: Any
) -> nn.Module:
    import transformers

    made = getattr(transformers, head)._from_config(
        getattr(transformers, config)(**options), attn_implementation=attention
    )
    module = calm(made)
    if experts is not None:
        module.set_experts_implementation(experts)
    if calls:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=calls)
        module.config.use_cache = False
        if calls["use_reentrant"]:
            module.enable_input_require_grads()
    return module


def token_ids(rows: int = B, length: int = T) -> Tensor:
    return torch.randint(3, V, (rows, length))


def lengths_mask(lengths: tuple[int, ...] = (T, 5, 3), length: int = T) -> Tensor:
    return (torch.arange(length) < torch.tensor(lengths)[:, None]).long()


def labelled(ids: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    """Labels of -100 where a sequence is padded."""
    if mask is None:
        return {"input_ids": ids, "labels": ids}
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def token_mean(module: nn.Module, batch: dict[str, Tensor], shift: int = 0) -> Tensor:
    """The mean over all tokens that have a label, in float64: the models' own is in float32."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    if module.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = batch["input_ids"]
    labels = batch["labels"]
    logits = module(**inputs).logits[:, -labels.size(1) :]  # after those of virtual tokens
    return F.cross_entropy(logits[:, : logits.size(1) - shift].flatten(0, 1), labels[:, shift:].flatten())


def own_loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return module(**batch).loss


def tokens_of(batch: dict[str, Tensor], shift: int) -> Tensor:
    """Each sample's weight in a mean over the tokens that have a label."""
    counted = (batch["labels"][:, shift:] != -100).sum(1).double()
    return counted / counted.sum()


def text(config: str, head: str, options=TEXT, attention: str = "eager", padded: bool = True, **calls: Any) -> Trial:
    module = model(config, head, options, attention, **calls)
    batch = labelled(token_ids(), lengths_mask() if padded else None)
    shift = 1 if "Causal" in head or "LMHead" in head else 0
    share = partial(tokens_of, shift=shift) if padded else None
    return Trial(module, batch, partial(token_mean, shift=shift), share, IN_FLOAT32)


def encoded(config: str, head: str, options=TEXT, attention: str = "eager", **more: Tensor) -> Trial:
    module = model(config, head, options, attention)
    return Trial(
        module, {"input_ids": token_ids(), "attention_mask": lengths_mask(), **more}, distance, tolerance=IN_FLOAT32
    )


def pictures(config: str, head: str, size: int = 32, bare: bool = False, **options: Any) -> Trial:
    module = model(config, head, options if bare else {**PICTURE, **options})
    return Trial(
        module, {"pixel_values": torch.randn(B, 3, size, size, dtype=torch.float64)}, distance, tolerance=IN_FLOAT32
    )


def speech(config: str, head: str, masked: bool = True, **options: Any) -> Trial:
    module = model(config, head, {**SPEECH, **options})
    batch = {"input_values": torch.randn(B, 80, dtype=torch.float64)}
    if masked:
        batch["attention_mask"] = lengths_mask((80, 60, 40), 80)
    return Trial(module, batch, lambda m, b: m(**b).last_hidden_state.sin().mean(), tolerance=IN_FLOAT32)


def between(config: str, head: str, options: dict[str, Any], padded: bool = True, **calls: Any) -> Trial:
    module = model(config, head, options, **calls)
    batch = labelled(token_ids(), lengths_mask() if padded else None)
    return Trial(module, batch, token_mean, partial(tokens_of, shift=0) if padded else None, IN_FLOAT32)


def picture_and_text(**options: Any) -> Trial:
    """Image features are scattered to the places of their tokens, as LLaVA does."""
    import transformers

    vision = transformers.CLIPVisionConfig(**{key: value for key, value in PICTURE.items() if key != "num_labels"})
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(**GROUPED), image_token_index=3, **options
    )
    module = calm(transformers.LlavaForConditionalGeneration._from_config(config, attn_implementation="eager"))
    ids = torch.cat([torch.full((B, 16), 3), torch.randint(4, V, (B, 6))], 1)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    return Trial(
        module, batch | {"pixel_values": torch.randn(B, 3, 32, 32, dtype=torch.float64)}, own_loss, tolerance=IN_FLOAT32
    )


def series(config: str, head: str, **options: Any) -> Trial:
    module = model(config, head, {"num_input_channels": 2, "context_length": 16, "prediction_length": 4, **options})
    past, future = torch.randn(B, 16, 2).double(), torch.randn(B, 4, 2).double()
    return Trial(module, {"past_values": past, "future_values": future}, own_loss, tolerance=IN_FLOAT32)


def case(name: str, build: Any, *args: Any, named: str | None = None, **options: Any) -> Case:
    return Case(name, lambda: build(*args, **options), named)


def decoder(name: str, options: dict[str, Any] = GROUPED, named: str | None = None, **more: Any) -> list[Case]:
    return [
        case(f"{name}-{way}", text, f"{name}Config", f"{name}ForCausalLM", options | more, way, named=named)
        for way in ("eager", "sdpa")
    ]


def checkpointed(name: str, build: Any, *args: Any, named: str | None = None) -> list[Case]:
    return [
        case(f"{name}-checkpointed", build, *args, use_reentrant=False),
        case(f"{name}-checkpointed-reentrant", build, *args, use_reentrant=True, named=named),
    ]


MOE = GROUPED | {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
MOE |= {"shared_expert_intermediate_size": 8, "decoder_sparse_step": 1}
DEEPSEEK = MOE | {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
DEEPSEEK |= {"kv_lora_rank": 4, "q_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8}
DEEPSEEK |= {"head_dim": 4, "num_key_value_heads": 2}
GPT_OSS = MOE | {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
JAMBA = MOE | {"mamba_d_state": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}
DEBERTA = TEXT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16}
WINDOWS = {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4}
LONG = TEXT | {"attention_window": 4}
CASES = [
    *(
        case(f"{name}-masked-lm-{way}", text, f"{name}Config", f"{name}ForMaskedLM", options, way)
        for name, options in (("Bert", TEXT), ("Roberta", TEXT), ("Electra", TEXT | {"embedding_size": 16}))
        for way in ("eager", "sdpa")
    ),
    case("Albert", text, "AlbertConfig", "AlbertForMaskedLM", TEXT | {"embedding_size": 8}),
    case(
        "DistilBert",
        text,
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {"vocab_size": V, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 32},
    ),
    case(
        "MobileBert",
        encoded,
        "MobileBertConfig",
        "MobileBertModel",
        TEXT | {"embedding_size": 8, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    ),
    case("MPNet", text, "MPNetConfig", "MPNetForMaskedLM"),
    case(
        "ModernBert",
        text,
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        TEXT | {"local_attention": 4, "cls_token_id": 1, "sep_token_id": 2},
        "sdpa",
    ),
    case("Deberta", text, "DebertaConfig", "DebertaForMaskedLM", DEBERTA),
    case(
        "DebertaV2",
        text,
        "DebertaV2Config",
        "DebertaV2ForMaskedLM",
        DEBERTA | {"position_buckets": 4, "share_att_key": True},
    ),
    case("DebertaV2-own-keys", encoded, "DebertaV2Config", "DebertaV2Model", DEBERTA),
    case(
        "ConvBert",
        encoded,
        "ConvBertConfig",
        "ConvBertModel",
        TEXT | {"embedding_size": 16, "head_ratio": 1, "conv_kernel_size": 3},
    ),
    case("RoFormer", text, "RoFormerConfig", "RoFormerForMaskedLM", TEXT | {"embedding_size": 16}),
    case("FNet", encoded, "FNetConfig", "FNetModel", TEXT),
    case(
        "Longformer",
        text,
        "LongformerConfig",
        "LongformerForMaskedLM",
        LONG | {"sep_token_id": 2},
        padded=False,
    ),
    case(
        "Funnel",
        encoded,
        "FunnelConfig",
        "FunnelModel",
        {
            "vocab_size": V,
            "d_model": 16,
            "n_head": 2,
            "d_head": 8,
            "d_inner": 24,
            "block_sizes": [1, 1],
            "num_decoder_layers": 1,
        },
    ),
    case(
        "SqueezeBert",
        encoded,
        "SqueezeBertConfig",
        "SqueezeBertModel",
        TEXT
        | {
            "embedding_size": 16,
            "q_groups": 2,
            "k_groups": 2,
            "v_groups": 2,
            "post_attention_groups": 1,
            "intermediate_groups": 2,
            "output_groups": 2,
        },
    ),
    *(case(f"GPT2-{way}", text, "GPT2Config", "GPT2LMHeadModel", GPT, way) for way in ("eager", "sdpa")),
    case(
        "GPTNeo",
        text,
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {
            "vocab_size": V,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "max_position_embeddings": 32,
            "intermediate_size": 24,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    case("GPTJ", text, "GPTJConfig", "GPTJForCausalLM", GPT | {"rotary_dim": 4}),
    case("CodeGen", text, "CodeGenConfig", "CodeGenForCausalLM", {**GPT, "n_head": 4, "rotary_dim": 4}),
    case(
        "Bloom",
        text,
        "BloomConfig",
        "BloomForCausalLM",
        {"vocab_size": V, "hidden_size": 16, "n_layer": 2, "n_head": 2},
    ),
    case("OPT", text, "OPTConfig", "OPTForCausalLM", TEXT | {"ffn_dim": 24, "word_embed_proj_dim": 16}),
    case("Falcon", text, "FalconConfig", "FalconForCausalLM", TEXT | {"alibi": False}),
    case(
        "MPT",
        text,
        "MptConfig",
        "MptForCausalLM",
        {"vocab_size": V, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 32},
    ),
    *decoder("GPTNeoX", TEXT),
    *decoder("Llama"),
    *decoder("Mistral", sliding_window=7),
    *decoder("Qwen2"),
    *decoder("Qwen3"),
    *decoder("Gemma"),
    case(
        "Gemma2", text, "Gemma2Config", "Gemma2ForCausalLM", GROUPED | {"sliding_window": 7, "query_pre_attn_scalar": 8}
    ),
    *decoder("Phi"),
    *decoder("Phi3", original_max_position_embeddings=32),
    *decoder("StableLm"),
    *decoder("Olmo2"),
    *decoder("Cohere"),
    *decoder("Granite"),
    *decoder("SmolLM3"),
    *(
        case(f"{name}-{way}-experts", text, f"{name}Config", f"{name}ForCausalLM", MOE, experts=way)
        for name in ("Mixtral", "Qwen2Moe", "Qwen3Moe")
        for way in ("eager", "batched_mm")
    ),
    *(
        case(f"{name}-{way}-experts", text, f"{name}Config", f"{name}ForCausalLM", options, experts=way, padded=padded)
        for name, options, padded in (
            ("DeepseekV2", DEEPSEEK, True),
            ("DeepseekV3", DEEPSEEK, True),
            ("GptOss", GPT_OSS, True),
            ("Jamba", JAMBA | {"expert_layer_offset": 1}, False),
        )
        for way in ("eager", "batched_mm")
    ),
    case(
        "Mamba",
        text,
        "MambaConfig",
        "MambaForCausalLM",
        {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
        padded=False,
    ),
    case("Bart", between, "BartConfig", "BartForConditionalGeneration", BETWEEN),
    case("MBart", between, "MBartConfig", "MBartForConditionalGeneration", BETWEEN),
    case("Pegasus", between, "PegasusConfig", "PegasusForConditionalGeneration", BETWEEN),
    case("Marian", between, "MarianConfig", "MarianMTModel", BETWEEN),
    case(
        "LED",
        between,
        "LEDConfig",
        "LEDForConditionalGeneration",
        BETWEEN | {"attention_window": 4, "max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32},
        padded=False,
    ),
    case("T5", between, "T5Config", "T5ForConditionalGeneration", T5),
    case("MT5", between, "MT5Config", "MT5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu"}),
    case("LongT5", between, "LongT5Config", "LongT5ForConditionalGeneration", T5 | {"local_radius": 3}),
    case(
        "LongT5-global",
        between,
        "LongT5Config",
        "LongT5ForConditionalGeneration",
        T5 | {"local_radius": 3, "global_block_size": 4, "encoder_attention_type": "transient-global"},
    ),
    *checkpointed("Bert", text, "BertConfig", "BertForMaskedLM"),
    *checkpointed("GPT2", text, "GPT2Config", "GPT2LMHeadModel", GPT),
    *checkpointed("Llama", text, "LlamaConfig", "LlamaForCausalLM", GROUPED),
    *checkpointed("Bart", between, "BartConfig", "BartForConditionalGeneration", BETWEEN),
    *checkpointed("T5", between, "T5Config", "T5ForConditionalGeneration", T5, named="checkpoint"),
    *checkpointed("MT5", between, "MT5Config", "MT5ForConditionalGeneration", T5, named="checkpoint"),
    *checkpointed("LongT5", between, "LongT5Config", "LongT5ForConditionalGeneration", T5, named="checkpoint"),
    case("ViT", pictures, "ViTConfig", "ViTForImageClassification"),
    case("DeiT", pictures, "DeiTConfig", "DeiTForImageClassification"),
    case("Beit", pictures, "BeitConfig", "BeitForImageClassification", use_relative_position_bias=True),
    case("Dinov2", pictures, "Dinov2Config", "Dinov2ForImageClassification"),
    case(
        "Segformer",
        pictures,
        "SegformerConfig",
        "SegformerForImageClassification",
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 8, 16, 16],
        num_attention_heads=[1, 1, 2, 2],
    ),
    case(
        "ResNet",
        pictures,
        "ResNetConfig",
        "ResNetForImageClassification",
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
    ),
    case("Wav2Vec2", speech, "Wav2Vec2Config", "Wav2Vec2Model", masked=False),
    case("Wav2Vec2-masked", speech, "Wav2Vec2Config", "Wav2Vec2Model"),
    case("Hubert", speech, "HubertConfig", "HubertModel", masked=False),
    case("Hubert-masked", speech, "HubertConfig", "HubertModel"),
    case("WavLM-masked", speech, "WavLMConfig", "WavLMModel"),
    case("Llava", picture_and_text),
    case("Swin", pictures, "SwinConfig", "SwinForImageClassification", bare=True, **WINDOWS),
    case("Swinv2", pictures, "Swinv2Config", "Swinv2ForImageClassification", bare=True, **WINDOWS),
    case(
        "ConvNextV2",
        pictures,
        "ConvNextV2Config",
        "ConvNextV2ForImageClassification",
        64,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        bare=True,
    ),
    case(
        "PatchTST",
        series,
        "PatchTSTConfig",
        "PatchTSTForPrediction",
        patch_length=4,
        patch_stride=4,
        d_model=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=24,
    ),
    case(
        "PatchTSMixer",
        series,
        "PatchTSMixerConfig",
        "PatchTSMixerForPrediction",
        patch_length=4,
        patch_stride=4,
        d_model=8,
        num_layers=2,
    ),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_language_image_and_speech_models(case):
    needs("transformers")
    check(case)
