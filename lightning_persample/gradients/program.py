"""What was computed from some tensors once, to be computed again from others that are laid out alike.

What a rule and the kernels of its structures call depends on shapes, strides and dtypes alone. Recorded, it is a list
of torch calls, which run again without the Python code that chose them.
"""

from __future__ import annotations

import builtins
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from operator import getitem
from types import CodeType, FunctionType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_persample.torch_internals import (
    OpOverload,
    TorchDispatchMode,
    as_called,
    view_base,
    with_torch_function,
    without_torch_function,
)

Layout: TypeAlias = "tuple[torch.Size, tuple[int, ...]]"
"""Shape and strides."""

_MOST = 512  # calls of one program

# Of these the shapes, strides and dtypes of the results depend on those of the arguments alone, and the values on
# nothing but their values. What is neither here nor in `_LAYOUT` is not recorded, such as where in its memory a tensor
# begins: a batch may be any part of a larger one.
_CALLS = frozenset({
    "T", "__add__", "__getitem__", "__iadd__", "__imul__", "__matmul__", "__mul__", "__neg__", "__radd__", "__rmul__",
    "__rsub__", "__setitem__", "__sub__", "__truediv__", "abs", "abs_", "add", "add_", "addcmul", "addmv", "amax",
    "amin", "arange", "as_strided", "bmm", "cat", "conj", "constant_pad_nd", "contiguous", "conv1d", "conv2d",
    "conv3d", "convolution_backward", "copy_", "cumsum", "detach", "diagonal", "div", "div_", "empty", "expand",
    "expand_as", "flatten", "float", "gather", "index_add_", "layer_norm", "linalg_vector_norm", "mT", "matmul",
    "mean", "minimum", "movedim", "mul", "mul_", "narrow", "native_batch_norm", "native_batch_norm_backward",
    "native_group_norm", "neg", "new_empty", "new_zeros", "ones_like", "pad", "permute", "real", "reciprocal",
    "repeat", "reshape", "resolve_conj", "rms_norm", "rsqrt", "rsqrt_", "scatter_", "select", "sqrt", "square",
    "square_", "squeeze", "stack", "sub", "sum", "t", "to", "transpose", "unflatten", "unsqueeze", "view", "view_as",
    "zeros", "zeros_like",
})  # fmt: skip
_LAYOUT = frozenset({
    "__len__", "_version", "data_ptr", "device", "dim", "dtype", "element_size", "is_complex", "is_contiguous",
    "is_floating_point", "is_inference", "is_meta", "layout", "ndim", "numel", "promote_types", "requires_grad",
    "shape", "size", "stride",
})  # fmt: skip
# Of these the result may be what they were given.
_SAME = frozenset({"contiguous", "conj", "detach", "float", "real", "resolve_conj", "to"})
_INDEXING = frozenset({"__getitem__", "__setitem__"})
# Of these the result may be a view of the first argument.
_VIEWS = frozenset({
    "T", "__getitem__", "as_strided", "diagonal", "expand", "expand_as", "flatten", "mT", "movedim", "narrow",
    "permute", "reshape", "select", "squeeze", "t", "transpose", "unflatten", "unsqueeze", "view", "view_as",
})  # fmt: skip
# What torch says of kernels whose results depend on more than the layout and the values of their arguments.
_BY_VALUES = frozenset({
    torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view,
    torch.Tag.nondeterministic_seeded,
})  # fmt: skip


class Program:
    """Torch calls on slots, the first of which hold what it is given."""

    # A step has its function (None makes a tuple), the slots of its arguments, that of its result, and those that
    # nobody reads any more. `constants` are what the slots hold besides, `checks` slots of numbers, each with the least
    # for which the results hold. They become the lines of one function: where kernels are short, a loop over steps
    # takes as long as these.

    __slots__ = ("functions", "run")

    functions: tuple[Callable[..., Any] | None, ...]
    """What the steps call."""
    run: Callable[[Sequence[Tensor]], tuple[Sequence[Tensor], Sequence[tuple[Tensor, float]]]]
    """The results for tensors laid out like those of the recording, which hold if no number is below its least."""

    def __init__(
        self,
        given: int,
        steps: Sequence[tuple[Callable[..., Any] | None, Sequence[int], int, Sequence[int]]],
        constants: Sequence[Any],
        results: Sequence[int],
        checks: Sequence[tuple[int, float]],
    ) -> None:
        made = set(range(given))
        values: dict[str, Any] = {"__builtins__": builtins}  # (C code asks the frame for them to import what it calls)

        def joined(slots: Iterable[int]) -> str:
            names = []
            for slot in slots:
                names.append(f"{'s' if slot in made else 'c'}{slot}")
                if slot not in made:
                    values[names[-1]] = constants[slot - given]
            return ", ".join(names)

        lines = ["def run(given):", f" [{joined(range(given))}] = given"]
        for number, (function, arguments, place, over) in enumerate(steps):
            call = f"({joined(arguments)},)"
            if function is not None:
                values[f"f{number}"], call = function, f"f{number}({joined(arguments)})"
            made.add(place)
            lines.append(f" s{place} = {call}")
            if gone := joined(slot for slot in over if slot in made):
                lines.append(f" del {gone}")
        values["least"] = [least for _, least in checks]
        checked = "".join(f"({joined([slot])}, least[{number}]), " for number, (slot, _) in enumerate(checks))
        lines.append(f" return ({joined(results)},), ({checked})")
        code = compile("\n".join(lines), "<program>", "exec")
        (function_code,) = (part for part in code.co_consts if isinstance(part, CodeType))
        self.run = FunctionType(function_code, values)
        self.functions = tuple(function for function, *_ in steps)

    def results(self, *given: Tensor) -> Sequence[Tensor]:
        """The results of one that has no numbers to check."""
        return self.run(given)[0]


