"""Tests that README.md and docs/ are true: commands print what stands below them, the passes are the compiler's.

A block of a document that begins with `$ autopar ...` is run; the lines below it are what it prints, with `...` for
lines that are left out. `--update-golden` writes the blocks without `...` anew.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import textwrap
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import compiler, errors
from autopar.cli.main import COMMANDS, main
from tests.helpers import gloo

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
BLOCK = re.compile(r"^```\n\$ autopar (?P<command>[^\n]*)\n(?P<printed>.*?)^```$", re.MULTILINE | re.DOTALL)
# A refused plan is planned again with each change that might let it fit; README.md has the first one too.
LONG = [("planning.md", "--memory 40GiB"), ("planning.md", "--precision bf16"), ("guide.md", "--memory 3MiB")]
GUIDE = ROOT / "docs/guide.md"


def commands() -> list:
    found = [(path, match["command"]) for path in DOCUMENTS for match in BLOCK.finditer(path.read_text())]
    slow = [any(path.name == name and word in command for name, word in LONG) for path, command in found]
    marks = {True: [pytest.mark.slow], False: []}
    return [
        pytest.param(path, command, id=f"{path.name} {command}", marks=marks[is_slow])
        for (path, command), is_slow in zip(found, slow)
    ]


@cache
def printed(command: str) -> tuple[str, ...]:
    """Return what a command prints, on stdout or, if it is refused, on stderr."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = main(shlex.split(command))
    return tuple(line.rstrip() for line in (out if code == 0 else error).getvalue().splitlines())


@pytest.mark.parametrize("path, command", commands())
def test_commands_print_what_the_documents_say(path, command, request):
    text = path.read_text()
    match = next(m for m in BLOCK.finditer(text) if m["command"] == command)
    lines, said = printed(command), match["printed"].splitlines()
    if request.config.getoption("--update-golden") and "..." not in said:
        start, end = match.span("printed")
        path.write_text(text[:start] + "\n".join(lines).strip() + "\n" + text[end:])
        return
    at = 0
    for line in said:
        if line == "...":
            at = None
        elif at is None:
            assert line in lines, f"{command} does not print {line!r}"
            at = lines.index(line) + 1
        else:
            assert at < len(lines) and lines[at] == line, f"{command} prints {lines[at : at + 1]}, not {line!r}"
            at += 1
    assert at is None or at == len(lines), f"{command} prints more: {lines[at]!r}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_in_the_text_have_their_options(path):
    """Also where a command stands for any such: `autopar report --model ... --out report.html`."""
    unknown = []
    for line in re.findall(r"`autopar ([a-z].*?)`", path.read_text()):
        command, *words = line.split()
        known = printed_help(command)
        unknown += [line for word in words if word.startswith("--") and word.split("=")[0] not in known]
    assert not unknown


