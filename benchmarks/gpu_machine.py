"""Share what the parts of benchmarks/gpu.py need: the device, how it is timed, models, distances."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from autopar import models
from autopar.ir.mesh import Mesh

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """`device`: "cuda", or "cpu" with tiny sizes."""

    device: str

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"

    def start(self, rank: int = 0, world: int = 1, store: str = "", backend: str = "") -> None:
        """Join a world of processes that share the device."""
        store = store or f"file://{tempfile.mkdtemp()}/store"
        backend = backend or ("cpu:gloo,cuda:nccl" if self.is_gpu else "gloo")
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=world)

    def mesh(self, text: str, device: str | None = None):
        mesh = Mesh.parse(text)
        return init_device_mesh(device or self.device, mesh.sizes, mesh_dim_names=mesh.names)

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], object], times: int = 5) -> float:
        """Return the median of `times` runs, after two others."""
        found = []
        for _ in range(times + 2):
            self.wait()
            start = time.perf_counter()
            run()
            self.wait()
            found.append(time.perf_counter() - start)
        return sorted(found[2:])[times // 2]

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Return the most that is allocated while `run` runs, 0 where nobody counts."""
        if not self.is_gpu:
            run()
            return 0
        torch.cuda.reset_peak_memory_stats()
        run()
        self.wait()
        return torch.cuda.max_memory_allocated()


def loss_of(output: object) -> Tensor:
    loss = getattr(output, "loss", None)
    loss = output["loss"] if loss is None and isinstance(output, dict) else loss
    return output.float().square().mean() if isinstance(output, Tensor) else loss


def train(module: nn.Module, inputs: dict) -> Tensor:
    loss = loss_of(module(**inputs))
    loss.backward()
    return loss.detach()


def on(device: str, inputs: dict) -> dict:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def detached(tensor: Tensor) -> Tensor:
    return whole(tensor.detach()).double().cpu()


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad).double().cpu() for name, p in module.named_parameters() if p.grad is not None}


def apart(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the relative distance of all tensors together, infinite if some are missing."""
    if found.keys() != wanted.keys():
        return float("inf")
    whole_norm = sum(float(g.square().sum()) for g in wanted.values()) ** 0.5
    return sum(float((found[n] - g).square().sum()) for n, g in wanted.items()) ** 0.5 / max(whole_norm, 1e-30)


FAMILIES = ("gpt2-tiny", "llama-tiny", "moe-tiny", "vit-tiny", "resnet-tiny", "unet-tiny", "mlp-tiny", "bert", "t5")


def family(name: str) -> tuple[nn.Module, dict]:
    torch.manual_seed(0)
    if name not in ("bert", "t5"):
        return models.build(name, batch=4, seq=32, device="cpu")
    from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

    ids = torch.randint(3, 96, (4, 32))
    if name == "t5":
        sizes = dict(vocab_size=96, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0)
        return T5ForConditionalGeneration(T5Config(**sizes)), {"input_ids": ids, "labels": ids}
    sizes = dict(vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
    config = BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertForMaskedLM(config), {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def gradients_after(module: nn.Module, inputs: dict) -> dict[str, Tensor]:
    train(module, inputs)
    return gradients(module)
