"""The exact objective of a choice by class, and a local search on it.

The objective is that of the integer program: members times seconds, plus for every hub the payments of one copy times the
copies. Changing one class touches only its own hubs, so the search re-prices those.
"""

from __future__ import annotations

import numpy as np

from .dual import Dual
from .evaluate import RESIDENT_LEAVES
from .program import Hub


class Tied:
    """Prices choices of the classes of a Dual's problem."""

    def __init__(self, dual: Dual):
        self.dual, self.problem, self.pricer = dual, dual.problem, dual.pricer
        self.hubs_of_class: dict[int, list[int]] = {cls: [] for cls in dual.classes}
        for number, hub in enumerate(dual.hubs):
            for cls in dict.fromkeys([hub.producer, *(c for c, _, _ in hub.consumers)]):
                self.hubs_of_class[cls].append(number)
        self._known: dict[tuple, float] = {}

    def objective(self, choice: dict[int, int]) -> float:
        total = sum(self._own(cls, k) for cls, k in choice.items())
        return total + sum(self._hub(h, choice) for h in range(len(self.dual.hubs)))

    def _own(self, cls: int, k: int) -> float:
        options = self.problem.classes[cls]
        return (options.seconds[k] + self.dual.byte_price * options.resident_bytes[k]) * len(options.members)

    def _hub(self, number: int, choice: dict[int, int]) -> float:
        hub = self.dual.hubs[number]
        classes = self.problem.classes
        source = classes[hub.producer].strategies[choice[hub.producer]].outputs[hub.output]
        wanted = tuple((self._wanted(cls, slot, choice[cls]), phase) for cls, slot, phase in hub.consumers)
        key = (number, source, wanted)
        if key not in self._known:
            self._known[key] = self._price(hub, source, wanted) * hub.copies
        return self._known[key]

    def _wanted(self, cls: int, slot: int, k: int):
        strategy = self.problem.classes[cls].strategies[k]
        return strategy.outputs[0] if slot < 0 else strategy.inputs[slot]

    def _price(self, hub: Hub, source, wanted) -> float:
        """Payments of one copy, as autopar/planner/evaluate.py decides them."""
        dual, vertex = self.dual, self.problem.vertices[hub.example[0]]
        bytes_ = self.problem.tensor_bytes[hub.example]
        bucketed = self.pricer.is_bucketed(hub.example[0], [slot for _, slot, _ in hub.consumers])
        forward = {q for q, phase in wanted if phase == "forward" and q != source}
        backward = {q for q, phase in wanted if phase == "backward" and q != source}
        reads_base = any(phase == "backward" and q == source for q, phase in wanted)
        price = {q: self.pricer.seconds(source, q, bytes_, bucketed) for q in forward | backward}
        if not all(np.isfinite(s) for s in price.values()):
            return np.inf
        is_parameter = vertex.kind == "parameter"
        is_saved = vertex.phase == "forward" and (is_parameter or vertex.kind not in RESIDENT_LEAVES)
        if is_parameter and dual.keep_parameters is False:
            return sum(price[q] for q in forward) + sum(price[q] for q in backward)
        if not (dual.price_saved and is_saved):
            return sum(price.values())
        held = {q: dual.byte_price * self.pricer.local_bytes(*hub.example, q) for q in backward}
        base = 0.0 if is_parameter else dual.byte_price * self.pricer.local_bytes(*hub.example, source)
        shared, alone = backward & forward, backward - forward
        if is_parameter and dual.keep_parameters:
            return sum(price.values()) + sum(held[q] for q in shared)
        fixed = sum(price[q] for q in forward) + sum(price[q] for q in alone)
        with_base = base + sum(min(price[q], held[q]) for q in shared)
        if reads_base or alone or not shared:
            needs = bool(reads_base or alone)
            return fixed + (with_base if needs else 0.0)
        return fixed + min(with_base, sum(held[q] for q in shared))

    def improve(self, choice: dict[int, int], passes: int = 8) -> dict[int, int]:
        """Change one class at a time for the better until nothing improves."""
        choice = dict(choice)
        for _ in range(passes):
            changed = False
            for i, cls in enumerate(self.dual.classes):
                options = self.dual.index[i]
                if len(options) == 1:
                    continue
                here, best, best_k = choice[cls], None, None
                for k in options:
                    choice[cls] = int(k)
                    value = self._own(cls, int(k)) + sum(self._hub(h, choice) for h in self.hubs_of_class[cls])
                    if best is None or value < best - 1e-15 or (int(k) == here and value <= best + 1e-15):
                        best, best_k = value, int(k)
                choice[cls] = best_k
                changed |= best_k != here
            if not changed:
                break
        return choice
