"""Check a rule against a loop over single samples: by itself, and as `expanded_weights` comes to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from lightning_persample.engine.example_call import ExampleCall, Samples, along, cut
from lightning_persample.engine.mode import expanded_weights
from lightning_persample.engine.rule_call import Finding, RuleCall, compared, raised
from lightning_persample.engine.rule_report import RuleCheck, RuleReport
from lightning_persample.engine.sums import default_tolerance
from lightning_persample.errors import OptionError, PerSampleError, RuleRegistrationError, UnsupportedError
from lightning_persample.gradients import Dense, SampleGradient
from lightning_persample.options import check_option, check_options, is_none_or_positive
from lightning_persample.rules import Call, Rule, canonical_op, find_rule, op_name, watched

__all__ = ["check_rule"]

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
    device = example.named[example.weights[0]].device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        return _Check(example, batch_dim, further_axis, tuple(dtypes), tolerance).report()


class _Check:
    """Calls the rule in every way and collects the rows of the report."""

    def __init__(
        self,
        example: ExampleCall,
        batch_dim: int,
        further_axis: bool,
        dtypes: tuple[torch.dtype, ...],
        tolerance: float | None,
    ) -> None:
        # Values that all precisions can hold, so that all see the same.
        lowest = max((torch.float32, *dtypes), key=lambda dtype: torch.finfo(dtype).eps)
        self.example = example.in_precision(lowest).in_precision(dtypes[0])
        self.rule = example.rule
        self.batch_dim = batch_dim
        self.further_axis = further_axis
        self.dtypes = dtypes
        self.device = example.named[example.weights[0]].device
        self.tolerance = tolerance
        self.checks: list[RuleCheck] = []

    def report(self) -> RuleReport:
        left_out: list[str] = []
        layouts = self._layouts(left_out)
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
        return RuleReport(op_name(self.rule.op), tuple(self.checks), tuple(left_out))

    def _layouts(self, left_out: list[str]) -> list[Samples]:
        """The samples with one and with several rows, alone, and along either of two axes where the op can."""
        example, dim = self.example, self.batch_dim
        tensors = {name: example.named[name] for name in example.batched}
        tensors = {name: tensor.narrow(dim, 0, min(_MOST, tensor.size(dim))) for name, tensor in tensors.items()}

        def rows(number: int) -> dict[str, Tensor]:
            return {name: cut(tensor, dim, number) for name, tensor in tensors.items()}

        total = next(iter(tensors.values())).size(dim)
        first = example.laid_out(f"{total} samples", dim, rows(1))
        layouts = [first]
        for number in (2, 3):
            text = (
                f"{total // number} samples of {number} rows" if total // number > 1 else f"1 sample of {number} rows"
            )
            layouts.append(example.laid_out(text, dim, rows(number), first.output_dims))
        of_samples = torch.stack([rows.reshape(len(rows), -1).any(1) for rows in example.loop(first).values()])
        telling = int(of_samples.sum(0).argmax())  # a sample alone whose gradients are zero would prove nothing
        alone = {name: tensor[telling : telling + 1] for name, tensor in first.inputs.items()}
        layouts.append(example.laid_out("1 sample", dim, alone, first.output_dims))
        pairs = rows(2) if self.further_axis else {}
        for text, place, after in (
            (f"{total // 2} samples, then 2 positions", dim, 1 + dim),
            (f"2 positions, then {total // 2} samples", dim + 1, 2 + dim),
        ):
            inputs = {name: tensor.unsqueeze(after) for name, tensor in pairs.items()}
            if not inputs:
                break
            try:
                layouts.append(example.laid_out(text, place, inputs))
            except PerSampleError:  # the op takes no further axis, or keeps the samples along another
                left_out.append(text)
        return layouts

    def _direct(
        self,
        samples: Samples,
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
        call = RuleCall(self.example.in_precision(dtype), samples, asked, dtype, strided=strided)
        allowed = self._allowed(dtype)
        findings = call.compare(expected, allowed)
        needed = self._undeclared(call, expected, allowed, _severity(findings))
        if needed:
            reason = (
                f"the rule reads {', '.join(needed)}, of which it is promised no values: register it with "
                f"reads={(*sorted(self.rule.reads), *needed)!r}"
            )
            findings = {n: f if f[1] == "agrees" else (f[0], f[1], reason) for n, f in findings.items()}
        text = f"{samples.text}, {note}" if note else samples.text
        self.checks += [RuleCheck(text, name, *finding) for name, finding in findings.items()]

    def _undeclared(
        self, call: RuleCall, expected: Mapping[str, Tensor], allowed: float, severity: int
    ) -> tuple[str, ...]:
        """Names of the arguments without whose values, of which none are promised, the rule does worse."""
        given = call.held_back
        least = _severity(call.compare(expected, allowed, given)) if severity else 0
        if least >= severity:
            return ()
        needed = [name for name in given if _severity(call.compare(expected, allowed, given - {name})) > least]
        return tuple(sorted({name.split("[")[0] for name in needed}))

    def _through_the_engine(self, samples: Samples) -> None:
        """Call the op inside `expanded_weights` and compare the record."""
        example, text = self.example, f"expanded_weights, {samples.text}"
        expected = example.loop(samples)
        module, called = nn.Module(), []
        for place, weight in enumerate(example.leaves().values()):
            module.register_parameter(f"weight{place}", nn.Parameter(weight.detach()))
        names = {name: f"weight{place}" for place, name in enumerate(example.weights)}

        @wraps(self.rule.function)
        def counted(call: Call, grad_output: Any) -> Mapping[str, SampleGradient]:
            called.append(call.batch_size)
            return self.rule.function(call, grad_output)

        inputs = {name: tensor.clone() for name, tensor in samples.inputs.items()}
        try:
            with (
                watched(self.rule, counted),
                torch.enable_grad(),
                expanded_weights(
                    module,
                    (inputs, samples.output_grads),
                    loss_reduction="sum",
                    quantities=("sq_norm", "grad_sample"),
                    unsupported="ignore",
                ) as capture,
            ):
                values = {name: along(tensor, samples.dim) for name, tensor in inputs.items()}
                values |= {name: module.get_parameter(own) for name, own in names.items()}
                outputs = [output for output in example.run(values) if output.requires_grad]
                terms = [
                    (output * along(grad, dim).conj()).sum()
                    for output, grad, dim in zip(outputs, samples.output_grads, samples.output_dims, strict=True)
                ]
                torch.stack([term.real if term.is_complex() else term for term in terms]).sum().backward()
            record = capture.record
        except Exception as error:  # whatever the user's op and rule raise, which the report names
            reason = raised(error)
            self.checks += [RuleCheck(text, name, math.nan, "raised", reason) for name in names]
            return
        unseen = "" if called else self._why_not_found()
        for name, own in names.items():
            finding: Finding = (math.nan, "missing", record.unsupported.get(own, "no gradient reached it"))
            if own in record.grad_samples:
                rows, allowed = Dense(record.grad_samples[own]), self._allowed(self.dtypes[0])
                finding = compared(rows, expected[name], allowed, record.sq_norms[own])
            if unseen:
                finding = (finding[0], "not found", unseen)
            self.checks.append(RuleCheck(text, name, *finding))

    def _why_not_found(self) -> str:
        seen: list[Callable[..., Any]] = []

        class Listening(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.append(func)
                return func(*args, **(kwargs or {}))

        leaves = self.example.leaves()
        with Listening():
            self.example.run(leaves)
        ops = list(dict.fromkeys(canonical_op(function) for function in seen))
        if self.rule.op in ops:
            return (
                "the rule is never asked, although torch shows the call: the op was called in a way that `arguments`, "
                "`batched` and `weights` of the rule do not describe"
            )
        calls = ", ".join(op_name(op) for op in ops) or "nothing"
        return (
            f"the rule is never asked, because torch does not show the call of {op_name(self.rule.op)!r}, but what is "
            f"inside it: {calls}. Make the op a torch.library.custom_op, or decorate a Python function that calls it "
            "with torch.overrides.wrap_torch_function, and register the rule for that"
        )

    def _allowed(self, dtype: torch.dtype) -> float:
        return default_tolerance({dtype}, self.device) if self.tolerance is None else self.tolerance


def _severity(findings: Mapping[str, Finding]) -> int:
    """0 for nothing wrong, 1 for wrong values, 2 for an exception."""
    statuses = {status for _, status, _ in findings.values()}
    return 2 if "raised" in statuses else int(bool(statuses - {"agrees", "not compared"}))


def _example(
    op: Callable[..., Any],
    rule: Rule,
    arguments: Sequence[Any] | Mapping[str, Any],
    batched: Collection[str] | None,
    weights: Collection[str] | None,
) -> ExampleCall:
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
    return ExampleCall(op, rule, args, kwargs, named, tuple(batched), tuple(weights))


def _check_sizes(example: ExampleCall, batch_dim: int) -> None:
    shapes = {name: tuple(example.named[name].shape) for name in example.batched}
    sizes = {shape[batch_dim] if len(shape) > batch_dim else 0 for shape in shapes.values()}
    if len(sizes) != 1 or min(sizes) < _FEWEST:
        raise OptionError(
            f"the batched arguments have shapes {shapes}; allowed is one number of samples along axis {batch_dim} "
            f"(batch_dim), at least {_FEWEST}"
        )
