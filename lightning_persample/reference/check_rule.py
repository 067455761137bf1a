"""Check a rule against a loop over single samples: by itself, and as `expanded_weights` comes to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from itertools import combinations
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from lightning_persample.batch_axis.observed import tensors_in
from lightning_persample.batch_axis.ops import POINTWISE
from lightning_persample.capture.contributions import wrong_answer
from lightning_persample.capture.mode import expanded_weights
from lightning_persample.capture.observing import ObservingMode
from lightning_persample.capture.parameters import default_tolerance
from lightning_persample.errors import OptionError, PerSampleError, RuleRegistrationError, UnsupportedError
from lightning_persample.gradients import Dense, SampleGradient
from lightning_persample.gradients.norms import as_rows
from lightning_persample.gradients.precision import accumulation_dtype
from lightning_persample.options import check_option, check_options, is_none_or_positive
from lightning_persample.reference.loops import loop_per_sample_grads
from lightning_persample.reference.verify import Comparison, table
from lightning_persample.rules import Call, Rule, canonical_op, find_rule, op_name, watched
from lightning_persample.rules.elementwise import align_rank
from lightning_persample.torch_internals import tree_map, version_counter


@dataclass(frozen=True, eq=False)
class _Samples:
    """The batched arguments of a call and the gradients of its outputs, sample by sample."""

    text: str  # the layout, in words
    dim: int  # the axis along which the op sees the samples in the batched arguments
    inputs: Mapping[str, Tensor]  # these by name, each (B, *shape with the rows of one sample along `dim`)
    output_dims: tuple[int, ...] = ()  # the axis of the samples in each output that has a gradient
    output_grads: tuple[Tensor, ...] = ()  # the gradient of each of these outputs, cut as `inputs`
    output: Tensor | None = None  # the first output, cut likewise

    @property
    def count(self) -> int:
        """Number of samples B."""
        return next(iter(self.inputs.values())).shape[0]

    def taken(self, samples: slice = slice(None)) -> dict[str, Tensor]:
        """The batched arguments of the call with some samples."""
        return {name: _along(tensor[samples], self.dim) for name, tensor in self.inputs.items()}


def _cut(tensor: Tensor, dim: int, rows: int) -> Tensor:
    """Samples of `rows` neighbouring rows of axis `dim`: (B, ..., rows, ...); rows left over are dropped."""
    count = tensor.size(dim) // rows
    return tensor.narrow(dim, 0, count * rows).unflatten(dim, (count, rows)).movedim(dim, 0)


def _along(samples: Tensor, dim: int) -> Tensor:
    """The inverse of `_cut`: the rows of all samples after one another along axis `dim`."""
    return samples.movedim(0, dim).flatten(dim, dim + 1)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest error of a sample, ``max_i ||found[i] - expected[i]|| / ||expected[i]||``."""
    # found (B, *shape), expected (B, *shape)
    wide = accumulation_dtype(found, expected)
    pair = as_rows(found.to(wide)), as_rows(expected.to(wide))
    if not all(bool(rows.isfinite().all()) for rows in pair):
        return math.nan
    return Comparison({"": pair}, 0.0).error("")


