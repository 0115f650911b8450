"""The canonical ops, `autopar::*`: what models are written in after capture, each with a rule that shards it. All are
registered with torch when anything of this folder is imported; `autopar` here is their namespace."""

import torch

from . import canonical  # noqa: F401  (registers them)

autopar = torch.ops.autopar
ATTENTION = {autopar.attention.default, autopar.attention_bw.default}  # forward, and its gradient
