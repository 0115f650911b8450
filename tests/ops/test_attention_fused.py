"""The kernels of attention that caps scores, drops weights or wants the gradient of what is added.

What they give, where they are taken, and what they hold. Without a GPU they run in Triton's interpreter, and are
compiled to machine code.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import types

import pytest
import torch

from autopar.ops import attention, attention_fused, attention_workspace, autopar, workspace
from autopar.ops.attention_dropout import WeightDropout
from autopar.ops.counter_rng import contiguous_strides

from ..helpers.fake_allocations import counted
from ..helpers.triton_alone import NEEDS_TRITON, run_alone
from .test_attention_gpu import BF16, FP32, seq_major
from .test_workspace import check

STATE, P, STREAM = torch.tensor([11, 4]), 0.3, 6
MASKS = ["none", "causal", "later queries", "window", "padding", "documents", "added", "lowest", "learned",
         "learned by head"]  # fmt: skip
SIZES = [(64, 64), (128, 128), (256, 256), (80, 80), (96, 64), (20, 24)]  # of a head of queries and of values
SHARED = {80: 99 * 1024, 90: 227 * 1024}  # bytes of shared memory; those of 8.6 and 8.9 are the least of 8.x


def problem(mask: str, b: int, heads: int, kv_heads: int, rows: int, keys: int, sizes, dtype, device="cpu"):
    """Return q, k, v, and what the op takes from `mask` to `window`."""
    q, k, v = (
        torch.randn(b, h, n, d)
        for h, n, d in zip((heads, kv_heads, kv_heads), (rows, keys, keys), (*sizes[:1], *sizes))
    )
    q, k, v = (x.to(device, dtype).requires_grad_() for x in (q, k, v))
    first = keys - rows if mask == "later queries" else 0
    added = {
        "padding": (torch.arange(keys) < torch.randint(1, keys + 1, (b, 1))).view(b, 1, 1, keys),
        "added": torch.randn(b, 1, rows, keys),
        "learned": torch.randn(b, heads, rows, keys),
        "learned by head": torch.randn(1, heads, rows, keys),
    }.get(mask)
    if mask == "lowest":  # numbers that scores are lost in close some keys, and all of the first sample
        added = torch.zeros(b, 1, 1, keys).masked_fill(torch.rand(b, 1, 1, keys) < 0.5, torch.finfo(FP32).min)
        added[0] = torch.finfo(FP32).min
        return (q, k, v), added.to(device), False, 0, None, 0
    if added is not None:
        added = added.to(device) if added.dtype == torch.bool else added.to(device, dtype)
    if mask.startswith("learned"):
        added.requires_grad_()
    ids = torch.randint(0, 2, (b, keys)).cumsum(-1).to(device) if mask == "documents" else None
    causal = mask in ("causal", "later queries", "window", "documents")
    return (q, k, v), added, causal, first, ids, max(1, rows // 3) if mask == "window" else 0


def attended(qkv, added, causal, first, ids, window, softcap, drops):
    """Return the output and every gradient."""
    b, h, rows, _ = qkv[0].shape
    keys = qkv[1].shape[2]
    strides = contiguous_strides((b, h, first + rows, keys))
    dropout = (STATE, P, STREAM, first * strides[2], strides) if drops else (None, 0.0, 0, 0, None)
    documents = (None, None) if ids is None else (ids[:, first : first + rows], ids)
    as_softmax = added is not None and added.dtype in (FP32, torch.float64)  # only lowest numbers make a difference
    rest = 0.3, first, 0, 0, *documents, None, softcap, as_softmax, *dropout, 0, window
    out, _ = autopar.attention(*qkv, added, causal, *rest)
    inputs = [*qkv, *([added] if added is not None and added.requires_grad else [])]
    torch.manual_seed(rows)
    grad = torch.randn(out.shape).to(out)
    return out, *torch.autograd.grad(out, inputs, grad)


def wide(x):
    return x if x is None or not x.is_floating_point() else x.detach().double().requires_grad_(x.requires_grad)


def compare(lengths, count: int, dtype=torch.float16, device: str = "cpu") -> None:
    """Compare random cases with the blocks in fp64 on the same numbers, to some roundings of the narrow type."""
    seed = random.randrange(10**6)
    print("seed", seed)
    random.seed(seed), torch.manual_seed(seed)
    with_mask = [(mask, softcap, drops) for mask in MASKS for softcap in (0.0, 5.0) for drops in (False, True)
                 if softcap or drops or mask.startswith("learned")]  # fmt: skip
    cases = [*itertools.product(with_mask, SIZES, lengths, ((2, 2), (4, 2), (4, 1)))]
    for (mask, softcap, drops), sizes, length, heads in random.sample(cases, min(count, len(cases))):
        keys = length + random.choice((0, 4, 7)) if mask in ("none", "padding", "later queries") else length
        qkv, added, *rest = problem(mask, 2, *heads, length, keys, sizes, dtype, device)
        found = attended(qkv, added, *rest, softcap, drops)
        wanted = attended([wide(x) for x in qkv], wide(added), *rest, softcap, drops)
        for mine, theirs in zip(found, wanted, strict=True):
            least = (sizes[1] * theirs.numel()) ** 0.5 / keys  # with one key scores have no gradient
            error = (mine.double() - theirs).norm() / theirs.norm().clamp(min=least)
            assert mine.dtype == dtype and error < 4 * torch.finfo(dtype).eps, (
                f"{error:.1e}: {mask}, softcap {softcap}, drops {drops}, {sizes}, {length}, {keys}, {heads}"
            )


def interpreted(lengths, count: int) -> None:
    """Compare as above in this process, whose kernels Triton interprets, on the CPU, but for bf16, which it gets
    wrong."""
    served = []

    def is_there(device) -> bool:
        served.append(device)
        return True

    attention_fused.is_there = is_there
    compare(lengths, count)
    assert served


@NEEDS_TRITON
@pytest.mark.parametrize("lengths, count", [((1, 100), 20), pytest.param((130, 300), 30, marks=pytest.mark.slow)])
def test_the_kernels_in_tritons_interpreter(lengths, count):
    program = f"from tests.ops.test_attention_fused import interpreted; interpreted({lengths}, {count})"
    run_alone(program, TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_the_kernels_on_a_gpu(dtype):
    compare((1, 100, 300, 2048), 200, dtype, "cuda")


def compiled(name: str, width: int, capability: int, dtype: str = "bf16", **flags):
    """Return a kernel as Triton compiles it for a GPU that need not be there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from autopar.ops.attention_added_kernel import added_kernel
    from autopar.ops.attention_backward_kernel import keys_kernel, queries_kernel
    from autopar.ops.attention_forward_kernel import forward_kernel

    kernel, tiles = {
        "forward": (forward_kernel, attention_fused.MASKED_FORWARD if flags["MASKED"] else attention_fused.FORWARD),
        "queries": (queries_kernel, attention_fused.QUERIES),
        "keys": (keys_kernel, attention_fused.KEYS),
        "added": (added_kernel, attention_fused.ADDED),
    }[name]
    tile, number = tiles[width], ("i32",) * 3
    constants = {"WIDTH": width, "VALUE_WIDTH": width, "DIM": width, "VALUE_DIM": width} | flags
    constants |= {"ROWS": tile.rows, "COLUMNS": tile.columns}
    constants = {k: v for k, v in constants.items() if k in kernel.arg_names}
    masks = {"mask", "dmask"}
    told = {
        "steps": attention_fused.Steps(
            *(number + number[:1] if f in masks else number for f in attention_fused.Steps._fields)
        ),
        "problem": attention_fused.Problem(*["i32"] * 5, "fp32", "fp32"),
        "drops": attention_fused.Drops("i64", "i64", ("i64",) * 3, "i32", "fp32"),
    }
    told |= dict.fromkeys(("grad", "q", "k", "v", "out", "mask", "dq", "dk", "dv"), f"*{dtype}")
    told |= dict.fromkeys(("lse", "delta", "dmask"), "*fp32") | dict.fromkeys(constants, "constexpr")
    signature = {name: told.get(name, "i32") for name in kernel.arg_names}
    pointers = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(signature.values()) if t[0] == "*"}
    at = kernel.arg_names.index("steps")
    strides = [(at, i, j) for i, of_one in enumerate(told["steps"]) for j in range(len(of_one))]
    pointers |= dict.fromkeys(strides, [["tt.divisibility", 16]])  # as those of heads in memory are
    source = ASTSource(kernel, signature, constexprs=constants, attrs=pointers)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def compile_some(capability: int, count: int) -> None:
    """Compile random kernels to machine code, with tensor cores and no more shared memory than a multiprocessor has."""
    seed = random.randrange(10**6)
    print("seed", seed)
    kinds = [(1, 0, 0), (0, 1, 0), (1, 1, 1), (0, 0, 1)]  # drops, caps, masked
    cases = [*itertools.product(("forward", "queries", "keys", "added"), (64, 128, 256), kinds)]
    for name, width, (drops, caps, masked) in random.Random(seed).sample(cases, count):
        flags = {"CAUSAL": True, "DROPS": bool(drops), "ALIGNED": False, "CAPS": bool(caps), "MASKED": bool(masked)}
        made = compiled(name, width, capability, **flags)
        assert made.asm["cubin"] and "mma" in made.asm["ptx"], (name, width, flags)
        assert made.metadata.shared <= SHARED[capability], (name, width, flags, made.metadata.shared)


