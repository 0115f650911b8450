"""Scripts that do not run unchanged yet, each with the reason; all are refused with a typed error."""

from __future__ import annotations

NOT_YET = {
    "gradient_penalty": "gradients of gradients: autograd would multiply them by the ranks at each collective of a "
    "backward; the joint graph would have to be differentiated, planned and lowered once more",
    "packed_sentences": "pack_padded_sequence in the forward: the shapes of its result are values of a tensor",
}
