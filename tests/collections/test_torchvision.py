"""Image models of torchvision, on small images."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.collections.comparison import B, Case, Trial, calm, check, distance, needs


def image_model(name: str, size: int = 32, **options) -> Trial:
    import torchvision

    module = calm(getattr(torchvision.models, name)(weights=None, num_classes=5, **options))
    return Trial(module, (torch.randn(B, 3, size, size, dtype=torch.float64),), distance)


def swin(version: str) -> Trial:
    from torchvision.models import swin_transformer

    parts = {"patch_size": [4, 4], "embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": [4, 4]}
    if version == "v2":
        parts |= {"block": swin_transformer.SwinTransformerBlockV2, "downsample_layer": swin_transformer.PatchMergingV2}
    module = calm(swin_transformer.SwinTransformer(**parts, num_classes=5))
    return Trial(module, (torch.randn(B, 3, 64, 64, dtype=torch.float64),), distance)


def transformer() -> Trial:
    from torchvision.models import VisionTransformer

    module = calm(VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=24, num_classes=5))
    return Trial(module, (torch.randn(B, 3, 32, 32, dtype=torch.float64),), distance)


def segmented(name: str) -> Trial:
    import torchvision

    module = calm(getattr(torchvision.models.segmentation, name)(weights=None, weights_backbone=None, num_classes=4))
    x, y = torch.randn(B, 3, 64, 64, dtype=torch.float64), torch.randint(0, 4, (B, 64, 64))

    def loss(module: nn.Module, batch) -> torch.Tensor:
        return F.cross_entropy(module(batch[0])["out"], batch[1])

    return Trial(module, (x, y), loss)


def case(name: str, size: int = 32, named: str | None = None, **options) -> Case:
    return Case(name, lambda: image_model(name, size, **options), named)


CASES = [
    case("squeezenet1_1", 64),
    case("shufflenet_v2_x0_5"),
    case("mobilenet_v2", width_mult=0.25),
    case("mobilenet_v3_small", width_mult=0.5),
    case("mnasnet0_5"),
    case("regnet_y_400mf"),
    case("efficientnet_b0"),
    case("googlenet", aux_logits=False, init_weights=False),
    Case("vision_transformer", transformer),
    Case("swin", lambda: swin("v1")),
    Case("swin_v2", lambda: swin("v2")),
    Case("lraspp_mobilenet_v3_large", lambda: segmented("lraspp_mobilenet_v3_large")),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_image_models(case):
    needs("torchvision")
    check(case)
