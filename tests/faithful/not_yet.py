"""Programs that do not hold yet, by what they wait for. Nothing is to be added; test_programs.py says which can go."""

from __future__ import annotations

_BY_REASON: dict[str, tuple[str, ...]] = {
    "eager refuses a backward that the compiled model runs": (
        "gradients/input_changed_between_forward_and_backward", "grad_modes/region_inference_mode",
    ),
    "parameters and their gradients are DTensors, which do not mix with plain tensors": (
        "hooks/parameter_hook_mask", "containers/weight_used_outside", "containers/all_weights_regularized",
    ),
    "torch.manual_seed between calls": ("randomness/seeded_by_the_user",),
    "whether an output has a gradient after a part of the parameters was frozen": (
        "training/output_of_a_layer_that_is_frozen_later",
    ),
    "outputs that only a later call asks for": ("huggingface/hidden_states_asked_for",),
    "caches among the outputs": ("huggingface/cache_returned",),
    "refused: state with a graph of an earlier call": ("memories/recurrent_state_attached",),
    "refused: a value of a tensor kept as a Python number": ("attributes/float_from_item",),
    "refused: inputs that share memory, are empty, or are numbers with ever new values": (
        "inputs/same_tensor_twice_written", "inputs/empty_batch", "inputs/learning_rate_like_floats",
    ),
    "refused: gradients switched on inside of no_grad": ("grad_modes/enable_grad_inside_no_grad",),
    "refused: another default dtype in a later call": ("grad_modes/default_dtype_changed",),
    "refused: backward hooks of modules, and of tensors in the forward": (
        "hooks/full_backward_before_compile_root", "hooks/full_backward_before_compile_inner",
        "hooks/full_backward_after_compile_inner", "hooks/full_backward_pre_before_compile_root",
        "hooks/full_backward_pre_before_compile_inner", "hooks/full_backward_pre_after_compile_inner",
        "hooks/tensor_hook_in_the_forward", "hooks/retain_grad_in_the_forward",
    ),
    "refused: parameters and layers that are thawed or replaced after compile": (
        "training/thawing_what_was_frozen", "training/parameter_replaced_between_calls", "training/layer_replaced_between_calls",
        "training/frozen_bias_thawed", "training/frozen_bias_thawed_with_a_counter", "containers/depth_changed_between_calls",
    ),
    "refused: methods that need no parameters": (
        "containers/method_without_parameters", "huggingface/checkpointing_enabled_between",
    ),
}  # fmt: skip
NOT_YET = {name: reason for reason, names in _BY_REASON.items() for name in names}
NOT_YET_ON_SEVERAL = {  # but on one process
    "losses/loss_and_logits_of_a_counter": "a batch of another size, cut unevenly, in the program of a loss and other outputs",
}
