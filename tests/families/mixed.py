"""Models of several kinds of input: images with texts."""

from __future__ import annotations

import torch

from .build import VOCAB, Family, integers, model_of

SIZE = 32
TEXT = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, projection_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
IMAGE = dict(
    image_size=SIZE,
    patch_size=8,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    projection_dim=16,
)
PAIRED = {
    "altclip": dict(text_config=TEXT | dict(project_dim=16)),
    "blip": dict(text_config=TEXT | dict(encoder_hidden_size=32), image_text_hidden_size=16),
    "chinese_clip": {},
    "clip": {},
    "siglip": {},
}


def _paired(name: str, options: dict) -> Family:
    def make(batch: int, seq: int):
        both = {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 16} | options
        model = model_of(name, "AutoModel", **both)
        inputs = {
            "input_ids": integers(100, batch, seq),
            "pixel_values": torch.randn(batch, 3, SIZE, SIZE),
            "return_loss": True,
        }
        return model, inputs

    return Family(name, "image and text", make)


def _vision_encoder_decoder(batch: int, seq: int):
    import transformers

    encoder = transformers.AutoConfig.for_model("vit", **IMAGE)
    decoder = transformers.AutoConfig.for_model(
        "gpt2", vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4
    )
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    from .build import without_randomness

    without_randomness(config)
    config.pad_token_id, config.decoder_start_token_id = 0, 1
    inputs = {"pixel_values": torch.randn(batch, 3, SIZE, SIZE), "labels": integers(100, batch, seq)}
    return transformers.VisionEncoderDecoderModel(config), inputs


FAMILIES = [
    *(_paired(name, options) for name, options in PAIRED.items()),
    Family("vision-encoder-decoder", "image and text", _vision_encoder_decoder),
]
