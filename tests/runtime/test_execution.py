"""Compiled modules run their graphs op by op on CPUs, through torch.compile on GPUs, or as is asked."""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace

import pytest

import autopar
from autopar import _torch, models
from autopar.api import entry
from autopar.errors import CompilerError
from autopar.planner.options import execution_on
from autopar.runtime import loaded
from tests.helpers import gloo

from . import tiny
from .parity import assert_same_gradients, device_mesh, pair

X, Y = tiny.Regressor.batch()
CALL = dict(x=X, target=Y)


def test_defaults():
    assert execution_on("cuda", None, "none") == "compiled"
    assert execution_on("cpu", None, "none") == execution_on(None, None, "none") == "eager"
    assert execution_on("cuda", None, "activations") == "eager"  # Inductor does not place copies of the host
    assert execution_on("cuda", "eager", "none") == "eager" and execution_on("cpu", "compiled", "auto") == "compiled"


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """CPUs that are taken for GPUs where it is asked how graphs run, and Inductor that counts what it is given."""
    given = []

    def compile_counted(module, *others):
        given.append(module)
        return SimpleNamespace(run=lambda values: module(*values))

    monkeypatch.setattr(entry, "device_type_of", lambda mesh: "cuda")
    monkeypatch.setattr(_torch, "InductorProgram", compile_counted)
    return given


def test_graphs_are_compiled_on_gpus(alone, as_on_a_gpu):
    parallel, reference = pair(tiny.Regressor(loss=True), alone, CALL)
    assert parallel.plan.execution == "compiled" and "run compiled" in str(parallel.plan)
    for module in (parallel, reference):
        module(**CALL).loss.backward()
    assert_same_gradients(parallel, reference)
    assert len(as_on_a_gpu) == 2


def test_a_plan_and_the_caller_say_how_graphs_run(alone, as_on_a_gpu):
    plan = autopar.plan(tiny.Regressor(loss=True), alone, CALL, baselines=False)
    for given, calls in ({"plan": plan}, 0), ({"execution": "eager"}, 0), ({"plan": plan, "execution": "compiled"}, 2):
        parallel, _ = pair(tiny.Regressor(loss=True), alone, CALL, **given)
        parallel(**CALL).loss.backward()
        assert len(as_on_a_gpu) == calls


def failing(*arguments):
    raise ValueError("no compiler is here")


def test_by_default_what_cannot_be_compiled_runs_op_by_op(alone, as_on_a_gpu, monkeypatch):
    monkeypatch.setattr(_torch, "InductorProgram", failing)
    loaded._warn_once.cache_clear()
    parallel, reference = pair(tiny.Regressor(loss=True), alone, CALL)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for module in (parallel, reference):
                module.zero_grad()
                module(**CALL).loss.backward()
    assert_same_gradients(parallel, reference)
    (told,) = [str(w.message) for w in caught if "torch.compile" in str(w.message)]
    assert "no compiler is here" in told and "it runs op by op" in told


def test_an_error_where_it_was_asked_for(alone, monkeypatch):
    monkeypatch.setattr(_torch, "InductorProgram", failing)
    parallel, _ = pair(tiny.Regressor(loss=True), alone, CALL, execution="compiled")
    with pytest.raises(CompilerError, match="failed on the forward graph: .*no compiler is here"):
        parallel(**CALL)


def _through_inductor(rank: int, strategy: str, folder: str) -> dict[str, int]:
    """Train steps of three sizes as the plain model does; return what Inductor found in its cache."""
    from torch._dynamo.utils import counters

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    text = "llama:hidden=32,layers=2,heads=4,kv_heads=2,ffn=48,vocab=60"
    model, batch = models.build(text, batch=4, seq=16, device="cpu")
    parallel, reference = pair(model, device_mesh("dp=2"), batch, strategy=strategy, execution="compiled")
    for length in (16, 16, 12, 14, 10):  # the last two in graphs that follow their size
        call = {name: value[:, :length] for name, value in batch.items()}
        for module in (parallel, reference):
            module.zero_grad()
            module(**call).loss.backward()
        assert_same_gradients(parallel, reference)
    return {name: count for name, count in counters["inductor"].items() if name.startswith("fxgraph_cache")}


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_through_inductor(strategy, tmp_path):
    """The same gradients, and a second start takes what the first one compiled."""
    gloo.run(2, _through_inductor, strategy, str(tmp_path), seconds=400)
    for found in gloo.run(2, _through_inductor, strategy, str(tmp_path), seconds=400):
        assert found == {"fxgraph_cache_hit": 4}  # of the first size, and of all others
