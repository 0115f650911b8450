"""Scripts that do not run unchanged yet, each with the reason; all are refused with a typed error."""

from __future__ import annotations

NOT_YET = {
    "gradient_penalty": "gradients of gradients: a compiled model has first derivatives only",
    "packed_sentences": "pack_padded_sequence in the forward: lengths are values of a tensor",
}
