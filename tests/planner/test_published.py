"""Numbers that others have published, against plans and graphs of the same models: bytes of ZeRO, activations of
Megatron, its parameters and FLOPs, and the volumes of sequence parallelism. Where autopar's graph differs from the
paper's the difference is part of the formula and is said."""

from __future__ import annotations

from collections import Counter

import pytest

from autopar import compiler
from autopar.cost.compute import flops_of
from autopar.ir.block_order import block_of
from autopar.models import registry
from autopar.planner.objective.checkpoint_blocks import Blocks
from autopar.planner.objective.checkpoint_min_cut import FULL, SELECTIVE
from autopar.planner.problem.multipliers import Prices

from .planning import Instance, make, toy

MACHINE = toy(flops=1e9, memory=1e10, latency=1e-6)
MLP = "mlp:hidden=64,layers=3,bias=false"
ELEMENTS = 3 * 2 * 64 * 256
FIRST = 64 * 256  # of the first weight, which no backward op reads, as its input is data


@pytest.fixture(scope="module")
def narrow_mlp():
    return compiler.trace(*registry.build(MLP, batch=64, seq=8), precision="bf16")


@pytest.mark.parametrize("n", [4, 16, 64])
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
def test_zero_bytes(narrow_mlp, strategy, n):
    """ZeRO, arXiv 1910.02054, figure 1 with K = 12: 4 + 12/N, 2 + 14/N and 16/N bytes a parameter at stages 1, 2 and 3.

    autopar keeps gradients in fp32, 2 bytes more wherever a gradient is, and at stages 1 and 2 the shard of the bf16
    copy beside the gathered one. Of bf16 copies there are most when the forward ends: of the parameters that the
    backward reads. Stage 1 has whole gradients where those of several passes wait for one reduction; in a single pass
    it reduces them like stage 2."""
    paper = {"zero1": 4 + 12 / n, "zero2": 2 + 14 / n, "fsdp": 16 / n}[strategy] * ELEMENTS
    gradients = 2 * ELEMENTS / (1 if strategy == "zero1" else n)
    passes = 2 if strategy == "zero1" else 1
    memory = make(narrow_mlp, f"dp={n}", MACHINE, strategy=strategy, precision="bf16", micro_batches=passes).memory
    held = sum(memory[kind] for kind in ("parameters", "gradients", "optimizer"))
    state = held + 2 * FIRST / n  # its copy is gone by then, unless the next pass reads it too
    if strategy == "fsdp":
        assert state == paper + gradients and "gathered parameters kept" not in memory
    else:
        gathered = 2 * ELEMENTS / n - (0 if passes > 1 else 2 * FIRST)
        assert state + memory["gathered parameters kept"] == paper + gradients + gathered


@pytest.mark.parametrize("n", [4, 16])
def test_zero_volumes(narrow_mlp, n):
    """ZeRO, section 7: a device sends 2 Psi elements a step, (N - 1)/N of it on a ring, 3 Psi at stage 3. Here
    parameters travel in bf16 and gradients in fp32, and nothing gathers the first weight a second time."""
    ring = (n - 1) / n
    for strategy, elements in (("ddp", {"all_reduce": 2 * 4 * ELEMENTS}),
                               ("zero1", {"all_gather": 2 * ELEMENTS, "reduce_scatter": 4 * ELEMENTS}),
                               ("zero2", {"all_gather": 2 * ELEMENTS, "reduce_scatter": 4 * ELEMENTS}),
                               ("fsdp", {"all_gather": 2 * (2 * ELEMENTS - FIRST),
                                         "reduce_scatter": 4 * ELEMENTS})):  # fmt: skip
        sent: Counter = Counter()
        for c in make(narrow_mlp, f"dp={n}", MACHINE, strategy=strategy, precision="bf16").collectives:
            sent[c.kind] += c.wire_bytes
        loss = 2 * 4 * ring  # one number is summed in the forward
        expected = Counter({"all_reduce": loss}) + Counter({kind: bytes_ * ring for kind, bytes_ in elements.items()})
        assert sent == pytest.approx(expected)


# activations
# -------------------------------------------------------------------------------------------------------------

S, B, H, A = 32, 8, 64, 4  # sequence, batch, hidden, heads
GPT = f"gpt:hidden={H},layers=3,heads={A},vocab=256,seq={S}"


