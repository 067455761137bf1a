"""How products, layers and losses move the batch axis."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightning_persample.batch_axis.added_up import added_up
from lightning_persample.batch_axis.axis import BatchAxis, picked, row_owners
from lightning_persample.batch_axis.base import (
    Entries,
    Followed,
    beside_lost,
    broadcast,
    into_own_rows,
    keep,
    lost,
    propagation_rule,
)
from lightning_persample.batch_axis.observed import ObservedCall

_MEET = "meets two tensors of the batch with their batch axes at different places"


@propagation_rule("linear", by_layout=True)
def _follow_linear(call: ObservedCall) -> Followed:
    data = [call.argument(0, "input", "input1")]
    if call.op == "bilinear":
        data.append(call.argument(1, "input2"))
    if call.lost or any(all(tensor is not item for item in data) for tensor, _ in call.located):
        return lost(call, "has a weight that depends on the batch", mixes=None)
    if any(axis.dim == tensor.dim() - 1 for tensor, axis in call.located):
        return lost(call, "sums over the batch axis", mixes=True)
    placed = broadcast(call)

    def aligned(tensor: Tensor) -> BatchAxis | None:  # no axis of the weight is laid along the batch
        beside = placed.aligned is not None and any(tensor is item for item in data)
        return placed.aligned(tensor) if placed.aligned is not None and beside else None

    (_, axis), *_ = call.located  # axes keep their places from the front: a weight that is a vector takes the last away
    outputs = tuple(mark.moved(axis.dim) if isinstance(mark, BatchAxis) else mark for mark in placed.outputs)
    return Followed(outputs, aligned, placed.mixing, placed.weighting)


@propagation_rule("affine_grid", by_layout=True)
def _follow_affine_grid(call: ObservedCall) -> Followed:
    """A grid for each row of `theta`; the number of rows is in the arguments, so that one sample alone is refused."""
    _, axis = call.located[0]
    return keep(call, axis) if axis.dim == 0 else lost(call, "combines what is along the batch axis", mixes=True)


@propagation_rule("embedding", by_layout=True)
def _follow_embedding(call: ObservedCall) -> Followed:
    indices = call.argument(1, "indices")
    axis = call.axis_of(indices)
    if not isinstance(axis, BatchAxis) or len(call.located) > 1 or call.lost:
        return lost(call, "has a table that depends on the batch", mixes=None)
    return keep(call, axis)


@propagation_rule("embedding_bag")
def _follow_embedding_bag(call: ObservedCall) -> Followed:
    """Each output row is a bag of neighbouring input rows; `offsets` say where the bags begin."""
    rows, offsets, weights = (
        call.argument(1, "input"),
        call.argument(2, "offsets"),
        call.argument(6, "per_sample_weights"),
    )
    if call.axis_of(call.argument(0, "weight")) is not None or any(tensor is not offsets for tensor, _ in call.lost):
        return lost(call, "has a table that depends on the batch", mixes=None)
    bags = call.outputs[0].size(0)
    own, by_bag = call.axis_of(rows), call.axis_of(offsets)
    starts = offsets[:bags].to(rows.device)
    bag_of_row = torch.searchsorted(starts, torch.arange(rows.numel(), device=rows.device), right=True) - 1
    if isinstance(by_bag, BatchAxis) and bags == offsets.numel():
        owners = row_owners(by_bag, call.batch_size, rows.device)
    elif isinstance(own, BatchAxis):
        of_rows = row_owners(own, call.batch_size, rows.device)
        filled = torch.bincount(bag_of_row, minlength=bags) > 0
        owners = of_rows[starts.clamp(max=rows.numel() - 1)]
        if not bool(filled.all()) or not torch.equal(owners[bag_of_row], of_rows):
            return lost(call, "has bags that no one sample fills; put the offsets into the batch", mixes=None)
    else:
        return lost(call, "has bags that do not belong to samples one by one", mixes=None)
    marks = [own, None if weights is None else call.axis_of(weights)]
    followed, of_rows = [mark for mark in marks if isinstance(mark, BatchAxis)], owners[bag_of_row]
    if any(not torch.equal(row_owners(mark, call.batch_size, rows.device), of_rows) for mark in followed):
        return lost(call, "has rows or weights of other samples in a bag", mixes=True)
    mixing = next((mark.mixing for mark in followed if mark.mixing), None)
    along_rows = picked(0, of_rows, call.batch_size, mixing)

    def aligned(tensor: Tensor) -> BatchAxis | None:
        return along_rows if tensor is rows or tensor is weights else None

    return Followed((picked(0, owners, call.batch_size, mixing), None, None, None)[: len(call.outputs)], aligned)


@propagation_rule("channels", by_layout=True)
def _follow_channels(call: ObservedCall) -> Followed:
    """Layers on (N, C, ...): samples must lie along N, or along the groups of a convolution."""
    first = call.argument(0, "input")
    axis = call.axis_of(first)
    is_convolution = call.name.startswith("conv")
    unbatched = is_convolution and first.dim() == _spatial_axes(call) + 1
    if is_convolution and not unbatched and isinstance(axis, BatchAxis) and axis.dim == 1 and not call.lost:
        return _along_groups(call, first)
    if not isinstance(axis, BatchAxis) or len(call.located) > 1 or call.lost:
        return lost(call, "has a weight that depends on the batch", mixes=None)
    if axis.dim != 0 or unbatched:
        return lost(call, "needs the samples along its first axis", mixes=None)
    return keep(call, axis)


def _along_groups(call: ObservedCall, first: Tensor) -> Followed:
    """A convolution of (N, B * C, ...) whose groups are of one sample each, as are their rows of weight and bias."""
    batch_size, groups = call.batch_size, call.argument(6, "groups", default=1)

    def along(tensor: Tensor) -> BatchAxis:
        dim = int(tensor is first or tensor is call.outputs[0])
        return BatchAxis(dim, inner=tensor.size(dim) // batch_size, mixing=call.mixing)

    is_apart = all(own.same_place(along(tensor)) for tensor, own in call.located)
    if groups % batch_size or first.size(1) % batch_size or not is_apart:
        return lost(call, "needs the samples along its first axis, or in groups of their own", mixes=True)
    output, place = call.outputs[0], along(call.outputs[0])
    args, kwargs = (*call.args[:6], *[groups // batch_size] * (len(call.args) > 6)), dict(call.kwargs)
    kwargs |= {"groups": groups // batch_size} if "groups" in kwargs else {}
    of_one = Entries(args, kwargs, output.shape, place, 1.0)  # the call as it is for a sample alone
    return replace(keep(call, place, along), entries=lambda: of_one)


def _spatial_axes(call: ObservedCall) -> int:
    """The number in the op's name: 2 for conv2d."""
    return next(int(character) for character in call.name if character.isdigit())


