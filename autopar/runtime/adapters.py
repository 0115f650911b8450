"""The LoRA adapters of a compiled model: saved and loaded, several of them switched, merged into the base and out of
it.

The words are PEFT's. An adapter that is not active is a rank's parts of its values, kept beside the parameters, which
hold those of the active one. While adapters are merged or disabled the model runs graphs without them, which are
compiled when first called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from ..adapt.lora import LoRA
from ..adapt.lora_site import MAGNITUDE, LoraSite, sites_of
from ..errors import AdaptError, nearest
from ..ir.layout import local_ranges
from ..processes import agree
from ..storage.adapter_folder import file_names, load_adapter, save_adapter
from ..storage.gather import gather_everywhere
from ..storage.model_folder import local, whole
from ..storage.tensor_file import cut

FIRST = "default"


class Adapters:
    """Those of a ParallelModule with this configuration. `switch(on)` tells the module which graphs to run."""

    def __init__(self, module: nn.Module, config: LoRA, switch: Callable[[bool], None]):
        self.module, self.config, self.switch = module, config, switch
        self.active, self.loaded, self.merged, self.disabled_by = FIRST, {FIRST: None}, False, 0
        self.trained = tuple(
            file_names(module)
        )  # what an adapter is, in all stages, also if some of it is frozen later
        self.sites = [(path, site) for path, _, site in sites_of(module._source)]
        self._lengths: dict[str, Tensor] = {}  # what the rows of a merged DoRA layer were multiplied by

    @property
    def names(self) -> list[str]:
        """Return the names of all loaded adapters, the active one among them."""
        return list(self.loaded)

    def _local(self, name: str) -> Tensor:
        return local(self.module.get_parameter(name))

    def save(self, folder: str | Path) -> None:
        """Write the active adapter to a folder. Raises AdaptError while it is merged. All ranks call this together."""
        self.refuse_merged("save it")
        save_adapter(self.module, self.config, self.trained, folder)

    def load(self, folder: str | Path, name: str | None) -> None:
        """Load an adapter into the active one, or as another one called `name` that `activate` makes active. Raises
        AdaptError while an adapter is merged. All ranks call this together."""
        self.refuse_merged("load another one")
        parts = agree.everywhere(lambda: load_adapter(self.module, self.config, self.trained, folder))
        if name is None or name == self.active:
            self._write(parts)
        else:
            self.loaded[name] = parts

    def activate(self, name: str) -> None:
        """Make the adapter called `name` the active one. Raises AdaptError if it is not there, or while an adapter is
        merged."""
        self.refuse_merged("change it")
        if name not in self.loaded:
            raise AdaptError(
                f"there is no adapter {name!r}", fix=f"one of {nearest(name, self.loaded)}, or load_adapter first"
            )
        if name != self.active:
            replaced = ({*self.trained} - {*self.module.elsewhere}) | {*self.loaded[name]}
            self.loaded[self.active] = {n: self._local(n).clone() for n in replaced}
            self._write(self.loaded[name])
            self.loaded[name], self.active = None, name

    def _write(self, parts: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, part in parts.items():
                self._local(name).copy_(part)

    def refuse_merged(self, wish: str) -> None:
        """Raise AdaptError while the adapter is part of the base, where its values would count twice. `wish`: what the
        user wants to do, for the message."""
        if self.merged:
            raise AdaptError("the adapter is merged into the base", fix=f"unmerge_adapter() before you {wish}")

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Let the model compute without adapters inside; what trains besides, such as modules_to_save, stays as it
        is."""
        self.refuse_merged("disable it")
        self.disabled_by += 1
        self.switch(False)
        try:
            yield
        finally:
            self.disabled_by -= 1
            self.switch(not self.disabled_by)

    def merge(self) -> None:
        """Add the active adapter to the base's parameters, each rank to its parts, in place. Raises AdaptError for a
        quantized base, for a weight that another layer reads too, and while the adapter is disabled."""
        if packed := [
            n for n in (f"{path}.{site.parameter}" for path, site in self.sites) if n in self.module.quantized_names
        ]:
            raise AdaptError(
                f"{packed[0]} is quantized, and the sum would have to be rounded to its code book",
                fix="save_adapter(folder), then load and merge it on a base that is not quantized",
            )
        if self.disabled_by:
            raise AdaptError("the adapter is disabled", fix="merge it outside of disable_adapter()")
        if shared := self._shared():
            raise AdaptError(
                f"{shared[0]} is shared with another layer, which the merged adapter would change too",
                fix="save_adapter(folder), and keep the adapter beside its base",
            )
        if not self.merged:
            for path, site in self.sites:
                self._change(path, site, 1.0)
            self.merged = True
            self.switch(False)

    def unmerge(self) -> None:
        """Take the merged adapter out of the base's parameters again, up to rounding."""
        if self.merged:
            for path, site in self.sites:
                self._change(path, site, -1.0)
            self.merged = False
            self.switch(True)

    def _shared(self) -> list[str]:
        """Return the names of adapted weights that several layers read."""
        names = self.module._forms.all_names
        held = Counter(first for t in self.module._forms.tables for first in t.parameters.values() if first is not None)
        added = [f"{path}.{site.parameter}" for path, site in self.sites if site.kind != "parameter"]
        return [name for name in added if held[names[name]] > 1]

    @torch.no_grad()
    def _change(self, path: str, site: LoraSite, sign: float) -> None:
        """Add an adapter to its weight (`sign` 1) or take it out again (-1), on the stages that have the weight; the
        adapter itself may be on a later stage."""
        name = f"{path}.{site.parameter}"
        pp_ranks = self.module.pp_ranks_of(name)
        a, b = (whole(self.module, f"{path}.{n}", pp_ranks) for n in site.names)
        magnitude = whole(self.module, f"{path}.{MAGNITUDE}", pp_ranks) if site.use_dora and sign > 0 else None
        if name in self.module.elsewhere:
            return
        weight, shape = self._local(name), tuple(self.module.get_parameter(name).shape)
        layout, stage = self.module.layouts[name], self.module.stage_mesh
        ranges = local_ranges(shape, layout, stage.mesh, stage.coordinate)
        product = _part(a, b, site, ranges)
        wide = torch.promote_types(weight.dtype, product.dtype)
        if not site.use_dora:
            weight.copy_(weight.to(wide) + sign * product)
            return
        rows, across = (ranges[1], (1, -1)) if site.is_transposed else (ranges[0], (-1, 1))
        if sign > 0:
            changed = weight.to(wide) + product
            length = gather_everywhere(changed, shape, layout, stage).norm(dim=0 if site.is_transposed else 1)
            self._lengths[path] = magnitude / length
            weight.copy_(changed * cut(self._lengths[path], [rows]).view(across))
        else:
            weight.copy_(weight.to(wide) / cut(self._lengths.pop(path), [rows]).view(across) - product)


def _part(a: Tensor, b: Tensor, site: LoraSite, ranges) -> Tensor:
    """Return what a rank that holds `ranges` of a parameter adds to it: (o, i), (i, o), (experts, o, i) or (experts, i,
    o)."""
    experts = a.shape[0] // site.r
    rows, columns = (ranges[-1], ranges[-2]) if site.is_transposed else (ranges[-2], ranges[-1])
    held = ranges[0] if len(ranges) == 3 else [(0, experts)]
    a = cut(a.view(experts, site.r, -1), [held, [(0, site.r)], columns])
    b = cut(b.view(-1, site.r, experts).permute(2, 0, 1), [held, rows, [(0, site.r)]])
    product = site.scaling * (b @ a)
    product = product.transpose(1, 2) if site.is_transposed else product
    return product if len(ranges) == 3 else product[0]
