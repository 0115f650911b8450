"""The parts of benchmarks/gpu.py. Each prints what it finds, a line a case.

python benchmarks/gpu_parts.py slice            # one part alone, with its traceback
python benchmarks/gpu_parts.py slice --fake
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from gpu_machine import FAMILIES, GIB, Machine, apart, detached, family, gradients, gradients_after, loss_of, on, train
from gpu_ranks import nccl, ranks, verified

import autopar
from autopar import models
from autopar.cost.attention import Shape, attention_seconds, own_kernel
from autopar.hardware.profile import load
from autopar.ops import autopar as ops


def families(machine: Machine) -> None:
    """Loss and gradients of one device over its own library of collectives, against eager torch, and what both are off
    from the same model in fp64 on the processor."""
    machine.start()
    mesh = machine.mesh("dp=1")
    for name in FAMILIES[:3] if not machine.is_gpu else FAMILIES:
        source, inputs = family(name)
        exact = copy.deepcopy(source).double()
        train(exact, {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()})
        wanted = gradients(exact)
        for precision in ("fp32", "bf16"):
            eager, here = copy.deepcopy(source).to(machine.device), on(machine.device, inputs)
            with torch.autocast(machine.device, torch.bfloat16, enabled=precision == "bf16"):
                loss = loss_of(eager(**here))
            loss.backward()
            try:
                mine = autopar.compile(copy.deepcopy(source).to(machine.device), mesh, here, precision=precision)
                off = apart(gradients_after(mine, here), wanted)
            except autopar.errors.AutoparError as error:
                print(f"{name:12} {precision}: {type(error).__name__}: {error.message}")
                continue
            theirs = apart(gradients(eager), wanted)
            fits = off <= max(2 * theirs, 1e-4 if precision == "fp32" else 2e-2)
            print(
                f"{name:12} {precision}: gradients off {off:.1e}, eager torch {theirs:.1e}{'' if fits else '  WRONG'}"
            )


def attention(machine: Machine) -> None:
    """The canonical op against fp64 and against torch's own attention: error, seconds, peak."""
    lengths = (1, 100, 2048, 8192) if machine.is_gpu else (1, 33)
    for dtype in (torch.bfloat16, torch.float32):
        for heads, kv_heads, dim in ((8, 8, 64), (8, 2, 128), (8, 1, 80), (4, 4, 256)):
            for length in lengths:
                for kind in ("causal", "full", "padded"):
                    _attend(machine, dtype, heads, kv_heads, dim, length, kind)


