"""Micro-batches and stages."""
