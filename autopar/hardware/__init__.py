"""Describe what a device, its links and its libraries can do, by named profiles: `load("h100")`."""

from .profile import Hardware, load, names

__all__ = ["Hardware", "load", "names"]
