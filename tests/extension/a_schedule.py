import autopar


def two_by_two(stages, micro_batches):
    """Two forwards, then their two backwards."""
    groups = [range(i, min(i + 2, micro_batches)) for i in range(0, micro_batches, 2)]
    return [" ".join(f"{s}{kind}{i}" for group in groups for kind in "FB" for i in group) for (s,) in stages]


autopar.register_schedule("two_by_two", two_by_two)