@NEEDS_TRITON
@pytest.mark.parametrize("count", [6, pytest.param(48, marks=pytest.mark.slow)])
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_for_gpus(capability, count):
    run_alone(f"from tests.ops.test_attention_fused import compile_some; compile_some({capability}, {count})")


def test_what_the_kernels_serve(monkeypatch):
    """Half precision, heads up to 256, what is added to all queries and keys; the rest runs in blocks."""
    monkeypatch.setattr(attention_fused, "is_there", lambda device: True)
    dropout = WeightDropout(3, 0, (8, 4, 2, 1), 2**14)

    def form(dtype=BF16, width=64, softcap=0.0, drops=False, dmask=None, mask=None) -> str:
        q = torch.empty(2, 4, 100, width, dtype=dtype, device="meta")
        gradient = None if dmask is None else torch.empty(dmask, device="meta")
        form_of = attention._form_of(softcap, dropout if drops else None, gradient)
        return form_of(q, q, q, mask, True).name

    assert form(softcap=5.0) == form(drops=True) == form(torch.float16, 256, drops=True) == "fused"
    assert form(dmask=(1, 4, 100, 100)) == form(dmask=(100, 100)) == "fused"
    assert form(FP32, drops=True) == form(width=264, drops=True) == "blocks"
    assert form(dmask=(1, 4, 1, 100)) == form(dmask=(2, 1, 100, 1)) == form(dmask=(100,)) == "blocks"
    assert form() == "blocks"  # a kernel of torch's, had the tensors a device


