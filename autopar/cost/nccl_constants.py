"""Constants of NCCL's time model, by version: data only, the formulas are in autopar/cost/nccl.py.

Times in microseconds, speeds in GB/s, as NCCL has them. Triples of protocols are (LL, LL128, Simple); triples of a
generation are for one node, two nodes, and more. Source: github.com/NVIDIA/nccl, src/graph/tuning.cc, the defaults of
its tuner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PROTOCOLS = ("LL", "LL128", "Simple")
Triple = tuple[float, float, float]


@dataclass(frozen=True)
class Constants:
    """One version. `intra_us` by kind of link and algorithm; a latency is paid once a step of that kind of link."""

    version: str
    base_us: Mapping[str, Triple]
    intra_us: Mapping[str, Mapping[str, Triple]]
    inter_us: Mapping[str, Triple]
    net_overhead_us: float  # least time of a ring's step once it leaves the node; three times that for Simple
    ring_ll_share: float  # of the ring's speed
    ring_ll128_share: float
    tree_share: float
    tree_ll_share: float
    tree_ll128_share: tuple[float, float]  # one node, several
    pat_share: float
    pat_step_us: float  # a rank
    pat_net_divisor: float
    plateau: float  # latency of a Simple ring's all-reduce over several nodes is longer by this factor
    ll_most: Mapping[str, Triple]
    ring_ll128_most: Mapping[str, Triple]  # this and the next ones: a channel
    tree_most: Mapping[str, Triple]
    tree_ll128_most: Mapping[str, Triple]
    nvls_tree_most: Mapping[str, Triple]
    nvls_efficiency: Mapping[str, float]
    tree_correction: tuple[tuple[float, ...], ...]  # a protocol: share of the tree's speed at 64 B, 128 B, ..., then 1


NCCL_2_30 = Constants(
    version="2.30.7",
    base_us={
        "tree": (6.8, 14.0, 8.4),
        "ring": (6.6, 14.0, 8.4),
        "nvls": (0, 0, 0),
        "nvls_tree": (0, 0, 0),
        "pat": (8, 8, 8),
    },
    intra_us={
        "nvlink": {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4), "nvls": (0, 0, 25), "nvls_tree": (0, 0, 25)},
        "pci": {"tree": (1.0, 1.9, 4.0), "ring": (1.0, 2.5, 5.7)},
    },
    inter_us={
        "tree": (5.0, 8.5, 14.0),
        "ring": (2.7, 4.0, 14.0),
        "nvls": (0, 0, 18),
        "nvls_tree": (0, 0, 20.9),
        "pat": (0, 0, 14),
    },
    net_overhead_us=1.0,
    ring_ll_share=0.5,
    ring_ll128_share=0.92,
    tree_share=0.92,
    tree_ll_share=1 / 3.8,
    tree_ll128_share=(7 / 9, 120 / 128),
    pat_share=0.75,
    pat_step_us=2.8,
    pat_net_divisor=3.5,
    plateau=1.4,
    # on several nodes NCCL takes a row by the maker of the processor: Intel's, unless it is AMD's 22.5 and 19
    ll_most={
        "volta": (39.0, 39.0, 20.4),
        "ampere": (87.7, 39.0, 20.4),
        "hopper": (141.0, 39.0, 20.4),
        "blackwell": (282.0, 39.0, 20.4),
    },
    ring_ll128_most={"volta": (20.0,) * 3, "ampere": (20.0,) * 3, "hopper": (36.7,) * 3, "blackwell": (40.0,) * 3},
    tree_most={
        "volta": (26.5, 18.5, 10.0),
        "ampere": (24.0, 23.6, 17.8),
        "hopper": (38.7, 41.4, 36.0),
        "blackwell": (70.0, 42.8, 24.0),
    },
    tree_ll128_most={
        "volta": (20.0,) * 3,
        "ampere": (20.0,) * 3,
        "hopper": (36.7, 36.7, 29.0),
        "blackwell": (55.6, 31.67, 20.0),
    },
    nvls_tree_most={
        "volta": (0, 0, 0),
        "ampere": (24.0, 23.6, 17.8),
        "hopper": (0, 57.7, 45.5),
        "blackwell": (0, 96.0, 80.0),
    },
    nvls_efficiency={"volta": 0.0, "ampere": 0.0, "hopper": 0.85, "blackwell": 0.74},
    tree_correction=(
        (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1, 1),
        (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1, 1),
        (0.9,) * 7 + (0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9),
    ),
)
LATEST = NCCL_2_30

# Not in NCCL's model. A ring over several nodes reaches only part of its speed with little in hand: share by the bytes
# that a device contributes, between which the logarithm is linear. The ends are those that AutoParallel's authors found
# on H100.
RAMP_BYTES, RAMP_SHARE = (2**17, 2**24, 2**27), (0.10, 0.80, 1.0)

# Not in NCCL's model either: an all-to-all is as many sends. Shares and times fitted to nccl-tests on H100 by the same
# authors.
EXCHANGE_SHARE = 0.7  # of a ring's speed, where multiprocessors copy
COPY_ENGINE_US = 50.0
EXCHANGE_NET_US, EXCHANGE_RANK_US = 27.0, 0.6  # several nodes: 37, 42, 60, 98 us on 2, 4, 8, 16 nodes of 8
EXCHANGE_NET_LOSS = 0.44  # cards reach 1 - this / nodes of their speed