@dataclass(frozen=True, eq=False)
class _ExampleCall:
    """A call of an op with a rule, taken apart so that it can be repeated with other tensors."""

    op: Callable[..., Any]
    rule: Rule
    args: tuple[Any, ...]  # every tensor in them is an object of its own
    kwargs: Mapping[str, Any]
    named: Mapping[str, Any]  # the arguments as the rule has them; the tensors are those of `args` and `kwargs`
    batched: tuple[str, ...]  # names of the arguments that hold the samples
    weights: tuple[str, ...]  # names of the arguments whose gradients are compared

    @property
    def device(self) -> torch.device:
        """Where the first weight is."""
        return self.named[self.weights[0]].device

    def in_precision(self, dtype: torch.dtype) -> _ExampleCall:
        """The same call with every floating point and complex tensor in another precision."""
        moved: dict[int, Any] = {}

        def move(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return moved.setdefault(id(leaf), _like(leaf.detach(), dtype))

        args, kwargs = tree_map(move, self.args), tree_map(move, dict(self.kwargs))
        return replace(self, args=args, kwargs=kwargs, named={name: move(value) for name, value in self.named.items()})

    def run(self, values: Mapping[str, Tensor]) -> list[Tensor]:
        """The tensors that the op returns with other values for some of its arguments."""
        replaced = {id(self.named[name]): value for name, value in values.items()}

        def choose(leaf: Any) -> Any:
            return replaced.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf

        return list(tensors_in(self.op(*tree_map(choose, self.args), **tree_map(choose, dict(self.kwargs)))))

    def module(self) -> nn.Module:
        """A module whose parameters are copies of the weights, in their order."""
        return nn.ParameterDict({f"weight{n}": self.named[name].clone() for n, name in enumerate(self.weights)})

    def outputs(self, module: nn.Module, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """The outputs with a gradient, of the op on batched arguments and the weights of such a module."""
        values = {**inputs, **dict(zip(self.weights, module.parameters(), strict=True))}
        return [output for output in self.run(values) if output.requires_grad]

    def loss(
        self, samples: _Samples, module: nn.Module, inputs: Mapping[str, Tensor], grads: Sequence[Tensor]
    ) -> Tensor:
        """The loss of some of the samples whose gradient by each output is `grads`."""
        outputs = self.outputs(module, replace(samples, inputs=inputs).taken())
        cut = zip(outputs, grads, samples.output_dims, strict=True)
        terms = [(output * _along(grad, dim).conj()).sum() for output, grad, dim in cut]
        return torch.stack([term.real if term.is_complex() else term for term in terms]).sum()

    def laid_out(self, text: str, dim: int, inputs: Mapping[str, Tensor], fallback: Sequence[int] = ()) -> _Samples:
        """Samples in one layout, with random gradients for the outputs."""
        samples = _Samples(text, dim, inputs)
        name = op_name(self.rule.op)
        with self._explained(f"on {text}"):
            whole = self._differentiable(samples.taken())
            again = self._differentiable(samples.taken())
            alone = [self._differentiable(samples.taken(slice(n, n + 1))) for n in range(samples.count)]
        if not whole:
            raise UnsupportedError(
                f"no output of {name!r} has a gradient with respect to {', '.join(self.weights)}: an op needs a "
                "backward of its own (torch.library.register_autograd for a custom op) before it can have a rule"
            )
        if not self.rule.several_outputs and len(whole) != 1:
            raise UnsupportedError(
                f"{name!r} has {len(whole)} outputs with a gradient, but its rule takes one: register it with "
                "several_outputs=True"
            )
        if any(
            not torch.allclose(one, two, rtol=0, atol=0, equal_nan=True) for one, two in zip(whole, again, strict=True)
        ):
            raise UnsupportedError(f"{name!r} gives another value each time, so a loop over samples tells nothing")
        generator = torch.Generator().manual_seed(0)
        dims, grads = [], []
        for place, output in enumerate(whole):
            parts = [outputs[place] for outputs in alone]
            axis = fallback[place] if samples.count == 1 and fallback else _sample_axis(output, parts[0])
            if axis is None or not _is_made_of(output, parts, axis):
                raise UnsupportedError(
                    f"{name!r} gives a sample another value alone than in its batch ({text}): it mixes samples, or "
                    "they do not lie along axis `batch_dim` of every batched argument; such an op has no per-sample "
                    "gradient to compare with"
                )
            dims.append(axis)
            grads.append(_random((samples.count, *parts[0].shape), output, generator))
        output = torch.stack([outputs[0] for outputs in alone])
        return _Samples(text, dim, inputs, tuple(dims), tuple(grads), output)

    def loop(self, samples: _Samples) -> dict[str, Tensor]:
        """The gradients by autograd through the op itself, one sample after the other."""
        with self._explained("and its backward on one sample alone"):
            loss = partial(self.loss, samples)
            _, grads = loop_per_sample_grads(self.module(), loss, samples.inputs, samples.output_grads)
        return dict(zip(self.weights, grads.values(), strict=True))

    def _differentiable(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        with torch.enable_grad():
            outputs = self.outputs(self.module(), {name: tensor.clone() for name, tensor in inputs.items()})
        return [output.detach() for output in outputs]

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        dtype = self.named[self.weights[0]].dtype
        try:
            yield
        except Exception as error:  # whatever the user's op raises
            raise PerSampleError(
                f"running {op_name(self.rule.op)!r} {doing} in {dtype} failed with {type(error).__name__}: "
                f"{str(error).strip()}; `dtypes` chooses the precisions"
            ) from error


def _random(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    """Random numbers that every precision can hold."""
    numbers = torch.randn((2, *shape), generator=generator).bfloat16().float()
    value = torch.complex(numbers[0], numbers[1]) if like.is_complex() else numbers[0]
    return value.to(like.device, like.dtype)


def _sample_axis(whole: Tensor, part: Tensor) -> int | None:
    """The one axis that shrinks where one sample is taken out of the batch."""
    if whole.dim() != part.dim():
        return None
    changed = [dim for dim in range(whole.dim()) if whole.size(dim) != part.size(dim)]
    return changed[0] if len(changed) == 1 else None


def _is_made_of(whole: Tensor, parts: Sequence[Tensor], axis: int) -> bool:
    joined = torch.cat(list(parts), dim=axis)
    if joined.shape != whole.shape:
        return False
    tolerance = 1e-2 if whole.dtype in (torch.float16, torch.bfloat16) else 1e-4
    scale = float(whole.abs().max()) if whole.numel() else 0.0
    return torch.allclose(joined, whole, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


_Status: TypeAlias = Literal["agrees", "differs", "missing", "raised", "not found", "not compared"]
_Finding: TypeAlias = tuple[float, _Status, str]


@dataclass(eq=False)
class _RuleCall:
    """A call of a rule that can be repeated, in one precision, for the weights of which gradients are `expected`."""

    example: _ExampleCall
    samples: _Samples
    expected: Mapping[str, Tensor]
    dtype: torch.dtype
    tolerance: float
    strided: bool

    def __post_init__(self) -> None:
        self.rule, samples, dtype = self.example.rule, self.samples, self.dtype
        self._lay = _strided if self.strided else torch.clone
        rank = samples.output_grads[0].dim() if self.rule.op in POINTWISE else 0
        self.values: dict[str, Any] = dict(self.example.named)
        for name, tensor in samples.inputs.items():
            aligned = align_rank(tensor, rank) if tensor.dim() < rank else tensor
            self.values[name] = _like(aligned, dtype)
        self.grads = tuple(self._lay(_like(grad, dtype)) for grad in samples.output_grads)
        output = samples.output if self.rule.reads_output else None
        self.output = None if output is None else self._lay(_like(output, dtype))
        # The tensors among the arguments that the rule has not declared to read.
        self.held_back = {n for n, v in self.values.items() if isinstance(v, Tensor) and not self.rule.is_read(n)}

    def undeclared(self, severity: int) -> tuple[str, ...]:
        """Names of the arguments without whose values, of which none are promised, the rule does worse."""
        least = _severity(self.compare(self.held_back)) if severity else 0
        if least >= severity:
            return ()
        needed = [name for name in self.held_back if _severity(self.compare(self.held_back - {name})) > least]
        return tuple(sorted({name.split("[")[0] for name in needed}))

    def compare(self, given: Collection[str] = ()) -> dict[str, _Finding]:
        """Call the rule and compare; some arguments are `given` although the rule has not declared to read them."""
        expected, arguments = self.expected, dict[str, Any]()
        for name, value in self.values.items():
            if name not in self.held_back or name in given:
                arguments[name] = self._lay(value) if isinstance(value, Tensor) else value
            elif name in expected:
                arguments[name] = value.to("meta")
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        tensors |= {f"grad_output[{place}]": grad for place, grad in enumerate(self.grads)}
        versions = {name: version_counter(tensor) for name, tensor in tensors.items()}
        call = Call(self.samples.count, arguments, frozenset(expected), output=self.output)
        try:
            with torch.no_grad():
                found: Any = self.rule.function(call, self.grads if self.rule.several_outputs else self.grads[0])
        except Exception as error:  # whatever the rule raises, which the report names
            return dict.fromkeys(expected, (math.nan, "raised", _raised(error)))
        written = [name for name, tensor in tensors.items() if version_counter(tensor) != versions[name]]
        if written:
            reason = f"the rule writes into {', '.join(written)}, which belongs to the caller: write to a copy"
            return dict.fromkeys(expected, (math.nan, "differs", reason))
        findings: dict[str, _Finding] = {}
        for name, rows in expected.items():
            wrong = wrong_answer(found, {name: tuple(rows.shape)})
            if wrong:
                is_there = isinstance(found, Mapping) and name in found
                findings[name] = (math.nan, "differs" if is_there else "missing", f"the rule {wrong}")
            else:
                findings[name] = _compared(found[name], rows, self.tolerance)
        return findings


def _compared(found: SampleGradient, expected: Tensor, tolerance: float, sq_norm: Tensor | None = None) -> _Finding:
    """One structure beside the loop's gradients: the gradients, squared norms and inner products."""
    # expected (B, *shape), sq_norm (B,)
    if not bool(expected.any()):
        reason = "the loop's gradients are all zero, which proves nothing: give other example arguments"
        return math.nan, "not compared", reason
    square = expected.abs().square().reshape(len(expected), -1).sum(1)
    try:
        dense = found.dense()
        if dense.shape != expected.shape:
            reason = f"its structure is of shape {tuple(found.shape)}, but dense() gives {tuple(dense.shape)}"
            return math.nan, "differs", reason
        quantities = {
            "gradients": (dense, expected),
            "squared norms": (found.sq_norm() if sq_norm is None else sq_norm, square),
            "inner products with themselves": (found.inner(found), square),
            "inner products": (found.inner(Dense(expected.to(found.dtype))), square),
            "gradients of the last sample": (found.samples(len(expected) - 1, len(expected)).dense(), expected[-1:]),
        }
        errors = {what: relative_error(*pair) for what, pair in quantities.items()}
    except Exception as error:  # whatever the rule's structure raises, which the report names
        return math.nan, "raised", _raised(error)
    wrong = [what for what, error in errors.items() if not error <= tolerance]
    if any(math.isnan(error) for error in errors.values()):
        return math.nan, "differs", f"the {wrong[0]} hold values that are not finite"
    if not wrong:
        return max(errors.values()), "agrees", ""
    factor = _factor(dense, expected, tolerance) if wrong[0] == "gradients" else None
    if factor is not None:
        return errors[wrong[0]], "differs", f"every value of the gradients is {factor:.4g} times the loop's"
    return errors[wrong[0]], "differs", f"the {wrong[0]} are off by more than {tolerance:.0e}"


def _factor(found: Tensor, expected: Tensor, tolerance: float) -> float | None:
    """The one number that all gradients are a multiple of the loop's by, or None."""
    factor = float((found * expected.conj()).sum().real / expected.abs().square().sum())
    return factor if factor and relative_error(found, factor * expected) <= tolerance else None


def _raised(error: Exception) -> str:
    """An exception as a reason."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in another precision; integers stay what they are."""
    if tensor.is_complex():
        return tensor.to(torch.complex128 if dtype is torch.float64 else torch.complex64)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _strided(tensor: Tensor) -> Tensor:
    """A copy with strides that no kernel expects: every axis has gaps, and the first one varies fastest."""
    order = tuple(reversed(range(tensor.dim())))
    memory = tensor.new_empty((*reversed(tensor.shape), 2))
    return memory[..., 0].permute(order).copy_(tensor)


_HEADER = ("call", "weight", "largest relative error", "status", "reason")


@dataclass(frozen=True)
class RuleCheck:
    """One row of a `RuleReport`.

    >>> import torch
    >>> from lightning_persample import check_rule
    >>> report = check_rule(torch.nn.functional.linear, (torch.randn(6, 3), torch.randn(2, 3), torch.randn(2)))
    >>> report.checks[0].weight, report.checks[0].status
    ('weight', 'agrees')

    Attributes:
        call: how the rule was called: how many samples, with how many rows each, in which layout, by whom.
        weight: name of the weight.
        error: largest error of a sample's value, relative to the loop's: ``max_i ||g_i - r_i|| / ||r_i||`` for the
            gradients (a value below 1% of the largest sample's counts as 1% of it); where these agree, that of squared
            norms and inner products; nan where there is nothing to compare, or a value is not a finite number.
        status: "agrees"; "differs"; "missing": the rule gives no value; "raised": the rule raised an exception; "not
            found": `expanded_weights` does not come to the rule; "not compared": the example arguments prove nothing.
        reason: why, where the status is not "agrees".
    """

    call: str
    weight: str
    error: float
    status: Literal["agrees", "differs", "missing", "raised", "not found", "not compared"]
    reason: str = ""


@dataclass(frozen=True)
class RuleReport:
    """A rule beside a loop over single samples; true where all rows agree that prove anything, at least one per weight.

    >>> import torch
    >>> from lightning_persample import check_rule
    >>> report = check_rule(torch.nn.functional.linear, (torch.randn(6, 3), torch.randn(2, 3), torch.randn(2)))
    >>> bool(report), {check.status for check in report.checks}
    (True, {'agrees'})

    Attributes:
        op: the op.
        checks: one row for each way of calling the rule and each weight.
        left_out: ways of calling the op that it does not allow.
    """

    op: str
    checks: tuple[RuleCheck, ...]
    left_out: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        proven = {row.weight for row in self.named("agrees")}
        return bool(self.checks) and all(
            row.status == "agrees" or (row.status == "not compared" and row.weight in proven) for row in self.checks
        )

    def named(self, status: str) -> tuple[RuleCheck, ...]:
        """The rows with one status."""
        return tuple(row for row in self.checks if row.status == status)

    def __str__(self) -> str:
        """The table, with each reason written once below it."""
        agree = len(self.named("agrees"))
        lines = [
            f"The rule of {self.op!r}, compared with a loop over single samples: {agree} of {len(self.checks)} checks "
            "agree",
            table(_HEADER, self.checks),
        ]
        if self.left_out:
            lines.append(f"left out, because the op does not allow it: {', '.join(self.left_out)}")
        return "\n".join(lines)


_FEWEST, _MOST = 4, 6


def check_rule(
    op: Callable[..., Any],
    arguments: Sequence[Any] | Mapping[str, Any],
    *,
    batched: Collection[str] | None = None,
    weights: Collection[str] | None = None,
    batch_dim: int = 0,
    further_axis: bool = True,
    dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32),
    tolerance: float | None = None,
) -> RuleReport:
    """Compare the rule of an op with a loop over single samples that knows nothing of rules.

    For a random gradient s of the op's output y, the loop gives ``r_i = d <s_i, y_i> / d w`` by autograd through the
    op, called for sample i alone. The rule is called as `register_rule` promises it, with the arguments that it `reads`
    and no others, and its structure's gradients, squared norms and inner products are compared with those of the r_i:
    with one row per sample and with several, one sample alone, the samples along the first or the second of two axes
    (where the op takes such arguments), tensors of any strides, lower precision, each choice of weights. Last, the op
    is called inside `expanded_weights`, which must come to this rule and give the same.

    >>> import torch
    >>> report = check_rule(torch.nn.functional.linear, (torch.randn(6, 3), torch.randn(2, 3), torch.randn(2)))
    >>> bool(report)
    True

    Args:
        op: the op, as it is called.
        arguments: one example batch, as the op takes it: the positional arguments, or a mapping of keyword arguments.
            The batched ones have the samples along axis `batch_dim`, at least 4 of them; 6 are used.
        batched: names of the arguments that hold the samples; by default all tensors that the rule declares as batched
            and not as weights.
        weights: names of the weights to check; by default all tensors that the rule declares as such and that are not
            in `batched`.
        batch_dim: the axis of the samples in the batched arguments.
        further_axis: also give the op batched arguments with one axis more than in the example, where it accepts them;
            False for an op that does not look at the number of axes and may read beyond its arguments.
        dtypes: the precisions to check; the loop runs in the first.
        tolerance: largest relative error that counts as agreement; by default what the precision allows, 1e-7 in double
            and 1e-3 in single precision.

    Returns:
        The report: true where everything agrees that proves anything, and a table with the reasons when printed.

    Raises:
        RuleRegistrationError: the op has no rule.
        UnsupportedError: the op mixes samples or is random, so that there is nothing to compare with.
    Arguments that do not fit the op as its rule names them, and options with a value that is not allowed, give an
    `OptionError`, an op that itself raises an error a `PerSampleError`.
    """
    rule = find_rule(op)
    if rule is None:
        raise RuleRegistrationError(
            f"{op_name(canonical_op(op))!r} has no rule; register one with lightning_persample.register_rule"
        )
    check_options(batch_dim=batch_dim)
    are_precisions = len(dtypes) > 0 and all(getattr(dtype, "is_floating_point", False) for dtype in dtypes)
    check_option("dtypes", dtypes, are_precisions, "floating point precisions, at least one")
    check_option("tolerance", tolerance, is_none_or_positive(tolerance), "None or a number > 0")
    example = _example(op, rule, arguments, batched, weights)
    _check_sizes(example, batch_dim)
    if rule.mixes_samples is not None and rule.mixes_samples(example.named):
        raise UnsupportedError(
            f"{op_name(rule.op)!r} lets samples influence each other here (`mixes_samples`): a loop over single "
            "samples is no reference for it"
        )
    # Values that all precisions can hold, so that all see the same.
    lowest = max((torch.float32, *dtypes), key=lambda dtype: torch.finfo(dtype).eps)
    example = example.in_precision(lowest).in_precision(dtypes[0])
    devices = [example.device] if example.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        return _Check(example, batch_dim, further_axis, dtypes, tolerance).report()


@dataclass(eq=False)
class _Check:
    """Calls the rule in every way and collects the rows of the report."""

    example: _ExampleCall
    batch_dim: int
    further_axis: bool
    dtypes: Sequence[torch.dtype]
    tolerance: float | None

    def report(self) -> RuleReport:
        self.checks: list[RuleCheck] = []
        self.left_out: list[str] = []
        layouts = self._layouts()
        several = layouts[1]
        for samples in layouts:
            self._direct(samples)
        for count in range(1, len(self.example.weights)):
            for chosen in combinations(self.example.weights, count):
                self._direct(several, f"only {', '.join(chosen)}", asked=chosen)
        self._direct(several, "strided", strided=True)
        for dtype in self.dtypes[1:]:
            self._direct(several, str(dtype).removeprefix("torch."), dtype=dtype)
        for samples in (sample for sample in layouts if sample.count > 1):
            self._through_the_engine(samples)
        return RuleReport(op_name(self.example.rule.op), tuple(self.checks), tuple(self.left_out))

    def _layouts(self) -> list[_Samples]:
        """The samples with one and with several rows, alone, and along either of two axes where the op can."""
        example, dim = self.example, self.batch_dim
        tensors = {name: example.named[name] for name in example.batched}
        tensors = {name: tensor.narrow(dim, 0, min(_MOST, tensor.size(dim))) for name, tensor in tensors.items()}

        def rows(number: int) -> dict[str, Tensor]:
            return {name: _cut(tensor, dim, number) for name, tensor in tensors.items()}

        total = next(iter(tensors.values())).size(dim)
        first = example.laid_out(f"{total} samples", dim, rows(1))
        layouts = [first]
        for number in (2, 3):
            samples = f"{total // number} sample{'s' if total // number > 1 else ''}"
            layouts.append(example.laid_out(f"{samples} of {number} rows", dim, rows(number), first.output_dims))
        of_samples = torch.stack([rows.reshape(len(rows), -1).any(1) for rows in example.loop(first).values()])
        telling = int(of_samples.sum(0).argmax())  # a sample alone whose gradients are zero would prove nothing
        alone = {name: tensor[telling : telling + 1] for name, tensor in first.inputs.items()}
        layouts.append(example.laid_out("1 sample", dim, alone, first.output_dims))
        further = (
            (f"{total // 2} samples, then 2 positions", dim, 1 + dim),
            (f"2 positions, then {total // 2} samples", dim + 1, 2 + dim),
        )
        for text, place, after in further if self.further_axis else ():
            inputs = {name: tensor.unsqueeze(after) for name, tensor in rows(2).items()}
            try:
                layouts.append(example.laid_out(text, place, inputs))
            except PerSampleError:  # the op takes no further axis, or keeps the samples along another
                self.left_out.append(text)
        return layouts

    def _direct(
        self,
        samples: _Samples,
        note: str = "",
        *,
        asked: tuple[str, ...] | None = None,
        strided: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Call the rule itself and compare what it gives for each weight that is asked for."""
        asked = self.example.weights if asked is None else asked
        expected = {name: value for name, value in self.example.loop(samples).items() if name in asked}
        dtype = self.dtypes[0] if dtype is None else dtype
        example, allowed = self.example.in_precision(dtype), self._allowed(dtype)
        call = _RuleCall(example, samples, expected, dtype, allowed, strided)
        findings = call.compare()
        needed = call.undeclared(_severity(findings))
        if needed:
            reason = (
                f"the rule reads {', '.join(needed)}, of which it is promised no values: register it with "
                f"reads={(*sorted(self.example.rule.reads), *needed)!r}"
            )
            findings = {n: f if f[1] == "agrees" else (f[0], f[1], reason) for n, f in findings.items()}
        text = f"{samples.text}, {note}" if note else samples.text
        self.checks += [RuleCheck(text, name, *finding) for name, finding in findings.items()]

    def _through_the_engine(self, samples: _Samples) -> None:
        """Call the op inside `expanded_weights` and compare the record."""
        example, rule, text = self.example, self.example.rule, f"expanded_weights, {samples.text}"
        expected = example.loop(samples)
        module, called = example.module(), list[int]()
        names = dict(zip(example.weights, dict(module.named_parameters()), strict=True))

        @wraps(rule.function)
        def counted(call: Call, grad_output: Any) -> Mapping[str, SampleGradient]:
            called.append(call.batch_size)
            return rule.function(call, grad_output)

        batch = {name: tensor.clone() for name, tensor in samples.inputs.items()}, samples.output_grads
        try:
            with (
                watched(rule, counted),
                torch.enable_grad(),
                expanded_weights(
                    module,
                    batch,
                    loss_reduction="sum",
                    quantities=("sq_norm", "grad_sample"),
                    unsupported="ignore",
                ) as capture,
            ):
                example.loss(samples, module, *batch).backward()
            record = capture.record
        except Exception as error:  # whatever the user's op and rule raise, which the report names
            reason = _raised(error)
            self.checks += [RuleCheck(text, name, math.nan, "raised", reason) for name in names]
            return
        unseen = "" if called else self._why_not_found()
        for name, own in names.items():
            finding: _Finding = (math.nan, "missing", record.unsupported.get(own, "no gradient reached it"))
            if own in record.grad_samples:
                rows, allowed = Dense(record.grad_samples[own]), self._allowed(self.dtypes[0])
                finding = _compared(rows, expected[name], allowed, record.sq_norms[own])
            if unseen:
                finding = (finding[0], "not found", unseen)
            self.checks.append(RuleCheck(text, name, *finding))

    def _why_not_found(self) -> str:
        ops: dict[Any, None] = {}

        def note(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            ops[canonical_op(function)] = None
            return function(*args, **kwargs)

        weights = dict(zip(self.example.weights, self.example.module().parameters(), strict=True))
        with ObservingMode(note).active():
            self.example.run(weights)
        if self.example.rule.op in ops:
            return (
                "the rule is never asked, although torch shows the call: the op was called in a way that `arguments`, "
                "`batched` and `weights` of the rule do not describe"
            )
        calls = ", ".join(op_name(op) for op in ops) or "nothing"
        return (
            f"the rule is never asked, because torch does not show the call of {op_name(self.example.rule.op)!r}, but "
            f"what is inside it: {calls}. Make the op a torch.library.custom_op, or decorate a Python function that "
            "calls it with torch.overrides.wrap_torch_function, and register the rule for that"
        )

    def _allowed(self, dtype: torch.dtype) -> float:
        return default_tolerance({dtype}, self.example.device) if self.tolerance is None else self.tolerance


def _severity(findings: Mapping[str, _Finding]) -> int:
    """0 for nothing wrong, 1 for wrong values, 2 for an exception."""
    statuses = {status for _, status, _ in findings.values()}
    return 2 if "raised" in statuses else int(bool(statuses - {"agrees", "not compared"}))


def _example(
    op: Callable[..., Any],
    rule: Rule,
    arguments: Sequence[Any] | Mapping[str, Any],
    batched: Collection[str] | None,
    weights: Collection[str] | None,
) -> _ExampleCall:
    """The call, with tensors of its own, and which of its arguments are what."""
    name = op_name(rule.op)
    given: tuple[Any, ...] = () if isinstance(arguments, Mapping) else tuple(arguments)
    options = dict(arguments) if isinstance(arguments, Mapping) else {}

    def own(leaf: Any) -> Any:
        return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf

    args, kwargs = tree_map(own, given), tree_map(own, options)
    named = rule.bind(args, kwargs)
    if named is None:
        raise OptionError(
            f"the example arguments of {name!r} do not fit its rule: there are {len(args)} by position and "
            f"{sorted(kwargs)} by name, the rule knows {list(rule.arguments)}"
        )
    tensors = {key: value for key, value in named.items() if isinstance(value, Tensor)}
    for option, names in (("batched", batched), ("weights", weights)):
        unknown = sorted(set(names or ()) - tensors.keys())
        if unknown:
            raise OptionError(f"{option} names {unknown}, but the tensors among the arguments are {sorted(tensors)}")
    if batched is None:
        shared = {key for key in tensors if rule.is_weight(key) and not rule.is_per_sample(key)}
        excluded = shared if weights is None else set(weights)
        batched = [key for key in tensors if rule.is_batched(key) and key not in excluded]
    if weights is None:
        weights = [key for key in tensors if rule.is_weight(key) and key not in batched]
    for option, names, declared in (("batched", batched, rule.is_batched), ("weights", weights, rule.is_weight)):
        wrong = [key for key in names if not declared(key)]
        if wrong or not names:
            raise OptionError(
                f"{option} is {sorted(names)}; allowed are tensors that the rule of {name!r} declares as {option}, one "
                f"at least: {[key for key in tensors if declared(key)]}"
            )
    whole = [key for key in weights if not (tensors[key].is_floating_point() or tensors[key].is_complex())]
    if whole or set(weights) & set(batched):
        wrong = whole or sorted(set(weights) & set(batched))
        raise OptionError(f"weights names {wrong}, which are batched or of an integer dtype; allowed are other tensors")
    return _ExampleCall(op, rule, args, kwargs, named, tuple(batched), tuple(weights))


def _check_sizes(example: _ExampleCall, batch_dim: int) -> None:
    shapes = {name: tuple(example.named[name].shape) for name in example.batched}
    sizes = {shape[batch_dim] if len(shape) > batch_dim else 0 for shape in shapes.values()}
    if len(sizes) != 1 or min(sizes) < _FEWEST:
        raise OptionError(
            f"the batched arguments have shapes {shapes}; allowed is one number of samples along axis {batch_dim} "
            f"(batch_dim), at least {_FEWEST}"
        )
