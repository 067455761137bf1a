"""Which rule answers for which op.

A rule is a function ``(call, grad_output) -> {argument name: SampleGradient}``. It is maths only: it reads the tensors
of one call of one op and the gradient with respect to the op's output, and returns the structure of what this use
contributes to the gradient of each weight among the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torch import Tensor

from lightning_persample.errors import RuleRegistrationError
from lightning_persample.gradients import SampleGradient
from lightning_persample.torch_internals import is_torch_op, name_of_custom_op


@dataclass(frozen=True, eq=False)
class Call:
    """One call of an op as a rule sees it: batch first.

    >>> import torch
    >>> from lightning_persample import Outer
    >>> def rule(call, grad_output):  # of torch.mm, (B, 1, d) and (B, 1, p)
    ...     return {"mat2": Outer(call.arguments["input"], grad_output)}
    >>> rule(Call(2, {"input": torch.ones(2, 1, 3)}, ("mat2",)), torch.ones(2, 1, 4))["mat2"].shape
    torch.Size([3, 4])

    Attributes:
        batch_size: number of samples B.
        arguments: value of every argument that was passed, by name. A tensor named in `Rule.batched` is batch-first
            where it depends on the batch in this call, (B, *shape): ``shape`` is the shape the op saw, with the batch
            axis reduced to the k rows that belong to one sample (k = 1 unless samples were flattened together with
            another axis). All else, also a tensor that all samples share, is as it was passed.
        weights: names of the arguments whose per-sample gradients are asked for: some of `Rule.weights`, or none.
        counts: for a batched argument of which samples have unequal numbers of rows, the number of each sample's rows
            (B,); the rows beyond it only fill up.
        draws: the random tensors of the call, drawn again, each batch-first; see `Rule.draws`.
        output: the first output of the call, batch-first, where the rule reads it.
        nested: whether a later output was computed on the way to an earlier one, so that its gradient holds what flows
            back through the earlier one too.
        saved: results that autograd keeps for the op's own backward, batch-first, where they can be had; see
            `Rule.saved`.
        per_sample: names of the weights among the arguments that hold a row for every sample: they are batch-first,
            and their gradient has the same shape.
    """

    batch_size: int
    arguments: Mapping[str, Any]
    weights: frozenset[str]
    counts: Mapping[str, Tensor] = field(default_factory=dict)
    draws: tuple[Tensor, ...] = ()
    output: Tensor | None = None
    nested: bool = False
    saved: Mapping[str, Tensor] = field(default_factory=dict)
    per_sample: frozenset[str] = frozenset()

    def get(self, name: str, default: Any = None) -> Any:
        """The value of an argument, or `default` where the call left it out."""
        return self.arguments.get(name, default)


RuleFunction: TypeAlias = Callable[[Call, Any], Mapping[str, SampleGradient]]
Bind: TypeAlias = Callable[[tuple[Any, ...], Mapping[str, Any]], dict[str, Any] | None]


@dataclass(frozen=True)
class Rule:
    """A registered rule.

    >>> import torch
    >>> from lightning_persample.rules import find_rule
    >>> rule = find_rule(torch.nn.functional.linear)
    >>> rule.arguments, sorted(rule.weights)
    (('input', 'weight', 'bias'), ['bias', 'weight'])

    Attributes:
        op: canonical op, see `canonical_op`.
        function: the rule itself.
        arguments: names of the op's arguments in positional order.
        batched: names of the arguments that may depend on the batch.
        weights: names of the arguments whose gradient the rule knows.
        reads: names of the arguments whose values the rule reads; what is not read need not be kept alive for the
            backward. Of a weight that is asked for, shape and dtype are known in any case.
        mixes_samples: given the arguments by name, does this call let one sample influence another's output?
        binds: gives the arguments by name where their order depends on their kinds.
        several_outputs: the rule gets a tuple of gradients, one per output, None where an output got none.
        draws: given the arguments by name and the first output, draws the random tensors of the call in the order in
            which the op drew them, each with the batch where the output has it.
        reads_output: whether the rule reads the first output.
        per_sample: names of arguments that may hold a row for every sample even where they do not depend on the batch,
            such as an initial state; one that does is batch-first.
        saved: names of results that autograd keeps for the op's own backward (``_saved_<name>`` of its node), such as
            the statistics of a normalization, from which the rule would profit. Each has an entry for every row of the
            first output along its own first axis.
        adds_rows: given the arguments by name, is what a sample gets the sum of what each of its rows would get as a
            sample, in structures no larger than the output's gradient and what the rule reads? Then the rule is called
            once where samples have unequal numbers of rows, with every row as a sample.
    """

    op: object
    function: RuleFunction
    arguments: tuple[str, ...]
    batched: frozenset[str]
    weights: frozenset[str]
    reads: frozenset[str]
    mixes_samples: Callable[[Mapping[str, Any]], bool] | None = None
    binds: Bind | None = None
    several_outputs: bool = False
    draws: Callable[[Mapping[str, Any], Tensor], list[Tensor]] | None = None
    reads_output: bool = False
    per_sample: frozenset[str] = frozenset()
    saved: tuple[str, ...] = ()
    adds_rows: Callable[[Mapping[str, Any]], bool] | None = None

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """A call's arguments by name, or None where they do not fit; tensors in a list are ``name[0]``, ``name[1]``."""
        if any(name not in self.arguments for name in kwargs):
            return None
        if self.binds is not None:
            named = self.binds(args, kwargs)
        else:
            fits = len(args) <= len(self.arguments)
            named = {**dict(zip(self.arguments, args, strict=False)), **kwargs} if fits else None
        if named is None:
            return None
        bound: dict[str, Any] = {}
        for name, value in named.items():
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
                bound |= {f"{name}[{place}]": tensor for place, tensor in enumerate(value)}
            else:
                bound[name] = value
        return bound

    def is_weight(self, name: str) -> bool:
        """Whether the rule knows the gradient of this argument."""
        return name.split("[")[0] in self.weights

    def is_batched(self, name: str) -> bool:
        """Whether this argument may depend on the batch."""
        return name.split("[")[0] in self.batched

    def is_per_sample(self, name: str) -> bool:
        """Whether this argument holds a row for every sample in any case."""
        return name.split("[")[0] in self.per_sample

    def is_read(self, name: str) -> bool:
        """Whether the rule reads the value of this argument."""
        return name.split("[")[0] in self.reads


