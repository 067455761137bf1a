"""What is replayed of a call gives what it gave when all was decided, whatever the weights are by then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_persample.capture import plan
from lightning_persample.capture.mode import expanded_weights
from tests.capture.op_modules import one_call
from tests.capture.reference import assert_exact
from tests.rules.case import Case
from tests.rules.families import all_cases

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same'"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning"),
]


def sq_norms(module: nn.Module, batch: list[Tensor], quantities: tuple[str, ...]) -> dict[str, Tensor]:
    with expanded_weights(module, batch, quantities=quantities, loss_reduction="sum", unsupported="ignore") as capture:
        module(*batch).square().sum().backward()
    assert capture.record.coverage == 1.0
    return dict(capture.record.sq_norms)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in all_cases()])
def test_every_op_gives_the_same_once_more(case: Case) -> None:
    module, batch = one_call(case, torch.float64)
    plan.PLANS.clear()
    first, *others = (sq_norms(module, batch, ("sq_norm",)) for _ in range(3))
    for other in (*others, sq_norms(module, batch, ("sq_norm", "grad_sample"))):
        torch.testing.assert_close(other, first, rtol=1e-12, atol=1e-300)


def of_other_strides(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.randn(weight.shape[::-1], dtype=weight.dtype).t())


@pytest.mark.parametrize("positions", [(), (3,)])
def test_a_parameter_may_be_another_one_in_each_step(positions: tuple[int, ...]) -> None:
    module = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).double()
    x = torch.randn(4, *positions, 5, dtype=torch.float64)
    step = lambda module, x: module(x).square().sum() / len(x)  # noqa: E731
    for _ in range(2):
        assert_exact(module, step, (x,))
    module[0].weight = of_other_strides(module[0].weight)
    assert_exact(module, step, (x,))
    module[1].weight = nn.Parameter(torch.zeros(5, 5, dtype=torch.float64).fill_(torch.inf), requires_grad=False)
    module[1].weight.data.normal_()
    assert_exact(module, step, (x,))
    module[0], module[1] = module[1], module[0]
    assert_exact(module, step, (x,))
    module[1] = module[0]
    assert_exact(module, step, (x,))


def test_a_weight_may_lie_elsewhere_by_the_backward() -> None:
    module, x = nn.Linear(5, 3).double(), torch.randn(4, 5, dtype=torch.float64)
    found = []
    for moved in (False, False, False, True):
        with expanded_weights(module, x, loss_reduction="sum", unsupported="error") as capture:
            loss = module(x).square().sum()
            if moved:
                module.weight.data = module.weight.data.clone().fill_(7.0)
            loss.backward()
        found.append(capture.record.norms())
    for norms in found[1:]:
        torch.testing.assert_close(norms, found[0], rtol=1e-12, atol=0.0)


class WritesOver(nn.Module):
    """Scales and shifts in place what it has computed, and a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.shift, self.gain = nn.Linear(5, 4), *map(nn.Parameter, torch.rand(3, 4).add(0.5))

    def forward(self, x: Tensor) -> Tensor:
        h = (self.first(x) * 1.0).mul_(self.scale).add_(self.shift).sin()
        h = (h * 2.0).mul_(self.gain[0])
        h[..., 1:3].mul_(self.gain[1:3])
        return h.sub_(self.gain.reshape_as(self.shift)).div_(self.scale)


@pytest.mark.parametrize("positions", [(), (3,)])
def test_a_weight_may_be_written_into_samples(positions: tuple[int, ...]) -> None:
    module, x = WritesOver().double(), torch.randn(6, *positions, 5, dtype=torch.float64)
    plan.PLANS.clear()
    for _ in range(4):
        assert_exact(module, lambda module, x: module(x).square().sum() / len(x), (x,))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.rand_like(parameter), alpha=0.1)
    names = {known.slots.op for known in plan.PLANS.values() if isinstance(known, plan.InPlacePlan)}
    assert names == {"mul", "add", "sub", "div"}


class Noting(TorchFunctionMode):
    """A mode of the user's."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what is called."""
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_modes_of_the_users_are_offered_the_calls_that_they_are_without_a_capture() -> None:
    module, x = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.GroupNorm(2, 4), nn.Softplus()), torch.randn(4, 5)

    def forward() -> list[str]:
        with Noting() as mode:
            module(x)
        return mode.seen

    plain = forward()
    for _ in range(2):
        with expanded_weights(module, x):
            assert forward() == plain
        with Noting() as around, expanded_weights(module, x):
            around.seen.clear()
            module(x)
            seen = [name for name in around.seen if name in plain]
        assert seen == plain
    assert F.handle_torch_function is torch.overrides.handle_torch_function