@pytest.fixture(scope="module")
def narrow_gpt():
    return compiler.trace(*registry.build(GPT, batch=B, seq=S), precision="bf16")


def layer_bytes(instance: Instance, saved) -> float:
    """Return the bytes that the middle block saves for the backward."""
    modules = {v.index: v.node.meta.get("module", "") for v in instance.problem.vertices if v.kind == "op"}
    return sum(bytes_ for (v, _, _), bytes_ in saved.items() if block_of(modules.get(v, "")) == "h.1")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("strategy", "mesh", "price", "shared", "cut"), [
    ("ddp", "dp=2", 0.0, 0, 2), ("megatron", "tp=2", 0.0, 8, 2), ("megatron", "tp=4", 0.0, 8, 4),
    ("megatron_sp", "tp=2", 1e-6, 0, 2), ("megatron_sp", "tp=4", 1e-6, 0, 4),
])  # fmt: skip
def test_activation_bytes_of_a_layer(narrow_gpt, strategy, mesh, price, shared, cut):
    """Korthikanti et al., arXiv 2205.05198, table 2: sbh (34 + 5as/h) bytes a layer, of which tensor parallelism cuts
    all but 10 sbh, and sequence parallelism those as well; 2 sbh with full recomputation.

    Here 32 sbh, of which 8 are not cut: there is no dropout, which saves 2 sbh of masks. Attention is fused and saves a
    fp32 logsumexp a row, 4 sba, instead of 5 ass; the mean and deviation of two norms, which the paper leaves out, are
    8 sb."""
    instance = Instance(narrow_gpt, mesh, toy(flops=1e9, memory=1e13, latency=1e-4), strategy)
    prices = Prices(price, price > 0)
    e = instance.evaluate(instance.minimize(prices).choice, prices)
    rows = S * B
    norms = 8 * rows / (1 if shared else cut)
    layer = rows * H * (shared + (32 - shared) / cut) + norms + 4 * rows * A / cut
    assert layer_bytes(instance, e.saved) == pytest.approx(layer)
    blocks = Blocks(instance.problem, instance.pricer)
    steps = [step for step in blocks.recomputation(e, levels=(SELECTIVE, FULL)) if step.block == "h.1"]
    left = layer - sum(step.freed_bytes for step in steps)
    assert left == pytest.approx(2 * rows * H / (1 if shared else cut))  # full: what the block reads
    assert [step.level for step in steps] == [SELECTIVE, FULL]
    if strategy == "ddp":  # selective: outputs of norms, 4 sbh, and of gelu, 8 sbh, are made again
        assert steps[0].freed_bytes == pytest.approx((rows * H * 12 + 8 * rows) / cut)


# Megatron-LM on GPUs, SC 2021
# ----------------------------------------------------------------------------------------------

# Billions of parameters, layers, hidden, devices, batch, TFLOP/s a device, aggregate PFLOP/s: arXiv 2104.04473, table
# 1.
SC21 = {
    "gpt-1.7b": (1.7, 24, 2304, 32, 512, 137, 4.4), "gpt-3.6b": (3.6, 30, 3072, 64, 512, 138, 8.8),
    "gpt-7.5b": (7.5, 36, 4096, 128, 512, 142, 18.2), "gpt-18.4b": (18.4, 40, 6144, 256, 1024, 135, 34.6),
    "gpt-39.1b": (39.1, 48, 8192, 512, 1536, 138, 70.8), "gpt-76.1b": (76.1, 60, 10240, 1024, 1792, 140, 143.8),
    "gpt-145.6b": (145.6, 80, 12288, 1536, 2304, 148, 227.1), "gpt-310.1b": (310.1, 96, 16384, 1920, 2160, 155, 297.4),
    "gpt-529.6b": (529.6, 105, 20480, 2520, 2520, 163, 410.2),
    "gpt-1008b": (1008.0, 128, 25600, 3072, 3072, 163, 502.0),
}  # fmt: skip
SEQ, VOCAB = 2048, 51200


@pytest.mark.parametrize("name", SC21)
def test_parameters_of_megatron(name):
    """P = 12 L h^2 (1 + 13 / 12 h + (V + s) / 12 L h), equation 2, which leaves the last norm's 2 h out."""
    billions, layers, hidden, *_ = SC21[name]
    found = sum(p.numel() for p in registry.build(name, batch=1, seq=8)[0].parameters())
    assert found == 12 * layers * hidden**2 + 13 * layers * hidden + (VOCAB + SEQ) * hidden + 2 * hidden
    assert found / 1e9 == pytest.approx(billions, abs=0.06)


