"""Networks of diffusion models, made of tiny random configurations of diffusers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.collections.comparison import B, Case, Trial, calm, check, distance, needs


def image(channels: int = 4, size: int = 8) -> Tensor:
    return torch.randn(B, channels, size, size, dtype=torch.float64)


def sequence(length: int, width: int) -> Tensor:
    return torch.randn(B, length, width, dtype=torch.float64)


def timestep() -> Tensor:
    return torch.tensor([1, 10, 100])


def network(name: str, batch: Any, checkpointed: bool = False, **options: Any) -> Trial:
    import diffusers

    module = calm(getattr(diffusers, name)(**options))
    if checkpointed:
        module.enable_gradient_checkpointing()
    return Trial(module, batch(), distance, tolerance=1e-6)  # some norms and attentions are in float32 in any case


def latent(name: str, batch: Any, **options: Any) -> Trial:
    trial = network(name, batch, **options)
    if name == "AutoencoderKL":
        trial.loss = lambda module, batch: module(batch[0]).sample.sin().mean()  # the mode of the posterior, no draw
    return trial


def case(name: str, batch: Any, label: str = "", named: str | None = None, **options: Any) -> Case:
    return Case(label or name, lambda: latent(name, batch, **options), named)


UNET = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
UNET_2D = UNET | {"sample_size": 8, "in_channels": 4, "out_channels": 4, "attention_head_dim": 4}
CONDITIONED = UNET_2D | {"cross_attention_dim": 8, "norm_num_groups": 4}
CONDITIONED |= {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
CONDITIONED |= {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
DIT = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8}


def noisy() -> dict[str, Tensor]:
    return {"sample": image(), "timestep": timestep()}


def conditioned() -> dict[str, Tensor]:
    return noisy() | {"encoder_hidden_states": sequence(5, 8)}


def labelled() -> dict[str, Tensor]:
    return {"hidden_states": image(), "timestep": timestep(), "class_labels": torch.tensor([1, 4, 2])}


def captioned(width: int = 8) -> dict[str, Tensor]:
    return {"hidden_states": image(), "timestep": timestep(), "encoder_hidden_states": sequence(5, width)}


def stable_3() -> dict[str, Tensor]:
    return captioned(16) | {"pooled_projections": torch.randn(B, 12, dtype=torch.float64)}


CASES = [
    case(
        "UNet2DModel",
        noisy,
        **UNET_2D,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    case("UNet2DConditionModel", conditioned, **CONDITIONED),
    case("UNet2DConditionModel", conditioned, "UNet2DConditionModel-checkpointed", checkpointed=True, **CONDITIONED),
    case(
        "UNet3DConditionModel",
        lambda: {
            "sample": torch.randn(B, 4, 2, 8, 8, dtype=torch.float64),
            "timestep": timestep(),
            "encoder_hidden_states": sequence(5, 8),
        },
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=8,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
    ),
    case(
        "AutoencoderKL",
        lambda: (image(3, 16),),
        block_out_channels=(8, 16),
        norm_num_groups=4,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ),
    case(
        "DiTTransformer2DModel",
        labelled,
        **DIT,
        in_channels=4,
        sample_size=8,
        num_embeds_ada_norm=10,
        norm_num_groups=4,
    ),
    case(
        "DiTTransformer2DModel",
        labelled,
        "DiTTransformer2DModel-checkpointed",
        checkpointed=True,
        **DIT,
        in_channels=4,
        sample_size=8,
        num_embeds_ada_norm=10,
        norm_num_groups=4,
    ),
    case(
        "PixArtTransformer2DModel",
        lambda: captioned(8),
        **DIT,
        in_channels=4,
        sample_size=8,
        cross_attention_dim=16,
        caption_channels=8,
        use_additional_conditions=False,
    ),
    case(
        "SD3Transformer2DModel",
        stable_3,
        **DIT,
        in_channels=4,
        sample_size=8,
        patch_size=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=12,
        out_channels=4,
        pos_embed_max_size=8,
    ),
    case(
        "SanaTransformer2DModel",
        lambda: captioned(8),
        **DIT,
        in_channels=4,
        out_channels=4,
        sample_size=8,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=8,
        patch_size=1,
    ),
    case(
        "PriorTransformer",
        lambda: {
            "hidden_states": torch.randn(B, 8, dtype=torch.float64),
            "timestep": timestep(),
            "proj_embedding": torch.randn(B, 8, dtype=torch.float64),
            "encoder_hidden_states": sequence(5, 8),
        },
        **DIT,
        embedding_dim=8,
        num_embeddings=5,
        additional_embeddings=4,
    ),
    case(
        "UVit2DModel",
        lambda: {
            "input_ids": torch.randint(0, 10, (B, 4, 4)),
            "encoder_hidden_states": sequence(5, 8),
            "pooled_text_emb": torch.randn(B, 8, dtype=torch.float64),
            "micro_conds": torch.rand(B, 5, dtype=torch.float64),
        },
        hidden_size=16,
        cond_embed_dim=8,
        micro_cond_encode_dim=2,
        micro_cond_embed_dim=10,
        encoder_hidden_size=8,
        vocab_size=12,
        codebook_size=10,
        block_out_channels=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        block_num_heads=2,
        sample_size=4,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_networks_of_diffusion_models(case):
    needs("diffusers")
    check(case)
