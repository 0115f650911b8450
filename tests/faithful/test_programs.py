"""The programs do what they do in eager mode, or are refused where they say so; on one process, on two and on four.

pytest tests/faithful -m ""                                          # all of them
pytest tests/faithful -m "" -k "state and codebook"
python benchmarks/faithful.py --programs state/ --mesh dp=2,tp=2     # many on one start of the processes
"""

from __future__ import annotations

import pytest

from autopar.ir.mesh import Mesh

from .catalogue import PROGRAMS
from .not_yet import NOT_YET, NOT_YET_ON_SEVERAL
from .processes import judge_named, run_all
from .runner import SECONDS, judge

SHARE = 9  # one program of so many is in the default run
SLOW = ("huggingface/", "threads/", "layers/", "containers/reads")
QUICK = [name for name in PROGRAMS if name not in NOT_YET and not name.startswith(SLOW)][::SHARE]
ON_TWO = QUICK[::9]


def _marked(name: str):
    return pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [_marked(name) for name in PROGRAMS if name not in NOT_YET])
def test_alone(alone, name):
    program = PROGRAMS[name]
    outcome = judge(program, alone)
    assert outcome.holds(program), f"{name} ({program.source}): {outcome.kind} {outcome.error} {outcome.detail}"


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_YET)
def test_not_yet(alone, name):
    program = PROGRAMS[name]
    assert not judge(program, alone).holds(program), f"{name} holds now: take it out of tests/faithful/not_yet.py"


def _check(mesh: str, names, **options) -> None:
    left_out = {*NOT_YET, *NOT_YET_ON_SEVERAL, *(name for name, program in PROGRAMS.items() if program.alone)}
    jobs = [(name, mesh, SECONDS, options) for name in names if name not in left_out]
    wrong = [
        f"{name}: {outcome}" for (name, *_), outcome in run_all(Mesh.parse(mesh).devices, judge_named, jobs)
        if not outcome.holds(PROGRAMS[name])
    ]  # fmt: skip
    assert not wrong, "\n".join(wrong)


@pytest.mark.gloo
def test_two_processes():
    _check("dp=2", ON_TWO)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "mesh, strategy", [("dp=2", "fsdp"), ("tp=2", "megatron"), ("dp=2,tp=2", None), ("dp=4", "zero2")]
)
def test_processes(mesh, strategy):
    _check(mesh, PROGRAMS, strategy=strategy)
