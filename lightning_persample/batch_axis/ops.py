"""Every op that the package knows by name: its family, and what is true of it whatever the values.

A row is a family and its ops that are alike in all else. To add an op, put its canonical name (see
`rules.canonical_op`) into the row that fits; a new family needs a propagation rule, `@propagation_rule("name")` in the
file of the family. An op that stands nowhere is tried on single samples.

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
- ``orders``: which of the entries the result has, and where, is up to the values of all of them.
- ``draws``: random numbers.
- ``drops``: it multiplies entries by random numbers, as dropout does.
- ``makes``: data out of anything that Python holds.
- ``unseen``: it writes into its arguments without telling autograd.
- ``entrywise``, ``rows``, ``classes``: what a loss gives under reduction="none" a value for.
"""

from __future__ import annotations

from dataclasses import dataclass


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


def add_ops(
    family: str | None,
    traits: str,
    names: str,
    *,
    reduction: int | None = None,
    class_weights: int | None = None,
    converts: bool = False,
    data: tuple[int, str] | None = None,
) -> None:
    """Add a row to the table: these names, apart by blanks, are of this family and have these traits."""
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
add_ops("pointwise", "", """
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
add_ops("pointwise", "adds", "add rsub sub")
add_ops("pointwise", "chooses", "lerp")
add_ops("pointwise", "indexes", "eq ne")
add_ops("pointwise", "bounds", """
    abs absolute clamp clamp_max clamp_min clip fmax fmin hardtanh leaky_relu maximum minimum relu threshold
    """)
add_ops("pointwise", "same", "clone contiguous")
add_ops("pointwise", "casts", "bfloat16 cpu cuda double float half type")
add_ops("pointwise", "casts", "to type_as", converts=True, data=(0, "self"))
add_ops("pointwise", "passes", "data detach neg negative pos positive")
add_ops("pointwise", "draws drops", "alpha_dropout dropout feature_alpha_dropout feature_dropout")
add_ops("pointwise", "draws drops", "native_dropout rrelu")
add_ops("pointwise", "draws", "bernoulli normal poisson")
add_ops("pointwise", "makes", "as_tensor")
add_ops("copy", "passes", "copy")
add_ops("where", "chooses places", "where")

# Shapes.
add_ops("reshape", "", "_unsafe_view")
add_ops("reshape", "moves", "flatten ravel")
add_ops("reshape", "moves shapes", "reshape unflatten view")
add_ops("reshape", "moves", "reshape_as view_as", converts=True, data=(0, "self"))
add_ops("squeeze", "moves", "squeeze")
add_ops("unsqueeze", "moves", "unsqueeze")
add_ops("permutation", "", "adjoint")
add_ops("permutation", "permutes", "H mH")
add_ops("permutation", "permutes moves", "T mT moveaxis movedim permute swapaxes swapdims t transpose")
add_ops("expand", "moves shapes", "broadcast_to expand")
add_ops("expand", "moves", "expand_as", converts=True, data=(0, "self"))
add_ops("strided", "", "as_strided as_strided_copy")
add_ops("repeat", "moves shapes", "repeat tile")
add_ops("repeat_interleave", "moves", "repeat_interleave")
add_ops("joined", "joins", "cat concat concatenate row_stack stack vstack")
add_ops("padded", "", "pad_sequence")
add_ops("split", "", "unsafe_chunk unsafe_split")
add_ops("split", "picks", "chunk split split_with_sizes tensor_split")
add_ops("unbind", "picks", "unbind")
add_ops("flip", "moves", "flip")
add_ops("roll", "moves", "roll")
add_ops("pad", "passes", "constant_pad_nd pad")
add_ops("triangle", "", "tril triu")

# Entries by their places.
add_ops("select", "picks", "narrow")
add_ops("select", "picks indexes", "index_select select")
add_ops("select", "passes", "unfold")
add_ops("gather", "", "index_add index_copy index_fill index_reduce scatter scatter_add scatter_reduce")
add_ops("gather", "picks", "gather take_along_dim")
add_ops("take", "picks", "take")
add_ops("getitem", "picks indexes", "getitem")
add_ops("setitem", "passes", "setitem")
add_ops("index_put", "", "index_put")
add_ops("masked_select", "picks", "masked_select")
add_ops("masked_scatter", "", "masked_scatter")
add_ops("list", "places", "argwhere nonzero unique unique_consecutive")

# Over axes.
add_ops("reduction", "sums totals", "mean nansum sum")
add_ops("reduction", "totals", "nanmean")
add_ops("reduction", "", """
    all any argmax argmin count_nonzero logsumexp prod special_logsumexp std std_mean var var_mean
    """)
add_ops("reduction", "orders", "amax amin aminmax median mode nanmedian")
add_ops("extremum", "orders", "max min")
add_ops("norm", "", "linalg_norm linalg_vector_norm norm")
add_ops("scan", "", """
    cumprod log_softmax logcumsumexp softmax special_log_softmax special_softmax
    """)
add_ops("scan", "orders", "cummax cummin")
add_ops("scan", "sums", "cumsum")
add_ops("sort", "", "argsort glu")
add_ops("sort", "orders", "msort sort")
add_ops("topk", "orders", "topk")
add_ops("transform", "", """
    fft_fft fft_fft2 fft_fftn fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_ihfft2 fft_ihfftn
    fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn
    """)
add_ops("nested", "", "_nested_get_values nested_to_padded_tensor to_padded_tensor")
add_ops("segments", "", "segment_reduce")
add_ops("scattered", "", "_unsafe_masked_index_put_accumulate as_strided_scatter bincount histc")

# Products.
add_ops("dot", "sums", "dot vdot")
add_ops("linear", "", "bilinear")
add_ops("linear", "sums", "linear")
add_ops("matmul", "sums", "bmm matmul mm mv")
add_ops("reflected_matmul", "sums", "rmatmul")
add_ops("added_product", "", "addmm addmv baddbmm")
add_ops("einsum", "sums", "einsum")
add_ops("attention", "", "scaled_dot_product_attention")

# Layers.
add_ops("embedding", "indexes", "embedding")
add_ops("embedding_bag", "", "embedding_bag")
add_ops("channels", "", """
    batch_norm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d group_norm instance_norm
    """)
add_ops("layer_norm", "", "layer_norm rms_norm")
add_ops("pool", "", """
    _adaptive_avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
    adaptive_max_pool2d adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool1d_with_indices
    max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices
    """)
add_ops("one_hot", "", "one_hot")
add_ops("affine_grid", "", "affine_grid_generator")
add_ops("multinomial", "draws", "multinomial")
add_ops("recurrent_layer", "", "gru lstm rnn_relu rnn_tanh")
add_ops("recurrent_cell", "", "gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell")
add_ops("pack", "", "_pack_padded_sequence")
add_ops("unpack", "", "_pad_packed_sequence")
# They compute each row of the first axis from this row alone, whatever the values, or leave no row of it: along it one
# trial shows what holds for every call of that layout. Of any other op that is tried, and along another axis, values
# may decide (`renorm` beyond its maximum alone, neighbours that are zero in `im2col`), so that each call is tried.
add_ops("by_rows", "", """
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d channel_shuffle col2im cosine_similarity grid_sampler im2col max_unpool2d max_unpool3d
    pairwise_distance pixel_shuffle pixel_unshuffle prelu stft trapezoid
    upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_trilinear3d
    """)
add_ops("by_rows", "orders", "kthvalue nanquantile quantile")

# Losses.
add_ops("loss", "classes", "cross_entropy_loss nll_loss nll_loss2d nll_loss_nd", reduction=3, class_weights=2)
add_ops("loss", "entrywise", "huber_loss kl_div l1_loss mse_loss smooth_l1_loss soft_margin_loss", reduction=2)
add_ops("loss", "entrywise", "binary_cross_entropy hinge_embedding_loss", reduction=3)
add_ops("loss", "entrywise", "binary_cross_entropy_with_logits", reduction=4)
add_ops("loss", "entrywise", "poisson_nll_loss", reduction=5)
add_ops("loss", "", "margin_ranking_loss", reduction=4)
add_ops("loss", "rows", "multilabel_margin_loss", reduction=2)
add_ops("loss", "rows", "cosine_embedding_loss", reduction=4)
add_ops("loss", "rows", "multi_margin_loss", reduction=5, class_weights=4)
add_ops("loss", "rows", "triplet_margin_loss", reduction=7)
add_ops("ctc", "", "ctc_loss", reduction=5)

# Of no family.
add_ops(None, "same", "alias")
add_ops(None, "moves", "diagonal")
add_ops(None, "joins", "column_stack dstack hstack")
add_ops(None, "bounds", "nan_to_num")
add_ops(None, "sums", "diff inner outer tensordot trace")
add_ops(None, "unseen", "_fused_moving_avg_obs_fq_helper fused_moving_avg_obs_fake_quant")
add_ops(None, "draws", "rand randint randn randperm")
add_ops(None, "draws", "cauchy exponential geometric log_normal random uniform")
add_ops(None, "draws", "rand_like randint_like randn_like", converts=True)
add_ops(None, "makes", "asarray from_file from_numpy frombuffer tensor")
add_ops(None, "makes", "new new_tensor", converts=True, data=(1, "data"))
add_ops(None, "", """
    arange empty empty_like eye new_empty new_empty_strided new_ones new_zeros ones ones_like zeros zeros_like
    """, converts=True)
add_ops(None, "", "full full_like", converts=True, data=(1, "fill_value"))
add_ops(None, "", "new_full", converts=True, data=(2, "fill_value"))
# fmt: on

POINTWISE = frozenset(name for name, op in OPS.items() if op.family in ("pointwise", "copy"))
LOSSES = frozenset(name for name, op in OPS.items() if op.family == "loss")
