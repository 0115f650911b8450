"""The table of sharding rules: op -> what it does to factors. An op that is not here has no rule and is replicated.

Rows come in as a user's rules do (register.py). Names are those of ATen without "aten." and without an overload
".default". `linear` sets follow the rule text or the builder (see families.py). Random ops are left out on purpose:
several devices need counter-based random numbers.
"""

from __future__ import annotations

from . import experts, fp8, indexing, layers, views
from .families import (
    affine,
    along,
    blocked,
    cast,
    counted,
    created,
    drawn,
    einsum,
    filled,
    histogram,
    keeps_last,
    linear_layer,
    loss,
    pointwise,
    reduce,
)
from .register import register_rule as enter

UNARY = """
    abs acos acosh angle asin asinh atan atanh bitwise_not ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1
    floor frac i0 isfinite isinf isnan isneginf isposinf lgamma log log10 log1p log2 logical_not logit nan_to_num
    rad2deg reciprocal round round.decimals rsqrt sgn sigmoid sign signbit sin sinc sinh special_entr special_erfcx
    special_i0e special_i1 special_log_ndtr special_ndtr special_ndtri sqrt square tan tanh trunc"""
ACTIVATIONS = """
    celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid_forward mish relu relu6 selu silu
    softplus softshrink threshold _prelu_kernel"""
BINARY = """
    eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar ge.Tensor
    ge.Scalar logical_and logical_or logical_xor isin.Tensor_Scalar add.Scalar sub.Scalar rsub.Scalar atan2
    copysign.Tensor copysign.Scalar div.Tensor_mode div.Scalar_mode floor_divide floor_divide.Scalar fmax fmin
    fmod.Tensor fmod.Scalar heaviside hypot igamma logaddexp logaddexp2 maximum minimum nextafter polar
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar remainder.Tensor remainder.Scalar special_xlog1py special_zeta
    xlogy.Tensor xlogy.Scalar_Other xlogy.Scalar_Self clamp clamp.Tensor clamp_min clamp_min.Tensor clamp_max
    clamp_max.Tensor"""
INTEGER = """
    gcd lcm bitwise_and.Tensor bitwise_and.Scalar bitwise_or.Tensor bitwise_or.Scalar bitwise_xor.Tensor
    bitwise_xor.Scalar bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor
    bitwise_right_shift.Tensor_Scalar"""
# The gradient is the first argument and the result is linear in it.
POINTWISE_BACKWARDS = """
    elu_backward gelu_backward hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward
    leaky_relu_backward log_sigmoid_backward logit_backward mish_backward native_dropout_backward sigmoid_backward
    silu_backward softplus_backward softshrink_backward tanh_backward threshold_backward
    fake_quantize_per_tensor_affine_cachemask_backward fake_quantize_per_channel_affine_cachemask_backward"""

# element by element
enter(UNARY + ACTIVATIONS + BINARY + INTEGER, pointwise())
enter("neg positive alias clone detach lift_fresh_copy real imag _conj _conj_physical zeros_like", pointwise([0]))
enter("add.Tensor sub.Tensor rsub.Tensor", pointwise([0, 1]))
enter("mul.Tensor", pointwise([0], [1]))
enter("mul.Scalar div.Tensor div.Scalar", pointwise([0]))
enter("addcmul", pointwise([0, 1], [0, 2]))
enter("addcdiv lerp.Scalar lerp.Tensor", pointwise([0, 1]))
enter("where.self", pointwise([1, 2]))
enter("where.ScalarOther", filled("other", 1))
enter("where.ScalarSelf", filled("self", 1))
enter("masked_fill.Scalar", filled("value", 0))
enter("masked_fill.Tensor", pointwise([0, 2]))
enter("copy fill.Tensor", pointwise([1]))
enter("ones_like empty_like full_like fill.Scalar where.Scalar", pointwise())
enter("_to_copy prims.convert_element_type.default", cast)
enter(POINTWISE_BACKWARDS, pointwise([0]))
enter("fake_quantize_per_tensor_affine_cachemask", pointwise())
enter("fake_quantize_per_channel_affine_cachemask", layers.per_channel)
enter("autopar.fake_quantize.default", pointwise())
enter("autopar.fake_quantize_bw.default autopar.fake_quantize_dscale.default", pointwise([0]))
enter("bucketize.Tensor", einsum("..., _ -> ..."))