_RULES: dict[object, Rule] = {}

_OPERATORS = {
    "__add__": "add", "__radd__": "add", "__iadd__": "add",
    "__sub__": "sub", "__isub__": "sub", "__rsub__": "rsub",
    "__mul__": "mul", "__rmul__": "mul", "__imul__": "mul",
    "__div__": "div", "__truediv__": "div", "__itruediv__": "div", "__idiv__": "div",
    "__rdiv__": "rdiv", "__rtruediv__": "rdiv",
    "__matmul__": "matmul", "__rmatmul__": "rmatmul",
    "__pow__": "pow", "__ipow__": "pow", "__rpow__": "rpow",
    "__getitem__": "getitem", "__setitem__": "setitem",
    "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub",
}  # fmt: skip


def canonical_op(op: Callable[..., Any]) -> object:
    """The key under which an op is known: its name, or the function itself."""
    # Every spelling of one torch op (``torch.add``, ``Tensor.add``, ``Tensor.add_``, ``a + b``, ``a += b``) has the
    # op's plain name as key. A custom op (`torch.library.custom_op`, ``torch.ops.mine.affine``, any of its overloads)
    # has its name with the namespace, ``mine.affine``.
    name = getattr(op, "__name__", None)
    if name is None or not is_torch_op(op):
        return name_of_custom_op(op)
    if name in _OPERATORS:
        return _OPERATORS[name]
    if name.startswith("__"):
        return name.strip("_")
    plain = name.rstrip("_")
    return _OPERATORS.get(plain, plain)


def op_name(op: object) -> str:
    """A canonical op in messages: its name, or that of the function."""
    return op if isinstance(op, str) else str(getattr(op, "__qualname__", None) or repr(op))


