"""Check what all ranks must agree on before the first step: one graph, one plan, one program of collectives, one batch.

Rank 0 plans; the others receive its plan. Whatever fails on one rank fails on all of them, and all compare what they
are going to run: a disagreement is a typed error on every rank instead of a hang or a wrong number later.
"""

from __future__ import annotations

import hashlib
import itertools
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ..errors import AutoparError, DesyncError, InputError
from ..plans.plan import Plan
from . import process_groups, unlike, watch
from .call_log import ALL, DIGESTS
from .causes import Cause
from .meeting import MOST_SECONDS_BETWEEN_LOOKS, SECONDS_BETWEEN_LOOKS, Meeting

T = TypeVar("T")
OWN_LENGTHS = (
    "where each rank pads its batch to its own longest, pass pad={'input_ids': 0, 'labels': -100, 'attention_mask': 0} "
    "to autopar.compile, with the names and values of what you pad: ranks then agree on a length"
)
SAME_CALL = (
    "call the model with the same arguments, shapes and modes on every rank; drop or pad the last batch; " + OWN_LENGTHS
)


def everywhere(run: Callable[[], T]) -> T:
    """Return what `run` returns on this rank. If it fails on some rank, every rank raises: its own error, else the
    first rank's."""
    result, error = None, None
    try:
        result = run()
    except Exception as caught:
        error = caught
    failure = _portable(error)
    failures = [] if are_alike(failure) else _gather(failure)
    if error is not None:
        raise error
    for rank, theirs in enumerate(failures):
        _raise(theirs, rank)
    return cast(T, result)


def from_all(make: Callable[[], T]) -> list[T]:
    """Return what every rank makes, in order of rank. If it fails on some rank, every rank raises, as in
    `everywhere`."""
    return _gather(everywhere(make))


def from_rank_zero(make: Callable[[], T]) -> T:
    """Return the value that rank 0 makes, on every rank; if that fails, every rank raises."""
    box: list[Any] = [None, None]
    error = None
    if dist.get_rank() == 0:
        try:
            box[0] = make()
        except Exception as caught:
            error = caught
            box[1] = _portable(caught)
    group = process_groups.control_group()
    with watch.collective(watch.asked("the plan of rank 0")):
        watch.patiently(lambda: dist.broadcast_object_list(box, src=0, group=group))
    if error is not None:
        raise error
    _raise(box[1], 0)
    return box[0]


def rendezvous(module: str, number: int, call: str, fix: str = SAME_CALL) -> None:
    """Wait until all ranks come here with the same `call`, or raise InputError on all of them.

    A rank may come alone: the others run a step of theirs meanwhile, and a collective would mix with those of that
    step. So ranks wait for each other at the store, as long as a collective does or until one of the others is in a
    later call of the module. Raises RankFailure or CollectiveTimeout about a rank that died or is busy elsewhere, else
    DesyncError. `number` is that of the module's rendezvous."""
    patience = process_groups.timeout_seconds() * (process_groups.FIRST_STEP if watch.is_first_step() else 1)
    meeting, first = Meeting(f"autopar/{module}/{number}", range(dist.get_world_size())), f"{call} for the first time"
    end, seconds = time.monotonic() + patience, SECONDS_BETWEEN_LOOKS
    while not meeting.is_complete(min(seconds, end - time.monotonic())):
        watch.check_told(f"a call with {first}")
        missing = meeting.missing()
        ahead, seconds = watch.ahead(module, missing), min(2 * seconds, MOST_SECONDS_BETWEEN_LOOKS)
        if not ahead and time.monotonic() < end:
            continue
        meeting.leave()
        error = None if ahead else watch.absent(missing, f"a call with {first}", fix)
        if error is None:
            error = DesyncError(
                f"rank {meeting.rank} is called with {first}, and rank {', '.join(map(str, ahead or missing))} is not "
                + ("and has gone on" if ahead else f"after {patience:g} s"),
                ranks=tuple(ahead or missing),
                fix=fix,
            )
            watch.fail(error)
        raise error
    check_calls(call, fix)


