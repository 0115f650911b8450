"""Programs that do not hold yet, by what they wait for. Nothing is to be added; test_programs.py says which can go."""

from __future__ import annotations

_BY_REASON: dict[str, tuple[str, ...]] = {
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
    "refused: parameters and layers that are replaced after compile": (
        "training/parameter_replaced_between_calls", "training/layer_replaced_between_calls",
        "containers/depth_changed_between_calls",
    ),
    "refused: methods that need no parameters": (
        "containers/method_without_parameters", "huggingface/checkpointing_enabled_between",
    ),
}  # fmt: skip
NOT_YET = {name: reason for reason, names in _BY_REASON.items() for name in names}
NOT_YET_ON_SEVERAL: dict[str, str] = {}  # but on one process
