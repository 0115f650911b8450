"""Fine-tune a Hugging Face model with LoRA in transformers' Trainer.

    torchrun --nproc_per_node 2 examples/trainer_lora.py

The model is a small Llama made from a config, so that nothing is downloaded; `from_pretrained` gives one of yours. Each
rank reads the samples of its own part of the batch, as the Trainer does anywhere, hence `inputs="local"`.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import autopar
from autopar.integrations.trainer import Trainer  # in place of transformers.Trainer
from autopar.models.corpus import batches

SAMPLES, SEQ, BATCH_OF_A_RANK = 256, 64, 4

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=1, num_attention_heads=4, use_cache=False,
    bos_token_id=0, eos_token_id=0,
)  # fmt: skip
model = LlamaForCausalLM(config)

text = next(batches(SAMPLES, SEQ))["input_ids"]
data = [{"input_ids": ids, "labels": ids} for ids in text]  # the model shifts the labels itself
example = torch.utils.data.default_collate(data[:BATCH_OF_A_RANK])

mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
lora = autopar.LoRA(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
compiled = autopar.compile(model, mesh, example, inputs="local", adapt=[lora])

arguments = TrainingArguments(
    "output/trainer", max_steps=40, per_device_train_batch_size=BATCH_OF_A_RANK, learning_rate=2e-2, logging_steps=10,
    eval_strategy="steps", eval_steps=20, per_device_eval_batch_size=BATCH_OF_A_RANK, save_strategy="no", use_cpu=True,
    report_to="none", disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(compiled, arguments, train_dataset=data[:-32], eval_dataset=data[-32:])
trainer.train()

compiled.save_adapter("output/adapter")  # what peft.PeftModel.from_pretrained reads
if dist.get_rank() == 0:
    trained = sum(p.numel() for p in compiled.parameters() if p.requires_grad)
    print(f"trained {trained:,} of {sum(p.numel() for p in compiled.parameters()):,} parameters")
    for entry in trainer.state.log_history:
        if "eval_loss" in entry:
            print(f"step {entry['step']}: evaluation loss {entry['eval_loss']:.4f}")
dist.destroy_process_group()
