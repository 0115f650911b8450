"""Execute the actions of a schedule on a stage of a pipeline, on whatever its graphs run.

A stage is on one rank, or on all of its ranks in lock step in the simulator: what follows from the schedule is the
same, so values come as lists here, with one item a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, fx

from ..codegen.rank_program import SAME_STAGE, GraphKey, StageProgram, pair_of
from ..ir.graph import OutputRole, output_node
from ..passes.pipeline.add_gradients import is_gradient
from ..schedule.actions import Action
from .kept_rows import KeptRows, is_kept

CPU = torch.device("cpu")
Values = dict[str, list[Tensor]]  # local tensors by name, then by rank
Run = Callable[[GraphKey, list[list[Tensor]]], Sequence[Sequence[Tensor]]]  # arguments and results by rank
Leaf = Callable[[fx.Node, int, int], Tensor]
Output = Callable[[OutputRole, int, list[Tensor]], None]

DO = {"F": "forward", "B": "backward", "I": "input_part", "W": "weight_part", "U": "update"}


class StageExecutor:
    """`programs`: of the stage, by rank. `run` runs one of their graphs and may empty the lists of its arguments; sums
    are added to in place, so it gives first gradients in memory of their own. `is_smaller(i)`: whether micro-batch `i`
    has one sample less; `row_chunks` that follow one another are chunks of the same rows. `sums`: by rank, local
    gradients by parameter."""

    def __init__(
        self,
        programs: Sequence[StageProgram],
        run: Run,
        is_smaller: Callable[[int], bool],
        row_chunks: int = 1,
        device: torch.device = CPU,
    ):
        self.programs, self.run, self.is_smaller, self.device = tuple(programs), run, is_smaller, device
        self.kept = KeptRows(row_chunks)
        self.program, self.index = self.programs[0], self.programs[0].stage.index
        self._signatures: dict[tuple[GraphKey, int], tuple[list[fx.Node], list]] = {}

    def begin(self, leaf: Leaf, output: Output) -> None:
        """Begin a call, and make the copies that all its micro-batches share. `leaf(placeholder, micro-batch, rank)`
        returns an argument of a graph; `output(role, micro-batch, values)` takes an output of the call, the new
        value of what it writes to or the gradient of an input."""
        self.leaf, self.output = leaf, output
        self.copies: list[dict[str, Tensor]] = [{} for _ in self.programs]
        self.saved: dict[int, list[list[Tensor]]] = {}
        self.stash: dict[int, list[list[Tensor]]] = {}  # of the input part for the weight part
        self.sums: list[dict[str, Tensor]] = [{} for _ in self.programs]
        if self.program.copies is not None:
            made = self.run(GraphKey("C"), self._arguments(GraphKey("C"), 0, {}))
            each = [zip(self._signature(GraphKey("C"), at)[1], mine) for at, mine in enumerate(made)]
            self.copies = [{role.name: value for role, value in mine} for mine in each]  # uneven ranks make more

    def end(self) -> list[dict[str, Tensor]]:
        """Let go of what belongs to the call and return the sums."""
        sums, self.sums = self.sums, []
        self.leaf = self.output = None
        self.copies = []
        self.kept.rows.clear()
        return sums

    def do(self, together: Sequence[Action], arrived: Sequence[Values], behind: StageExecutor) -> list[Values]:
        """Run an action, or a forward together with a backward of the stage `behind`, with what each has waited for,
        which is let go of, and return what each sends."""
        if len(together) == 2:
            return self.pair(together[0][2], behind, together[1][2], *arrived)
        return [getattr(self, DO[together[0].kind])(together[0][2], arrived[0])]

    def expects(self, message: Action) -> Mapping[str, Tensor]:
        """Return what a message to the stage consists of: tensors of this rank's shapes and dtypes by name."""
        kind, _, i = message
        program = self.program.sizes[self.is_smaller(i)]
        if kind == "B" and program.backward is None:
            return {}
        nodes = {n.name: n.meta["val"] for n in self._signature(GraphKey(kind, self.is_smaller(i)))[0]}
        return {name: nodes[name] for name in (program.stage.received if kind == "F" else program.stage.arriving)}

    def forward(self, i: int, arrived: Values) -> Values:
        """Run the forward of a micro-batch."""
        key = GraphKey("F", self.is_smaller(i))
        return self._leave(key, i, self.run(key, self._arguments(key, i, arrived)))

    def _leave(self, key: GraphKey, i: int, made: Sequence[Sequence[Tensor]]) -> Values:
        """Keep what the backward reads of the results of a forward, and return what goes to the next stage."""
        results, roles = [list(r) for r in made], self._signature(key)[1]
        sent, given = {}, [role for role in roles if role is not None]
        for role, *values in zip(given, *results):
            if role.kind == "activation":
                sent[role.name] = values
            else:
                self.output(role, i, values)
        self.saved[i] = [r[len(given) :] for r in results]
        self.kept.forward_ended(i, self.program.backward is not None)
        return sent

    def backward(self, i: int, arrived: Values) -> Values:
        """Run the whole backward of a micro-batch."""
        if self.program.backward is None:  # nothing that the stage computes has a gradient
            del self.saved[i]
            return {}
        sent, _ = self._add_up(GraphKey("B", self.is_smaller(i)), i, self._backward_arguments(i, arrived))
        self.kept.backward_ended(i)
        return sent

    def pair(self, i: int, behind: StageExecutor, before: int, arrived: Values, arrived_before: Values) -> list[Values]:
        """Run the forward of a micro-batch and the whole backward of another one in a stage as one graph."""
        if behind.program.backward is None:
            return [self.forward(i, arrived), behind.backward(before, arrived_before)]
        forward, backward = GraphKey("F", self.is_smaller(i)), GraphKey("B", self.is_smaller(before))
        ahead = self._arguments(forward, i, arrived)
        arguments = [mine + saved for mine, saved in zip(ahead, behind._backward_arguments(before, arrived_before))]
        ahead.clear()
        adds = behind._add_sums(backward, arguments)
        stage_before = SAME_STAGE if behind is self else behind.index
        results = self.run(pair_of(forward, backward._replace(adds=adds), stage_before), arguments)
        counts = [len(self._signature(forward, at)[1]) for at in range(len(results))]
        sent = self._leave(forward, i, [mine[:n] for mine, n in zip(results, counts)])
        return [sent, behind._take(backward, before, adds, [mine[n:] for mine, n in zip(results, counts)])[0]]

    def input_part(self, i: int, arrived: Values) -> Values:
        """Run the part of a micro-batch's backward that the stage before waits for, and keep what the other reads."""
        if self.program.backward is None:
            self.stash[i] = self.saved.pop(i)
            return {}
        is_smaller, arguments = self.is_smaller(i), self._backward_arguments(i, arrived)
        read = [[a[k] for k in p.sizes[is_smaller].split.weight_inputs] for p, a in zip(self.programs, arguments)]
        sent, made = self._add_up(GraphKey("I", is_smaller), i, arguments)
        self.stash[i] = [k + m for k, m in zip(read, made)]
        self.kept.backward_ended(i)
        return sent

    def weight_part(self, i: int, arrived: Values) -> Values:
        """Run the rest of a micro-batch's backward."""
        stash = self.stash.pop(i)
        if self.program.backward is not None:
            self._add_up(GraphKey("W", self.is_smaller(i)), i, stash)
        return {}

    def reduce(self, sums: Sequence[dict[str, Tensor]]) -> None:
        """Reduce sums over the ranks of the stage, those that have waited for it, in place of them."""
        deferred = self.program.deferred
        if deferred is not None and deferred.layouts:
            results = self.run(GraphKey("R"), [[mine.pop(name) for name in deferred.layouts] for mine in sums])
            for mine, result in zip(sums, results):
                mine |= dict(zip(deferred.layouts, result))

    def _signature(self, key: GraphKey, at: int = 0) -> tuple[list[fx.Node], list]:
        """Return (placeholders, roles of the outputs) of a graph of one of the programs."""
        if (key, at) not in self._signatures:
            graph = self.programs[at].graph(key).graph
            takes = [n for n in graph.nodes if n.op == "placeholder"]
            self._signatures[key, at] = takes, output_node(graph).meta["roles"]
        return self._signatures[key, at]

    def _arguments(self, key: GraphKey, i: int, arrived: Values, left_out: Sequence[int] = ()) -> list[list[Tensor]]:
        """Return by rank what the placeholders of a graph take for a micro-batch, without as many of the first as are
        `left_out`. Empties `arrived`."""
        found: list[list[Tensor]] = []
        for at, copies in enumerate(self.copies):
            nodes = self._signature(key, at)[0][left_out[at] if left_out else 0 :]
            found.append([self._argument(node, i, at, arrived, copies) for node in nodes])
        arrived.clear()
        return found

    def _argument(self, node: fx.Node, i: int, at: int, arrived: Values, copies: Mapping[str, Tensor]) -> Tensor:
        role = node.meta["role"]
        if is_kept(node):
            return self.kept.part(node, i, at, self.device)
        if role.kind == "copy":
            return copies[role.name]
        return arrived[role.name][at] if role.kind in ("activation", "arriving") else self.leaf(node, i, at)

    def _backward_arguments(self, i: int, arrived: Values) -> list[list[Tensor]]:
        saved, key = self.saved.pop(i), GraphKey("B", self.is_smaller(i))
        return [s + a for s, a in zip(saved, self._arguments(key, i, arrived, [*map(len, saved)]))]

    def _add_up(self, key: GraphKey, i: int, arguments: list[list[Tensor]]) -> tuple[Values, list[list[Tensor]]]:
        """Run a backward or a part of it, add the gradients of parameters to the sums, and return (what goes to the
        stage before, by rank what the weight part reads)."""
        adds = self._add_sums(key, arguments)
        return self._take(key, i, adds, self.run(key._replace(adds=adds), arguments))

    def _add_sums(self, key: GraphKey, arguments: list[list[Tensor]]) -> bool:
        """Add the sums of gradients so far to the arguments of a backward; return whether there are any."""
        names = [role.name for role in self._signature(key)[1] if is_gradient(role)]
        adds = bool(names) and all(name in self.sums[0] for name in names)
        for values, sums in zip(arguments, self.sums if adds else ()):
            values += [sums[name] for name in names]
        return adds

    def _take(self, key: GraphKey, i: int, adds: bool, results: Sequence) -> tuple[Values, list[list[Tensor]]]:
        """Keep the gradients of parameters that a backward made, unless it `adds` them to the sums itself, and return
        the rest as `_add_up` does."""
        roles = self._signature(key)[1]
        if not adds:
            for sums, result in zip(self.sums, results):
                sums |= {role.name: value for role, value in zip(roles, result) if is_gradient(role)}
        sent = {}
        for role, *values in zip(roles, *results):
            if role is not None and role.kind == "returned":
                sent[role.name] = values
            elif role is not None and not is_gradient(role):  # of an input
                self.output(role, i, values)
        each = [zip(self._signature(key, at)[1], result) for at, result in enumerate(results)]  # uneven ranks keep more
        return sent, [[value for role, value in mine if role is None] for mine in each]
