"""Parameters and buffers of other stages of a pipeline, looked up on a rank that has none of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from ..errors import AbsentError
from ..frontend.user_lines import line_now


class Table(dict):
    """The parameters or buffers of a module, by name. `elsewhere`: for names that other ranks have, what to say of it;
    nn.Module looks for a name here when it is read, and the error is an AttributeError, as for any other name."""

    def __init__(self, entries: Mapping, elsewhere: Mapping[str, str]):
        super().__init__(entries)
        self.elsewhere = dict(elsewhere)

    def __contains__(self, name: object) -> bool:
        if not super().__contains__(name) and name in self.elsewhere:
            raise AbsentError(
                self.elsewhere[name],
                source=line_now(),
                fix="read it there; model.elsewhere[name] has its shape, save_pretrained(folder) writes all parameters",
            )
        return super().__contains__(name)


def name_absent(model: nn.Module, absent: Mapping[str, Tensor], where: Callable[[str], str]) -> None:
    """Let a model's modules say `where` the parameters and buffers are that this rank has not."""
    words: dict[tuple[nn.Module, str], dict[str, str]] = defaultdict(dict)
    for name, tensor in absent.items():
        path, _, leaf = name.rpartition(".")
        kind = "_parameters" if isinstance(tensor, nn.Parameter) else "_buffers"
        words[model.get_submodule(path), kind][leaf] = where(name)
    for (module, kind), elsewhere in words.items():
        vars(module)[kind] = Table(vars(module)[kind], elsewhere)
