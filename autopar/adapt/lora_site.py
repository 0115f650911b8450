"""One adapted parameter: what its adapter is called, how it is shaped, and how it is found again.

Of a module M the adapter's parameters are M.lora_A.weight and M.lora_B.weight, of an embedding M.lora_embedding_A and
M.lora_embedding_B, with DoRA M.lora_magnitude_vector; of a second adapted parameter of one module
M.base_layer.lora_A.weight and so on: the names that PEFT saves them under.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from .attach import marked

SITES = "lora_sites"  # attribute of an adapted module
LORA_A, LORA_B = "lora_A", "lora_B"  # the modules of the two factors


@dataclass(frozen=True)
class LoraSite:
    """One adapted parameter of a module. `kind`: "linear", "embedding" or "parameter" (of any use, such as stacked
    experts); `is_transposed`: the parameter is (i, o), or (experts, i, o). `prefix` stands before the names of its
    adapter."""

    parameter: str
    kind: str
    is_transposed: bool
    r: int
    scaling: float
    dropout: float
    use_dora: bool
    prefix: str = ""

    @property
    def names(self) -> tuple[str, str]:
        """Return the names of A and B in the module."""
        if self.kind == "embedding":
            return "lora_embedding_A", "lora_embedding_B"
        return f"{self.prefix}{LORA_A}.weight", f"{self.prefix}{LORA_B}.weight"

    def shapes(self, weight: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of A and B for a parameter of this shape."""
        experts = weight[0] if len(weight) == 3 else 1
        o, i = weight[-2:] if not self.is_transposed else reversed(weight[-2:])
        return (self.r * experts, i), (o, self.r * experts)


MAGNITUDE = "lora_magnitude_vector"


def is_factor(name: str) -> bool:
    """Return whether a parameter, or the module that an op belongs to, is one of the thin matrices."""
    return any(part in (LORA_A, LORA_B, "lora_embedding_A", "lora_embedding_B") for part in name.split(".")[-2:])


def sites_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, LoraSite]]:
    """Iterate over (path, module, site) of every adapted parameter."""
    return marked(model, SITES)
