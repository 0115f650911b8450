"""`hf:PATH`: a Hugging Face model from its config.json alone, with random weights."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError, nearest
from .inputs import floats, fresh_weights, integers
from .sizes import bounded, require_few_layers

LONGEST_BYTES = 16 << 20  # of a config.json


def build_from_config(
    path: str | Path, batch: int, seq: int, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Build the model that config.json describes and keyword inputs for it, labels included if it takes any.

    The class is the one named under "architectures", else the causal language model of that model type; code that comes
    with a config is never run. Weights are of `dtype` whatever the config says; dropout stays as configured. Raises
    ModelError if the file is missing or is not a config, if transformers is not installed, does not know the type or
    cannot make a model of it, and if `seq` exceeds the model's positions."""
    try:
        import transformers
    except ImportError as error:
        raise ModelError("hf: models need the package transformers", fix="pip install transformers") from error
    config = _read_config(path, transformers)
    check_length(config, seq)
    with _refused(path), bounded():
        with fresh_weights(dtype, device, seed):
            model = _model(config, path, dtype, transformers)
        return model, example_inputs(model, batch, seq, dtype, device, seed)


def check_length(config, seq: int) -> None:
    """Raise ModelError if a config's model has fewer positions than `seq`."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if isinstance(longest, int) and longest < seq:
        raise ModelError(
            f"seq {seq} is longer than the model's {longest}", fix=f"set max_position_embeddings to {seq} in the config"
        )


@contextmanager
def _refused(path: str | Path) -> Iterator[None]:
    """Turn whatever transformers says of a config's values inside into a ModelError."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelError(
            f"transformers makes no model of the config of {path}: {reason:.300}", fix="see the values in it"
        ) from error


def _read_config(path: str | Path, transformers):
    file = Path(path).expanduser()
    file = file / "config.json" if file.is_dir() else file
    try:
        if file.stat().st_size > LONGEST_BYTES:
            raise ModelError(f"{file} has {file.stat().st_size:,} bytes", fix="give the config.json of a model")
        described = json.loads(file.read_text())
        model_type = described.pop("model_type")
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}", fix="give a folder with a config.json") from error
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelError(f"{file} has no model_type", fix="give the config.json of a Hugging Face model") from error
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if not isinstance(model_type, str) or model_type not in known:
        raise ModelError(
            f"transformers {transformers.__version__} does not know the model type {model_type!r}",
            fix=f"use {nearest(str(model_type), known.keys())}, or another release of transformers",
        )
    _check_depth(described)
    with _refused(path):
        return known[model_type].from_dict(described)


def _check_depth(described: dict) -> None:
    """Raise ModelError for a config, or one inside of it, with more layers than anybody waits for."""
    for key, value in described.items():
        if isinstance(value, dict):
            _check_depth(value)
        elif key.endswith(("layer", "layers")) and isinstance(value, int):
            require_few_layers(key, value)


def _model(config, path: str | Path, dtype: torch.dtype, transformers) -> nn.Module:
    named = getattr(config, "architectures", None) or ()
    for name in [named] if isinstance(named, str) else named:
        kind: Any = getattr(transformers, name, None)
        if _is_model(kind, transformers.PreTrainedModel):
            return kind(config)
        if kind is not None:
            raise ModelError(
                f"{path} names {name!r} under architectures, which is no model of transformers",
                fix="name the class of the model, such as GPT2LMHeadModel",
            )
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"{path} names no class that transformers has, and {config.model_type} has no causal language model",
            fix='name one under "architectures" in the config',
        )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)


def _is_model(kind: object, base: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, base) and getattr(kind, "config_class", None) is not None


def example_inputs(
    model: nn.Module, batch: int, seq: int, dtype: torch.dtype, device: torch.device, seed: int
) -> dict[str, Tensor]:
    """Return keyword inputs of a model of transformers (global sizes), with labels if it takes any."""
    config, kind = model.config, type(model).__name__
    if model.main_input_name == "pixel_values":
        size = getattr(config, "image_size", None) or 224
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        shape = (batch, getattr(config, "num_channels", 3), height, width)
        inputs = {"pixel_values": floats(shape, dtype, device, seed)}
    else:
        vocab = config.get_text_config().vocab_size
        inputs = {"input_ids": integers((batch, seq), vocab, device, seed)}
    accepted = inspect.signature(model.forward).parameters
    if kind.endswith("ForQuestionAnswering"):
        inputs["start_positions"] = integers((batch,), seq, device, seed + 1)
        inputs["end_positions"] = integers((batch,), seq, device, seed + 2)
    elif "labels" not in accepted:
        pass
    elif kind.endswith(("ForSequenceClassification", "ForImageClassification")):
        inputs["labels"] = integers((batch,), config.num_labels, device, seed + 1)
    elif kind.endswith("ForTokenClassification"):
        inputs["labels"] = integers((batch, seq), config.num_labels, device, seed + 1)
    elif "input_ids" in inputs:
        inputs["labels"] = inputs["input_ids"].clone()
    return inputs