@pytest.fixture
def without_kernels(monkeypatch):
    """Let launches do nothing, on fake tensors of a GPU."""
    nothing = type("Kernel", (), {"__getitem__": lambda self, grid: lambda *_, **__: None})()
    for module, names in (
        ("forward", ("forward_kernel",)), ("backward", ("queries_kernel", "keys_kernel")), ("added", ("added_kernel",)),
    ):  # fmt: skip
        stand_in = types.ModuleType(module)
        stand_in.__dict__.update(dict.fromkeys(names, nothing))
        monkeypatch.setitem(sys.modules, f"autopar.ops.attention_{module}_kernel", stand_in)
    monkeypatch.setattr(attention_fused, "is_there", lambda device: True)
    monkeypatch.setattr(
        torch.cuda, "device_of", lambda tensor: contextlib.nullcontext()
    )  # which a build for CPUs has not
    monkeypatch.setattr(attention, "weight_dropout", lambda state, p, _, start, strides, *__: (
        None if strides is None else WeightDropout(3, start, tuple(strides), 2**14)
    ))  # fmt: skip


@pytest.mark.parametrize("of_mask", [False, True])
@pytest.mark.parametrize("drops, softcap, mask", [
    (True, 0.0, None), (False, 5.0, None), (True, 0.0, torch.bool), (False, 0.0, BF16),
])  # fmt: skip
def test_what_they_hold(without_kernels, drops, softcap, mask, of_mask):
    """A number a query, and what is made of a mask of bools: nothing of all pairs."""
    b, h, h_kv, s, d = 2, 8, 2, 2048, 64
    dropout = (None, 0.3, 6, 0, contiguous_strides((b, h, s, s))) if drops else ()
    if of_mask and mask != BF16 or not (of_mask or drops or softcap):
        return

    def tensors():
        q, k, v = (seq_major(b, n, s, d, BF16) for n in (h, h_kv, h_kv))
        added = None if mask is None else torch.empty(1, h if of_mask else 1, s, s, dtype=mask, device="cuda")
        return q, k, v, added

    tail = (True, None, 0, 0, 0, None, None)
    if not of_mask:
        results, given, count = counted(
            lambda *x: attention.attention._init_fn(*x, *tail, None, softcap, False, *dropout), lambda: [*tensors()]
        )
        said = workspace.workspace_bytes(autopar.attention.default, *given, *tail, None, softcap, False, *dropout)
        check(said, results, count)
    op, body = (
        (autopar.attention_bias_bw, attention.attention_bias_bw)
        if of_mask
        else (autopar.attention_bw, attention.attention_bw)
    )

    def of_backward():
        q, k, v, added = tensors()
        return [torch.empty_like(q), q, k, v, torch.empty_like(q), torch.empty(b, h, s, device="cuda"), added]

    results, given, count = counted(lambda *x: body._init_fn(*x, *tail, True, softcap, *dropout), of_backward)
    check(workspace.workspace_bytes(op.default, *given, *tail, True, softcap, *dropout), results, count)
    assert attention_workspace.attention_bw(*given, *tail, True, 5.0) < b * h * s * s
