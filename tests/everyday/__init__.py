"""Ordinary training scripts that run on many devices after one line."""
