"""Scripts that do not run unchanged yet, each with the reason; all are refused with a typed error."""

from __future__ import annotations

NOT_YET = {
    "gradient_penalty": "gradients of gradients: a compiled model has first derivatives only",
    "packed_sentences": "sequences packed by lengths, which are values of a tensor",
    "stochastic_weight_averaging": "update_bn: batch norm with a cumulative average reads how many batches it saw",
    "lengths_by_rank": "parts of the batch with lengths of their own",
}
