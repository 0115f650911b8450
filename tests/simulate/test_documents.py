"""A step of documents that are packed into rows equals one device's to 1e-10, however the sequence is cut, on other
documents than it was planned with: random cases, and models of transformers' with positions that start again."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
import torch
import transformers as hf

from autopar.ir.mesh import Mesh
from autopar.ops import autopar
from autopar.rules.reading import bound
from autopar.simulate.compare import verify_plan
from autopar.simulate.step import plan_and_capture

from ..helpers.sequences import Packed, batch, packed_batch
from .test_sequence import OPEN, SIZES, WithLoss

MESHES = {
    "all_gather_kv": ("cp=2", "cp=3", "cp=4"), "ring": ("cp=2", "cp=3", "cp=4"), "ulysses": ("cp=2", "cp=3", "cp=4"),
    "ring+ulysses": ("cp=2,up=2",), "all_gather_kv+fsdp": ("dp=2,cp=2",), "ring+megatron_sp": ("cp=2,tp=2",),
}  # fmt: skip


def assert_same(model, planned_with, others, mesh: str, **options) -> None:
    """Plan for a batch, and compare a step on each of the others."""
    options |= {"hardware": "cpu-gloo", "baselines": False}
    plan, captured = plan_and_capture(model, mesh, planned_with, **options)
    attentions = captured.graph.find_nodes(op="call_function", target=autopar.attention.default)
    assert attentions and all(bound(node)["documents"] is not None for node in attentions), "documents are not carried"
    for inputs in others:
        report = verify_plan(captured, plan, model, inputs)
        assert report.match and max(report.errors.values()) <= 1e-10, report


@dataclass(frozen=True)
class Case:
    """Describes a step of `kind` on documents, about `most` in a row of `length`."""

    kind: str
    heads: tuple[int, int]
    strategy: str
    mesh: str
    length: int
    zigzag: bool
    most: int
    shift: str

    def check(self, seed: int) -> None:
        pin = {"input_ids": "cp:Z(1)"} if self.zigzag else {}
        batches = [packed_batch(self.length, seed + i, most) for i, most in enumerate((2, self.most))]
        model = Packed(self.kind, *self.heads, shift=self.shift)
        assert_same(model, batches[0], batches[1:], self.mesh, strategy=self.strategy, pin=pin)


def any_case(rng: random.Random) -> Case:
    strategy = rng.choice(list(MESHES))
    mesh, kind = rng.choice(MESHES[strategy]), rng.choice(("causal", "full", "padded", "window"))
    blocks = 2 * Mesh.parse(mesh).devices
    zigzag = "ulysses" != strategy and kind in ("causal", "padded") and rng.random() < 0.6
    devices = blocks // 2
    plain = [n for n in range(blocks, 26) if -(-n // devices) * (devices - 1) < n]  # a block for each device
    length = blocks * rng.randint(2, 3) if zigzag else rng.choice(plain)
    kv_heads = rng.choice((12, 6, 3, 1)) if strategy in ("ring", "all_gather_kv") else 12
    return Case(kind, (12, kv_heads), strategy, mesh, length, zigzag, rng.choice((1, 2, 5, length)),
                rng.choice(("pad", "cut")))  # fmt: skip


def check(seed: int) -> None:
    case = any_case(random.Random(seed))
    print("seed", seed, case)
    case.check(seed)


def test_a_random_case():
    check(random.randrange(10**6))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(40))
def test_random_cases(part):
    check(10**6 + random.randrange(10**6))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy, zigzag, kv_heads", itertools.product(
    ("all_gather_kv", "ring", "ulysses"), (False, True), (4, 2)))  # fmt: skip
def test_documents_cross_shards(strategy, zigzag, kv_heads):
    """Two documents lie on two devices, one of them on both; then each token is one."""
    zigzag = zigzag and strategy != "ulysses"
    Case("causal", (4, kv_heads), strategy, "cp=2", 12 if zigzag else 11, zigzag, 12, "pad").check(3)


# with a cache transformers looks for no documents
TRAINED = SIZES | OPEN | dict(num_key_value_heads=2, use_cache=False)
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TRAINED)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**TRAINED)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**TRAINED, head_dim=8)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**TRAINED, sliding_window=3)),
}  # fmt: skip


def flattened(*lengths: int) -> dict[str, torch.Tensor]:
    """Return a batch as transformers' collator packs documents of these lengths into a row."""
    ids = batch(sum(lengths), samples=1)["input_ids"][0].split(lengths)
    return dict(hf.DataCollatorWithFlattening()([{"input_ids": x.tolist()} for x in ids]))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name, mesh, strategy, zigzag", [
    ("llama", "cp=2", "ring", True), ("qwen3", "cp=2", "all_gather_kv", False), ("llama", "cp=3", "ring", False),
    ("qwen2", "cp=2", "ulysses", False), ("mistral", "cp=2", "all_gather_kv", True), ("mistral", "cp=4", "ring", False),
    ("qwen2", "cp=4", "all_gather_kv", True), ("qwen3", "cp=2,up=2", "ring+ulysses", False),
    ("llama", "cp=2,tp=2", "ring+megatron_sp+zero1", False), ("llama", "cp=2", None, False),
])  # fmt: skip
def test_models_of_transformers(name, mesh, strategy, zigzag):
    torch.manual_seed(0)
    model, pin = WithLoss(MODELS[name]()).double(), {"input_ids": "cp:Z(1)"} if zigzag else {}
    planned, others = flattened(5, 7, 4), [flattened(1, 13, 2), flattened(16), flattened(*[2] * 8)]
    if not zigzag:
        planned, others = flattened(5, 7, 5), [flattened(1, 14, 2), flattened(17)]
    assert_same(model, planned, others, mesh, strategy=strategy, pin=pin)


def test_documents_and_stages():
    """Micro-batches have rows with documents of their own."""
    model, inputs = Packed("causal", 4, 2), packed_batch(12, 1, 3, samples=4)
    assert_same(model, inputs, [packed_batch(12, 2, 5, samples=4)], "cp=2", strategy="ring", micro_batches=2)
