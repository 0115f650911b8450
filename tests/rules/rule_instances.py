"""Instances of every op in the table of rules: INSTANCES[name] is a list of (args, kwargs) on small real tensors."""

from . import instances_fp8, instances_layers, instances_places, instances_pointwise  # noqa: F401  (enter theirs)
from .instances import INSTANCES

__all__ = ["INSTANCES"]
