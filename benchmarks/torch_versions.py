"""Does autopar work with these versions of torch and transformers? A smoke set in a fresh environment of each.

    python benchmarks/torch_versions.py                                  # those of VERSIONS
    python benchmarks/torch_versions.py 2.13.0 2.15.0
    python benchmarks/torch_versions.py 2.13.0 --transformers 5.0.0      # with Hugging Face folders, a Trainer
    python benchmarks/torch_versions.py --python ENV/bin/python ...      # environments that exist

Makes an environment for each version (gigabytes where the index has builds for GPUs alone), installs torch, autopar and
what it needs, and runs plans, simulated steps compared with one device, and training on two processes. Prints a line a
check, and the first line of the error where one fails. The pin in pyproject.toml follows what passes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
VERIFIED = (
    ("mlp-tiny", "tp=2"), ("gpt2-tiny", "dp=2,tp=2"), ("llama-tiny", "dp=2,tp=2"), ("vit-tiny", "tp=2"),
    ("resnet-tiny", "dp=2"), ("moe-tiny", "tp=2"), ("llama-tiny", "pp=2"),
)  # fmt: skip
CHECKS = {
    "plan": ["plan", "--model", "llama3-8b", "--mesh", "dp=8,tp=8", "--batch", "16", "--seq", "2048"],
    **{f"verify {model} {mesh}": ["verify", "--model", model, "--mesh", mesh, "--hardware", "cpu-gloo"]
       for model, mesh in VERIFIED},
    "verify bf16": ["verify", "--model", "gpt2-tiny", "--mesh", "dp=2", "--precision", "bf16"],
    "train gpt2-tiny dp=2": ["train", "--model", "gpt2-tiny", "--mesh", "dp=2", "--steps", "3"],
    "train gpt2-tiny fsdp": ["train", "--model", "gpt2-tiny", "--mesh", "dp=2", "--steps", "3", "--strategy", "fsdp"],
    "train gpt2-tiny pp=2": ["train", "--model", "gpt2-tiny", "--mesh", "pp=2", "--steps", "3"],
    "train lora": ["train", "--model", "llama-tiny", "--mesh", "dp=2", "--steps", "3", "--lora", "r=4"],
}  # fmt: skip
TINY = dict(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
CONFIGS = {  # of models of transformers, by their type
    "gpt2": dict(architectures=["GPT2LMHeadModel"], vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "llama": dict(architectures=["LlamaForCausalLM"], **TINY, num_key_value_heads=2),
    "bert": dict(architectures=["BertForMaskedLM"], **TINY),
    "t5": dict(architectures=["T5ForConditionalGeneration"], vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2,
               num_heads=4, decoder_start_token_id=0),
    "mixtral": dict(architectures=["MixtralForCausalLM"], **TINY, num_key_value_heads=2, num_local_experts=4),
}  # fmt: skip
FOLDERS = {f"verify hf:{kind} dp=2,tp=2": ["verify", "--model", f"hf:{kind}", "--mesh", "dp=2,tp=2", "--hardware",
                                           "cpu-gloo", "--batch", "4", "--seq", "12"] for kind in CONFIGS}  # fmt: skip
TRAINER = {"transformers.Trainer dp=2": ["-m", "torch.distributed.run", "--nproc_per_node", "2",
                                          str(ROOT / "examples" / "trainer_lora.py")]}  # fmt: skip
VERSIONS_OF = """
import importlib.util, torch
print("torch", torch.__version__, end="")
if importlib.util.find_spec("transformers"):
    import transformers
    print(", transformers", transformers.__version__)
"""
SECONDS = 600


def make(version: str, folder: Path, transformers: str | None) -> str:
    """Return the Python of a fresh environment with these versions of torch and of transformers, if it has any."""
    python = str(folder / "bin" / "python")
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    others = [need for need in needs if not need.startswith("torch")]
    others += [f"transformers=={transformers}", "accelerate"] if transformers else []
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    for wanted in ([f"torch=={version}", *others], ["--no-deps", str(ROOT)]):
        subprocess.run([python, "-m", "pip", "install", "-q", *wanted], check=True, capture_output=True, text=True)
    return python


def check(python: str) -> int:
    """Run the smoke set with an environment's Python; return how many checks failed."""
    failed = 0
    command = [python, "-c", VERSIONS_OF]
    versions = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    print(versions, flush=True)
    for name, arguments in (CHECKS | FOLDERS | TRAINER if "transformers" in versions else CHECKS).items():
        program = [] if arguments[0] == "-m" else ["-m", "autopar.cli"]
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            for kind, config in CONFIGS.items():
                (Path(folder) / kind).mkdir()
                (Path(folder) / kind / "config.json").write_text(json.dumps({"model_type": kind, **config}))
            try:
                done = subprocess.run(
                    [python, *program, *arguments], capture_output=True, text=True, timeout=SECONDS,
                    cwd=folder, env={"AUTOPAR_CACHE": "off", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
                )  # fmt: skip
                lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith(" ")]
                result = "ok" if done.returncode == 0 else f"FAILED: {lines[-1] if lines else done.returncode}"
            except subprocess.TimeoutExpired:
                result = f"FAILED: not done after {SECONDS} s"
        failed += result != "ok"
        print(f"  {name:<32} {time.perf_counter() - start:6.1f} s  {result:.160}", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", help=f"default {' '.join(VERSIONS)}")
    parser.add_argument("--transformers", help="a version; without it no Hugging Face folder is tried")
    parser.add_argument("--python", nargs="+", help="Pythons of environments that have torch and autopar")
    args = parser.parse_args()
    if args.python:
        return sum(map(check, args.python))
    failed = 0
    for version in args.versions or VERSIONS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                failed += check(make(version, Path(folder), args.transformers))
            except subprocess.CalledProcessError as error:
                print(f"torch {version}: {(error.stderr or str(error)).strip().splitlines()[-1]:.200}", flush=True)
                failed += 1
    return failed


if __name__ == "__main__":
    sys.exit(main() > 0)
