"""Turn a user's Python into a graph: what a forward reads and writes besides tensors, while it is traced and at every
later call."""
