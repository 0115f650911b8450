"""The canonical ops, `autopar::*`: what models are written in after capture, each with a rule that shards it. All are
registered with torch when anything of this folder is imported; `autopar` here is their namespace."""

import torch

from . import canonical  # noqa: F401  (registers them)

autopar = torch.ops.autopar
ATTENTION = {  # forward, and its gradient without and with that of what is added to the scores
    autopar.attention.default, autopar.attention_bw.default, autopar.attention_bias_bw.default,
}  # fmt: skip
OF_KEPT_KEYS = {autopar.with_earlier.default, autopar.of_own.default}  # beside an attention (kept_keys.py)
ROW_PRODUCTS = (autopar.linear.default, autopar.linear_dx.default)  # rows of the first argument with a weight