def _attend(machine: Machine, dtype, heads: int, kv_heads: int, dim: int, length: int, kind: str) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(1, n, length, dim, device=machine.device, dtype=dtype) for n in (heads, kv_heads, kv_heads)]
    mask = None
    if kind == "padded":
        mask = torch.arange(length, device=machine.device) < max(1, length - length // 4)
        mask = mask.expand(1, 1, 1, length)
    grad = torch.randn_like(tensors[0])

    def mine(q, k, v):
        return ops.attention(q, k, v, mask, kind == "causal", dim**-0.5)[0]

    def torchs(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=kind == "causal", enable_gqa=True)

    def both(run, *inputs):
        inputs = [t.detach().clone().requires_grad_() for t in inputs]
        out = run(*inputs)
        out.backward(grad.to(out.dtype))
        return [out, *(t.grad for t in inputs)]

    exact = both(torchs, *(t.double() for t in tensors)) if length <= 2048 else None
    found = both(mine, *tensors)
    theirs = both(torchs, *tensors)
    names = ("out", "q", "k", "v")  # together, as some are zero where there is one key
    errors = [apart(*(dict(zip(names, map(detached, side))) for side in (x, exact or theirs))) for x in (found, theirs)]
    seconds = [machine.seconds(lambda run=run: both(run, *tensors), 3) for run in (mine, torchs)]
    peaks = [machine.peak_bytes(lambda run=run: both(run, *tensors)) / GIB for run in (mine, torchs)]
    print(
        f"{str(dtype)[6:]:8} {heads}/{kv_heads} heads of {dim:3}, {length:4} long, {kind:6}: off {errors[0]:.1e} "
        f"(torch {errors[1]:.1e}), {seconds[0] * 1e3:.2f} ms ({seconds[1] * 1e3:.2f}), "
        f"{peaks[0]:.2f} GiB ({peaks[1]:.2f})"
    )


def own_attention(machine: Machine) -> None:
    """Attention that no kernel of torch does, against fp64: error, seconds, those of torch's without, as predicted."""
    hardware = load(torch.cuda.get_device_name() if machine.is_gpu else "h100")
    for heads, kv_heads, dim in ((16, 16, 64), (16, 4, 128), (8, 8, 256)):
        for length in (100, 2048, 8192) if machine.is_gpu else (33,):
            for kind in ("dropout", "softcap", "learned"):
                _attend_by_own(machine, hardware, heads, kv_heads, dim, length, kind)


def _attend_by_own(machine: Machine, hardware, heads: int, kv_heads: int, dim: int, length: int, kind: str) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(1, n, length, dim, device=machine.device) for n in (heads, kv_heads, kv_heads)]
    tensors += [torch.randn(1, heads, length, length, device=machine.device)] if kind == "learned" else []
    tensors = [t.bfloat16() for t in tensors]
    strides = [heads * length**2, length**2, length, 1]
    drops = (torch.tensor([3, 5]), 0.1, 1, 0, strides) if kind == "dropout" else (None, 0.0, 0, 0, None)

    def mine(q, k, v, mask=None):
        extra = None, 30.0 if kind == "softcap" else 0.0, False, *drops
        return ops.attention(q, k, v, mask, mask is None, dim**-0.5, 0, 0, 0, None, None, *extra)[0]

    def torchs(q, k, v, mask=None):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)

    def both(run, inputs):
        inputs = [t.detach().clone().requires_grad_() for t in inputs]
        out = run(*inputs)
        return [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]

    off = ""
    if length <= 2048:
        sides = (both(mine, x) for x in (tensors, [t.double() for t in tensors]))
        off = f"off {apart(*({str(i): detached(t) for i, t in enumerate(side)} for side in sides)):.1e}, "
    shape = Shape(1, heads, length, length, dim, dim, kind != "learned")
    peak = hardware.peak_flops_per_second("bf16")
    beside = (own_kernel(forward, kind == "dropout", kind == "softcap", kind == "learned") for forward in (True, False))
    expected = sum(attention_seconds(hardware, peak, replace(shape, **b), f) for f, b in zip((True, False), beside))
    seconds = [machine.seconds(lambda run=run: both(run, tensors), 3) for run in (mine, torchs)]
    print(
        f"{heads}/{kv_heads} heads of {dim:3}, {length:4} long, {kind:7}: {off}{seconds[0] * 1e3:.2f} ms, predicted "
        f"{expected * 1e3:.2f}; torch's without {seconds[1] * 1e3:.2f}"
    )


def _slice_model(machine: Machine) -> tuple[nn.Module, dict]:
    sizes = "hidden=4096,layers=4,heads=32,kv_heads=8,ffn=14336,vocab=128256,seq=8192"
    tiny = "hidden=64,layers=2,heads=4,kv_heads=2,ffn=128,vocab=256,seq=64"
    torch.manual_seed(0)
    text, seq = (f"llama:{sizes}", 8192) if machine.is_gpu else (f"llama:{tiny}", 64)
    model, inputs = models.build(text, batch=1, seq=seq, device=machine.device)
    return model, on(machine.device, inputs)