@propagation_rule("layer_norm", by_layout=True)
def _follow_layer_norm(call: ObservedCall) -> Followed:
    tensor, axis = call.located[0]
    if len(call.located) > 1 or call.lost or tensor is not call.argument(0, "input"):
        return lost(call, "has a weight that depends on the batch", mixes=None)
    if axis.dim >= tensor.dim() - len(call.argument(1, "normalized_shape")):
        return lost(call, "normalises over the batch axis", mixes=True)
    return keep(call, axis)


@propagation_rule("pool", by_layout=True)
def _follow_pool(call: ObservedCall) -> Followed:
    tensor, axis = call.located[0]
    if axis.dim >= tensor.dim() - _spatial_axes(call):
        return lost(call, "pools over the batch axis", mixes=True)
    return keep(call, axis)


@propagation_rule("pad", by_layout=True)
def _follow_pad(call: ObservedCall) -> Followed:
    tensor, axis = call.located[0]
    padding = tuple(call.argument(1, "pad"))
    from_end = tensor.dim() - 1 - axis.dim
    if any(padding[2 * from_end : 2 * from_end + 2]):
        return lost(call, "pads the batch axis")
    return keep(call, axis)


@propagation_rule("one_hot", by_layout=True)
def _follow_one_hot(call: ObservedCall) -> Followed:
    return keep(call, call.located[0][1])


@propagation_rule("triangle", by_layout=True)
def _follow_triangle(call: ObservedCall) -> Followed:
    tensor, axis = call.located[0]
    if axis.dim >= tensor.dim() - 2:
        return lost(call, "works along the batch axis", mixes=None)
    return keep(call, axis)


