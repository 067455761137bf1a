"""This engine beside its peers on the cases that users of other tools reported: each cell is right, wrong or refused.

Every engine gets a copy of the same module, the same batch in float64 and `nn.MSELoss()` against fixed targets, and is
used as its documentation says. What it gives is compared with the one-sample loop:

right    every trainable parameter's per-sample gradients (or norms, all that some engines give) are the loop's to 1e-8;
wrong    there is an answer, with another value or another shape;
refused  an exception, on the way or when a value is asked for that is not there.

Peers that are not installed get "-"; examples/guide/benchmarks.md says how to install them. Run it by hand:

    python -m tests.benchmarks.right_wrong_refused [--details]
"""

from __future__ import annotations

import argparse
import logging
import platform
import warnings
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from importlib.metadata import distributions
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

import lightning_persample
from lightning_persample import expanded_weights
from tests.capture.model_cases import CASES, Model, T, images, parameter, sequences, time_major, tokens
from tests.capture.reference import loop
from tests.capture.sequence_cases import outputs_only, recurrent  # the import also adds that file's cases to CASES
from tests.models import MODELS, BasicBlock

BATCH_SIZE = 10  # no other axis of a case has this size, but where a case is about that
NOTES = """
(a) after Opacus' own replacement of the layer (`ModuleValidator.fix`, `DPRNN`); its total norms are compared
(b) after BackPACK's converter (`use_converter=True`)
"""
Batch = tuple[Tensor, ...]  # the inputs, then the targets


class Row(NamedTuple):
    title: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]  # of so many samples
    batch_dim: int = 0  # the axis on which they lie
    batch_size: int = BATCH_SIZE


class Cell(NamedTuple):
    verdict: str  # "right", "wrong", "refused" or "-"
    note: str = ""
    why: str = ""


# Cases ----------------------------------------------------------------------------------------------------------------
def known(*names: str) -> list[Row]:
    return [Row(name.replace("-", " "), CASES[name].build, CASES[name].batch) for name in names]


def small(title: str, name: str) -> Row:
    return Row(title, lambda: MODELS[name]().module, lambda b: MODELS[name]().make_batch(b)[:1])


def frozen(layer: nn.Module, part: str, *more: nn.Module) -> nn.Module:
    getattr(layer, part).requires_grad_(False)
    return nn.Sequential(layer, *more)


def tied_head() -> nn.Module:
    module = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9, bias=False))
    module[1].weight = module[0].weight
    return module


def of(function: Callable[..., Tensor], **parts: Callable[[], Any]) -> Callable[[], nn.Module]:
    return lambda: Model(function, **{name: build() for name, build in parts.items()})


def longest_first(batch_size: int) -> tuple[Tensor, ...]:
    """Sequences whose number of positive first entries, which the model reads as their length, is T, T - 1, ..."""
    x = torch.randn(batch_size, T, 6).abs()
    x[..., 0] *= torch.where(torch.arange(T) < T - torch.arange(batch_size)[:, None], 1.0, -1.0)
    return (x,)


class BlockOutOfPlace(BasicBlock):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.shortcut(x))


def resnet_out_of_place() -> nn.Module:
    module = MODELS["resnet18"]().module
    for part in module.modules():
        if isinstance(part, BasicBlock):
            part.__class__ = BlockOutOfPlace
    module[2].inplace = False
    return module