@cache
def printed_help(command: str) -> set[str]:
    """Return the options that a command's --help names. Fails if there is no such command."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main([command, "--help"])
    assert out.getvalue(), f"no command {command}"
    return set(re.findall(r"--[\w-]+", out.getvalue()))


def test_the_first_command_of_readme_prints_its_plan():
    """A plan prints what stands there before the first step, and the seconds that are predicted at the end."""
    text = (ROOT / "README.md").read_text()
    said = re.search(r"^(plan of gpt2-tiny .*?)\n\n.*?^predicted (.*?),", text, re.MULTILINE | re.DOTALL)
    model, mesh = re.search(r"&& autopar train (--model \S+) (--mesh \S+) --steps 20", text).groups()
    lines = printed(f"plan {model} {mesh} --batch 8 --seq 64 --hardware cpu-gloo --no-baselines")
    assert "\n".join(lines).startswith(f"{said[1]}\n\n") and lines[1].startswith(f"step {said[2]} = ")


def test_readme_names_every_command():
    text = (ROOT / "README.md").read_text()
    names = [command.__name__.rpartition(".")[2] for command in COMMANDS]
    assert [name for name in names if f"`autopar {name} " not in text] == []


def test_readme_has_the_list_of_passes(request):
    """`--update-golden` writes it anew."""
    readme = ROOT / "README.md"
    text = readme.read_text()
    block = re.search(r"^```\n(export -> .*?)^```$", text, re.MULTILINE | re.DOTALL)
    names = [step.name for step in compiler.PASSES]
    after = names.index(compiler.UNROLL.name) + 1
    steps = [*names[:after], "plan", *names[after:], "run"]
    if request.config.getoption("--update-golden"):
        lines = textwrap.wrap(" -> ".join(steps), 120, break_on_hyphens=False)
        said = "\n".join(lines).replace(" ->\n", "\n-> ") + "\n"
        readme.write_text(text[: block.start(1)] + said + text[block.end(1) :])
        return
    assert re.split(r"\s*->\s*", block[1].strip()) == steps


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_paths_are_there(path):
    text = path.read_text()
    linked = [path.parent / link for link in re.findall(r"\]\(([\w./-]+)\)", text)]
    named = [ROOT / name for name in re.findall(r"`((?:autopar|passes|models|tests|benchmarks|docs)/[\w./-]+)`", text)]
    assert [str(p) for p in (*linked, *named) if not p.exists()] == []


def _run_the_guide(rank: int, folder: Path) -> str:
    os.chdir(folder)
    names: dict = {"__name__": "guide"}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for block in re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE):
            exec(block, names)
    return out.getvalue()


@pytest.mark.gloo
def test_the_blocks_of_the_guide_run(tmp_path):
    first, second = gloo.run(2, _run_the_guide, tmp_path)
    assert first == second and first.startswith("plan of Sequential on mesh dp=2")
    assert (
        "going on after step 1 with batch 2" in first and "captures: args[0] (16, 32); train, args[0] (10, 32)" in first
    )


def _run_blocks(rank: int, path: Path, folder: Path) -> None:
    """Run a document's blocks on a Llama of transformers, on what they take as given."""
    from transformers import LlamaConfig, LlamaForCausalLM

    os.chdir(folder)
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
    ids = torch.randint(64, (8, 16))
    batch = {"input_ids": ids, "labels": ids}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    names = {"__name__": "document", "torch": torch, "autopar": autopar, "init_device_mesh": init_device_mesh}
    names |= {"model": LlamaForCausalLM(LlamaConfig(**sizes)), "batch": batch, "loader": [batch, batch], "mesh": mesh}
    with contextlib.redirect_stdout(io.StringIO()):
        for block in re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE):
            exec(block, names)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("name, leaves", [
    ("README.md", []), ("docs/adapting.md", ["adapter", "merged"]), ("docs/pipelines.md", ["step.html"]),
])  # fmt: skip
def test_the_blocks_of_other_documents_run(name, leaves, tmp_path):
    (tmp_path / "other").symlink_to("adapter")  # that PEFT wrote
    gloo.run(4, _run_blocks, ROOT / name, tmp_path, seconds=240)
    assert [leaf for leaf in leaves if not (tmp_path / leaf).exists()] == []


def test_the_guide_has_a_remedy_for_every_error():
    known = [n for n, x in vars(errors).items() if isinstance(x, type) and issubclass(x, errors.AutoparError)]
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", GUIDE.read_text(), re.MULTILINE)
    assert sorted(name for name, _, _ in rows if hasattr(errors, name)) == sorted(known)


def test_figures_of_the_comparison_are_those_of_the_benchmarks():
    text = (ROOT / "docs/compared.md").read_text()
    results = "".join((ROOT / "docs" / link).read_text() for link in re.findall(r"\]\((\.\./benchmarks/.*?)\)", text))
    figures = re.findall(r"\d+\.\d\d\b|\d+%", text)
    known = {*re.findall(r"\d+\.\d\d(?=x)|\d+%", results)}
    assert len(figures) > 15 and [figure for figure in figures if figure not in known] == []


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
