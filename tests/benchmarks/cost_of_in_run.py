"""What in-run influence costs: captured steps of a Trainer.fit beside the steps between them, which are not captured.

    python -m tests.benchmarks.cost_of_in_run [--models resnet18 gpt] [--pairs 9] [--json FILE]

One fit captures every second step, so that each captured step has a plain one right before it, and what else runs on
the machine is nearly the same for both. Every ratio is that of such a pair; the median and the middle half of them are
shown, of the time that the process spent on its processors and of the time that passed: of steps that take the dots
with a validation gradient that is there, and of those that take this gradient again, of one batch, too. A fit that
takes it again every n steps, and captures all, has the mean of n - 1 of the former and one of the latter.

"By hand" is what bounds the first of them on this machine, in the same run: bare module hooks that know each layer,
keep its input and the gradient of its output, and take the dots after the backward, or in it; a dot is that of this
gradient with the layer of the direction in place of its weights. There is no Trainer, no ledger, and no index of a
sample in it.

A dot is also the derivative of the sample's loss along the direction, so that one pass of forward mode gives all dots
(``torch.func.jvp`` of the losses, equal to a loop over samples to 4e-16 in float64). It takes more: a layer has two
products, of the direction with the input and of the weight with the input's tangent, where a dot has one, and the
losses are computed again. Beside the training step it was 1.18 of a plain one for ResNet-18 and 1.34 for the GPT.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_persample import InRunInfluence
from lightning_persample.gradients import Outer
from tests.benchmarks.timed_fits import middle, prepared_fit
from tests.benchmarks.timed_models import MODELS, Built

_FRESH = 4  # every so many captured steps take the validation gradient again
_WARM = 4  # pairs that are not counted


class Watch(Callback):
    """Notes how long each step takes: what passes, and what the process computes."""

    def __init__(self) -> None:
        self.seconds: list[tuple[float, float]] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self._start = time.perf_counter(), time.process_time()

    def on_train_batch_end(self, *args: Any) -> None:
        passed, computed = self._start
        self.seconds.append((time.perf_counter() - passed, time.process_time() - computed))


def compare(build: Callable[[], Built], pairs: int) -> dict[str, Any]:
    """The ratios of the pairs, and the milliseconds of a plain step."""
    captured = _WARM + -(-pairs * _FRESH // (_FRESH - 1)) + 1
    watch, inputs = Watch(), build()[1]
    validation = DataLoader(TensorDataset(inputs, torch.randint(0, 10, (len(inputs),))), len(inputs))
    with tempfile.TemporaryDirectory() as folder:
        every = {"every_n_steps": 2, "refresh_every_n_steps": 2 * _FRESH}
        in_run = InRunInfluence(Path(folder) / "ledger", validation, **every)
        prepared_fit(build, 2 * captured, folder, [in_run, watch])()
    found: dict[str, Any] = {}
    for place, kind in enumerate(("passed", "computed")):
        plain, with_dots = ([step[place] for step in watch.seconds[first::2]] for first in (0, 1))
        ratios = [b / a for a, b in zip(plain, with_dots, strict=True)]
        counted = range(_WARM, captured)
        found[kind] = {
            "dots": middle([ratios[n] for n in counted if n % _FRESH][:pairs]),
            "dots and gradient": middle([ratios[n] for n in counted if n % _FRESH == 0]),
            "plain_ms": 1e3 * statistics.median(plain[_WARM:]),
        }
    return found


def dot_by_hand(direction: nn.Module, x: Tensor, grad: Tensor) -> Tensor:
    """The dot (B,) of each sample's gradient of a layer with the weights of another one like it."""
    if isinstance(direction, nn.Linear):
        left, right = (each.reshape(len(grad), -1, each.size(-1)) for each in (grad, x))
        dot = Outer(left, right).dot(direction.weight)
        return dot if direction.bias is None else dot + left.sum(1) @ direction.bias
    return (direction(x) * grad).reshape(len(grad), -1).sum(1)  # (all layers here are linear in their weights)


def like(layer: nn.Module) -> nn.Module:
    """A layer that has the gradients of another one for weights."""
    direction = copy.deepcopy(layer)
    for weight, source in zip(direction.parameters(), layer.parameters(), strict=True):
        assert source.grad is not None
        weight.data.copy_(source.grad)
    return direction


def by_hand(build: Callable[[], Built], pairs: int, at_once: bool) -> dict[str, dict[str, float]]:
    """The ratios of steps with dots by hand and plain ones, in turn, by which time."""
    module, x = build()
    y = torch.randint(0, 10, (len(x),))
    F.cross_entropy(module(x), y).backward()
    directions = {
        layer: like(layer) for layer in module.modules() if any(True for _ in layer.parameters(recurse=False))
    }
    kept: list[tuple[nn.Module, Tensor, Tensor]] = []
    dots: list[Tensor] = []

    def take(layer: nn.Module, inputs: Tensor, grad: Tensor) -> None:
        if len(grad) == len(x):  # (not of positions that all samples share)
            with torch.no_grad():
                dots.append(dot_by_hand(directions[layer], inputs, grad))

    def receive(layer: nn.Module, inputs: Tensor, grad: Tensor) -> None:
        if at_once:
            take(layer, inputs, grad)
        else:
            kept.append((layer, inputs, grad))

    def hook(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        output.register_hook(partial(receive, layer, args[0].detach()))

    def step(watched: bool) -> tuple[float, float]:
        module.zero_grad()
        hooks = [layer.register_forward_hook(hook) for layer in directions] if watched else []
        passed, computed = time.perf_counter(), time.process_time()
        F.cross_entropy(module(x), y).backward()
        for each in kept:
            take(*each)
        if watched:
            torch.stack(dots).sum(0)
        kept.clear()
        dots.clear()
        taken = time.perf_counter() - passed, time.process_time() - computed
        for handle in hooks:
            handle.remove()
        return taken

    steps = [(step(False), step(True)) for _ in range(_WARM + pairs)][_WARM:]
    return {
        kind: middle([watched[place] / plain[place] for plain, watched in steps])
        for place, kind in enumerate(("passed", "computed"))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["resnet18", "gpt"])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.pairs < 6:
        parser.error("--pairs: at least 6")
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    threads = f"{torch.get_num_threads()} threads"
    machine = f"{platform.machine()}, {threads}, torch {torch.__version__}, float32, {options.pairs} pairs"
    print(f"{machine}\n\n| model | time | plain | dots | dots and a new validation gradient |\n|---|---|---|---|---|")
    results = {}
    for model in options.models:
        title, build = MODELS[model]
        results[model] = compare(build, options.pairs)
        for kind, one in results[model].items():
            cells = ["{ratio:.2f}x ({low:.2f} to {high:.2f})".format(**one[name]) for name in list(one)[:2]]
            print(f"| {title} | {kind} | {one['plain_ms']:.1f} ms | {' | '.join(cells)} |", flush=True)
        for when in ("after the backward", "in the backward"):
            hand = results[model][f"by hand, {when}"] = by_hand(build, options.pairs, when == "in the backward")
            for kind, ratios in hand.items():
                cell = "{ratio:.2f}x ({low:.2f} to {high:.2f})".format(**ratios)
                print(f"| {title} | {kind}, by hand, {when} | | {cell} | |", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "results": results}, indent=2))


if __name__ == "__main__":
    main()
