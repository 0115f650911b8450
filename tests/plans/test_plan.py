"""Plans as files: what is loaded is what was saved, and whatever else a file may hold is refused in one way."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar import Plan
from autopar.errors import InputError, PlanFormatError, PlanIncompatible, PlanTampered
from autopar.hardware.profile import load
from autopar.ir.graph import fingerprint
from autopar.ir.mesh import Mesh
from autopar.models import build
from autopar.planner.pipeline.stage_costs import Parts
from autopar.plans.diff import diff_text
from autopar.plans.file import LARGEST_FILE_BYTES, VERSION, content_hash
from autopar.simulate.oracle import global_values
from autopar.simulate.step import plan_and_capture

from ..fuzz import plan_files
from ..planner.planning import captured, make, toy

GPT = "gpt:hidden=32,layers=1,heads=4,vocab=64,seq=16"
MUTATIONS = 120


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make(GPT, "dp=2,tp=2", toy(flops=1e9, memory=1e10, latency=1e-6), baselines=True)


@pytest.fixture
def file(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_round_trip(plan, file):
    again = Plan.load(file)
    assert again == plan and again.hash == plan.hash and str(again) == str(plan)
    assert again.sharding == plan.sharding and again.sharding.kept == plan.sharding.kept
    again.save(file.with_name("again.json"))
    assert file.read_bytes() == file.with_name("again.json").read_bytes()


def test_planning_time_is_not_part_of_a_plan(plan):
    assert replace(plan, planning_seconds=1e6) == plan and replace(plan, planning_seconds=1e6).hash == plan.hash


@pytest.mark.parametrize(("model", "mesh", "options"), [
    ("mlp:hidden=64,layers=4", "dp=4", {"memory_bytes": 2.9e6, "batch": 512, "seq": 1}),
    (GPT, "a=2,b=2", {"strategy": "hsdp"}), ("gpt:hidden=36,layers=1,heads=4,vocab=65,seq=16", "tp=3", {}),
    (GPT, "dp=1", {}), (GPT, "tp=2", {"pin": {"*": "R"}}),
])  # fmt: skip
def test_round_trip_of_other_plans(model, mesh, options, tmp_path):
    plan = make(model, mesh, **options)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_bytes_of_stages_are_numbers_that_a_file_may_hold(monkeypatch):
    """A bucket that is smaller than all gradients of a stage is the largest entry of an array."""
    gloo, found, charge = load("cpu-gloo"), [], Parts._transients
    monkeypatch.setattr(Parts, "_transients", lambda self, live: (charge(self, live), found.extend(self.found))[0])
    small = replace(gloo, links=tuple(replace(tier, bucket_bytes=4096) for tier in gloo.links))
    model, inputs = build(GPT, batch=8, seq=16)
    autopar.plan(model, "pp=2,dp=2", inputs, hardware=small, precision="fp32", micro_batches=2, strategy="zero1")
    assert any(part.reducing_bytes for part in found) and {type(part.reducing_bytes) for part in found} <= {int, float}


def test_every_field_is_covered_by_the_hash(plan):
    """Any other value of any field gives another hash."""
    data = plan.to_json()
    for key in data:
        if key != "hash":
            assert content_hash(data | {key: "something else"}) != data["hash"], key


def test_a_type_that_gradients_are_reduced_in(plan, tmp_path):
    """It is left out where there is none, so that plans are the files that they were."""
    narrow = replace(plan, reduce_dtype="bf16")
    narrow.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == narrow and narrow.hash != plan.hash
    assert "reduce_dtype" not in plan.to_json() and diff_text(plan, narrow).count("reduce_dtype") == 1
    for wrong in (None, "fp8", 3):
        data = narrow.to_json() | {"reduce_dtype": wrong}
        with pytest.raises(PlanFormatError, match="reduce_dtype is not a type that gradients are reduced in"):
            Plan.from_json(data | {"hash": content_hash(data)})


def test_a_type_that_state_is_kept_in(plan, tmp_path):
    narrow = replace(plan, state_dtype="bf16")
    narrow.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == narrow and narrow.hash != plan.hash
    assert "state_dtype" not in plan.to_json() and diff_text(plan, narrow).count("state_dtype") == 1
    assert f"{plan.optimizer} with state in bf16, strategy" in str(narrow)
    for wrong in (None, "fp16", 3):
        data = narrow.to_json() | {"state_dtype": wrong}
        with pytest.raises(PlanFormatError, match="state_dtype is not a type that the state of an optimizer is kept"):
            Plan.from_json(data | {"hash": content_hash(data)})


# files that are not plans


@pytest.mark.parametrize("content", [
    b"", b"{", b"[]", b"null", b"3", b'"plan"', b"{}", b"\xff\xfe\x00", b"\x80\x04K\x01.", b"PK\x03\x04",
    b"[" * 100_000, b'{"version": 4}', b'{"version": "1"}', b'{"version": true}', b'{"version": NaN}',
    b'{"a": 1, "a": 2}', b"1e999999", b'{"version": 4, "hash": null}', b'{"version": 4, "hash": ' + b"9" * 5000 + b"}",
])  # fmt: skip
def test_garbage(content, tmp_path):
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(PlanFormatError):
        Plan.load(tmp_path / "plan.json")


def test_no_file(tmp_path):
    for path in (tmp_path / "missing.json", tmp_path, tmp_path / "x\0y"):
        with pytest.raises(PlanFormatError, match="cannot be read"):
            Plan.load(path)


def test_huge_file(tmp_path):
    path = tmp_path / "plan.json"
    with path.open("wb") as file:
        file.truncate(LARGEST_FILE_BYTES + 1)
    with pytest.raises(PlanFormatError, match="larger than any plan"):
        Plan.load(path)


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1, None, "1", [VERSION]])
def test_other_versions(plan, version):
    data = plan.to_json() | {"version": version}
    data["hash"] = content_hash(data)
    with pytest.raises(PlanFormatError, match="version"):
        Plan.from_json(data)


def test_a_changed_byte_is_noticed(plan, file):
    """Any changed byte gives a typed error, but for blanks between words, which change nothing."""
    rng, content = random.Random(0), file.read_bytes()
    for _ in range(MUTATIONS):
        at = rng.randrange(len(content))
        changed = content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :]
        file.write_bytes(changed)
        try:
            assert Plan.load(file) == plan
        except (PlanFormatError, PlanTampered):
            pass


def test_a_cut_file_is_noticed(plan, file):
    content = file.read_bytes()
    for length in random.Random(1).sample(range(len(content) - 2), 20):
        file.write_bytes(content[:length])
        with pytest.raises(PlanFormatError):
            Plan.load(file)


def test_keys(plan, tmp_path):
    """A plan saved with a key loads with that key and without one; one that was not signed with it does not load with
    it."""
    signed, plain = tmp_path / "signed.json", tmp_path / "plain.json"
    plan.save(signed, key="secret")
    plan.save(plain)
    assert Plan.load(signed, key=b"secret") == Plan.load(signed) == plan
    data = json.loads(signed.read_text()) | {"model": "another"}
    data["hash"] = content_hash(data)
    forged = tmp_path / "forged.json"
    forged.write_text(json.dumps(data))
    for file, key in ((signed, "other"), (plain, "secret"), (forged, "secret")):
        with pytest.raises(PlanTampered, match="not signed with this key"):
            Plan.load(file, key=key)
    assert Plan.load(forged).model == "another"


@pytest.mark.parametrize("key", ["", b"", 5])
def test_keys_that_are_none(plan, file, key, tmp_path):
    """An empty key is one that everybody has."""
    with pytest.raises(InputError, match="the key of a plan is (empty|a int)"):
        plan.save(tmp_path / "signed.json", key=key)
    assert not (tmp_path / "signed.json").exists()
    with pytest.raises(InputError, match="the key of a plan is (empty|a int)"):
        Plan.load(file, key=key)


@pytest.mark.parametrize("text, reason", [
    ('{"version": 4, "version": 4}', "two values under one key"), ('{"a": NaN}', "finite"),
    ('{"a": -Infinity}', "finite"), ('{"a": 1e999}', "not a finite"), ('{"a": 1234567890123456789}', "19 digits"),
    ("[" * 65 + "]" * 65, "deeper than 64"),
])  # fmt: skip
def test_json_that_is_refused(text, reason, tmp_path):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanFormatError, match=reason):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("text", [
    '"' + '\\"' * 1_000_000, '"' * 1_000_001, '"' + "\\\\" * 1_000_000 + "\\", '["' + "a" * 8_000_000,
    '["' * 32 + '\\"]' * 500_000,
], ids=["quotes", "empty strings", "backslashes", "letters", "brackets"])  # fmt: skip
def test_strings_without_an_end(text, tmp_path):
    """A file of megabytes is refused within a test's time: it would be an hour if each quote looked for its end again
    (`benchmarks/fuzz.py` says how long the slowest file takes)."""
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanFormatError):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("times, simulated", [(2, 5), pytest.param(4, 10, marks=pytest.mark.slow)])
def test_fuzzed_files(times, simulated, tmp_path):
    """Typed errors only, nothing executed or imported; what still loads fits the graph or says that it does not, and
    what fits gives right numbers."""
    model, inputs = build("mlp:hidden=16,layers=2", batch=4, seq=2, device="cpu", seed=0)
    plan, graph = plan_and_capture(model, "dp=2,tp=2", inputs, hardware=toy(), baselines=False, strategy="megatron_sp")
    values = global_values(graph, model, inputs)
    report = plan_files.run(plan, graph, values, times * MUTATIONS, tmp_path / "plan.json", seed=2, simulate=simulated)
    assert not report.wrong and report.refused > times * MUTATIONS / 2, report
    assert {"PlanFormatError", "PlanTampered", "PlanIncompatible", "fits"} <= report.outcomes.keys()


# plans of something else


def test_fits_its_own_model_and_mesh(plan):
    plan.check_fits(captured(GPT).graph, Mesh.parse("dp=2,tp=2"))


@pytest.mark.parametrize("mesh", ["dp=4", "tp=2,dp=2", "dp=2,tp=4", "a=2,b=2"])
def test_another_mesh(plan, mesh):
    with pytest.raises(PlanIncompatible, match="made for mesh dp=2,tp=2"):
        plan.check_fits(captured(GPT).graph, Mesh.parse(mesh))


@pytest.mark.parametrize(("model", "batch"), [
    (GPT, 4), (GPT.replace("heads=4", "heads=2"), 8), (GPT.replace("layers=1", "layers=2"), 8),
                                              ("mlp-tiny", 8)])  # fmt: skip
def test_another_model_or_input_shape(plan, model, batch):
    with pytest.raises(PlanIncompatible, match="another model, input shape or torch version") as error:
        plan.check_fits(captured(model, batch).graph, Mesh.parse("dp=2,tp=2"))
    assert plan.fingerprint[:12] in str(error.value)


def test_fingerprint_is_stable():
    """Two captures of one model agree, whatever order of names Python hashed."""
    assert fingerprint(captured(GPT).graph) == fingerprint(captured.__wrapped__(GPT).graph)


@pytest.mark.parametrize("mesh", ["dp=1,tp=1", "tp=1", "dp=2", "a=2,b=2"])
def test_a_plan_of_batch_norms_fits_its_model(mesh):
    """Their sums are in fp64, and are cast to the parameter's type before they are reduced."""
    model, inputs = nn.Sequential(nn.BatchNorm1d(7), nn.BatchNorm1d(7), nn.Linear(7, 3)), (torch.randn(4, 7),)
    plan, captured = plan_and_capture(model, mesh, inputs, hardware="cpu-gloo", strategy="ddp", baselines=False)
    plan.check_fits(captured.graph, plan.mesh)
