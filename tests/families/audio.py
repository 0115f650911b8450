"""Models of sound: raw waves, spectrograms, speech to text."""

from __future__ import annotations

import torch

from .build import LABELS, VOCAB, Family, classes, integers, model_of

SAMPLES = 400  # of a wave
WAVE = dict(
    vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, conv_dim=[16, 16],
    conv_kernel=[10, 4], conv_stride=[5, 4], num_feat_extract_layers=2, num_conv_pos_embeddings=16,
    num_conv_pos_embedding_groups=4, num_labels=LABELS, classifier_proj_size=16, apply_spec_augment=False,
    pad_token_id=0,
)  # fmt: skip
WAVES = {
    "wav2vec2": {},
    "wav2vec2-conformer": {},
    "hubert": {},
    "data2vec-audio": dict(conv_pos_kernel_size=5, num_conv_pos_embeddings=2),
    "sew": dict(squeeze_factor=2),
    "sew-d": dict(squeeze_factor=2, max_position_embeddings=64, position_buckets=8),
    "unispeech": {},
    "unispeech-sat": {},
    "wavlm": dict(num_buckets=16, max_bucket_distance=32),
}
WHISPER = dict(
    vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=16,
    max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    apply_spec_augment=False, suppress_tokens=None, begin_suppress_tokens=None,
)  # fmt: skip
SPECTROGRAM = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, patch_size=8, frequency_stride=8,
    time_stride=8,
    max_length=32, num_mel_bins=16, num_labels=LABELS,
)  # fmt: skip


def _wave(name: str, options: dict) -> Family:
    def make(batch: int, seq: int):
        model = model_of(name, "AutoModelForAudioClassification", **WAVE | options)
        return model, {"input_values": torch.randn(batch, SAMPLES)} | classes(batch)

    return Family(name, "audio", make)


def _whisper(batch: int, seq: int):
    sound = torch.randn(batch, WHISPER["num_mel_bins"], 2 * WHISPER["max_source_positions"])
    model = model_of("whisper", "AutoModelForSpeechSeq2Seq", **WHISPER)
    return model, {"input_features": sound, "labels": integers(100, batch, seq)}


def _spectrogram(batch: int, seq: int):
    model = model_of("audio-spectrogram-transformer", "AutoModelForAudioClassification", **SPECTROGRAM)
    return model, {
        "input_values": torch.randn(batch, SPECTROGRAM["max_length"], SPECTROGRAM["num_mel_bins"])
    } | classes(batch)


FAMILIES = [
    *(_wave(name, options) for name, options in WAVES.items()),
    Family("whisper", "audio", _whisper),
    Family("audio-spectrogram-transformer", "audio", _spectrogram),
]