def _sides(machine: Machine, mesh) -> dict[str, Callable[[nn.Module, dict], tuple[nn.Module, bool]]]:
    """Return, by name, what makes a module ready to train, and whether it is run under autocast."""

    def fsdp(module, inputs):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in module.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        return fully_shard(module, mesh=mesh, mp_policy=policy), False

    def mine(**options):
        return lambda module, inputs: (autopar.compile(module, mesh, inputs, precision="bf16", **options), False)

    def mine_compiled(module, inputs):
        module = autopar.compile(module, mesh, inputs, precision="bf16")
        module.compile()
        return module, False

    sides = {"autopar": mine(), "eager, autocast": lambda module, inputs: (module, True), "FSDP2": fsdp}
    if machine.is_gpu:  # on the processor these compile for minutes
        sides["torch.compile, autocast"] = lambda module, inputs: (torch.compile(module), True)
        sides["autopar, torch.compile"] = mine_compiled
    return sides


def slice_(machine: Machine) -> None:
    """Four layers of Llama-3-8B at 8k, bf16, AdamW: seconds and peak against the prediction and against torch."""
    machine.start()
    mesh = machine.mesh("dp=1")
    for name, make in _sides(machine, mesh).items():
        module, inputs = _slice_model(machine)
        try:
            module, casts = make(module, inputs)
            optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

            def step(module=module, inputs=inputs, optimizer=optimizer, casts=casts):
                with torch.autocast(machine.device, torch.bfloat16, enabled=casts):
                    loss = loss_of(module(**inputs))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

            seconds, peak = machine.seconds(step), machine.peak_bytes(step)
            plan = getattr(module, "plan", None)
            told = ""
            if plan is not None:
                told = (f"; predicted {plan.step_seconds * 1e3:.1f} ms, {plan.peak_bytes / GIB:.2f} GiB: measured "
                        f"{seconds / plan.step_seconds:.2f} and {peak / plan.peak_bytes:.2f} times that")  # fmt: skip
            print(f"{name:34}: {seconds * 1e3:9.1f} ms, peak {peak / GIB:6.2f} GiB{told}", flush=True)
        except Exception as error:  # the next side may well run
            print(f"{name:34}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
        del module


def calibrated(machine: Machine) -> None:
    """Print what `autopar calibrate` finds, and the slice predicted with it and without."""
    from autopar import calibrate, hardware
    from autopar.cli.calibrate import summary

    backend = "nccl" if machine.is_gpu else "gloo"
    base = hardware.load(torch.cuda.get_device_name() if machine.is_gpu else "cpu-gloo")
    found = calibrate.to_profile(calibrate.measurements(backend, 1, True), base, "here", calibrate.fingerprint(backend))
    print(summary(found))
    module, inputs = _slice_model(machine)
    for name, profile in (("shipped", base), ("calibrated", found)):
        plan = autopar.plan(module, "dp=1", inputs, hardware=profile, precision="bf16", baselines=False)
        print(f"{name:10}: the slice is predicted at {plan.step_seconds * 1e3:.1f} ms, {plan.peak_bytes / GIB:.2f} GiB")


def waits(machine: Machine) -> None:
    """Host synchronisations in a step, from the profiler: those beside the user's own are the compiler's."""
    machine.start()
    module, inputs = _slice_model(machine)
    module = autopar.compile(module, machine.mesh("dp=1"), inputs, precision="bf16")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, foreach=True)
    for _ in range(2):
        train(module, inputs)
        optimizer.step()
        optimizer.zero_grad()
    kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * machine.is_gpu
    with torch.profiler.profile(activities=kinds) as profile:
        train(module, inputs)
        optimizer.step()
    counts = {event.key: event.count for event in profile.key_averages()}
    for key in ("cudaStreamSynchronize", "cudaDeviceSynchronize", "aten::item", "aten::_local_scalar_dense"):
        print(f"{key:28} {counts.get(key, 0)}")
    print(f"{'calls of ops':28} {sum(n for key, n in counts.items() if '::' in key)}")
    started = time.perf_counter()
    train(module, inputs)
    host = time.perf_counter() - started
    machine.wait()
    print(
        f"host {host * 1e3:.1f} ms of a forward and backward that take {(time.perf_counter() - started) * 1e3:.1f} ms"
    )


