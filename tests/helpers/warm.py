"""Importing this compiles a small model once: what torch prepares at its first trace (registries, caches) is
prepared."""

from __future__ import annotations

import contextlib

import torch

from autopar.simulate.compare import verify_model
from tests.runtime import tiny

torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
with contextlib.suppress(Exception):  # what is wrong here is a test's to report
    verify_model(*tiny.gpt2(n_layer=1), "tp=2", strategy="megatron")
