"""What a rule of one's own may give in a capture, and in which words the engine refuses anything else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_persample import Dense, PerSampleWarning, expanded_weights
from tests.capture.affine import B, affine, register

pytestmark = pytest.mark.usefixtures("own_rules")


class Affine(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

    def forward(self, x):
        return affine(x, self.weight, self.bias)


def both(call, grad):
    x = call.arguments["x"]
    return {"weight": Dense((grad * x).flatten(1, -2).sum(1)), "bias": Dense(grad.flatten(1, -2).sum(1))}


def captured(module):
    with expanded_weights(
        module, x := torch.randn(B, 4, 3), loss_reduction="sum", quantities=("sq_norm", "grad_sample")
    ) as capture:
        module(x).sin().sum().backward()
    return capture.record


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_what_a_rule_gives_for_a_frozen_weight_does_not_matter(frozen: str):
    register(both)
    module = Affine()
    module.get_parameter(frozen).requires_grad_(False)
    record = captured(module)
    (name,) = record.names
    assert record.coverage == 1.0
    torch.testing.assert_close(record.grad_samples[name].sum(0), module.get_parameter(name).grad)


RETURNS = "a rule returns a dict with a structure (Dense, Outer, Indexed or Patches) for each argument asked for"


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (lambda call, g: {"bias": both(call, g)["bias"]}, f"gave nothing for weight, only for bias; {RETURNS}"),
        (lambda call, g: {}, f"gave nothing for weight, bias; {RETURNS}"),
        (lambda call, g: tuple(both(call, g).values()), f"gave a tuple; {RETURNS}"),
        (lambda call, g: g, f"gave a Tensor; {RETURNS}"),
        (lambda call, g: None, f"gave a NoneType; {RETURNS}"),
        (
            lambda call, g: {**both(call, g), "bias": g},
            f"gave a Tensor for bias; {RETURNS}: Dense(...) around a tensor (samples, *shape of the weight) is one",
        ),
        (
            lambda call, g: {**both(call, g), "bias": Dense(g)},
            "gave shape (6, 1, 4, 3) for bias, but (samples, *shape of the weight) is (6, 3): sum over the rows and "
            "positions of each sample",
        ),
    ],
    ids=["one weight", "no weight", "tuple", "tensor", "nothing", "tensors", "positions"],
)
def test_answers_of_another_form_are_refused_by_name(rule, reason: str):
    register(rule)
    with pytest.warns(PerSampleWarning, match="missing for 2 parameters"):
        record = captured(Affine())
    assert record.coverage == 0.0
    for text in record.unsupported.values():
        assert text.endswith(f"with `bias`, `weight`: the rule of affine {reason}")


def test_an_exception_of_a_rule_of_ones_own_is_said_to_be_its_own():
    def reads_x(call, grad):
        return {"weight": Dense((grad * call.arguments["x"]).flatten(1, -2).sum(1))}

    register(reads_x, reads=())
    module = Affine()
    module.bias.requires_grad_(False)
    with pytest.warns(PerSampleWarning, match="missing for 1 parameter"):
        record = captured(module)
    assert record.unsupported["weight"].endswith(
        f"with `weight`: its rule {__name__}.{reads_x.__qualname__} failed with KeyError: 'x'; check_rule shows in "
        "which calls, and what the rule reads must be registered with reads=(...)"
    )
