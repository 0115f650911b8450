"""Fine-tune the model of a Hugging Face folder with QLoRA: its linear layers stay in 4 bits, adapters train.

    torchrun --nproc_per_node 2 examples/qlora.py FOLDER

The model is built on the meta device and each rank reads from the folder what it keeps, a tensor at a time, so that the
weights are nowhere whole. Without FOLDER a small Llama is written to output/small-llama first; nothing is downloaded.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import autopar
from autopar.models.corpus import batches

SEQ, BATCH, STEPS = 32, 4, 12


def make_folder(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=1024, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=4, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
is_first = dist.get_rank() == 0
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "output/small-llama")
if is_first and len(sys.argv) == 1:
    make_folder(folder)
dist.barrier()  # the folder is there

with torch.device("meta"):  # shapes alone
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, use_cache=False))
qlora = autopar.QLoRA(r=8, target_modules="all-linear", quant_type="nf4", double_quant=True)
stream = batches(BATCH, SEQ)
compiled = autopar.compile(model, mesh, next(stream), weights=folder, adapt=[qlora], strategy="fsdp")

trained = [p for p in compiled.parameters() if p.requires_grad]  # the adapters
optimizer = torch.optim.AdamW(trained, lr=5e-3)
for step in range(1, STEPS + 1):
    loss = compiled(**next(stream)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if is_first:
        print(f"step {step}: loss {loss.item():.4f}")

compiled.save_adapter("output/qlora-adapter")  # for peft.PeftModel.from_pretrained on the folder's model
if is_first:
    whole = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    mine = compiled.plan.memory["parameters"]
    print(f"weights in the folder: {whole / 2**20:.2f} MiB, on a rank: {mine / 2**20:.2f} MiB")
dist.destroy_process_group()
