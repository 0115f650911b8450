"""Run what other frameworks got wrong in silence, on the meshes and strategies where they did (see threads.py for what
each says).

python benchmarks/faithful.py --programs threads/ --mesh dp=2,tp=2 --verbose     # all of them on another mesh
"""

from __future__ import annotations

import pytest

from autopar.ir.mesh import Mesh

from .processes import judge_named, run_all
from .runner import EQUAL, SECONDS
from .threads import threads

VOCABULARY = {"pin": {"head.weight": "tp:S(0)"}}
STAGES = {"micro_batches": 2, "outputs": "everywhere"}
CASES = [  # program, mesh, options of compile
    ("smoothed_labels_over_a_cut_vocabulary", "tp=2", VOCABULARY),
    ("loss_beside_gathered_logits", "tp=2", VOCABULARY),
    ("second_head_with_other_token_counts", "dp=2", {"strategy": "ddp"}),
    ("norm_shared_by_heads", "tp=2", {"strategy": "megatron"}),
    ("norm_shared_by_heads", "tp=2", {"strategy": "megatron_sp"}),
    ("gradients_scaled_by_all_tokens", "dp=2", {"strategy": "fsdp"}),
    ("count_of_tokens_with_a_cut_sequence", "tp=2", {"strategy": "megatron_sp"}),
    ("adapters_of_cut_experts", "tp=2", {"pin": {"up": "tp:S(2)", "down": "tp:S(1)"}}),
    ("second_head_with_other_token_counts", "dp=4", {"strategy": "fsdp"}),
    ("sum_over_global_tokens_in_stages", "pp=2,dp=2", STAGES),
    ("norm_of_replicated_shards", "a=2,b=2", {"strategy": "hsdp"}),
    ("norm_of_replicated_shards", "dp=4", {"strategy": "ddp"}),
    ("norm_with_cut_layers", "dp=2,tp=2", {"strategy": "megatron+fsdp"}),
    ("norm_with_cut_layers", "dp=2,tp=2", {"strategy": "megatron_sp"}),
    ("norm_where_ranks_own_other_parameters", "pp=2,tp=2", STAGES),
    ("encoder_used_twice", "dp=4", {"strategy": "zero2"}),
    ("bias_of_a_row_cut_layer", "tp=4", {"strategy": "megatron"}),
]
QUICK = CASES[3:4]


def _check(cases) -> None:
    wrong = []
    for world in (2, 4):
        jobs = [
            (f"threads/{name}", mesh, SECONDS, options)
            for name, mesh, options in cases
            if Mesh.parse(mesh).devices == world
        ]
        found = run_all(world, judge_named, jobs)
        wrong += [f"{job}: {outcome.detail or outcome}" for job, outcome in found if outcome.kind != EQUAL]
    assert not wrong, "\n".join(wrong)


@pytest.mark.gloo
def test_one_thread():
    _check(QUICK)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(900)
def test_threads():
    assert {name for name, _, _ in CASES} == {name.partition("/")[2] for name in threads.programs}
    _check(CASES)