@pytest.mark.parametrize("name", ["gpt-1.7b", "gpt-145.6b"])
def test_flops_of_megatron(name):
    """F = 96 B s L h^2 (1 + s / 6 h + V / 16 L h), equation 3, of which the recomputed forward is 24 B s L h^2 (1 + s /
    6 h).

    Without it 72 B s L h^2 + 12 B s^2 L h + 6 B s h V. Here attention is causal, half of it is masked, and its fused
    backward multiplies scores once more: 7 B s^2 L h instead of 12."""
    _, layers, hidden, devices, batch, tera, peta = SC21[name]
    short = compiler.trace(*registry.build(f"{name}:layers=2", batch=batch, seq=SEQ))
    found = sum(flops_of(node) for node in short.graph.nodes if node.op == "call_function")

    def formula(layers: int, attention: float) -> float:
        matrices = 72 * batch * SEQ * layers * hidden**2
        return matrices + attention * batch * SEQ**2 * layers * hidden + 6 * batch * SEQ * hidden * VOCAB

    assert found == formula(2, 7)
    published = 96 * batch * SEQ * layers * hidden**2 * (1 + SEQ / (6 * hidden) + VOCAB / (16 * layers * hidden))
    recomputed = 24 * batch * SEQ * layers * hidden**2 * (1 + SEQ / (6 * hidden))
    assert published - recomputed == pytest.approx(formula(layers, 12))
    assert devices * tera / 1e3 == pytest.approx(peta, rel=5e-3)


# sequence parallelism
# ------------------------------------------------------------------------------------------------------


def sent(instance: Instance, prices: Prices) -> Counter:
    """Bytes that a device sends of activations, tensors of N h elements, and their gradients, by (kind, phase)."""
    found: Counter = Counter()
    for transfer in instance.evaluate(instance.minimize(prices).choice, prices).transfers:
        for step in transfer.redistribution.steps if transfer.bytes_ == 4 * S * B * H else ():
            found[step.move.kind, transfer.phase] += step.wire_fraction * transfer.bytes_
    return found


@pytest.mark.slow
def test_volume_of_megatron_with_sequence_parallelism():
    """arXiv 2205.05198, 4.2.2: a layer gathers twice and scatters twice, N h elements each, in both phases; where
    gathered inputs are not kept the backward gathers those two again. A ring sends (t - 1) / t of each."""
    of_layers = [
        sent(Instance(GPT.replace("layers=3", f"layers={n}"), "tp=4", toy(flops=1e9, memory=1e10), "megatron_sp",
                      batch=B, seq=S),
             Prices(1e-6, True)) for n in (2, 1)
    ]  # fmt: skip
    ring = 3 / 4 * S * B * H * 4
    of_one = of_layers[0] - of_layers[1]
    assert {key: bytes_ / ring for key, bytes_ in of_one.items()} == {
        ("all_gather", "forward"): 2, ("reduce_scatter", "forward"): 2, ("all_gather", "backward"): 4,
        ("reduce_scatter", "backward"): 2,
    }  # fmt: skip


@pytest.mark.slow
def test_volume_of_ulysses():
    """Jacobs et al., arXiv 2309.14509, section 3.2: all-to-alls of 3 N h and N h elements a layer and phase, of which a
    device sends 1/P; exactly (P - 1) / P of that. Found by the search where sequences are long and every device has one
    part of one."""
    of_layers = []
    for layers in (2, 1):
        gpt = f"gpt:hidden=64,layers={layers},heads=8,vocab=64,seq=512"
        pin = {"input_ids": "sp:S(1)", "labels": "sp:S(1)", "*.weight": "R", "*.bias": "R"}
        plan = make(gpt, "sp=8", toy(flops=1e10, memory=1e10), batch=1, seq=512, pin=pin)
        of_layers.append({c.phase: c.wire_bytes for c in plan.collectives if c.kind == "all_to_all"})
    for phase in ("forward", "backward"):
        assert of_layers[0][phase] - of_layers[1][phase] == pytest.approx(4 * 512 * 64 * 4 / 8 * 7 / 8)
