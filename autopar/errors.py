"""Every error autopar raises on purpose, with what a user needs to act on it."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable

from .utils.format import size


class AutoparError(Exception):
    """Base of all errors that autopar raises on purpose.

    The message is one sentence with the numbers in it; the optional fields are printed below it, one a line: `node`
    (graph node), `source` (the user's ``file:line``), `shape` (global shapes), `mesh`, and `fix` (the nearest remedy).
    """

    def __init__(
        self,
        message: str,
        *,
        node: str | None = None,
        source: str | None = None,
        shape: object = None,
        mesh: object = None,
        fix: str | None = None,
    ):
        self.message, self.node, self.source, self.shape, self.mesh, self.fix = message, node, source, shape, mesh, fix
        super().__init__(self.text())

    def locate(self, source: str | None) -> None:
        """Say the user's line, if the error does not say one yet."""
        self.source = self.source or source
        self.args = (self.text(),)

    def text(self) -> str:
        """Return the message with the fields that are given below it, one a line."""
        lines = [self.message]
        for label in ("node", "source", "shape", "mesh", "fix"):
            value = getattr(self, label)
            if value is not None:
                lines.append(f"  {label}: {value}")
        return "\n".join(lines)


class MeshError(AutoparError):
    """The mesh text is malformed, an axis is unknown, or the mesh does not match the number of processes."""


class CaptureError(AutoparError):
    """The model could not be traced (data-dependent control flow, an op without functional form, ...)."""


class InputError(AutoparError):
    """An input of a call has another structure, shape or dtype than the one compiled for, or differs between ranks."""


class UnsupportedOpError(AutoparError):
    """Some ops have no sharding rule and `strict=True`, or cannot be run on several devices with right numbers."""


class StrategyError(AutoparError):
    """A strategy, pin or layout that this model or mesh cannot follow."""


class MicroBatchError(AutoparError):
    """A model that cannot run on one part of its batch after the other, as a pipeline does, with the numbers of the
    whole batch."""


class StageError(AutoparError):
    """A model that cannot be cut into the stages of a pipeline as asked."""


class PipelineError(AutoparError):
    """A number of micro-batches or stages that no pipeline has."""


class OptimizerError(AutoparError):
    """An optimizer that cannot update the parameters of a compiled model as it would those of a plain one."""


class RuleError(AutoparError):
    """A sharding rule of the user's own that does not fit its op, or gives other numbers than the op."""


class PassError(AutoparError):
    """A pass of the user's own that cannot run where it wants to, or left a graph that cannot be run."""


class AdaptError(AutoparError):
    """An adaptation (LoRA, fake-quantization, QLoRA) that this model cannot have, or a file of an adapter that is not
    its own."""


class MemoryInfeasibleError(AutoparError):
    """No plan fits the memory limit. Carries `missing_bytes`, a `breakdown` of the smallest need (bytes of a device by
    kind), with how many `micro_batches` that is, and `fixes`: what was planned instead, cheapest first
    (autopar/planner/remedies.py)."""

    def __init__(
        self,
        message: str,
        *,
        missing_bytes: int = 0,
        breakdown: dict[str, float] | None = None,
        micro_batches: int = 1,
        fixes: Iterable = (),
        **fields,
    ):
        self.missing_bytes, self.breakdown, self.fixes = missing_bytes, breakdown or {}, tuple(fixes)
        self.micro_batches = micro_batches
        super().__init__(message, **fields)

    def text(self) -> str:
        """Return the message with the breakdown right after its first line."""
        first, *others = super().text().splitlines()
        kinds = ", ".join(f"{kind} {size(bytes_)}" for kind, bytes_ in self.breakdown.items())
        return "\n".join([first, *([f"  breakdown: {kinds}"] if kinds else []), *others])


class PlanFormatError(AutoparError):
    """A plan file that is not a plan: bad JSON, unknown version, a missing or wrong field."""


class PlanTampered(AutoparError):
    """A plan file that was changed after it was written, or that the given key did not sign."""


class PlanIncompatible(AutoparError):
    """A plan made for another model, mesh or input shape, or with a decision that these do not allow."""


class WeightsError(AutoparError):
    """A folder of weights that cannot be read, or that is another model's."""


class CheckpointError(AutoparError):
    """A checkpoint that is not there, or something that cannot be saved in one."""


class CheckpointCorrupt(CheckpointError):
    """A file of a committed checkpoint is missing or is not the one that was written."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint of another model or optimizer."""


class HardwareError(AutoparError):
    """An unknown hardware profile, or one with a missing or impossible number."""


class ModelError(AutoparError):
    """An unknown model name or a model option that does not exist."""


class DesyncError(AutoparError):
    """Ranks disagree about the plan or about the collectives that they run. `ranks`: those that are not where most are,
    in a step, as far as it is known."""

    def __init__(self, message: str, *, ranks: tuple[int, ...] = (), **fields):
        self.ranks = tuple(ranks)
        super().__init__(message, **fields)


class NotFiniteError(AutoparError):
    """A parameter that trains has become NaN or infinite."""


class CompilerError(AutoparError):
    """torch.compile, where it was asked for, could not compile a graph."""


class RankFailure(AutoparError):
    """Another process died or failed. `rank`: the first one (None if unknown); `step`: the one this rank was in,
    counted from 1, 0 before the first; `collective`: what it was waiting for."""

    def __init__(self, message: str, *, rank: int | None = None, step: int = 0, collective: str = "", **fields):
        self.rank, self.step, self.collective = rank, step, collective
        super().__init__(message, **fields)


class CollectiveTimeout(AutoparError):
    """Other processes did not arrive at a collective in time. `ranks`: those; `step` and `collective` as in
    RankFailure."""

    def __init__(self, message: str, *, ranks: tuple[int, ...] = (), step: int = 0, collective: str = "", **fields):
        self.ranks, self.step, self.collective = tuple(ranks), step, collective
        super().__init__(message, **fields)


class ScheduleError(AutoparError):
    """A pipeline schedule that cannot run: ranks that wait for each other, an action that is missing or there twice, or
    a file that holds no schedule. `stuck`: the action at which each rank stands, as text, where there is a deadlock."""

    def __init__(self, message: str, *, stuck: dict[int, str] | None = None, **fields):
        self.stuck = dict(stuck or {})
        super().__init__(message, **fields)


class VerifyError(AutoparError):
    """A graph that breaks an invariant: autopar's own bug, caught before it could give a wrong number."""


class MovedParameterError(AutoparError):
    """A parameter of the source model was used after `autopar.compile` took it over."""


class SourceMethodError(AutoparError, AttributeError):
    """A method of the source model, such as `generate`, was looked up on the compiled one, which has only the call."""


class AbsentError(AutoparError, AttributeError):
    """Something of the plain model was looked up where the compiled one has none: in the cache of an output, or of a
    layer whose parameters are on other ranks of a pipeline."""


def said(error: Exception) -> str:
    """Return in one line what an error says: the message of autopar's own, of another its type too."""
    text = error.message if isinstance(error, AutoparError) else f"{type(error).__name__}: {error}"
    return text.partition("\n")[0]


def not_compared(error: Exception) -> AutoparError:
    """Return what a row says of a comparison that could not be made: nobody asked for it, so it never takes the place
    of a plan."""
    return error if isinstance(error, AutoparError) else StrategyError(f"could not be compared: {said(error)}")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return up to three of the `known` names that look like `word`, else all of them, as text for a `fix`."""
    names = sorted(known)
    return ", ".join(like(word, names) or names)


def like(word: str, known: Iterable[str]) -> list[str]:
    """Return up to three of the `known` names that look like `word`, the most similar first."""
    return difflib.get_close_matches(word, sorted(known), n=3, cutoff=0.5)


added: list[str] = []  # what code outside of autopar has registered


def check_new(error: type[AutoparError], what: str, name: object, known: Iterable[str], replace: bool) -> None:
    """Raise `error` unless `name` can be that of a new thing: text without "+", and not one of the `known` names that
    it is not to `replace`."""
    if not isinstance(name, str) or not name or "+" in name:
        raise error(f"{name!r} is no name of a {what}", fix="use a word")
    if name in known and not replace:
        raise error(
            f"there is a {what} {name} already", fix="use another name, or put it in that one's place with replace=True"
        )
    if sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] != "autopar":
        added.append(name)
