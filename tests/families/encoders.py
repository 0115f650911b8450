"""Models that read a whole text: encoders that classify it or fill in words, and encoders with a decoder."""

from __future__ import annotations

from .build import LABELS, VOCAB, Family, classes, model_of, tokens

BERT = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, num_labels=LABELS, pad_token_id=0,
)  # fmt: skip

ENCODERS = {
    "bert": dict(num_hidden_layers=1),
    "albert": dict(embedding_size=16),
    "big_bird": dict(attention_type="original_full"),
    "camembert": {},
    "canine": {},
    "convbert": dict(embedding_size=32, head_ratio=2, conv_kernel_size=3, num_groups=1),
    "data2vec-text": {},
    "deberta": dict(relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=16),
    "deberta-v2": dict(relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8,
                       max_relative_positions=16),
    "distilbert": dict(dim=32, hidden_dim=64, n_layers=2, n_heads=4),
    "electra": dict(embedding_size=16),
    "ernie": {},
    "esm": dict(position_embedding_type="rotary", mask_token_id=5),
    "eurobert": dict(num_key_value_heads=2, head_dim=8),
    "flaubert": dict(emb_dim=32, n_layers=2, n_heads=4, n_words=VOCAB),
    "fnet": dict(tpu_short_seq_length=16),
    "ibert": {},
    "layoutlm": {},
    "longformer": dict(attention_window=8),
    "luke": dict(entity_vocab_size=16, entity_emb_size=16),
    "megatron-bert": {},
    "mobilebert": dict(embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16),
    "modernbert": dict(sep_token_id=3, cls_token_id=4, eos_token_id=2, bos_token_id=1),
    "mpnet": {},
    "mra": dict(approx_mode="full", block_per_row=1),
    "nystromformer": dict(num_landmarks=4, segment_means_seq_len=16),
    "rembert": dict(input_embedding_size=16, output_embedding_size=16),
    "roberta": {},
    "roberta-prelayernorm": {},
    "roc_bert": dict(pronunciation_vocab_size=VOCAB, shape_vocab_size=VOCAB),
    "roformer": dict(embedding_size=32),
    "squeezebert": dict(embedding_size=32),
    "xlm": dict(emb_dim=32, n_layers=2, n_heads=4, n_words=VOCAB),
    "xlm-roberta": {},
    "xmod": dict(default_language="en_XX", languages=["en_XX"]),
    "yoso": dict(use_expectation=True, num_hash=2),
}  # fmt: skip

# with option names of their own
OTHER = {
    "funnel": dict(
        vocab_size=VOCAB,
        block_sizes=[1, 1],
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=64,
        num_decoder_layers=1,
        num_labels=LABELS,
    ),
    "xlnet": dict(vocab_size=VOCAB, d_model=32, n_layer=2, n_head=4, d_inner=64, num_labels=LABELS),
}
BART = dict(
    vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
)  # fmt: skip
T5 = dict(
    vocab_size=VOCAB,
    d_model=32,
    d_kv=8,
    d_ff=64,
    num_layers=2,
    num_decoder_layers=2,
    num_heads=4,
    decoder_start_token_id=0,
)

ENCODER_DECODERS = {
    "t5": T5 | dict(num_layers=1, num_decoder_layers=1),
    "mt5": T5,
    "umt5": T5,
    "longt5": T5 | dict(local_radius=4, global_block_size=4),
    "switch_transformers": T5 | dict(num_experts=4, expert_capacity=16, num_sparse_encoder_layers=1,
                                     num_sparse_decoder_layers=1),
    "bart": BART,
    "bigbird_pegasus": BART | dict(attention_type="original_full"),
    "blenderbot": BART,
    "blenderbot-small": BART,
    "led": BART | dict(max_encoder_position_embeddings=64, max_decoder_position_embeddings=64, attention_window=8),
    "m2m_100": BART,
    "marian": BART | dict(decoder_vocab_size=VOCAB),
    "mbart": BART,
    "mvp": BART,
    "pegasus": BART,
    "pegasus_x": BART | dict(num_global_tokens=4, block_size=8),
    "plbart": BART,
    "prophetnet": dict(vocab_size=VOCAB, hidden_size=32, encoder_ffn_dim=64, decoder_ffn_dim=64, num_encoder_layers=2,
                       num_decoder_layers=2, num_encoder_attention_heads=4, num_decoder_attention_heads=4,
                       max_position_embeddings=64,
                       ngram=2, num_buckets=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                       decoder_start_token_id=1),
    "nllb-moe": BART | dict(num_experts=4, expert_capacity=16, encoder_sparse_step=2, decoder_sparse_step=2),
}  # fmt: skip


def _encoder(name: str, options: dict) -> Family:
    def make(batch: int, seq: int):
        ids = {"input_ids": tokens(batch, seq)["input_ids"]}
        return model_of(name, "AutoModelForSequenceClassification", **options), ids | classes(batch)

    return Family(name, "encoder", make)


def _encoder_decoder(name: str, options: dict) -> Family:
    return Family(
        name,
        "encoder-decoder",
        lambda batch, seq: (model_of(name, "AutoModelForSeq2SeqLM", **options), tokens(batch, seq)),
    )


FAMILIES = [
    *(_encoder(name, BERT | options) for name, options in ENCODERS.items()),
    *(_encoder(name, options) for name, options in OTHER.items()),
    *(_encoder_decoder(name, options) for name, options in ENCODER_DECODERS.items()),
]
