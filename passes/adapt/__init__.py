"""Adapters and quantization in an exported forward."""