LINEAR, TABLE, WEIGHT = partial(nn.Linear, 6, 6), partial(nn.Embedding, T, 6), partial(parameter, 6, 6)
ROWS = [
    *known("linear", "linear-3d", "linear-4d", "linear-by-keyword", "linear-of-non-contiguous", "called-twice"),
    Row("linear, time first", LINEAR, time_major, batch_dim=1),
    Row("linear, frozen weight", lambda: frozen(nn.Linear(6, 4), "weight", nn.Linear(4, 2)), sequences),
    Row("linear, frozen bias", lambda: frozen(nn.Linear(6, 4), "bias", nn.Linear(4, 2)), sequences),
    Row("module and functional use", of(lambda m, x: F.linear(m.a(x), m.a.weight), a=LINEAR), sequences),
    *known("linear-in-place-relu", "linear-in-place-residual", "tokens-picked", "bilinear", "prelu"),
    Row("embedding", lambda: nn.Embedding(9, 6), tokens),
    *known("embedding-padding_idx", "embedding-bag-sum", "embedding-bag-mean-uneven"),
    Row("tied embedding and head, two modules", tied_head, tokens),
    known("tied-head-linear")[0]._replace(title="tied embedding and head, functional"),
    known("position-table")[0]._replace(title="position table, ids (1, T)"),
    Row("position table, ids (T,), T = B", of(lambda m, x: x + m.p(torch.arange(T)), p=TABLE), sequences, batch_size=T),
    known("position-of-length-T")[0]._replace(title="position Parameter, T = B", batch_size=T),
    *known("class-token-expand", "relative-positions"),
    Row("conv2d, grouped", lambda: nn.Conv2d(4, 6, 3, groups=2), images),
    Row("conv2d, depthwise", lambda: nn.Conv2d(4, 8, 3, padding=1, groups=4), images),
    Row("conv2d, circular", lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), images),
    Row('conv2d, "same", even kernel', lambda: nn.Conv2d(4, 6, (4, 2), padding="same"), images),
    Row("conv2d, kernel (3, 1), padding (1, 0)", lambda: nn.Conv2d(4, 6, (3, 1), padding=(1, 0)), images),
    Row("conv2d, dilation and stride", lambda: nn.Conv2d(4, 6, 2, stride=2, dilation=2), images),
    Row("conv2d, frozen weight", lambda: frozen(nn.Conv2d(4, 6, 3), "weight"), images),
    Row("conv3d, dilation", lambda: nn.Conv3d(2, 4, 2, dilation=2), lambda b: (torch.randn(b, 2, 5, 4, 6),)),
    known("conv-transpose")[0]._replace(title="conv transpose, output_padding, groups"),
    *known("layer-norm-first", "rms-norm", "batch-norm-eval"),
    Row("group norm", lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 6)), images),
    Row("group norm, frozen bias", lambda: frozen(nn.GroupNorm(2, 4), "bias", nn.Conv2d(4, 2, 3)), images),
    Row("instance norm, running statistics, eval", lambda: CASES["instance-norm"].build().eval(), images),
    *known(
        "multihead-batch-first", "multihead-kdim-vdim-bias", "attention", "transformer-encoder-layer", "transformer"
    ),
    Row("multihead, T first", of(lambda m, x: m.a(x, x, x)[0], a=lambda: nn.MultiheadAttention(6, 2)), time_major, 1),
    Row("transformer encoder layer, T first", lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0), time_major, 1),
    *known("rnn-one-layer", "gru-one-layer", "lstm-one-layer", "lstm-two-layers-both-ways", "lstm-cell"),
    Row("lstm, T first", recurrent(outputs_only, nn.LSTM), time_major, batch_dim=1),
    Row("lstm, packed, longest first", CASES["lstm-one-layer-packed"].build, longest_first, batch_size=3),
    known("lstm-one-layer-packed")[0]._replace(title="lstm, packed, any order"),
    Row("weight_norm", lambda: parametrizations.weight_norm(nn.Linear(6, 4)), sequences),
    known("spectral_norm")[0]._replace(title="spectral_norm, eval"),
    Row("lora merged", of(lambda m, x: F.linear(x, m.w + m.u @ m.d), w=WEIGHT, u=WEIGHT, d=WEIGHT), sequences),
    Row("Parameter in mul", of(lambda m, x: m.a(x) * m.p, a=LINEAR, p=lambda: parameter(6)), sequences),
    *known("lora-beside", "matmul", "einsum", "addmm"),
    small("CNN with GroupNorm, in-place ReLU", "cnn"),
    small("ResNet-18 with GroupNorm, in-place ReLU and residual", "resnet18"),
    small("ResNet-18 with GroupNorm, nothing in place", "resnet18")._replace(build=resnet_out_of_place),
    small("GPT: tied head, class token, layer scale", "gpt"),
]


# Engines give values under the names of `expected_values`, and a key of NOTES where they needed help ------------------
Answer = tuple[dict[str, Tensor], str]
Engine = Callable[[nn.Module, Batch, int], Answer]


def mean_loss(module: nn.Module, *batch: Tensor) -> Tensor:
    return nn.MSELoss()(module(*batch[:-1]), batch[-1])


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def norms(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"norms": torch.cat([g.flatten(1) for g in grads.values()], 1).norm(dim=1)}