# products
enter("mm", einsum("m k, k n -> m n", [0], [1]))
enter("bmm", einsum("b m k, b k n -> b m n", [0], [1]))
enter("autopar.matmul.default", einsum("... m k, ... k n -> ... m n", [0], [1]))
enter("mv", einsum("m k, k -> m", [0], [1]))
enter("dot", einsum("k, k ->", [0], [1]))
enter("addmm baddbmm addmv", affine)
enter("linear", linear_layer)
enter("autopar.linear.default", einsum("... i, o i -> ... o", [0], [1]))
enter("autopar.linear_dx.default", einsum("... o, o i -> ... i", [0], [1]))
enter("autopar.linear_dw.default", einsum("... o, ... i -> o i", [0], [1]))

# products of rows with the matrix of their group: a device may hold one range of the groups
enter("autopar.grouped_mm.default autopar.grouped_mm_dw.default", experts.grouped)
enter("autopar.dispatch.default", experts.dispatch)
enter("autopar.combine.default", experts.combine)
enter("autopar.dispatch_tokens.default", experts.dispatch_tokens)
enter("autopar.combine_tokens.default", experts.combine_tokens)

# quantized weights
enter("autopar.dequantize.default", layers.dequantize)

# 8-bit floats
enter("autopar.fp8_rows.default", fp8.rows)
enter("autopar.fp8_columns.default", fp8.columns)
enter("autopar.fp8_blocks.default", fp8.blocks)
enter("autopar.fp8_amax.default", fp8.amax)
enter("autopar.fp8_tensor.default", fp8.tensor)
enter("autopar.fp8_step.default", pointwise())
enter("autopar.fp8_linear.default", fp8.linear)
enter("autopar.fp8_linear_dx.default", fp8.linear_dx)
enter("autopar.fp8_linear_dw.default", fp8.linear_dw)

# the vocabulary: sharded ops take the offset of their rows, so a device holds one range of them
enter("autopar.embedding.default", einsum("v h, ... -> ... h", [0], contiguous="v"))
enter("autopar.embedding_dw.default", einsum("... h, ... -> v h", [0], contiguous="v"))
enter("autopar.vocab_loss.default", einsum("... v, ..., ... -> ..., ...", contiguous="v"))
enter("autopar.vocab_loss_bw.default", einsum("..., ..., ... v, ..., ... -> ... v", [0, 1], contiguous="v"))
enter("embedding", einsum("_ h, ... -> ... h", [0]))
enter("embedding_dense_backward", layers.embedding_dense_backward)
enter("nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward", blocked)

# reductions
enter("sum.dim_IntList sum", reduce("sum", [0]))
enter("amax max", reduce("max"))
enter("mean mean.dim", reduce(None, [0]))
enter("amin min prod prod.dim_int argmax argmin aminmax max.dim min.dim median.dim kthvalue mode", reduce(None))
enter("all any all.dim any.dim logsumexp count_nonzero.dim_IntList", reduce(None))
enter("histc", histogram)
enter("linalg_vector_norm norm.Scalar norm.ScalarOpt_dim", reduce(None))
enter("var.correction std.correction var_mean.correction std_mean.correction", reduce(None))
enter("all.dims any.dims", reduce(None, empty_is_all=False))

# along a dim
enter("_softmax _log_softmax _safe_softmax sort sort.stable argsort argsort.stable topk", along("dim"))
enter("cumprod cummax cummin logcumsumexp glu", along("dim"))
enter("_softmax_backward_data _log_softmax_backward_data glu_backward cumsum", along("dim", linear=([0],)))
enter("linalg_cross", along("dim", linear=([0], [1])))
enter("flip roll", along("dims", linear=([0],)))
enter("tril triu", along(-1, -2, linear=([0],)))
enter("_fft_c2c _fft_r2c _fft_c2r", along("dim", linear=([0],)))
enter("_weight_norm_interface _weight_norm_interface_backward", layers.weight_norm)
enter("constant_pad_nd", indexing.pad)

# losses of user code
enter("mse_loss smooth_l1_loss huber_loss soft_margin_loss", loss())
enter("binary_cross_entropy binary_cross_entropy_with_logits", loss())
enter("mse_loss_backward smooth_l1_loss_backward huber_loss_backward", loss([0]))
enter("soft_margin_loss_backward binary_cross_entropy_backward", loss([0]))

enter("autopar.ctc.default autopar.ctc_bw.default", layers.ctc)