@propagation_rule("multinomial")
def _follow_multinomial(call: ObservedCall) -> Followed:
    tensor, axis = call.located[0]
    return keep(call, axis) if axis.dim == 0 and tensor.dim() == 2 else lost(call, "draws across the batch", mixes=None)


@propagation_rule("attention", by_layout=True)
def _follow_attention(call: ObservedCall) -> Followed:
    if any(axis.dim - tensor.dim() > -3 for tensor, axis in call.located):
        return lost(call, "attends from one sample to another", mixes=True)
    return broadcast(call)


@propagation_rule("matmul", by_layout=True)
def _follow_matmul(call: ObservedCall) -> Followed:
    return _product(call, call.argument(0, "input", "self"), call.argument(1, "other", "mat2", "vec"))


@propagation_rule("reflected_matmul", by_layout=True)
def _follow_reflected_matmul(call: ObservedCall) -> Followed:
    return _product(call, call.args[1], call.args[0])


@propagation_rule("added_product", by_layout=True)
def _follow_added_product(call: ObservedCall) -> Followed:
    # Overloads that torch deprecates have beta and alpha among the tensors.
    call = replace(call, args=tuple(arg for arg in call.args if isinstance(arg, Tensor)))
    added = call.argument(0, "input", "self")
    left, right = call.argument(1, "mat1", "batch1", "mat"), call.argument(2, "mat2", "batch2", "vec")
    if call.axis_of(left) is None and call.axis_of(right) is None:
        return replace(broadcast(call), aligned=None)
    product = _product(call, left, right)
    where = call.axis_of(added)
    placed = product.outputs[0]
    if where is None and isinstance(placed, BatchAxis) and call.batch_size > 1:
        dim = added.dim() - call.outputs[0].dim() + placed.dim
        if dim >= 0 and added.size(dim) == call.outputs[0].size(placed.dim):  # it has a row for every sample
            inside, own = product.aligned, placed.moved(dim)
            return replace(product, aligned=lambda t: own if t is added else inside(t) if inside else None)
    if where is None or (
        isinstance(where, BatchAxis)
        and isinstance(placed, BatchAxis)
        and where.dim - added.dim() == placed.dim - call.outputs[0].dim()
        and where.same_layout(placed)
    ):
        return product
    return lost(call, _MEET, mixes=True)


def _product(call: ObservedCall, left: Tensor, right: Tensor) -> Followed:
    """Rows of the left, columns of the right, or a shared leading axis may hold the batch."""
    if call.lost:
        return beside_lost(call)
    output = call.outputs[0]
    places: list[BatchAxis] = []
    summed_over = 0
    for tensor, other, is_left in ((left, right, True), (right, left, False)):
        axis = call.axis_of(tensor)
        if not isinstance(axis, BatchAxis):
            continue
        from_right = axis.dim - tensor.dim()
        summed = -1 if is_left or tensor.dim() == 1 else -2
        if from_right == summed:
            summed_over += 1
            continue
        if from_right >= -2:  # the rows of the left or the columns of the right
            dim = output.dim() - (1 if not is_left or other.dim() == 1 else 2)
        else:
            dim = output.dim() + from_right + (other.dim() == 1)
        places.append(axis.moved(dim))
    if summed_over:
        pooled = _pooled(call, left, 1, right, output.dim() - 2) or _pooled(call, right, 0, left, output.dim() - 1)
        return pooled or _contracted(call, alone=summed_over == 1, mixed=bool(places))
    apart = len(places) == 2 and (places[0].dim != places[1].dim or not places[0].same_layout(places[1]))
    if apart and call.batch_size > 1:
        return lost(call, _MEET, mixes=True)
    place = places[0].mixed(call.mixing)
    size = output.size(place.dim)
    behind = output.dim() - place.dim

    def aligned(tensor: Tensor) -> BatchAxis | None:
        dim = tensor.dim() - behind
        shared = call.batch_size > 1 and behind > 2 and dim >= 0
        return place.moved(dim) if shared and tensor.size(dim) == size else None

    return keep(call, place, aligned)