def expected_values(module: nn.Module, batch: Batch, batch_dim: int) -> dict[str, Tensor]:
    grads = loop(module, mean_loss, batch, batch_dim)
    sq_norms = {f"squared norms of {name}": g.flatten(1).square().sum(1) for name, g in grads.items()}
    return grads | sq_norms | norms(grads)


def ours(module: nn.Module, batch: Batch, batch_dim: int) -> Answer:
    asked = ("sq_norm", "grad_sample")
    with expanded_weights(module, batch, batch_dim=batch_dim, quantities=asked, unsupported="error") as capture:
        mean_loss(module, *batch).backward()
    grads = {name: capture.record.grad_samples[name] for name in trainable(module)}
    return grads | {"norms": capture.record.norms()}, ""


def torch_expanded_weights(module: nn.Module, batch: Batch, batch_dim: int) -> Answer:
    size = batch[0].size(batch_dim)
    call = call_for_per_sample_grads(module, batch_size=size, loss_reduction="mean", batch_first=batch_dim == 0)
    nn.MSELoss()(call(*batch[:-1]), batch[-1]).backward()
    return {name: p.grad_sample for name, p in trainable(module).items()}, ""


def func_vmap(module: nn.Module, batch: Batch, batch_dim: int) -> Answer:
    def loss(weights: dict[str, Tensor], *sample: Tensor) -> Tensor:
        *inputs, target = (tensor.unsqueeze(batch_dim) for tensor in sample)
        return nn.MSELoss()(functional_call(module, weights, tuple(inputs)), target)

    weights = {name: p.detach() for name, p in trainable(module).items()}
    return vmap(grad(loss), in_dims=(None, *[batch_dim] * len(batch)), randomness="different")(weights, *batch), ""


def replace_for_opacus(module: nn.Module, batch: Batch) -> str:
    """Put Opacus' own layers where it says it needs them; where these compute something else, its refusal stands."""
    from opacus.layers import DPRNN
    from opacus.validators import ModuleValidator

    def replacement(part: nn.Module) -> nn.Module:
        if type(part) is not nn.RNN:
            return ModuleValidator.fix(part)
        shape = {name: getattr(part, name) for name in ("num_layers", "bias", "batch_first", "bidirectional")}
        other = DPRNN(part.input_size, part.hidden_size, nonlinearity=part.nonlinearity, **shape)
        other.load_state_dict(part.state_dict())
        return other

    def is_replaced(part: nn.Module) -> bool:
        validate = ModuleValidator.VALIDATORS.get(type(part))
        return type(part) is nn.RNN or bool(validate and validate(part))

    places = [(m, name, part) for m in module.modules() for name, part in m.named_children() if is_replaced(part)]
    original = deepcopy(module)
    for parent, name, part in places:
        setattr(parent, name, replacement(part))
    is_same = torch.allclose(module(*batch[:-1]), original(*batch[:-1]))
    ModuleValidator.validate(module if is_same else original, strict=True)
    return "a" if places else ""


def opacus_hooks(module: nn.Module, batch: Batch, batch_dim: int) -> Answer:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    note = replace_for_opacus(module, batch)
    wrapped = GradSampleModule(module, batch_first=batch_dim == 0, loss_reduction="mean")
    mean_loss(wrapped, *batch).backward()
    plain = torch.optim.SGD(trainable(module).values(), lr=0.1)
    optimizer = DPOptimizer(plain, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=BATCH_SIZE)
    grads = dict(zip(trainable(module), optimizer.grad_samples, strict=True))  # raises where a parameter has none
    return norms(grads) if note else grads, note


def opacus_ghost(module: nn.Module, batch: Batch, batch_dim: int) -> Answer:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    note = replace_for_opacus(module, batch)
    wrapped = GradSampleModuleFastGradientClipping(module, batch_first=batch_dim == 0, loss_reduction="mean")
    mean_loss(wrapped, *batch).backward()
    return {"norms": wrapped.get_norm_sample()}, note


def backpack(extension: str, convert: bool, module: nn.Module, batch: Batch, batch_dim: int) -> Answer:
    from backpack import backpack, extend, extensions

    if batch_dim != 0:
        raise NotImplementedError("BackPACK takes the first axis as the batch's and has no option for another")
    ask = getattr(extensions, extension)()
    model, loss = extend(module, use_converter=convert), extend(nn.MSELoss())
    with backpack(ask):
        loss(model(*batch[:-1]), batch[-1]).backward()
    size = len(batch[0])  # of a mean loss BackPACK gives a sample's share, 1/B of its gradient
    name, scale = ("{}", size) if extension == "BatchGrad" else ("squared norms of {}", size**2)
    found = {name.format(key): getattr(p, ask.savefield) * scale for key, p in trainable(module).items()}
    return found, "b" if convert else ""


