import json
import sys
from dataclasses import replace

import pytest

from autopar import Plan, compiler, verify
from autopar.cli.main import COMMANDS, main
from autopar.codegen import pass_manager
from autopar.models import build

MLP = ["--model", "mlp-tiny:layers=1", "--mesh", "dp=2,tp=2", "--batch", "4", "--seq", "4"]


@pytest.fixture(scope="module")
def kept_here(tmp_path_factory):
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(autouse=True)
def kept(kept_here, monkeypatch) -> None:
    """Commands find what others have traced, as those of a user do."""
    monkeypatch.setenv("AUTOPAR_CACHE", str(kept_here))


def plan(*words: str) -> list[str]:
    return ["plan", *MLP, "--no-baselines", "--hardware", "cpu-gloo", *words]


# reading the command line ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [command.__name__.rpartition(".")[2] for command in COMMANDS])
def test_help_has_an_example(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    example = capsys.readouterr().out.partition("example:\n")[2].split()
    assert example[:2] == ["autopar", command]


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out.startswith("autopar ")


@pytest.mark.parametrize(
    "words, message, fix",
    [
        ([], "COMMAND", "autopar --help"),
        (["plna"], "'plna'", "autopar --help"),
        (["plan", "--model", "gpt2"], "--seq", "as in `autopar plan --model"),
        (["plan", "--model", "gpt2"], "--seq", "autopar plan --help"),
        (["plan", *MLP, "--batch", "0"], "0 is not 1 or more", "autopar plan --help"),
        (["plan", *MLP, "--batch", "many"], "invalid count value: 'many'", "autopar plan --help"),
        (["plan", *MLP, "--model", "gtp2"], "no model named 'gtp2'", "gpt2"),
        (["plan", *MLP, "--mesh", "8x8"], "'8x8' as a mesh", "dp=2,tp=4"),
        (["plan", *MLP, "--mesh", "dp=0"], "positive", "1 or more"),
        (["plan", *MLP, "--mesh", "dp=-1,tp=2"], "-1 in dp=-1,tp=2", "--devices N"),
        (["plan", *MLP, "--mesh", "dp=-1,tp=2", "--devices", "7"], "2 does not divide 7", "product"),
        (["plan", *MLP, "--devices", "8"], "has 4 devices, --devices says 8", "one of the two"),
        (["plan", *MLP[:2], *MLP[4:]], "no --mesh", "--devices 64"),
        (["plan", *MLP, "--model", "some/model-7b"], "nothing is downloaded", "hf download some/model-7b"),
        (["plan", *MLP, "--hardware", "h1000"], "'h1000'", "h100"),
        (["plan", *MLP, "--strategy", "megatorn"], "'megatorn'", "megatron"),
        (["plan", *MLP, "--mesh", "dp=4", "--strategy", "hsdp"], "has 1", "fsdp"),
        (["plan", *MLP, "--optimizer", "adaw"], "'adaw'", "adamw"),
        (["plan", *MLP, "--memory", "4 apples"], "'4 apples'", "40GiB"),
        (["plan", *MLP, "--pin", "weight"], "'weight' as a pin", "GLOB=LAYOUT"),
        (["plan", *MLP, "--pin", "*.up.weight=ep:S(0)"], "no axis 'ep'", "dp, tp"),
        (["plan", *MLP, "--pin", "*.upp.weight=tp:S(0)"], "matches no parameter", "blocks.0.up.weight"),
        (["plan", *MLP, "--pin", "*.up.weight=tp:T(0)"], "T(0)", "S("),
        (plan("--forbid", "weight"), "'weight' as what is forbidden", "GLOB=LAYOUT"),
        (plan("--forbid", "*.upp.weight=R"), "matches no parameter", "blocks.0.up.weight"),
        (plan("--forbid", "*.up.weight=R", "--pin", "*.up.weight=R"), "no layout left", "forbid less"),
        (["trace", *MLP], "--out", "autopar trace --help"),
        (["trace", *MLP, "--out", "x", "--slowdown", "0.9"], "0.9 is not 1 or more", "autopar trace --help"),
        (["trace", *MLP, "--hardware", "cpu-gloo", "--out", "/there/is/no/such/folder/trace.json"], "No such file", ""),
        (["report", *MLP, "--out", "x", "--strategy", "megatorn"], "'megatorn'", "megatron"),
        (["explain", *MLP], "PATTERN", "autopar explain --help"),
        (["explain", "*.upp.weight", *MLP], "'*.upp.weight' matches no parameter", "blocks.0.up.weight"),
        (["compare", "/no/such/plan.json"], "cannot be read as a plan", "plan.save"),
        (["diff", "one.json"], "AFTER", "autopar diff --help"),
        (plan("--json", "/there/is/no/such/folder/plan.json"), "No such file", ""),
        (plan("--schedule", "gpipe"), "with an axis pp, not dp=2,tp=2", "pp=2,dp=2,tp=2"),
        (["train", *MLP, "--stages-per-rank", "2"], "with an axis pp, not dp=2,tp=2", "pp=2,dp=2,tp=2"),
        (["verify", *MLP, "--schedule", "gpip"], "with an axis pp, not dp=2,tp=2", "pp=2,dp=2,tp=2"),
        (["verify", *MLP, "--mesh", "pp=2", "--schedule", "gpip"], "no pipeline schedule 'gpip'", "gpipe"),
        (["graph", *MLP, "--diff"], "--diff", "--after"),
        (["graph", *MLP, "--rank", "4"], "no rank 4", ""),
        (["graph", *MLP, "--after", "lunch"], "'lunch'", "canonicalize, "),
        (["verify", *MLP, "--model", "gpt2-tiny", "--seq", "999"], "seq 999", "seq=999"),
        (["verify", *MLP, "--device", "cuda"], "--device cuda needs a GPU here", "leave it out"),
        (["train", *MLP, "--model", "hf:/no/such/folder"], "/no/such/folder", ""),
        (["train", *MLP, "--resume"], "--every, --keep, --async-save, --elastic and --resume", "--checkpoint FOLDER"),
        (["train", *MLP, "--checkpoint", "x", "--keep", "0"], "--keep: 0 is not 1 or more", ""),
        (["train", *MLP, "--checkpoint", "x", "--keep", "-1"], "--keep: -1 is not 1 or more", ""),
        (["train", *MLP, "--checkpoint", "x", "--keep", "2.0"], "--keep: invalid count value: '2.0'", ""),
        (["train", *MLP, "--qlora", "--save", "there"], "has them in 4 bits", "--save-adapter"),
        (["train", *MLP, "--data", "/no/such/file.txt"], "no file /no/such/file.txt", "text or JSONL"),
        (["train", *MLP, "--save-adapter", "there"], "--save-adapter", "--lora"),
        (plan("--lora", "rank=2"), "no 'rank'", "r"),
        (plan("--lora", "r=2,target_modules=upp"), "'upp'", "up"),
        (plan("--lora", "--qlora"), "both lora and qlora", "give it alone"),
        (plan("--qat", "int9"), "'int9'", "int8"),
        (plan("--fp8", "row"), "'row'", "block"),
        (plan("--fp8", "block", "--qat", "int8"), "both fp8 and fake_quant", "FP8 to train fast"),
        (["graph", *MLP, "--after", "lora"], "the pass lora", "--lora"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, message, fix, capsys):
    assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("autopar: ")
    before, _, after = lines[0].partition("; fix: ")
    assert message in before and fix in after


# plan -----------------------------------------------------------------------------------------------------------------


def test_plan_text_and_files(capsys, tmp_path):
    assert main(plan("--json", str(tmp_path / "plan.json"), "--emit", str(tmp_path / "rank0.py"))) == 0
    captured = capsys.readouterr()
    loaded = Plan.load(tmp_path / "plan.json")
    assert captured.out == str(loaded) and captured.err == ""
    code = (tmp_path / "rank0.py").read_text()
    compile(code, "rank0.py", "exec")
    assert "def forward(" in code and "def backward(" in code and "# blocks.0.up" in code


def test_plan_of_a_mesh_with_what_is_left(capsys):
    assert main(plan("--mesh", "dp=-1,tp=2", "--devices", "8", "--memory", "80G")) == 0
    out = capsys.readouterr().out
    assert "on mesh dp=4,tp=2 (8 devices" in out and "of 74.51 GiB" in out


@pytest.mark.parametrize("columns", [80, 100])
def test_text_ends_where_the_terminal_does(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    words = ["--mesh", "pp=2,dp=2,tp=2", "--micro-batches", "4", "--batch", "16", "--schedule", "1f1b"]
    for command in (plan(*words), ["schedule", "zbv"], ["verify", *MLP]):
        assert main(command) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines and max(map(len, lines)) <= columns


def test_plan_json_on_stdout(capsys):
    assert main(plan("--json", "-", "--strategy", "megatron", "--pin", "*.up.bias=R")) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["hash"] == Plan.from_json(data).hash
    assert data["step_seconds"] > 0 and data["peak_bytes"] > 0 and data["gap"] >= 0
    assert data["layouts"]["blocks.0.up.weight"] == "tp:S(0)" and data["layouts"]["blocks.0.up.bias"] == "R"


def test_plan_in_bf16_takes_less(capsys):
    peak = {}
    for precision in ("fp32", "bf16"):
        assert main(plan("--json", "-", "--precision", precision, "--seq", "512")) == 0
        peak[precision] = json.loads(capsys.readouterr().out)["memory"]["activations"]
    assert 0.4 < peak["bf16"] / peak["fp32"] < 0.8  # the loss keeps fp32 copies of what it compares


@pytest.mark.parametrize("words, trained", [
    (("--lora", "r=2"), True), (("--qlora", "r=2,block_size=16"), True), (("--lora", "r=2", "--qat", "int8"), True),
    (("--qat", "int8,range_learning=true"), False),
])  # fmt: skip
def test_plan_of_an_adapted_model(words, trained, capsys):
    assert main(plan(*words)) == 0
    out = capsys.readouterr().out
    assert ("\ntrains " in out) is trained and (".lora" in out) is trained


# graph and verify -----------------------------------------------------------------------------------------------------


def test_graph_lists_the_passes(capsys, golden):
    assert main(["graph", *MLP, "--strategy", "megatron"]) == 0
    out = capsys.readouterr().out
    golden(out)
    lines = out.splitlines()
    here = [step.name for step in (*compiler.MODEL, *compiler.RANK, compiler.PARTITION) if not step.needs]
    assert [line.partition(":")[0] for line in lines[1:]] == here
    localize = next(line for line in lines if line.startswith("localize:"))
    assert " -> " in localize and "all_reduce +" in localize


@pytest.mark.parametrize("step", ["export", "clean", "plan", "localize"])
def test_graph_text(step, capsys, golden):
    assert main(["graph", *MLP, "--strategy", "megatron", "--after", step, "--rank", "3"]) == 0
    golden(capsys.readouterr().out)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "words",
    [
        *([step.name] for step in compiler.PASSES if not step.needs),
        ["lora", "--lora", "r=2"],
        ["quantize", "--qlora", "r=2"],
        ["fake_quant", "--qat", "int8"],
        ["fp8", "--fp8", "tensor"],
        ["upcast", "--precision", "bf16"],
        ["overlap", "--hardware", "h100"],
        *([name, "--mesh", "pp=2,dp=2"] for name in ("micro_batch", "cut", "compute_once", "split_backward")),
    ],
    ids=lambda words: words[0],
)
def test_graph_after_every_pass(words, capsys):
    assert main(["graph", *MLP, "--after", *words]) == 0
    assert capsys.readouterr().out.count("\n") > 5


def test_graph_of_a_deep_model(capsys):
    """Few of its blocks are traced; the graph with the plan's layouts and what a rank runs have all of them."""
    deep = ["graph", "--model", "mlp-tiny:layers=9", "--mesh", "tp=2", "--strategy", "megatron"]
    assert main([*deep, "--after", "plan"]) == 0
    planned = capsys.readouterr().out
    assert all(f"p_blocks_{i}_up_weight: parameter" in planned for i in range(9))
    assert main(deep) == 0
    lines = capsys.readouterr().out.splitlines()
    localize = next(line for line in lines if line.startswith("localize:"))
    assert f"nodes {planned.count(chr(10))} -> " in localize and any(line.startswith("unroll:") for line in lines)


def test_a_pass_is_called_what_the_list_says(capsys, monkeypatch):
    """The list alone has the names: the command follows if they are others."""
    for name in ("MODEL", "MICRO_BATCHES", "STAGES", "RANK", "PASSES"):
        renamed = tuple(replace(step, name=f"{step.name}_2") for step in getattr(compiler, name))
        monkeypatch.setattr(compiler, name, renamed)
    assert main(["graph", *MLP, "--mesh", "pp=2", "--after", "localize_2"]) == 0
    assert capsys.readouterr().out.count("\n") > 5
    assert main(["graph", *MLP, "--after", "upcast_2"]) == 2
    assert "it needs --precision bf16" in capsys.readouterr().err


def test_graph_after_partition_is_code(capsys):
    assert main(["graph", *MLP, "--after", "partition"]) == 0
    code = capsys.readouterr().out
    compile(code, "rank0.py", "exec")
    assert code.startswith("# rank 0 of dp=2,tp=2") and "def backward(" in code


def test_graph_diff(capsys):
    assert main(["graph", *MLP, "--strategy", "megatron", "--after", "localize", "--diff"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["--- plan", "+++ localize"]
    assert any(line.startswith("+linear_1_all_reduce: _c10d_functional.wait_tensor") for line in lines)


def test_verify(capsys):
    assert main(["verify", *MLP, "--strategy", "fsdp"]) == 0
    assert capsys.readouterr().out.endswith("\nmatch\n")


def test_verify_of_stages(capsys):
    staged = ["--mesh", "pp=2", "--schedule", "gpipe", "--micro-batches", "4", "--stages-per-rank", "1"]
    assert main(["verify", *MLP, *staged]) == 0
    printed = capsys.readouterr().out
    assert "gpipe with 4 micro-batches" in printed and printed.endswith("\nmatch\n")


def test_verify_in_python():
    model, inputs = build("mlp-tiny", batch=4, seq=1, device="cpu")
    assert verify(model, "dp=2", inputs, micro_batches=2).match


def test_a_models_file_imports_what_lies_beside_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_the_model.py").write_text("from torch import nn\ndef layer(): return nn.Linear(8, 8)\n")
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom beside_the_model import layer\ndef build(): return layer(), (torch.ones(8, 8),)\n"
    )
    model = f"{tmp_path / 'mine.py'}:build"
    assert main(["plan", "--model", model, "--batch", "8", "--seq", "1", "--mesh", "dp=2", "--no-baselines"]) == 0
    assert "plan of" in capsys.readouterr().out


def test_verify_that_does_not_match(capsys, monkeypatch):
    monkeypatch.setattr("autopar.simulate.compare.TOLERANCE", {"fp32": -1.0, "fp64": -1.0})
    assert main(["verify", *MLP]) == 1
    assert "no match" in capsys.readouterr().out.splitlines()[-1]


# watching the passes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["", "1", "2", "3"])
def test_debug_levels(level, capsys, monkeypatch):
    monkeypatch.setenv("AUTOPAR_DEBUG", level)
    module, inputs = build("mlp-tiny:layers=1", batch=4, seq=4)
    compiler.trace(module, inputs)
    lines = capsys.readouterr().err.splitlines()
    assert bool(lines) == (level >= "2")
    assert (level >= "2") == any(line.startswith("clean: nodes ") for line in lines)
    assert (level >= "3") == any(line.startswith("x_x: input x -> (4, 4, 64) float32") for line in lines)
    pass_manager.planned("the plan")
    assert capsys.readouterr().err == ("the plan\n" if level >= "1" else "")


def test_schedule_draws(capsys, tmp_path, golden):
    assert main(["schedule", "zb_h1", "--ranks", "3", "--micro-batches", "4", "--out", str(tmp_path / "x.svg")]) == 0
    golden(capsys.readouterr().out.replace(str(tmp_path), "FOLDER"))
    assert (tmp_path / "x.svg").read_text().startswith("<svg")
    assert main(["schedule", "1f1b", "--out", str(tmp_path / "x.png")]) == 2
    assert main(["schedule", "no_such"]) == 2