def check_calls(call: str, fix: str) -> None:
    """Raise InputError if ranks make another `call`, with their words for it. All ranks call this together."""
    for other, theirs in enumerate([] if are_alike(call) else _gather(call)):
        if theirs != call:
            raise InputError(f"rank {other} is called with {theirs} and rank {dist.get_rank()} with {call}", fix=fix)


def check_alike() -> None:
    """Raise DesyncError, on all ranks, if they did not call the same until here. All ranks call this together."""
    if unlike.disagreeing(dict(enumerate(_gather(watch.logged(DIGESTS))))) is not None:
        cause = unlike.found(dict(enumerate(_gather(watch.logged(ALL)))))
        raise watch.unlike_error(cast(Cause, cause), watch.asked("the check that ranks are equal"))


def extremes(numbers: Sequence[int], what: str = "the lengths of the ranks") -> tuple[list[int], list[int]]:
    """Return the least and the largest of each number over all ranks, which have equally many. It goes from host to
    host, and waits for no device."""
    both = torch.tensor([*(-n for n in numbers), *numbers], dtype=torch.int64)
    with watch.collective(what):
        dist.all_reduce(both, dist.ReduceOp.MAX, process_groups.host_group())
    least, most = both.view(2, -1).tolist()
    return [-n for n in least], most


def check_captures(inputs: Sequence[str], fingerprint: str) -> None:
    """Raise InputError or DesyncError if ranks traced other input shapes ("x (4, 8)") or another graph than rank 0."""
    if are_alike((list(inputs), fingerprint)):
        return
    everyone = _gather((list(inputs), fingerprint))
    first_inputs, first = everyone[0]
    for rank, (others, found) in enumerate(everyone):
        if others != first_inputs:
            raise InputError(
                f"rank {rank} compiles for {', '.join(others)} and rank 0 for {', '.join(first_inputs)}",
                fix=f"pass example_inputs of the same structure and shape on every rank; {OWN_LENGTHS}",
            )
        if found != first:
            raise DesyncError(
                f"rank {rank} traced another graph ({found[:12]}) than rank 0 ({first[:12]})",
                fix="build the same model on every rank; what it computes must not depend on the rank",
            )


def check_programs(plan: Plan, program: Sequence[tuple[str, str, tuple[int, ...]]]) -> None:
    """Raise DesyncError with both lines of the first collective, or with both plans, in which ranks differ. `program`
    as RankProgram.collectives gives it; ranks of the same stages that share no group have the same collectives too.
    Only digests travel unless they differ."""
    watch.note(plan)
    groups = sorted({group for group, _, _ in program})
    digests = {"": _digest([what for _, what, _ in program])}
    digests |= {group: _digest([entry for entry in program if entry[0] == group]) for group in groups}
    if are_alike((plan.hash, digests)):
        return
    everyone, alike = _gather((plan.hash, digests)), tuple(a for a in plan.mesh.names if a != plan.pipeline.axis)
    for rank, (other_hash, theirs) in enumerate(everyone):
        if other_hash != everyone[0][0]:
            raise DesyncError(
                f"rank {rank} has plan {other_hash[:12]}, rank 0 has {everyone[0][0][:12]}",
                fix="pass the same plan on every rank",
            )
        for group, digest in theirs.items():
            first = plan.mesh.first_of_group(tuple(group.split(",")) if group else alike, rank)
            if digest != everyone[first][1].get(group):
                programs = _gather(list(program))
                raise _first_difference(group, (first, programs[first]), (rank, programs[rank]))


