"""The values with which a data collator pads a batch, as `autopar.compile(..., pad=)` takes them."""

from __future__ import annotations

from ..runtime.lengths import Padding

OF_IDS = ("input_ids", "decoder_input_ids")
OF_ZEROS = (
    "attention_mask", "decoder_attention_mask", "token_type_ids", "position_ids", "special_tokens_mask",
    "completion_mask", "assistant_masks",
)  # fmt: skip


def padding_of(collator: object, processing_class: object) -> Padding | None:
    """Return what a collator pads the inputs of a language model with, None if neither it nor a tokenizer says so. Of
    two collators with a pad_token_id of their own, as TRL's are, and with a tokenizer, as transformers' are, the first
    pads behind the tokens, and the other where the tokenizer does; one that puts samples one after the other
    (`separator_id`) pads with nothing, and what is added is labeled as a separator is."""
    tokenizer = next((t for t in (getattr(collator, "tokenizer", None), processing_class) if t is not None), None)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    is_own = any(hasattr(collator, name) for name in ("pad_token_id", "separator_id"))
    if tokenizer is None and not is_own:
        return None
    side = "right" if is_own else getattr(tokenizer, "padding_side", "right")
    ids = getattr(collator, "pad_token_id", None if is_own else getattr(tokenizer, "pad_token_id", None)) or 0
    labels = getattr(collator, "label_pad_token_id", getattr(collator, "separator_id", -100))
    types = getattr(tokenizer, "pad_token_type_id", 0)
    values = dict.fromkeys(OF_IDS, ids) | dict.fromkeys(OF_ZEROS, 0) | {"labels": labels, "token_type_ids": types}
    return {name: (value, side) for name, value in values.items()}