def _pooled(call: ObservedCall, matrix: Tensor, summed: int, rows: Tensor, dim: int) -> Followed | None:
    """The answer where a matrix adds each row of the batch, times one number, to one row of the result alone."""
    own, axis = call.axis_of(matrix), call.axis_of(rows)
    if matrix.requires_grad or matrix.dim() != 2 or not isinstance(axis, BatchAxis) or call.batch_size == 1:
        return None
    # (of rows that are a sample each another number than one may weigh them, as in a mean)
    number = 1 if axis.owner is None or not matrix.numel() else matrix.flatten()[matrix.abs().argmax()]
    places = matrix.movedim(summed, 0) == number
    if isinstance(own, BatchAxis) and (own.mixing is not None or own.dim != summed or not own.same_layout(axis)):
        return None
    has_others = len(places) != rows.size(axis.dim) or int(matrix.count_nonzero()) != len(places)
    if has_others or not bool((places.sum(1) == 1).all()):
        return None
    index = places.to(torch.uint8).argmax(1)
    placed = into_own_rows(call, call.outputs[0].detach(), dim, index, rows)
    return None if placed is None else replace(placed, by_values=True)


def _contracted(call: ObservedCall, *, alone: bool, mixed: bool) -> Followed:
    """A product that sums over the batch is a sum of what each sample gives, by itself or times a weight."""
    _, axis = call.located[0]
    if mixed or any(not other.same_layout(axis) for _, other in call.located):
        return lost(call, "multiplies different samples", mixes=True)
    return added_up(call, weighs=alone)


@propagation_rule("einsum", by_layout=True)
def _follow_einsum(call: ObservedCall) -> Followed:
    equation = call.argument(0, "equation")
    if call.lost:
        return beside_lost(call)
    if not isinstance(equation, str):
        return lost(call, "combines samples in a way that cannot be followed", mixes=None)
    inputs, _, result = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if "->" not in equation:
        letters = inputs.replace(",", "").replace(".", "")
        result = "".join(["..."] * ("..." in inputs) + sorted(c for c in set(letters) if letters.count(c) == 1))
    if any(len(set(term) - {"."}) < len(term.replace("...", "")) for term in terms):
        return lost(call, "takes a diagonal", mixes=None)
    spelled = [_spell(term, o.tensor.dim()) for term, o in zip(terms, call.operands, strict=True)]
    result_letters = _spell(result, call.outputs[0].dim())
    letters_of_batch = {
        letters[o.axis.dim] for letters, o in zip(spelled, call.operands, strict=True) if isinstance(o.axis, BatchAxis)
    }
    if len(letters_of_batch) > 1 and call.batch_size > 1:
        return lost(call, _MEET, mixes=True)
    letter = letters_of_batch.pop()
    _, axis = call.located[0]
    if letter not in result_letters:
        pairs = zip(spelled, call.operands, reversed(call.operands), strict=True) if len(spelled) == 2 else ()
        for term, one, other in pairs:
            to = next((each for each in term if each != letter and each in result_letters), None)
            if to is not None and letter in term:
                pooled = _pooled(call, one.tensor, term.index(letter), other.tensor, result_letters.index(to))
                if pooled is not None:
                    return pooled
        beside = sum(letter in letters for letters in spelled) > len(call.located)
        return _contracted(call, alone=beside, mixed=False)
    if any(not other.same_layout(axis) for _, other in call.located):
        return lost(call, _MEET, mixes=True)
    by_tensor = {id(o.tensor): letters for o, letters in zip(call.operands, spelled, strict=True)}
    sizes = {call.located[0][0].size(axis.dim)}

    def aligned(tensor: Tensor) -> BatchAxis | None:
        letters = by_tensor[id(tensor)]
        found = letters.index(letter) if letter in letters else None
        along = found is not None and tensor.size(found) in sizes and call.batch_size > 1
        return axis.moved(found) if found is not None and along else None

    return keep(call, replace(axis, dim=result_letters.index(letter), mixing=call.mixing), aligned)


def _spell(term: str, ndim: int) -> list[str]:
    """One name per axis; axes under an ellipsis are numbered from the right, as einsum aligns them."""
    before, dots, after = term.partition("...")
    if not dots:
        return list(before)
    hidden = ndim - len(before) - len(after)
    return [*before, *(f"...{hidden - position}" for position in range(hidden)), *after]
