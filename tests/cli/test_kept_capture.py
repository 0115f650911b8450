"""`autopar plan` traces a model's call once: for another mesh or limit the capture is in the cache."""

from __future__ import annotations

import pytest

from autopar import compiler
from autopar.cli import main as cli

DEEP = "llama:hidden=32,layers=9,heads=4,kv_heads=4,ffn=64,vocab=64,seq=16"
SHALLOW = "gpt:hidden=32,layers=1,heads=4,vocab=64,seq=16"


@pytest.fixture
def planned(tmp_path, monkeypatch, capsys):
    """Plan a model on the command line; return the text and how often it was traced."""
    traced, trace = [], compiler.trace
    monkeypatch.setattr(compiler, "trace", lambda *args, **options: traced.append(1) or trace(*args, **options))

    def run(model: str, mesh: str, *more: str, cache: object = tmp_path / "cache") -> tuple[str, int]:
        monkeypatch.setenv("AUTOPAR_CACHE", str(cache))
        traced.clear()
        asked = {"--batch": "8", "--seq": "16", "--hardware": "h100", "--strategy": "fsdp"} | dict(
            zip(more[::2], more[1::2])
        )
        options = [word for option in asked.items() for word in option]
        assert cli.main(["plan", "--model", model, "--mesh", mesh, "--no-baselines", *options]) == 0
        return capsys.readouterr().out, len(traced)

    return run


def test_another_mesh_and_another_limit_trace_nothing(planned):
    assert planned(SHALLOW, "dp=2")[1]
    found, times = planned(SHALLOW, "dp=4", "--memory", "10GiB")
    assert not times and found == planned(SHALLOW, "dp=4", "--memory", "10GiB", cache="off")[0]


@pytest.mark.slow
def test_a_deep_model_is_kept_with_few_of_its_blocks(planned):
    first = planned(DEEP, "dp=2")
    assert first[1] and planned(DEEP, "dp=2") == (first[0], 0)


def test_another_call_or_model_is_traced(planned):
    planned(SHALLOW, "dp=2")
    for change in (("--batch", "4"), ("--lora", "r=4")):
        assert planned(SHALLOW, "dp=2", *change)[1]
    assert planned(SHALLOW.replace("hidden=32", "hidden=64"), "dp=2")[1]


def test_a_damaged_entry_is_traced_anew(planned, tmp_path):
    first = planned(SHALLOW, "dp=2")[0]
    (entry,) = (tmp_path / "cache").glob("*.safetensors")
    entry.write_bytes(entry.read_bytes()[:-1] + b"?")
    assert planned(SHALLOW, "dp=2") == (first, 1) and planned(SHALLOW, "dp=2") == (first, 0)