def _first_difference(group: str, *programs: tuple[int, Sequence]) -> DesyncError:
    """Return the error that names the first difference of two ranks' programs, in the collectives of one group (with
    shapes) or of all ("", without)."""
    (one, mine), (other, theirs) = programs

    def lines(program) -> list[str]:
        return [f"{what}, {shape}" if group else what for axes, what, shape in program if group in ("", axes)]

    pairs = enumerate(itertools.zip_longest(lines(mine), lines(theirs), fillvalue="nothing"))
    where, (a, b) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    return DesyncError(
        f"collective {where}{f' of {group}' if group else ''} is {a} on rank {one} and {b} on rank {other}",
        fix="build the same model and use one version of torch and autopar on all ranks",
    )


def _digest(entries: list) -> str:
    return hashlib.sha256(repr(entries).encode()).hexdigest()


def check_batches(names: list[str], tensors: list[torch.Tensor], part: tuple | None = None) -> None:
    """Raise InputError on every rank if ranks pass different global batches, or different tensors for one `part` of the
    batch: the coordinate of this rank's part, as (axis, number) pairs."""
    mine = part, [_checksum(t) for t in tensors]
    if part is None and are_alike(mine):
        return
    everyone = _gather(mine)
    first: dict[tuple | None, int] = {}
    for rank, (where, others) in enumerate(everyone):
        same = first.setdefault(where, rank)
        for name, a, b in zip(names, everyone[same][1], others):
            if a != b:
                raise InputError(
                    f"rank {rank} passes another {name} than rank {same}, {_both(where)}", fix=_same_batch(where)
                )


def _both(part: tuple | None) -> str:
    if part is None:
        return "but inputs='global' wants the same global batch on every rank"
    coordinate = " and ".join(f"{axis} {number}" for axis, number in part)
    return (
        f"but inputs='local' wants one part of the batch for all ranks at {coordinate}"
        if part
        else "and no axis carries the batch"
    )


def _same_batch(part: tuple | None) -> str:
    if part is None:
        return "pass the same batch everywhere, or compile with inputs='local' if each rank loads its own part"
    axes = ", ".join(axis for axis, _ in part)
    return (
        f"load the part of a rank's place along {axes}, as DistributedSampler(rank=place) does"
        if part
        else "load one batch"
    )


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())


def union(names: Sequence[str]) -> list[str]:
    """Return the names that any rank gives, sorted."""
    mine = sorted({*names})
    return mine if are_alike(mine) else sorted({name for theirs in _gather(mine) for name in theirs})


def are_alike(value: object) -> bool:
    """Return whether all ranks give the same plain data, by a few bytes that no rank has more of in a larger world. All
    ranks call this together."""
    digest = int(_digest([value])[:15], 16)
    both = torch.tensor([digest, -digest])
    group = process_groups.control_group()
    with watch.collective(watch.asked("what ranks agree on before the first step")):
        watch.patiently(lambda: dist.all_reduce(both, dist.ReduceOp.MAX, group))
    return both[0].item() == -both[1].item()


def _gather(value: object) -> list:
    everyone: list = [None] * dist.get_world_size()
    group = process_groups.control_group()
    with watch.collective(watch.asked("what ranks agree on before the first step")):
        watch.patiently(lambda: dist.all_gather_object(everyone, value, group=group))
    return everyone


def _portable(error: Exception | None) -> tuple | None:
    """Return an error as plain data. Its traceback stays on the rank that it belongs to."""
    if error is None:
        return None
    if not isinstance(error, AutoparError):
        return None, f"{type(error).__name__}: {error}", {}
    return type(error), str(error), {k: _plain(v) for k, v in error.__dict__.items()}


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, (str, int, float, dict, tuple)) else str(value)


def _raise(failure: tuple | None, rank: int) -> None:
    if failure is not None:
        kind, message, fields = failure
        if kind is None:
            raise DesyncError(f"rank {rank} failed with {message}", fix="see the traceback of that rank")
        error = kind.__new__(kind, message)  # with all that it carries, also what torch has noted on it while tracing
        error.__dict__.update(fields)
        raise error
