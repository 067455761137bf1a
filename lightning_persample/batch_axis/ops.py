"""Every op that the package knows by name: its family, and what is true of it whatever the values.

A row is a family and its ops that are alike in all else. To add an op, put its canonical name (see
`rules.canonical_op`) into the row that fits; a new family needs a propagation rule, `@propagates("name")` in the file
of the family. An op that stands nowhere is tried on single samples.

What a row may say of its ops:

- ``same``: the result has the entries of the operand where they were.
- ``casts``: as ``same``, in another dtype or on another device.
- ``moves``: each entry of the result is an entry of the operand at another place, or one that is repeated.
- ``permutes``: the axes change places.
- ``picks``: as ``moves``, of some of the entries.
- ``joins``: as ``moves``, of several operands.
- ``passes``: as ``moves``, with signs, zeros or entries of another operand.
- ``sums``: each entry of the result is a sum of entries, each times a number from another operand.
- ``totals``: as ``sums``, all along some axes.
- ``adds``: a sum of two operands.
- ``chooses``: entry by entry one operand or the other, or between them.
- ``bounds``: of numbers within its bounds the result is these numbers.
- ``places``: positions of entries, or the numbers that occur.
- ``indexes``: a number among its arguments may say which entry is meant.
- ``shapes``: a number among its arguments may say how large the result is.
- ``draws``: random numbers.
- ``makes``: data out of anything that Python holds.
- ``unseen``: it writes into its arguments without telling autograd.
- ``entrywise``, ``rows``, ``classes``: what a loss gives under reduction="none" a value for.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LOSSES", "OPS", "POINTWISE", "Op", "having"]


@dataclass(frozen=True)
class Op:
    """What is known of an op.

    Attributes:
        family: whose propagation rule says where the batch lies in its results; None where it is tried.
        traits: see the head of this file.
        reduction: the place of `reduction` among the positional arguments of a loss.
        class_weights: the place of the weights of a loss over classes.
        converts: whether its tensors give but a dtype, a device or a shape, apart from `data`.
        data: place and name of the one argument of an op that converts whose values the result has.
    """

    family: str | None
    traits: frozenset[str]
    reduction: int | None = None
    class_weights: int | None = None
    converts: bool = False
    data: tuple[int, str] | None = None


OPS: dict[object, Op] = {}


def _ops(
    family: str | None,
    traits: str,
    names: str,
    *,
    reduction: int | None = None,
    class_weights: int | None = None,
    converts: bool = False,
    data: tuple[int, str] | None = None,
) -> None:
    op = Op(family, frozenset(traits.split()), reduction, class_weights, converts, data)
    for name in names.split():
        if name in OPS:
            raise ValueError(f"{name} stands in two rows of the table of ops")
        OPS[name] = op


def having(*traits: str) -> frozenset[object]:
    """The ops that have one of these traits."""
    return frozenset(name for name, op in OPS.items() if not op.traits.isdisjoint(traits))


# fmt: off
# Each entry of the result is computed from the entries at its place.
_ops("pointwise", "", """
    acos acosh addcdiv addcmul and angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan atan2
    atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor bool byte cdouble ceil
    celu cfloat conj copysign cos cosh deg2rad digamma div elu erf erfc erfinv exp exp2 expm1 fill fix float16
    float_power floor floor_divide floordiv fmod frac ge gelu greater greater_equal gt hardshrink hardsigmoid hardswish
    heaviside hypot i0 imag int invert isclose isfinite isinf isnan isneginf isposinf isreal ldexp le less less_equal
    lgamma log log10 log1p log2 log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit
    logsigmoid long lshift lt masked_fill mish mod mul nextafter not_equal or pow rad2deg rdiv real reciprocal relu6
    remainder requires_grad resolve_conj resolve_neg round rpow rrelu_with_noise rshift rsqrt selu sgn short sigmoid
    sign signbit silu sin sinc sinh softplus softshrink special_digamma special_entr special_erf special_erfc
    special_erfcx special_erfinv special_exp2 special_expit special_expm1 special_gammaln special_i0 special_i0e
    special_i1 special_i1e special_log1p special_log_ndtr special_logit special_ndtr special_ndtri special_psi
    special_round special_sinc special_xlog1py special_xlogy sqrt square tan tanh truediv trunc xlogy xor zero
    """)
_ops("pointwise", "adds", "add rsub sub")
_ops("pointwise", "chooses", "lerp")
_ops("pointwise", "indexes", "eq ne")
_ops("pointwise", "bounds", """
    abs absolute clamp clamp_max clamp_min clip fmax fmin hardtanh leaky_relu maximum minimum relu threshold
    """)
_ops("pointwise", "same", "clone contiguous")
_ops("pointwise", "casts", "bfloat16 cpu cuda double float half type")
_ops("pointwise", "casts", "to type_as", converts=True, data=(0, "self"))
_ops("pointwise", "passes", "data detach neg negative pos positive")
_ops("pointwise", "draws", "alpha_dropout bernoulli dropout feature_alpha_dropout feature_dropout native_dropout rrelu")
_ops("pointwise", "makes", "as_tensor")
_ops("copy", "passes", "copy")
_ops("where", "chooses places", "where")

# Shapes.
_ops("reshape", "", "_unsafe_view")
_ops("reshape", "moves", "flatten ravel")
_ops("reshape", "moves shapes", "reshape unflatten view")
_ops("reshape", "moves", "reshape_as view_as", converts=True, data=(0, "self"))
_ops("squeeze", "moves", "squeeze")
_ops("unsqueeze", "moves", "unsqueeze")
_ops("permutation", "", "adjoint")
_ops("permutation", "permutes", "H mH")
_ops("permutation", "permutes moves", "T mT moveaxis movedim permute swapaxes swapdims t transpose")
_ops("expand", "moves shapes", "broadcast_to expand")
_ops("expand", "moves", "expand_as", converts=True, data=(0, "self"))
_ops("strided", "", "as_strided as_strided_copy")
_ops("repeat", "moves shapes", "repeat tile")
_ops("repeat_interleave", "moves", "repeat_interleave")
_ops("joined", "joins", "cat concat concatenate row_stack stack vstack")
_ops("split", "", "unsafe_chunk unsafe_split")
_ops("split", "picks", "chunk split split_with_sizes tensor_split")
_ops("unbind", "picks", "unbind")
_ops("flip", "moves", "flip")
_ops("roll", "moves", "roll")
_ops("pad", "passes", "constant_pad_nd pad")
_ops("triangle", "", "tril triu")

# Entries by their places.
_ops("select", "picks", "narrow")
_ops("select", "picks indexes", "index_select select")
_ops("select", "passes", "unfold")
_ops("gather", "", "index_add index_copy index_fill scatter scatter_add")
_ops("gather", "picks", "gather take_along_dim")
_ops("take", "picks", "take")
_ops("getitem", "picks indexes", "getitem")
_ops("setitem", "passes", "setitem")
_ops("index_put", "", "index_put")
_ops("masked_select", "picks", "masked_select")
_ops("masked_scatter", "", "masked_scatter")
_ops("list", "places", "argwhere nonzero unique unique_consecutive")

# Over axes.
_ops("reduction", "sums totals", "mean nansum sum")
_ops("reduction", "totals", "nanmean")
_ops("reduction", "", """
    all amax amin aminmax any argmax argmin count_nonzero logsumexp median mode nanmedian prod special_logsumexp std
    std_mean var var_mean
    """)
_ops("extremum", "", "max min")
_ops("norm", "", "linalg_norm linalg_vector_norm norm")
_ops("scan", "", """
    cummax cummin cumprod log_softmax logcumsumexp softmax special_log_softmax special_softmax
    """)
_ops("scan", "sums", "cumsum")
_ops("sort", "", "argsort glu msort sort")
_ops("topk", "", "topk")
_ops("transform", "", """
    fft_fft fft_fft2 fft_fftn fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_ihfft2 fft_ihfftn
    fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn
    """)
_ops("scattered", "", "as_strided_scatter bincount histc")

# Products.
_ops("dot", "sums", "dot inner vdot")
_ops("linear", "", "bilinear")
_ops("linear", "sums", "linear")
_ops("matmul", "sums", "bmm matmul mm mv")
_ops("reflected_matmul", "sums", "rmatmul")
_ops("added_product", "", "addmm addmv baddbmm")
_ops("einsum", "sums", "einsum")
_ops("attention", "", "scaled_dot_product_attention")

# Layers.
_ops("embedding", "indexes", "embedding")
_ops("embedding_bag", "", "embedding_bag")
_ops("channels", "", """
    batch_norm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d group_norm instance_norm
    """)
_ops("layer_norm", "", "layer_norm rms_norm")
_ops("pool", "", """
    _adaptive_avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
    adaptive_max_pool2d adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool1d_with_indices
    max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices
    """)
_ops("one_hot", "", "one_hot")
_ops("affine_grid", "", "affine_grid_generator")
_ops("multinomial", "draws", "multinomial")
_ops("recurrent_layer", "", "gru lstm rnn_relu rnn_tanh")
_ops("recurrent_cell", "", "gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell")
_ops("pack", "", "_pack_padded_sequence")
_ops("unpack", "", "_pad_packed_sequence")
# They compute each row of the first axis from this row alone, whatever the values, or leave no row of it: along it one
# trial shows what holds for every call of that layout. Of any other op that is tried, and along another axis, values
# may decide (`renorm` beyond its maximum alone, neighbours that are zero in `im2col`), so that each call is tried.
_ops("by_rows", "", """
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d channel_shuffle col2im cosine_similarity grid_sampler im2col kthvalue max_unpool2d
    max_unpool3d nanquantile pairwise_distance pixel_shuffle pixel_unshuffle prelu quantile stft trapezoid
    upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_trilinear3d
    """)

# Losses.
_ops("loss", "classes", "cross_entropy_loss nll_loss nll_loss2d nll_loss_nd", reduction=3, class_weights=2)
_ops("loss", "entrywise", "huber_loss kl_div l1_loss mse_loss smooth_l1_loss soft_margin_loss", reduction=2)
_ops("loss", "entrywise", "binary_cross_entropy hinge_embedding_loss", reduction=3)
_ops("loss", "entrywise", "binary_cross_entropy_with_logits", reduction=4)
_ops("loss", "entrywise", "poisson_nll_loss", reduction=5)
_ops("loss", "", "margin_ranking_loss", reduction=4)
_ops("loss", "rows", "multilabel_margin_loss", reduction=2)
_ops("loss", "rows", "cosine_embedding_loss", reduction=4)
_ops("loss", "rows", "multi_margin_loss", reduction=5, class_weights=4)
_ops("loss", "rows", "triplet_margin_loss", reduction=7)
_ops("ctc", "", "ctc_loss", reduction=5)

# Of no family.
_ops(None, "same", "alias")
_ops(None, "moves", "diagonal")
_ops(None, "joins", "column_stack dstack hstack")
_ops(None, "bounds", "nan_to_num")
_ops(None, "sums", "diff outer tensordot trace")
_ops(None, "unseen", "_fused_moving_avg_obs_fq_helper fused_moving_avg_obs_fake_quant")
_ops(None, "draws", "cauchy exponential geometric log_normal normal poisson rand randint randn random randperm uniform")
_ops(None, "draws", "rand_like randint_like randn_like", converts=True)
_ops(None, "makes", "asarray from_file from_numpy frombuffer tensor")
_ops(None, "makes", "new new_tensor", converts=True, data=(1, "data"))
_ops(None, "", """
    arange empty empty_like eye new_empty new_empty_strided new_ones new_zeros ones ones_like zeros zeros_like
    """, converts=True)
_ops(None, "", "full full_like", converts=True, data=(1, "fill_value"))
_ops(None, "", "new_full", converts=True, data=(2, "fill_value"))
# fmt: on

POINTWISE = frozenset(name for name, op in OPS.items() if op.family in ("pointwise", "copy"))
LOSSES = frozenset(name for name, op in OPS.items() if op.family == "loss")