def packed(machine: Machine) -> None:
    """Products of few rows with a weight in 4 bits: from its codes, dequantized first, and in bf16."""
    from autopar.ops.nf4 import quantize

    shapes = ((4096, 4096), (14336, 4096), (4096, 14336)) if machine.is_gpu else ((64, 128),)
    for outputs, inputs in shapes:
        weight = torch.randn(outputs, inputs, device=machine.device)
        parts = quantize(weight, "nf4", 64, True)
        tensors, half = [parts[name] for name in ("packed", "absmax", "scale", "offset")], weight.bfloat16()
        for rows in (1, 4, 16):
            x = torch.randn(rows, inputs, device=machine.device, dtype=torch.bfloat16)
            ways = {
                "codes": lambda x=x, t=tensors: ops.packed_linear(x, *t, "nf4"),
                "dequantized": lambda x=x, t=tensors: F.linear(x, ops.dequantize(*t, "nf4", torch.bfloat16)),
                "bf16": lambda x=x, half=half: F.linear(x, half),
            }
            off = apart({"y": detached(ways["codes"]())}, {"y": detached(ways["dequantized"]())})
            times = ", ".join(f"{name} {machine.seconds(run, 20) * 1e6:.0f} us" for name, run in ways.items())
            print(f"{rows:2} rows x ({outputs}, {inputs}): {times}; apart {off:.1e}")


def state(machine: Machine) -> None:
    """Optimizers on the compiled module's parameters, clipping, checkpoints, and parameters on the host."""
    machine.start()
    for offload in ("none", "optimizer"):
        module, inputs = _slice_model(machine)
        module = autopar.compile(
            module, machine.mesh("dp=1"), inputs, precision="bf16", offload=offload, hardware="h100"
        )
        for kind in ("foreach", "fused") if offload == "none" else ("foreach",):
            optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, **{kind: True})
            train(module, inputs)
            optimizer.step()
            print(f"offload {offload}, {kind} AdamW: {machine.seconds(optimizer.step) * 1e3:.1f} ms a step, clipping "
                  f"{machine.seconds(lambda m=module: m.clip_grad_norm_(1.0)) * 1e3:.1f} ms, forward and backward "
                  f"{machine.seconds(lambda m=module, i=inputs: train(m, i)) * 1e3:.1f} ms", flush=True)  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            autopar.save_checkpoint(folder, module, optimizer, step=1)
            saved = time.perf_counter() - start
            autopar.load_checkpoint(autopar.latest_checkpoint(folder), module, optimizer)
            print(f"offload {offload}: saved in {saved:.1f} s, loaded in {time.perf_counter() - start - saved:.1f} s")
        del module, optimizer


def faults(machine: Machine) -> None:
    """Print what is said when memory is out."""
    machine.start()
    module, inputs = _slice_model(machine)
    module = autopar.compile(module, machine.mesh("dp=1"), inputs, precision="bf16")
    if not machine.is_gpu:
        return print("needs a GPU")
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(int(free * 0.98), dtype=torch.uint8, device="cuda")
    try:
        train(module, inputs)
    except Exception as error:
        print(f"{type(error).__name__}: {error}"[:600])
    del held


PARTS = {
    "families": families, "attention": attention, "own_attention": own_attention,
    "ranks": ranks, "slice": slice_, "calibrated": calibrated,
    "waits": waits, "state": state, "faults": faults, "packed": packed, "verified": verified, "nccl": nccl,
}  # fmt: skip

if __name__ == "__main__":
    PARTS[sys.argv[1]](Machine("cpu" if "--fake" in sys.argv else "cuda"))
    if dist.is_initialized():
        dist.destroy_process_group()
