"""Find the files of a Hugging Face model on this machine: a folder, or the snapshot that `hf download` left in the
cache. Nothing is fetched."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import ModelError

PREFIX = "hf:"


def is_hub(text: str) -> bool:
    """Return whether `text` names a Hugging Face model: hf:..., a path, or ORG/NAME, but no function of a file."""
    return ".py:" not in text and (text.startswith(PREFIX) or "/" in text or text in (".", ".."))


def folder_of(text: str) -> Path:
    """Return the path that `text` names, which may not exist, or for ORG/NAME the folder of its snapshot. Raises
    ModelError if ORG/NAME is neither a folder here nor in the cache."""
    name = text.removeprefix(PREFIX)
    path = Path(name).expanduser()
    if path.exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        return path
    cache = _cache()
    repository = cache / f"models--{name.replace('/', '--')}"
    main = repository / "refs" / "main"
    snapshots = [repository / "snapshots" / main.read_text().strip()] if main.is_file() else []
    snapshots += sorted(repository.glob("snapshots/*"))
    for snapshot in snapshots:
        if (snapshot / "config.json").is_file():
            return snapshot
    raise ModelError(
        f"nothing is downloaded, and {name} is neither a folder here nor in the cache of Hugging Face ({cache})",
        fix=f"run `hf download {name}` first (config.json alone is enough to plan), or give a folder with a "
        f"config.json: --model hf:FOLDER",
    )


def files_of(text: str) -> Path | None:
    """Return the folder of a Hugging Face model, in which its weights and tokenizer may be; None for any other text."""
    path = folder_of(text) if is_hub(text) else None
    return path.parent if path is not None and path.is_file() else path


def _cache() -> Path:
    """Return the folder in which huggingface_hub keeps snapshots, by the environment variables that it reads."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
