"""The table of sharding rules: op -> what it does to factors. An op that is not here has no rule and is replicated.

Names are those of ATen without "aten." and without an overload ".default"; `linear` sets follow the rule text or the builder
(see families.py). Random ops are left out on purpose: on several devices they need counter-based random numbers.
"""

from __future__ import annotations

from torch import fx

from . import indexing, layers, views
from .families import (
    Builder, affine, along, blocked, cast, counted, created, einsum, keeps_last, linear_layer, loss, masked_fill, pointwise, reduce
)  # fmt: skip
from .rule import Rule
from .settle import settle

UNARY = """abs acos acosh angle asin asinh atan atanh bitwise_not ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1
    floor frac i0 isfinite isinf isnan isneginf isposinf lgamma log log10 log1p log2 logical_not logit nan_to_num rad2deg
    reciprocal round round.decimals rsqrt sgn sigmoid sign signbit sin sinc sinh special_entr special_erfcx special_i0e
    special_i1 special_log_ndtr special_ndtr special_ndtri sqrt square tan tanh trunc"""
ACTIVATIONS = """celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid_forward mish relu relu6 selu silu
    softplus softshrink threshold _prelu_kernel"""
COMPARISONS = " ".join(f"{name}.Tensor {name}.Scalar" for name in ("eq", "ne", "lt", "le", "gt", "ge"))
BITS = " ".join(
    f"bitwise_{name}.Tensor bitwise_{name}.Scalar" for name in ("and", "or", "xor", "left_shift", "right_shift")
).replace("left_shift.Scalar", "left_shift.Tensor_Scalar").replace("right_shift.Scalar", "right_shift.Tensor_Scalar")
BINARY = """add.Scalar atan2 copysign.Tensor copysign.Scalar div.Tensor_mode div.Scalar_mode floor_divide floor_divide.Scalar fmax
    fmin fmod.Tensor fmod.Scalar gcd heaviside hypot igamma lcm logaddexp logaddexp2 logical_and logical_or logical_xor maximum
    minimum nextafter polar pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar remainder.Tensor remainder.Scalar rsub.Scalar
    special_xlog1py special_zeta sub.Scalar xlogy.Tensor xlogy.Scalar_Other xlogy.Scalar_Self clamp clamp.Tensor clamp_min
    clamp_min.Tensor clamp_max clamp_max.Tensor isin.Tensor_Scalar"""
# The gradient is the first argument and the result is linear in it.
POINTWISE_BACKWARDS = """elu_backward gelu_backward hardsigmoid_backward hardswish_backward hardtanh_backward
    leaky_relu_backward logit_backward mish_backward native_dropout_backward sigmoid_backward silu_backward softplus_backward
    softshrink_backward hardshrink_backward tanh_backward threshold_backward log_sigmoid_backward
    fake_quantize_per_tensor_affine_cachemask_backward fake_quantize_per_channel_affine_cachemask_backward"""

TABLE: dict[str, Builder] = {}


def rules(names: str, builder: Builder) -> None:
    """Enter one builder for several ops, written `name` or `name.overload` of ATen, or in full with two dots."""
    for name in names.split():
        full = name if name.count(".") == 2 else f"aten.{name}" if "." in name else f"aten.{name}.default"
        assert full not in TABLE, f"two rules for {full}"
        TABLE[full] = builder


# element by element
rules(f"{UNARY} {ACTIVATIONS} {COMPARISONS} {BITS} {BINARY}", pointwise())
rules("neg positive alias clone detach lift_fresh_copy real imag _conj _conj_physical zeros_like", pointwise([0]))
rules("add.Tensor sub.Tensor rsub.Tensor", pointwise([0, 1]))
rules("mul.Tensor", pointwise([0], [1]))
rules("mul.Scalar div.Tensor div.Scalar", pointwise([0]))
rules("addcmul", pointwise([0, 1], [0, 2]))
rules("addcdiv lerp.Scalar lerp.Tensor", pointwise([0, 1]))
rules("where.self", pointwise([1, 2]))
rules("copy fill.Tensor", pointwise([1]))
rules("masked_fill.Scalar", masked_fill)
rules("masked_fill.Tensor", pointwise([0, 2]))
rules("ones_like empty_like full_like fill.Scalar", pointwise())
rules("_to_copy prims.convert_element_type.default", cast)
rules(POINTWISE_BACKWARDS, pointwise([0]))
rules("fake_quantize_per_tensor_affine_cachemask", pointwise())
rules("fake_quantize_per_channel_affine_cachemask", layers.per_channel)
rules("bucketize.Tensor", einsum("..., _ -> ..."))

# products
rules("mm", einsum("m k, k n -> m n", [0], [1]))
rules("bmm", einsum("b m k, b k n -> b m n", [0], [1]))
rules("mv", einsum("m k, k -> m", [0], [1]))
rules("dot", einsum("k, k ->", [0], [1]))
rules("addmm baddbmm addmv", affine)
rules("linear", linear_layer)
rules("autopar.linear.default", einsum("... i, o i -> ... o", [0], [1]))
rules("autopar.linear_dx.default", einsum("... o, o i -> ... i", [0], [1]))
rules("autopar.linear_dw.default", einsum("... o, ... i -> o i", [0], [1]))

