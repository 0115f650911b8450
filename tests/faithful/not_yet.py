"""Programs that do not hold yet, by what they wait for. Nothing is to be added; test_programs.py says which can go."""

from __future__ import annotations

_BY_REASON: dict[str, tuple[str, ...]] = {
    "what a forward puts into lists and dicts is refused instead of done": (
        "memories/dict_cache_by_length", "memories/history_list", "memories/history_deque_read", "memories/metrics_dict",
        "hooks/activations_collected", "hooks/activations_collected_before_compile", "hooks/shapes_printed",
    ),
    "state with a graph of an earlier call": ("memories/recurrent_state_attached",),
    "eager refuses a backward that the compiled model runs": (
        "statistics/buffer_with_gradient_history", "gradients/input_changed_between_forward_and_backward",
        "grad_modes/region_inference_mode",
    ),
    "a value of a tensor kept as a Python number": ("attributes/float_from_item",),
    "inputs that share memory, are empty, or are numbers with ever new values": (
        "inputs/same_tensor_twice_written", "inputs/empty_batch", "inputs/learning_rate_like_floats",
    ),
    "gradients switched on inside of no_grad": ("grad_modes/enable_grad_inside_no_grad",),
    "the default dtype of a later call": ("grad_modes/default_dtype_changed",),
    "backward hooks of modules, and of tensors in the forward": (
        "hooks/full_backward_before_compile_root", "hooks/full_backward_before_compile_inner",
        "hooks/full_backward_after_compile_inner", "hooks/full_backward_pre_before_compile_root",
        "hooks/full_backward_pre_before_compile_inner", "hooks/full_backward_pre_after_compile_inner",
        "hooks/tensor_hook_in_the_forward", "hooks/retain_grad_in_the_forward",
    ),
    "parameters and their gradients are DTensors, which do not mix with plain tensors": (
        "hooks/parameter_hook_mask", "containers/weight_used_outside", "containers/all_weights_regularized",
    ),
    "torch.manual_seed between calls": ("randomness/seeded_by_the_user",),
    "recurrent layers rewrite their list of weights while they are traced": (
        "layers/lstm", "layers/gru_bidirectional", "layers/recurrent_with_hidden",
    ),
    "parameters and layers that are thawed or replaced after compile": (
        "training/thawing_what_was_frozen", "training/parameter_replaced_between_calls", "training/layer_replaced_between_calls",
        "training/frozen_bias_thawed", "training/frozen_bias_thawed_with_a_counter", "containers/depth_changed_between_calls",
    ),
    "whether an output has a gradient after a part of the parameters was frozen": (
        "training/output_of_a_layer_that_is_frozen_later",
    ),
    "copies of a compiled model": (
        "saving/weight_average", "saving/average_by_hand", "saving/deep_copy_is_apart", "saving/pickled",
    ),
    "methods that need no parameters": (
        "containers/method_without_parameters", "huggingface/checkpointing_enabled_between",
    ),
    "outputs that a later call has in addition, and none was asked for in the first": ("huggingface/hidden_states_asked_for",),
    "caches among the outputs": ("huggingface/cache_returned",),
}  # fmt: skip
NOT_YET = {name: reason for reason, names in _BY_REASON.items() for name in names}
