"""Compiled modules run their graphs op by op on CPUs, through torch.compile on GPUs, or as is asked."""

from __future__ import annotations

import os
import warnings

import pytest
import torch

import autopar
from autopar import models
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
    """CPUs that are taken for GPUs where it is asked how graphs run, and torch.compile that counts what it is given."""
    given = []

    def compile_counted(module, **options):
        given.append(options)
        return module

    monkeypatch.setattr(entry, "device_type_of", lambda mesh: "cuda")
    monkeypatch.setattr(torch, "compile", compile_counted)
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


def failing(module, **options):
    def run(*arguments):
        raise torch._dynamo.exc.TorchDynamoException("no compiler is here")

    return run


def test_by_default_what_cannot_be_compiled_runs_op_by_op(alone, as_on_a_gpu, monkeypatch):
    monkeypatch.setattr(torch, "compile", failing)
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
    monkeypatch.setattr(torch, "compile", failing)
    parallel, _ = pair(tiny.Regressor(loss=True), alone, CALL, execution="compiled")
    with pytest.raises(CompilerError, match="failed on the forward graph: .*no compiler is here"):
        parallel(**CALL)


def _through_inductor(rank: int, strategy: str, folder: str) -> dict[str, int]:
    """Train two steps as the plain model does; return what Inductor found in its cache."""
    from torch._dynamo.utils import counters

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    text = "llama:hidden=32,layers=2,heads=4,kv_heads=2,ffn=48,vocab=60"
    model, batch = models.build(text, batch=4, seq=16, device="cpu")
    parallel, reference = pair(model, device_mesh("dp=2"), batch, strategy=strategy, execution="compiled")
    for _ in range(2):
        for module in (parallel, reference):
            module.zero_grad()
            module(**batch).loss.backward()
        assert_same_gradients(parallel, reference)
    return {name: count for name, count in counters["inductor"].items() if name.startswith("fxgraph_cache")}


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_through_inductor(strategy, tmp_path):
    """The same gradients, and a second start takes what the first one compiled."""
    gloo.run(2, _through_inductor, strategy, str(tmp_path), seconds=400)
    for found in gloo.run(2, _through_inductor, strategy, str(tmp_path), seconds=400):
        assert found == {"fxgraph_cache_hit": 2}