ENGINES: dict[str, tuple[str, list[Engine]]] = {  # several ways of use: the one that is right counts
    "ours": ("lightning_persample", [ours]),
    "torch ExpandedWeights": ("torch", [torch_expanded_weights]),
    "torch.func vmap": ("torch", [func_vmap]),
    "Opacus hooks": ("opacus", [opacus_hooks]),
    "Opacus ghost norms": ("opacus", [opacus_ghost]),
    "BackPACK BatchGrad": ("backpack-for-pytorch", [partial(backpack, "BatchGrad", c) for c in (False, True)]),
    "BackPACK BatchL2Grad": ("backpack-for-pytorch", [partial(backpack, "BatchL2Grad", c) for c in (False, True)]),
}


# Table ----------------------------------------------------------------------------------------------------------------
def version(package: str) -> str:
    if package == "lightning_persample":
        return lightning_persample.__version__
    return next((found.version for found in distributions(name=package)), "-")


def judge(answer: Answer, expected: dict[str, Tensor]) -> Cell:
    found, note = answer
    for name, value in found.items():
        right = expected[name]
        if value.shape != right.shape:
            return Cell("wrong", note, f"{name}: shape {tuple(value.shape)}, not {tuple(right.shape)}")
        scale = max(right.abs().max(), 1e-4 * expected["norms"].max())  # some are zero, as that of a key's bias
        worst = ((value - right).abs().max() / scale).item()
        if not worst <= 1e-8:
            return Cell("wrong", note, f"{name}: off by {worst:.1e}")
    return Cell("right", note)


def cells_of(row: Row) -> dict[str, Cell]:
    torch.manual_seed(0)
    module, inputs = row.build().double(), row.inputs(row.batch_size)
    with torch.no_grad():
        batch = (*inputs, torch.randn_like(deepcopy(module)(*inputs)))
    expected = expected_values(deepcopy(module), batch, row.batch_dim)

    def cell_of(engine: Engine) -> Cell:
        try:
            return judge(engine(deepcopy(module), batch, row.batch_dim), expected)
        except Exception as error:  # strangers' code: whatever it raises is what its user would see
            return Cell("refused", why=f"{type(error).__name__}: {' '.join(str(error).split())[:150]}")

    cells = {}
    for title, (package, ways) in ENGINES.items():
        found = [Cell("-")] if version(package) == "-" else [cell_of(way) for way in ways]
        cells[title] = next((cell for cell in found if cell.verdict == "right"), found[0])
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--details", action="store_true", help="also say why each cell is not right")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    table = {row.title: cells_of(row) for row in ROWS}

    versions = ", ".join(f"{p} {version(p)}" for p in dict.fromkeys(package for package, _ in ENGINES.values()))
    print(f"Python {platform.python_version()}, {versions}; float64 on CPU, {len(table)} cases")
    print(f"\n| case | {' | '.join(ENGINES)} |\n|---|{'---|' * len(ENGINES)}")
    for title, cells in table.items():
        shown = [f"{cell.verdict} ({cell.note})" if cell.note else cell.verdict for cell in cells.values()]
        print(f"| {title} | {' | '.join(shown)} |")
    for verdict in ("right", "wrong", "refused"):
        counts = [sum(cells[engine].verdict == verdict for cells in table.values()) for engine in ENGINES]
        print(f"| **{verdict}** | {' | '.join(f'**{count}**' for count in counts)} |")
    print(NOTES)
    for engine in ENGINES:
        refusals = [cells[engine].why.split(":")[0] for cells in table.values() if cells[engine].verdict == "refused"]
        print(f"{engine} refuses with: {dict(Counter(refusals).most_common()) or '-'}")
    if options.details:
        whys = ((title, engine, cell) for title, cells in table.items() for engine, cell in cells.items() if cell.why)
        print(*(f"{title} / {engine}: {cell.verdict}: {cell.why}" for title, engine, cell in whys), sep="\n")


if __name__ == "__main__":
    main()
