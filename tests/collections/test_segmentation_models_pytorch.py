"""Segmentation models on a thin encoder."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.collections.comparison import B, Case, Trial, calm, check, needs


def segmented(name: str, **options) -> Trial:
    import segmentation_models_pytorch

    model = getattr(segmentation_models_pytorch, name)
    module = calm(model("timm-mobilenetv3_small_minimal_100", encoder_weights=None, classes=3, **options))
    batch = torch.randn(B, 3, 64, 64, dtype=torch.float64), torch.randint(0, 3, (B, 64, 64))
    return Trial(module, batch, lambda m, batch: F.cross_entropy(m(batch[0]), batch[1]))


def case(name: str, **options) -> Case:
    return Case(name, lambda: segmented(name, **options))


CASES = [
    case("Unet", decoder_channels=(16, 16, 8, 8, 8)),
    case("Linknet"),
    case("FPN", decoder_pyramid_channels=16, decoder_segmentation_channels=32),
    case("PSPNet", psp_out_channels=16),
    case("DeepLabV3Plus", decoder_channels=16),
    case("MAnet", decoder_channels=(16, 16, 8, 8, 8)),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_segmentation_models(case):
    needs("segmentation_models_pytorch")
    check(case)
