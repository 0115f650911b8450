"""autopar train: processes of its own and torchrun's, checkpoints, and what a model of a user's returns."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import socket
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from autopar.cli import train_rank
from autopar.cli.main import main
from autopar.cli.shown_steps import shown_steps
from autopar.cli.train import flops_of_step
from autopar.errors import AutoparError
from autopar.models import build
from autopar.models.text_data import Packed, tokens_of
from tests.cli.command import MLP, autopar, left_of
from tests.helpers import gloo
from tests.storage.damage import Killed, end_test

USERS = """
import torch
from torch import nn
class Deep(nn.Module):
    def __init__(self, returns):
        super().__init__()
        self.layers, self.returns = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), returns
    def forward(self, x):
        return self.returns(self.layers(x))
def scalar(): return Deep(lambda y: y.square().mean()), (torch.randn(8, 16),)
def several(): return Deep(lambda y: (y.square().mean(), y)), {"x": torch.randn(8, 16)}
def none(): return Deep(lambda y: y), (torch.randn(8, 16),)
"""


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("name, mesh", [("several", "dp=2"), ("scalar", "pp=2"), ("none", "dp=2")])
def test_train_takes_a_users_model(tmp_path, name, mesh):
    (tmp_path / "mine.py").write_text(USERS)
    process = autopar("train", "--model", f"{tmp_path / 'mine.py'}:{name}", "--mesh", mesh, "--steps", "2")
    out, err = process.communicate(timeout=200)
    if name == "none":
        assert process.returncode == 2 and "returns a Tensor without a loss" in err, err
    else:
        assert process.returncode == 0 and "step 2  loss 0." in out, err
    assert not left_of(process)


@pytest.mark.slow
@pytest.mark.gloo
def test_train_in_float16():
    """The loss is scaled; gradients are added up in bfloat16."""
    process = autopar(
        "train", "--model", "mlp-tiny:layers=1", "--mesh", "dp=2", "--batch", "4", "--seq", "4", "--steps", "4",
        "--lr", "0.01", "--precision", "float16", "--reduce-dtype", "bf16", "--strategy", "ddp",
    )  # fmt: skip
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0 and "fp16, gradients reduced in bf16" in out, err
    losses = [float(line.split()[3]) for line in out.splitlines() if line.startswith("step ") and "loss" in line]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]


@pytest.mark.gloo
@pytest.mark.slow
def test_train():
    model = ["--model", "gpt2-tiny:layers=1", "--batch", "4", "--seq", "16"]
    process = autopar("train", *model, "--mesh", "dp=2", "--steps", "8", "--lr", "0.01")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    losses = [float(line.split()[3]) for line in out.splitlines() if line.startswith("step ") and "loss" in line]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.2
    assert out.splitlines()[-2].startswith("predicted ") and "; measured " in out.splitlines()[-2]
    assert not left_of(process)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


LORA = ["train", "--model", "mlp-tiny:layers=1", "--mesh", "pp=2", "--steps", "2", "--lora", "r=2", "--save-adapter"]


def _as_torchrun_starts_it(rank: int, port: str, folder: str) -> tuple[int, str]:
    """Return the exit code of a process of two, and what it prints."""
    dist.destroy_process_group()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=port)  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main([*LORA, folder])
    return code, printed.getvalue()


def _assert_trained(out: str, adapter: Path) -> None:
    assert (
        out.count("step 1  loss") == 1 and "; measured " in out and "live tensors" in out
    )  # the first rank alone speaks
    assert sorted(p.name for p in adapter.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.gloo
def test_train_on_two_processes_of_another(tmp_path):
    (first, said), (second, silent) = gloo.run(2, _as_torchrun_starts_it, free_port(), str(tmp_path / "adapter"))
    assert first == second == 0 and silent == ""
    _assert_trained(said, tmp_path / "adapter")


@pytest.mark.slow
@pytest.mark.gloo
def test_train_under_torchrun(tmp_path):
    words = ["--standalone", "--nproc-per-node", "2", "-m", "autopar.cli", *LORA, str(tmp_path / "adapter")]
    process = autopar(*words, launcher=("-m", "torch.distributed.run"))
    try:
        out, err = process.communicate(timeout=200)
    finally:
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
    assert process.returncode == 0, err
    _assert_trained(out, tmp_path / "adapter")


@pytest.fixture
def alone(monkeypatch) -> None:
    """This process is what torchrun started, and the only one."""
    said = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in said.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def kept(monkeypatch, tmp_path) -> None:
    """Later runs of a test read what the first one has traced, as those of a user do."""
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "cache"))


SENTENCES = [
    "the quick brown fox jumps over the lazy dog",
    "a stitch in time saves nine",
    "all that glitters is not gold",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Hugging Face folder of a config, weights and a tokenizer of words, and beside it texts in two forms."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("hf") / "model"
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=["<unk>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    texts = SENTENCES * 20
    (folder.parent / "data.jsonl").write_text("\n".join(json.dumps({"text": text, "source": 1}) for text in texts))
    (folder.parent / "data.txt").write_text("\n".join(texts))
    return folder


def losses_of(out: str) -> list[float]:
    return [float(line.split()[3]) for line in out.splitlines() if line.startswith("step ") and "loss" in line]


def test_train_a_folder_on_a_file(folder, tmp_path, alone, capsys, kept):
    """The first loss is that of the folder's weights on the file's tokens; it falls; a resumed run goes on with the
    batches that come next; what is saved is a folder again."""
    from transformers import AutoModelForCausalLM

    data, runs = folder.parent / "data.jsonl", tmp_path / "runs"
    words = ["train", "--model", str(folder), "--data", str(data), "--mesh", "dp=-1", "--batch", "4", "--seq", "16"]
    words += ["--lr", "0.01", "--checkpoint"]
    assert main([*words, str(tmp_path / "whole"), "--steps", "8", "--save", str(tmp_path / "saved")]) == 0
    out = capsys.readouterr().out
    losses = losses_of(out)
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5
    assert f"weights of {folder}" in out and "tokens, " in out and out.splitlines()[-2].startswith("predicted ")
    stream = Packed(tokens_of(data, folder, 48), 4, 16)
    first = AutoModelForCausalLM.from_pretrained(folder)(**next(stream)).loss.item()
    assert losses[0] == pytest.approx(first, abs=2e-4)
    for _ in range(7):
        next(stream)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")(**next(stream)).loss.item()
    assert saved < losses[-1]
    assert main([*words, str(runs), "--steps", "5"]) == main([*words, str(runs), "--steps", "8", "--resume"]) == 0
    assert losses_of(capsys.readouterr().out) == losses
    assert main([*words, str(runs), "--steps", "9", "--resume", "--data", str(folder.parent / "data.txt")]) == 2
    assert "has --data " in capsys.readouterr().err


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "flags",
    [["--lora", "r=4"], ["--qlora", "r=4,block_size=16"], ["--qat", "int8"], ["--fp8", "tensor"], ["--fp8", "auto"]],
    ids=str,
)
def test_train_an_adapted_folder(flags, folder, tmp_path, alone, capsys):
    words = ["--mesh", "dp=1", "--batch", "4", "--seq", "16", "--steps", "6", "--lr", "0.02"]
    words += ["--save", str(tmp_path / "saved")] if flags[0] == "--lora" else []
    assert main(["train", "--model", f"hf:{folder}", "--data", str(folder.parent / "data.txt"), *words, *flags]) == 0
    out = capsys.readouterr().out
    losses = losses_of(out)
    assert losses[-1] < losses[0] - 0.05 and ("\ntrains " in out) == ("lora" in flags[0])
    if flags[0] == "--lora":  # what is saved has the adapters in it
        before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "saved"))
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert before.keys() == after.keys() and {n for n in before if "_proj" in n} == changed


@pytest.mark.gloo
@pytest.mark.slow
def test_train_a_folder_on_two_processes(folder):
    words = ["--model", str(folder), "--mesh", "dp=-1", "--devices", "2", "--batch", "4", "--seq", "16", "--steps", "3"]
    process = autopar("train", *words, "--data", str(folder.parent / "data.jsonl"))
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0 and len(losses_of(out)) == 3 and "on mesh dp=2 (2 devices, cpu-gloo)" in out, err
    assert not left_of(process)


@pytest.mark.parametrize(
    "model, data, message",
    [
        ("FOLDER", "{}", 'line 1 of DATA has no "text"'),
        ("FOLDER", "nothing in it", 'line 1 of DATA has no "text"'),
        ("FOLDER", "", "cannot be cut from 0 tokens"),
        ("gpt:hidden=16,layers=1,heads=2,vocab=64,seq=16", '{"text": "zzz zzz zzz zzz"}', "the token 122"),
        ("mlp-tiny:layers=1", '{"text": "zzz"}', "does not take input_ids and labels"),
    ],
)
def test_data_that_cannot_be_used(model, data, message, folder, tmp_path, alone, capsys):
    file = tmp_path / "data.jsonl"
    file.write_text(data)
    words = ["--mesh", "dp=1", "--batch", "2", "--seq", "8", "--data", str(file)]
    assert main(["train", "--model", model.replace("FOLDER", str(folder)), *words]) == 2
    err = capsys.readouterr().err
    assert message.replace("DATA", str(file)) in err and len(err.splitlines()) == 1


def test_a_terminal_has_a_bar_with_the_utilization(monkeypatch, capsys):
    with shown_steps(3, 0, 100, 0.01, print) as show:
        show(1, 2.5, 0.1)
    plain = capsys.readouterr().out
    assert plain == "step 1  loss 2.5000  1,000 tokens/s\n"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with shown_steps(3, 0, 100, 0.01, print) as show:
        show(1, 2.5, 0.1)
        show(3, 2.25, 0.05)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert plain in shown.replace("\r", "") and "3/3" in shown and "2,000 tokens/s  MFU 20.0%" in shown


def test_flops_of_a_step_are_those_of_the_mathematics():
    model, inputs = build("mlp-tiny:layers=1", batch=4, seq=4)
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    for lora, passes in ((None, 3), ("r=2", 2)):
        assert flops_of_step(model, inputs, Namespace(lora=lora, qlora=None)) == passes * 2 * weights * 16


def test_train_goes_on_after_a_kill(tmp_path, monkeypatch, capsys, alone, kept):
    """The last checkpoint of a run that was killed and resumed is that of one that was not, byte for byte (but for the
    name of the run and the time, which are in the manifest)."""
    from autopar.cli import train_rank

    words = [
        "train",
        "--model",
        "gpt:hidden=16,layers=1,heads=2,vocab=256,seq=8",
        "--mesh",
        "dp=1",
        "--batch",
        "2",
        "--seq",
        "8",
    ]
    words += ["--steps", "6", "--every", "2", "--keep", "2", "--resume", "--checkpoint"]
    assert main([*words, str(tmp_path / "whole")]) == 0
    assert f"no checkpoint in {tmp_path / 'whole'}: starting with step 1" in capsys.readouterr().out

    save = train_rank._save
    with monkeypatch.context() as patch:
        patch.setattr(train_rank, "_save", lambda step, *rest: end_test() if step == 5 else save(step, *rest))
        with pytest.raises(Killed):
            main([*words, str(tmp_path / "killed")])
    capsys.readouterr()
    assert main([*words, str(tmp_path / "killed")]) == 0
    out = capsys.readouterr().out
    assert "step-00000004: step 4 of run " in out and out.count("  loss ") == 2 and "step 5  loss" in out
    files = [p for p in (tmp_path / "whole").rglob("*") if p.is_file() and p.name not in ("manifest.json", "COMMIT")]
    names = [p.relative_to(tmp_path / "whole") for p in files]
    assert {p.parts[0] for p in names} == {"step-00000004", "step-00000006"}
    assert all((tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes() for name in names)


@pytest.mark.slow
def test_two_runs_in_one_folder(tmp_path, capsys, alone):
    """The checkpoints of the earlier run stay, however far it came, and the later one is resumed."""
    words = ["train", *MLP, "--mesh", "dp=1", "--every", "1", "--keep", "1", "--checkpoint", str(tmp_path)]
    assert main([*words, "--steps", "6"]) == 0
    assert main([*words, "--steps", "3"]) == 0
    assert "has checkpoints of an earlier run, the last of them step-00000006" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000006"]
    assert main([*words, "--steps", "5", "--resume"]) == 0
    out = capsys.readouterr().out
    assert "step-00000003: step 3 of run " in out and out.count("  loss ") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005", "step-00000006"]
    assert main([*words, "--steps", "9", "--resume", "--lr", "0.5", "--seed", "1"]) == 2
    assert "has --seed 0, not 1; --lr 0.001, not 0.5" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.gloo
def test_an_error_of_all_ranks_is_one_line():
    process = autopar("train", *MLP, "--mesh", "dp=2", "--memory", "10KiB")
    _, err = process.communicate(timeout=200)
    assert process.returncode == 2 and err.startswith("autopar: no plan fits") and len(err.splitlines()) == 1
    assert not left_of(process)


@pytest.mark.parametrize(("world", "local", "fix"), [
    (3, 3, "start it with --nproc-per-node 4"), (2, 1, "start it with --nnodes 2 --nproc-per-node 2"),
    (3, 1, "start it with --nproc-per-node 4"),
])  # fmt: skip
def test_torchrun_with_another_number_of_processes(world, local, fix, capsys, monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local}.items():
        monkeypatch.setenv(name, str(value))
    assert main(["train", *MLP]) == 2
    err = capsys.readouterr().err
    assert f"torchrun started {world}" in err and fix in err


def test_a_rank_of_torchrun_tells_the_others_why_it_ends(tmp_path, monkeypatch):
    """While its groups are there: at the end of the program nobody could be told."""
    told = []

    def fails(*args, **options):
        raise AutoparError("no", fix="yes")

    monkeypatch.setattr(train_rank, "_run", fails)
    monkeypatch.setattr(train_rank.watch, "fail", lambda error: told.append((str(error), dist.is_initialized())))
    with pytest.raises(AutoparError):
        train_rank.train(0, 1, f"file://{tmp_path}/store", {"timeout": None, "device": "cpu", "mesh": "dp=1"})
    assert told == [("no\n  fix: yes", True)]