def register_rule(
    op: Callable[..., Any],
    *,
    arguments: tuple[str, ...],
    batched: tuple[str, ...],
    weights: tuple[str, ...],
    reads: tuple[str, ...] | None = None,
    mixes_samples: Callable[[Mapping[str, Any]], bool] | None = None,
    bind: Bind | None = None,
    several_outputs: bool = False,
    draws: Callable[[Mapping[str, Any], Tensor], list[Tensor]] | None = None,
    reads_output: bool = False,
    per_sample: tuple[str, ...] = (),
    saved: tuple[str, ...] = (),
    adds_rows: Callable[[Mapping[str, Any]], bool] | None = None,
    overwrite: bool = False,
) -> Callable[[RuleFunction], RuleFunction]:
    """Register the decorated function as the rule of an op.

    The rule computes ``g_i = d <grad_output_i, op(...)_i> / d weight`` for each sample i, from batch-first tensors (see
    `Call` and the convention in `lightning_persample.rules`), summed over all rows and positions of the sample::

        @torch.library.custom_op("mine::scaled_linear", mutates_args=())
        def scaled_linear(x: Tensor, weight: Tensor, scale: float) -> Tensor: ...  # and its register_autograd


        @register_rule(scaled_linear, arguments=("x", "weight", "scale"), batched=("x",), weights=("weight",))
        def rule(call, grad_output):
            x = call.arguments["x"].flatten(1, -2)  # (B, t, d)
            return {"weight": Outer(call.arguments["scale"] * grad_output.flatten(1, -2), x)}


        assert check_rule(scaled_linear, (torch.randn(6, 3), torch.randn(2, 3), 0.5))

    examples/guide/op.md has the whole of it.

    Args:
        op: the op as torch dispatches it; every spelling of a torch op counts as the same op. A custom op
            (`torch.library.custom_op`) is known in all its forms. A Python function is seen only where it offers itself
            to overrides, decorated with `torch.overrides.wrap_torch_function`, and an `autograd.Function` only where
            such a function calls it. `check_rule` tells.
        arguments: names of the op's arguments in positional order.
        batched: names of the arguments that may depend on the batch; a call in which another argument depends on the
            batch goes to the generic rule.
        weights: names of the arguments whose gradient the rule knows; a call in which another argument is a tracked
            weight goes to the generic rule.
        reads: names of the arguments whose values the rule reads, by default `batched`. Of other tensors it is promised
            no values: a weight that is asked for has at least shape and dtype, the rest may be left out.
        mixes_samples: tells from the arguments by name whether the call lets samples influence each other.
        bind: gives the arguments by name where their order depends on their kinds.
        several_outputs: the rule gets a tuple of gradients, one per output, None where an output got none.
        draws: draws the random tensors of the call again, see `Rule`.
        reads_output: whether the rule reads the first output of the call.
        per_sample: names of arguments that may hold a row for every sample without the batch, see `Rule`.
        saved: names of results that autograd keeps, see `Rule`.
        adds_rows: tells from the arguments by name whether each row of a sample counts by itself, see `Rule`.
        overwrite: replace a rule that is already there.

    Returns:
        A decorator that returns the rule unchanged.

    Raises:
        RuleRegistrationError: the op has a rule and `overwrite` is False, or `batched`, `weights` or `reads` names
            something that is not in `arguments`.
    """
    key = canonical_op(op)
    read = batched if reads is None else reads
    unknown = [name for name in (*batched, *weights, *read, *per_sample) if name not in arguments]
    if unknown:
        raise RuleRegistrationError(
            f"rule for {op_name(key)!r} names {unknown}, but the op's arguments are {list(arguments)}"
        )

    def register(function: RuleFunction) -> RuleFunction:
        if key in _RULES and not overwrite:
            known = _RULES[key].function
            raise RuleRegistrationError(
                f"{op_name(key)!r} already has the rule {known.__module__}.{known.__qualname__}; "
                f"pass overwrite=True to replace it by {function.__module__}.{function.__qualname__}"
            )
        _RULES[key] = Rule(
            op=key,
            function=function,
            arguments=arguments,
            batched=frozenset(batched),
            weights=frozenset(weights),
            reads=frozenset(read),
            mixes_samples=mixes_samples,
            binds=bind,
            several_outputs=several_outputs,
            draws=draws,
            reads_output=reads_output,
            per_sample=frozenset(per_sample),
            saved=saved,
            adds_rows=adds_rows,
        )
        return function

    return register


def find_rule(op: Callable[..., Any]) -> Rule | None:
    """The rule of an op in any of its spellings, or None where only the generic rule can answer."""
    return rule_of(canonical_op(op))


rule_of: Callable[[object], Rule | None] = _RULES.get
"""The rule of a canonical op, or None."""


def supported_ops() -> tuple[str, ...]:
    """The names of all ops with a rule of their own, sorted."""
    return tuple(sorted(op_name(op) for op in _RULES))


@contextmanager
def watched(rule: Rule, function: RuleFunction) -> Iterator[None]:
    """Let another function answer in place of a registered rule inside this context."""
    _RULES[rule.op] = replace(rule, function=function)
    try:
        yield
    finally:
        _RULES[rule.op] = rule
