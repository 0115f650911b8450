"""The tensor parallelism of a transformers model's own plan, as a row beside the planner's."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.api import entry as api
from autopar.errors import StrategyError
from autopar.planner.problem.allowed import allowed_strategies
from autopar.planner.problem.hf_tp_plan import STYLES, TensorPlan, styles_of
from autopar.planner.spmd.describe import describe_plan
from autopar.plans.plan import Plan

from ..families import FAMILIES
from ..runtime import tiny
from .planning import make, toy

LAYERS = 1
MACHINE = toy(flops=1e12, memory=1e11, link=1e9)


@pytest.fixture(scope="module")
def planned():
    pytest.importorskip("transformers")
    model, batch = tiny.llama(num_hidden_layers=LAYERS)
    return api.search(model, "dp=2,tp=2", batch, hardware=MACHINE)


@pytest.fixture(scope="module")
def own(planned) -> Plan:
    """The model's own plan, described as a chosen one."""
    return describe_plan(replace(planned, chosen=planned.others["hf_tp"], others={}))


def test_weights_lie_as_the_config_says(own):
    column, row = (
        ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head", "embed_tokens"),
        ("o_proj", "down_proj"),
    )
    weights = {name: layout for name, layout in own.layouts.items() if name.endswith("weight")}
    assert len(weights) == 3 + 9 * LAYERS
    for name, layout in weights.items():
        layer = name.split(".")[-2]
        assert layout == ("tp:S(0)" if layer in column else "tp:S(1)" if layer in row else "R"), name
    assert own.layouts["input_ids"] == own.layouts["labels"] == "dp:S(0)"


def test_activations_move_as_transformers_moves_them(own):
    """All-reduces of the embedding and of two row-wise layers a block, of as many in the backward, the head's logits
    gathered."""
    moves = Counter({(c.phase, c.kind): c.count for c in own.collectives if c.axes == ("tp",)})
    blocks = 2 * LAYERS + 1
    assert moves == {
        ("forward", "all_reduce"): blocks,
        ("forward", "all_gather"): 1,
        ("backward", "all_reduce"): blocks,
    }


def test_it_costs_what_megatron_does_and_the_logits(planned):
    """Megatron keeps the logits cut and its loss is parallel; the rest is the same."""
    plan = planned.plan
    rows = {a.name: a for a in plan.alternatives}
    extra = rows["hf_tp"].step_seconds / rows["megatron"].step_seconds
    assert plan.step_seconds <= rows["hf_tp"].step_seconds and 1.0 <= extra < 1.25
    assert "\nhf_tp " in str(plan)


def test_names_and_styles():
    plan = TensorPlan((
        ("layers.*.mlp.experts", "moe_tp_experts"), ("layers.*.mlp.experts.gate_up_proj", "packed_colwise"),
        ("layers.*.mlp.experts.down_proj", "rowwise"), ("layers.*.q", "colwise"), ("layers.*.o", "rowwise"),
        ("embed", "embedding_colwise"), ("head", "colwise_gather_output"), ("norm", "sequence_parallel"),
    ))  # fmt: skip
    expected = {
        ("layers.7.mlp.experts.gate_up_proj", 3): 1, ("layers.7.mlp.experts.down_proj", 3): 2,
        ("layers.0.mlp.experts.other", 2): None,
        ("layers.11.q.weight", 2): 0, ("layers.11.q.bias", 1): 0, ("layers.11.o.weight", 2): 1,
        ("layers.11.o.bias", 1): None, ("embed.weight", 2): 1, ("head.weight", 2): 0, ("norm.weight", 1): None,
        ("layers.x.q.weight", 2): None,
    }  # fmt: skip
    assert {key: plan.dim_of(*key) for key in expected} == expected
    assert plan.is_between("layers.3.mlp.experts.act") and not plan.is_between("head") and plan.cuts("head")
    with pytest.raises(StrategyError, match="not known: spiral"):
        TensorPlan((("head", "spiral"),))


def test_where_the_styles_come_from():
    class Config:
        base_model_tp_plan = {"layers.*.q": "colwise"}

    class Model:
        config, base_model_prefix, model, _tp_plan = Config(), "model", object(), {"head": "colwise_rep"}

    assert styles_of(Model()) == {"model.layers.*.q": "colwise", "head": "colwise_rep"}
    assert styles_of(object()) == {} and styles_of(type("Odd", (), {"_tp_plan": ["q"]})()) == {}


def test_a_model_without_a_plan_has_no_such_row_and_an_unknown_style_is_a_note():
    plan = make("mlp-tiny", "tp=2", MACHINE, baselines=True)
    assert "hf_tp" not in {a.name for a in plan.alternatives}
    plan = make("mlp-tiny", "tp=2", MACHINE, baselines=True, styles={"blocks.*.up": "spiral"})
    row = plan.alternatives[-1]
    assert row.name == "hf_tp" and row.step_seconds is None and "spiral" in row.note
    assert "\nhf_tp: " in str(plan)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "qwen2_moe"])
def test_a_router_beside_experts_that_are_cut_stays_whole(name):
    pytest.importorskip("transformers")
    model, batch = FAMILIES[name](4, 8)
    planned = api.search(model, "dp=2,tp=2", batch, hardware=MACHINE)
    row = next(a for a in planned.plan.alternatives if a.name == "hf_tp")
    assert row.step_seconds >= planned.plan.step_seconds
    own = describe_plan(replace(planned, chosen=planned.others["hf_tp"], others={})).layouts
    routers = {name: layout for name, layout in own.items() if name.endswith("mlp.gate.weight")}
    experts = {name: layout for name, layout in own.items() if name.endswith("experts.down_proj")}
    assert {*routers.values()} == {"R"} and {*experts.values()} == {"tp:S(2)"}


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(st.dictionaries(st.sampled_from(["blocks.*.up", "blocks.*.down", "blocks.*", "blocks.0.up", "head", "embed",
                                        "*"]),
                       st.sampled_from(sorted(STYLES))))  # fmt: skip
def test_any_styles_make_a_row_or_a_note(styles):
    plan = make("mlp-tiny", "dp=2,tp=2", MACHINE, baselines=True, styles=styles)
    rows = {a.name: a for a in plan.alternatives}
    assert ("hf_tp" in rows) == bool(styles) and all(a.step_seconds is not None or a.note for a in rows.values())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", ["pp=2,dp=2", "dp=2,tp=2"])
def test_a_comparison_that_fails_never_costs_the_plan(mesh, monkeypatch):
    def allowed(problem, restriction, pins=None):
        if restriction.name in ("megatron", "zero1"):
            raise ValueError("a mistake in a row")
        return allowed_strategies(problem, restriction, pins)

    monkeypatch.setattr("autopar.planner.solver.solver.allowed_strategies", allowed)
    plan = _mlp_plan(mesh)
    notes = {a.name: a.note for a in plan.alternatives if a.step_seconds is None}
    assert {*notes} == {"megatron", "zero1"} and all(
        "ValueError: a mistake in a row" in note for note in notes.values()
    )
    with pytest.raises(ValueError, match="a mistake"):  # what was asked for itself is no comparison
        _mlp_plan("dp=2,tp=2", strategy="megatron")


def _mlp_plan(mesh: str, **options) -> Plan:
    model, batch = tiny.own("mlp:layers=4,hidden=16", 8)
    return api.search(model, mesh, batch, hardware=MACHINE, **options).plan