# the vocabulary: sharded ops take the offset of their rows, so a device holds one range of them
rules("autopar.embedding.default", einsum("v h, ... -> ... h", [0], contiguous="v"))
rules("autopar.embedding_dw.default", einsum("... h, ... -> v h", [0], contiguous="v"))
rules("autopar.vocab_loss.default", einsum("... v, ..., ... -> ..., ...", contiguous="v"))
rules("autopar.vocab_loss_bw.default", einsum("..., ..., ... v, ..., ... -> ... v", [0, 1], contiguous="v"))
rules("embedding", einsum("_ h, ... -> ... h", [0]))
rules("embedding_dense_backward", layers.embedding_dense_backward)
rules("nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward", blocked)

# reductions
rules("sum.dim_IntList sum", reduce("sum", [0]))
rules("amax max", reduce("max"))
rules("mean mean.dim", reduce(None, [0]))
rules("""amin min prod prod.dim_int argmax argmin max.dim min.dim median.dim kthvalue mode all any all.dim any.dim logsumexp
    linalg_vector_norm norm.Scalar norm.ScalarOpt_dim var.correction std.correction var_mean.correction std_mean.correction
    count_nonzero.dim_IntList aminmax""", reduce(None))  # fmt: skip
rules("all.dims any.dims", reduce(None, empty_is_all=False))

# along a dim
rules("_softmax _log_softmax _safe_softmax sort sort.stable argsort argsort.stable topk cumprod cummax cummin logcumsumexp glu",
      along("dim"))  # fmt: skip
rules("_softmax_backward_data _log_softmax_backward_data glu_backward cumsum", along("dim", linear=([0],)))
rules("linalg_cross", along("dim", linear=([0], [1])))
rules("flip roll", along("dims", linear=([0],)))
rules("tril triu", along(-1, -2, linear=([0],)))
rules("constant_pad_nd", indexing.pad)

# losses of user code
rules("mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss", loss())
rules("mse_loss_backward smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward soft_margin_loss_backward",
      loss([0]))  # fmt: skip

# layers
rules("autopar.attention.default autopar.attention_bw.default", layers.attention)
rules("_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward", layers.attention)
rules("native_layer_norm _fused_rms_norm", layers.layer_norm)
rules("native_layer_norm_backward _fused_rms_norm_backward", layers.layer_norm_backward)
rules("native_group_norm native_group_norm_backward", layers.group_norm)
rules("""native_batch_norm _native_batch_norm_legit _native_batch_norm_legit.no_stats _native_batch_norm_legit_no_training
    _native_batch_norm_legit_functional native_batch_norm_backward""", layers.batch_norm)  # fmt: skip
rules("convolution", layers.convolution)
rules("convolution_backward", layers.convolution_backward)
rules("max_pool2d_with_indices", keeps_last(2))
rules("""avg_pool2d _adaptive_avg_pool2d max_pool2d_with_indices_backward avg_pool2d_backward _adaptive_avg_pool2d_backward
    upsample_nearest2d upsample_nearest2d.vec upsample_nearest2d_backward upsample_bilinear2d upsample_bilinear2d.vec
    upsample_bilinear2d_backward reflection_pad2d replication_pad2d""", keeps_last(2, [0]))  # fmt: skip
rules("pixel_shuffle pixel_unshuffle", keeps_last(3, [0]))
rules("avg_pool1d reflection_pad1d replication_pad1d", keeps_last(1, [0]))

# views
rules("view _unsafe_view reshape flatten.using_ints unflatten.int", views.reshape)
rules("permute", views.permute)
rules("transpose.int", views.transpose)
rules("t", views.t)
rules("unsqueeze", views.unsqueeze)
rules("squeeze squeeze.dim squeeze.dims", views.squeeze)
rules("expand", views.expand)
rules("repeat", views.repeat)
rules("view_as_complex", views.to_complex)
rules("view_as_real", views.to_real)

# pieces and places
rules("split.Tensor split_with_sizes unsafe_split.Tensor unsafe_split_with_sizes split_with_sizes_copy", indexing.split)
rules("cat", indexing.cat)
rules("stack", indexing.stack)
rules("unbind.int", indexing.unbind)
rules("slice.Tensor", indexing.slice_)
rules("slice_backward", indexing.slice_backward)
rules("slice_scatter", indexing.slice_scatter)
rules("select.int select_backward select_scatter", indexing.select)
rules("index_select", indexing.index_select)
rules("index_add index_copy", indexing.index_add)
rules("gather", indexing.gather)
rules("scatter.src scatter.value scatter_add scatter_reduce.two", indexing.scatter)
rules("index.Tensor _unsafe_index.Tensor", indexing.index)
rules("index_put _unsafe_index_put", indexing.index_put)

# made from nothing
rules("zeros ones full empty.memory_format new_zeros new_ones new_full new_empty scalar_tensor", created)
rules("arange.start arange.start_step", counted)
rules("arange eye linspace", blocked)


def rule_of(node: fx.Node) -> Rule | None:
    """The sharding rule of a graph node, from the global shapes in its metadata. None: the op has no rule, replicate it."""
    builder = TABLE.get(str(node.target)) if node.op == "call_function" else None
    made = builder(node) if builder else None
    return settle(node, made) if made else None