def at_least(number: Tensor, least: float) -> bool:
    """Whether a number is not below another; a program asks again."""
    recorder = _recorder.get()
    if recorder is None:
        return float(number) >= least
    with without_torch_function():
        holds = float(number) >= least
    recorder.check(number, least, holds)
    return holds


def not_now() -> None:
    """These calls are not the usual ones: a program that is being recorded is recorded another time."""
    recorder = _recorder.get()
    if recorder is not None:
        recorder.postpone()


def run_again(program: Program, given: Sequence[Tensor]) -> Sequence[Tensor]:
    """The results of a program without numbers to check; another that is being recorded takes it for one call."""
    recorder = _recorder.get()
    if recorder is None:
        return program.results(*given)
    with without_torch_function():
        results = program.results(*given)
    recorder.note_if(True, program.results, tuple(given), {}, tuple(results))
    return results


def kept(make: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """A tensor that depends on no value of other tensors, and is not written to: a program keeps it."""
    with without_torch_function():
        tensor = make(*arguments)
    recorder = _recorder.get()
    if recorder is not None:
        recorder.keep(tensor)
    return tensor


def record(
    compute: Callable[[], Sequence[Tensor]], given: Sequence[Tensor], *, by_kernels: bool = False
) -> tuple[Sequence[Tensor], Program | Literal["none", "not now"]]:
    """What a function computes, and the program that does so from tensors laid out like `given`, if there is one."""
    recorder = _Recorder(given)
    if by_kernels:  # which run below autograd and the transforms of torch.func
        with _Kernels(recorder):
            results = compute()
        return results, recorder.program(results)
    before = _recorder.set(recorder)
    try:
        with with_torch_function(), _Calls(recorder):
            results = compute()
    finally:
        _recorder.reset(before)
    return results, recorder.program(results)


class _Calls(TorchFunctionMode):
    """Has the torch calls noted whose results depend on the arguments alone."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Make the call, offered to nobody else, and note it."""
        with without_torch_function():
            result, name = func(*args, **(kwargs or {})), _name_of(func)
            if name in _LAYOUT:
                self._recorder.note_if(not isinstance(result, Tensor))
            elif name in _SAME and args and result is args[0]:
                self._recorder.note_if(self._recorder.place_of(result) is not None)
            else:
                by_layout = name in _CALLS and (name not in _INDEXING or _is_by_layout(args[1]))
                self._recorder.note_if(by_layout, func, args, kwargs or {}, result)
        return result


class _Kernels(TorchDispatchMode):
    """Has the kernels noted of which torch says that shapes are those of the arguments, and values too."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the kernel, and note it."""
        result, name = func(*args, **(kwargs or {})), func.name()
        by_layout = name.startswith("aten::") and _BY_VALUES.isdisjoint(func.tags) and "as_strided" not in name
        is_filled = "empty" not in name or result.numel() == 0  # (otherwise nobody sees by what)
        self._recorder.note_if(by_layout and is_filled, func, args, kwargs or {}, result)
        return result


class _Recorder:
    """Takes note of calls on tensors that it knows: those that are given, and what was made of them."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        self._places: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._constants: list[Any] = []
        self._steps: list[tuple[Callable[..., Any] | None, tuple[int, ...], int]] = []
        self._checks: list[tuple[int, float]] = []
        self._roots: dict[int, tuple[int, Layout]] = {}  # of views that begin where a tensor does: its slot and layout
        self._views: set[int] = set()  # the steps that make them
        self._holds = True
        self._given, self._is_known = len(given), len({*map(id, given)}) == len(given)
        for place, tensor in enumerate(given):
            self._places[id(tensor)] = weakref.ref(tensor), place
            self._is_known &= type(tensor) is Tensor and not (tensor.is_complex() or tensor.is_neg())

    def note_if(self, is_known: bool, *call: Any) -> None:
        """Note a call, (function, args, kwargs, result), and that there is no program where it cannot be noted."""
        self._is_known = self._is_known and is_known and (not call or self._note(*call))

    def check(self, number: Tensor, least: float, holds: bool) -> None:
        """Note a question about a value, and whether the answer was as nearly always."""
        place = self.place_of(number)
        self._holds &= holds
        self._is_known &= holds and place is not None
        if place is not None:
            self._checks.append((place, least))

    def postpone(self) -> None:
        """Have no program of these calls."""
        self._holds = False

    def program(self, results: Sequence[Tensor]) -> Program | Literal["none", "not now"]:
        """The calls in order; what none of them reads any more is let go at once."""
        if not self._holds:  # these calls are not the usual ones
            return "not now"
        places = [self.place_of(result) for result in results]
        if not self._is_known or None in places or len(self._steps) > _MOST:
            return "none"
        kept = {*places, *(slot for slot, _ in self._checks), *range(self._given)}
        steps, met = [], {slot for slot in kept if slot is not None}
        constant = {self._given + slot for slot, value in enumerate(self._constants) if value is not None}
        for number, (function, arguments, place) in reversed([*enumerate(self._steps)]):
            if number in self._views and place not in met:
                continue
            over = tuple({*arguments, place} - met - constant)
            met.update(over)
            steps.append((function, arguments, place, over))
        found = [slot for slot in places if slot is not None]
        return Program(self._given, steps[::-1], self._constants, found, self._checks)

    def _note(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> bool:
        function, arguments = as_called(function), [self._slot(arg) for arg in args]
        if isinstance(kwargs.get("out"), Tensor):
            arguments.append(self._slot(kwargs["out"]))
            function, kwargs = partial(_into, function), {n: v for n, v in kwargs.items() if n != "out"}
        if kwargs:
            if any(isinstance(value, Tensor) for value in kwargs.values()):
                return False
            function = partial(function, **kwargs)
        if None in arguments or not arguments:
            return False
        several = isinstance(result, (tuple, list))
        if isinstance(result, Tensor) and _name_of(function) in _VIEWS and _begin_alike(args[0], result):
            self._note_view(result, args[0], function, tuple(slot for slot in arguments if slot is not None))
            return True
        place = self.place_of(result) if isinstance(result, Tensor) else None
        place = self._new(None) if place is None else place
        self._steps.append((function, tuple(slot for slot in arguments if slot is not None), place))
        if isinstance(result, Tensor):
            self._places[id(result)] = weakref.ref(result), place
        elif several:
            for part, tensor in enumerate(result):
                if isinstance(tensor, Tensor):
                    own = self._new(None)
                    self._steps.append((getitem, (place, self._new(part)), own))
                    self._places[id(tensor)] = weakref.ref(tensor), own
        return result is None or several or isinstance(result, Tensor)

    def _note_view(
        self, view: Tensor, source: Tensor, function: Callable[..., Any], arguments: tuple[int, ...]
    ) -> None:
        """Note a view that begins where its source does: none where it is the same, one step for views of views."""
        place, layout = arguments[0], (view.shape, view.stride())
        root, of_root = self._roots.get(place, (place, (source.shape, source.stride())))
        if layout == of_root:
            place = root
        elif layout != (source.shape, source.stride()):
            own = self._new(None)
            if root != place:
                function = torch.as_strided
                arguments = (root, self._new(tuple(view.shape)), self._new(view.stride()))
            self._views.add(len(self._steps))
            self._steps.append((function, arguments, own))
            self._roots[own], place = (root, of_root), own
        self._places[id(view)] = weakref.ref(view), place

    def _slot(self, value: Any) -> int | None:
        """Where a program has an argument; None of a tensor that is not known."""
        if isinstance(value, Tensor):
            return self.place_of(value)
        if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
            parts = [self._slot(item) for item in value]
            if None in parts:
                return None
            place = self._new(None)
            self._steps.append((None, tuple(slot for slot in parts if slot is not None), place))
            return place
        return self._new(value)

    def keep(self, tensor: Tensor) -> None:
        """Have a tensor in a slot of its own."""
        self._places[id(tensor)] = weakref.ref(tensor), self._new(tensor)

    def place_of(self, tensor: Tensor) -> int | None:
        """The slot of a tensor that is known."""
        reference, place = self._places.get(id(tensor), (None, 0))
        return place if reference is not None and reference() is tensor else None

    def _new(self, value: Any) -> int:
        self._constants.append(value)
        return self._given + len(self._constants) - 1


_recorder: ContextVar[_Recorder | None] = ContextVar("what takes note of the calls", default=None)


def _name_of(function: Callable[..., Any]) -> str:
    """Name of a torch function, of a method, or of the attribute that it reads."""
    name: str = getattr(function, "__name__", "")
    return getattr(getattr(function, "__self__", None), "__name__", "") if name == "__get__" else name


def _begin_alike(source: Any, result: Tensor) -> bool:
    """Whether a tensor is a view of another that begins where that does, and holds numbers of its dtype."""
    if not isinstance(source, Tensor) or source.dtype is not result.dtype:
        return False
    base = view_base(source)
    is_view = result is source or view_base(result) is (source if base is None else base)
    return is_view and bool(result.storage_offset() == source.storage_offset())


def _is_by_layout(index: Any) -> bool:
    """Whether the shape of what an index picks does not depend on values."""
    items = index if isinstance(index, tuple) else (index,)
    return all(
        isinstance(item, (int, slice, type(None), type(Ellipsis))) and not isinstance(item, bool) for item in items
    )


def _into(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    *args_, out = args
    return function(*args_, out=out, **kwargs)
