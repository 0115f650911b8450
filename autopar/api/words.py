"""The words that the arguments of `autopar.plan` and `compile` take, as types. Where a name may be registered, or two
be joined ("megatron_sp+zero1"), other text is as good; the words that autopar has are listed for editors."""

from collections.abc import Sequence
from typing import Literal

from ..plans.expert_balance import ExpertBalance

Inputs = Literal["global", "local"]
Outputs = Literal["stage", "everywhere", "sharded"]
Offload = Literal["none", "auto", "activations", "optimizer"]
Recompute = Literal["auto", "none", "selective", "full"]
Tile = Literal[
    "auto", "none", "loss", "mlp", "queries", "loss+mlp", "loss+queries", "mlp+queries", "loss+mlp+queries"
]  # fmt: skip
Loops = Literal["never", "auto", "always"]
Solver = Literal["dual", "ilp"]
Execution = Literal["eager", "compiled"]
ExpertLoad = float | Sequence[float] | ExpertBalance
HotExperts = int | Literal["auto"]
MicroBatches = int | Literal["auto"]
Strategy = (
    Literal[
        "ddp", "zero1", "zero2", "fsdp", "hsdp", "megatron", "megatron_sp", "all_gather_kv", "ulysses", "ring", "hf_tp"
    ]
    | str
)
Optimizer = Literal["adamw", "adam", "muon", "sgd", "sgd_momentum", "none"] | str
Schedule = (
    Literal[
        "auto",
        "naive",
        "gpipe",
        "1f1b",
        "interleaved_1f1b",
        "zb_h1",
        "zb_h2",
        "interleaved_zero_bubble",
        "zbv",
        "dualpipev",
        "v_half",
        "v_min",
    ]
    | str
)