# layers
enter("autopar.attention.default autopar.attention_bw.default autopar.attention_bias_bw.default", layers.attention)
enter("autopar.attention_sinks_bw.default", einsum("b h s d, b h s d, b h s, h -> h", [0]))
enter("autopar.even_gradient.default", layers.even_gradient)
enter("autopar.with_earlier.default", einsum("b h _ d -> b h _ d"))
enter("autopar.of_own.default", einsum("b h _ d -> b h _ d", [0]))
enter("_scaled_dot_product_flash_attention_for_cpu", layers.attention)
enter("_scaled_dot_product_flash_attention_for_cpu_backward", layers.attention)
enter("native_layer_norm _fused_rms_norm", layers.layer_norm)
enter("native_layer_norm_backward _fused_rms_norm_backward", layers.layer_norm_backward)
enter("native_group_norm native_group_norm_backward", layers.group_norm)
enter("native_batch_norm native_batch_norm_backward", layers.batch_norm)
enter("_native_batch_norm_legit _native_batch_norm_legit.no_stats", layers.batch_norm)
enter("_native_batch_norm_legit_no_training _native_batch_norm_legit_functional", layers.batch_norm)
enter("autopar.square_deviation.default autopar.batch_norm.default", layers.channelwise)
enter("autopar.batch_norm_sums.default autopar.batch_norm_dx.default", layers.channelwise)
enter("convolution", layers.convolution)
enter("convolution_backward", layers.convolution_backward)
enter("max_pool2d_with_indices adaptive_max_pool2d", keeps_last(2))
enter("max_pool2d_with_indices_backward adaptive_max_pool2d_backward", keeps_last(2, [0]))
enter("avg_pool2d avg_pool2d_backward", keeps_last(2, [0]))
enter("_adaptive_avg_pool2d _adaptive_avg_pool2d_backward reflection_pad2d replication_pad2d", keeps_last(2, [0]))
enter("upsample_nearest2d upsample_nearest2d.vec upsample_nearest2d_backward", keeps_last(2, [0]))
enter("upsample_bilinear2d upsample_bilinear2d.vec upsample_bilinear2d_backward", keeps_last(2, [0]))
enter("upsample_bicubic2d upsample_bicubic2d.vec upsample_bicubic2d_backward", keeps_last(2, [0]))
enter("im2col", einsum("n _ _ _ -> n _ _", [0]))
enter("col2im", einsum("n _ _ -> n _ _ _", [0]))
enter("grid_sampler_2d", einsum("n c _ _, n _ _ _ -> n c _ _", [0]))
enter("grid_sampler_2d_backward", einsum("n c _ _, n c _ _, n _ _ _ -> n c _ _, n _ _ _", [0]))
enter("pixel_shuffle pixel_unshuffle", keeps_last(3, [0]))
enter("avg_pool1d reflection_pad1d replication_pad1d", keeps_last(1, [0]))

# views
enter("view _unsafe_view reshape flatten.using_ints unflatten.int", views.reshape)
enter("permute", views.permute)
enter("transpose.int", views.transpose)
enter("t", views.t)
enter("unsqueeze", views.unsqueeze)
enter("squeeze squeeze.dim squeeze.dims", views.squeeze)
enter("expand", views.expand)
enter("repeat", views.repeat)
enter("view_as_complex", views.to_complex)
enter("view_as_real", views.to_real)

# pieces and places
enter("split.Tensor split_with_sizes unsafe_split.Tensor unsafe_split_with_sizes split_with_sizes_copy", indexing.split)
enter("cat", indexing.cat)
enter("stack", indexing.stack)
enter("unbind.int", indexing.unbind)
enter("slice.Tensor", indexing.slice_)
enter("slice_backward", indexing.slice_backward)
enter("slice_scatter", indexing.slice_scatter)
enter("select.int select_backward select_scatter", indexing.select)
enter("index_select", indexing.index_select)
enter("index_add index_copy", indexing.index_add)
enter("gather", indexing.gather)
enter("scatter.src scatter.value scatter_add scatter_reduce.two", indexing.scatter)
enter("index.Tensor _unsafe_index.Tensor", indexing.index)
enter("index_put _unsafe_index_put", indexing.index_put)

# made from nothing
enter("zeros ones full empty.memory_format new_zeros new_ones new_full new_empty scalar_tensor", created)
enter("arange.start arange.start_step", counted)

# random numbers
enter("autopar.dropout.default autopar.uniform.default autopar.normal.default", drawn)
enter("arange eye linspace", blocked)
