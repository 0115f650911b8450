"""Language models that read from left to right: dense ones, mixtures of experts, state spaces."""

from __future__ import annotations

from .build import VOCAB, Family, model_of, tokens

LLAMA = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
SPECIAL = dict(vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2)
EXPERTS = dict(moe_intermediate_size=32, num_experts_per_tok=2)
LATENT = dict(  # attention through low-rank keys and values
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    num_key_value_heads=4,
    head_dim=8,
)

# options over LLAMA
DENSE = {
    "llama": {},
    "arcee": {},
    "bitnet": {},
    "cohere": {},
    "cohere2": dict(layer_types=["full_attention"] * 2),
    "cwm": dict(layer_types=["full_attention"] * 2),
    "diffllama": {},
    "ernie4_5": {},
    "exaone4": dict(sliding_window=None, layer_types=["full_attention"] * 2),
    "falcon": dict(new_decoder_architecture=False),
    "gemma": dict(head_dim=8),
    "gemma2": dict(head_dim=8),
    "gemma3_text": dict(head_dim=8),
    "glm": dict(head_dim=8),
    "glm4": dict(head_dim=8),
    "gpt_neox": {},
    "granite": {},
    "helium": dict(head_dim=8),
    "internlm3": {},
    "ministral": dict(head_dim=8),
    "mistral": {},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "qwen2": {},
    "qwen3": dict(head_dim=8),
    "seed_oss": dict(head_dim=8),
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
    "vaultgemma": dict(head_dim=8),
}
MIXTURES = {
    "mixtral": dict(num_hidden_layers=1, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v2": LATENT
    | EXPERTS
    | dict(n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=2, topk_group=1),
    "deepseek_v3": LATENT
    | EXPERTS
    | dict(n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=2, topk_group=1),
    "dots1": EXPERTS
    | dict(n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1, head_dim=8),
    "ernie4_5_moe": EXPERTS | dict(moe_num_experts=4, moe_k=2, moe_num_shared_experts=1, moe_layer_start_index=1),
    "flex_olmo": dict(num_experts=4, num_experts_per_tok=2),
    "glm4_moe": EXPERTS
    | dict(n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1, head_dim=8),
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8),
    "granitemoe": dict(num_local_experts=4, num_experts_per_tok=2),
    "jetmoe": dict(num_local_experts=4, num_experts_per_tok=2, kv_channels=8),
    "minimax": dict(
        num_local_experts=4, num_experts_per_tok=2, head_dim=8, layer_types=["linear_attention", "full_attention"]
    ),
    "olmoe": dict(num_experts=4, num_experts_per_tok=2),
    "phimoe": dict(num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": EXPERTS | dict(num_experts=4, shared_expert_intermediate_size=32),
    "qwen3_moe": EXPERTS | dict(num_experts=4, head_dim=8),
}
# with option names of their own
OTHER = {
    "gpt2": dict(n_positions=64, n_embd=32, n_layer=2, n_head=4),
    "gpt_bigcode": dict(n_positions=64, n_embd=32, n_layer=2, n_head=4),
    "gpt_neo": dict(max_position_embeddings=64, hidden_size=32, num_layers=2, num_heads=4,
                    attention_types=[[["global", "local"], 1]],
                    window_size=8),
    "gptj": dict(n_positions=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=4),
    "codegen": dict(n_positions=64, n_ctx=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=4),
    "openai-gpt": dict(n_positions=64, n_embd=32, n_layer=2, n_head=4),
    "opt": dict(hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64,
                word_embed_proj_dim=32),
    "bloom": dict(hidden_size=32, n_layer=2, n_head=4),
    "biogpt": dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                   max_position_embeddings=64),
    "ctrl": dict(n_positions=64, n_embd=32, n_layer=2, n_head=4, dff=64),
    "dbrx": dict(d_model=32, n_heads=4, n_layers=2, max_seq_len=64,
                 attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=1e4),
                 ffn_config=dict(ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2),
                 rope_parameters=dict(rope_type="default", rope_theta=1e4)),
    "mpt": dict(d_model=32, n_heads=4, n_layers=2, max_seq_len=64),
    "xglm": dict(d_model=32, ffn_dim=64, num_layers=2, attention_heads=4, max_position_embeddings=64),
}  # fmt: skip
STATE_SPACES = {
    "mamba": dict(hidden_size=32, num_hidden_layers=2, state_size=4, time_step_rank=2, use_mambapy=False),
    "mamba2": dict(hidden_size=32, num_hidden_layers=2, state_size=4, num_heads=8, head_dim=8, n_groups=2,
                   chunk_size=8),
    "falcon_mamba": dict(hidden_size=32, num_hidden_layers=2, state_size=4, time_step_rank=2),
    "rwkv": dict(hidden_size=32, attention_hidden_size=32, num_hidden_layers=2, context_length=64),
    "jamba": dict(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
                  num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, mamba_d_state=4, mamba_dt_rank=2,
                  attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
                  use_mamba_kernels=False),
    "zamba": dict(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
                  attention_hidden_size=64, n_mamba_heads=2, mamba_d_state=4, mamba_dt_rank=2,
                  layers_block_type=["mamba", "hybrid"] * 2, use_mamba_kernels=False, num_key_value_heads=4),
    "bamba": LLAMA | dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=4, mamba_n_groups=1, mamba_chunk_size=8,
                          attn_layer_indices=[1]),
    "recurrent_gemma": LLAMA | dict(lru_width=32, attention_window_size=8, num_hidden_layers=3, head_dim=8),
    "lfm2": LLAMA | dict(layer_types=["conv", "full_attention"]),
    "qwen3_next": LLAMA | EXPERTS | dict(num_experts=4, head_dim=8, shared_expert_intermediate_size=32,
                                         linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
                                         linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"]),
}  # fmt: skip


def _family(name: str, kind: str, options: dict) -> Family:
    return Family(
        name, kind, lambda batch, seq: (model_of(name, "AutoModelForCausalLM", **options), tokens(batch, seq))
    )


FAMILIES = [
    *(_family(name, "decoder", LLAMA | options) for name, options in DENSE.items()),
    *(_family(name, "decoder", SPECIAL | options) for name, options in OTHER.items()),
    *(_family(name, "mixture of experts", LLAMA | options) for name, options in MIXTURES.items()),
    *(_family(name, "state space", SPECIAL | options) for name, options in STATE_SPACES.items()),
]
