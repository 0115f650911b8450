"""Report why a collective fails: which rank is missing, since what step, and where everybody is.

A step costs nothing for it but a count of graph calls. The work is done when gloo reports that a connection broke or
that a wait took too long: the rank asks where the others are (peers.py), those of the group that failed first. Who is
gone, who stands still and who waits at something else follows from their answers (causes.py). The first to find out
tells the others, as does a rank that ends with an exception, so that every survivor names the same first cause.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import fx

from .._torch.loaders import is_of_a_loader
from ..errors import AutoparError, CollectiveTimeout, DesyncError, RankFailure
from ..plans.plan import Plan
from . import causes, comparison, process_groups, unlike
from .call_log import ALL, ALL_KEPT, STEP, CallLogs, packed
from .calls import Call
from .causes import Cause, Progress
from .guarded import Guarded
from .heartbeat import Heartbeat
from .patience import Patience
from .peers import Peers
from .records import MOST, Record
from .verdicts import error_of

PATIENCE_SECONDS = 2.0  # for a dying process to close its connections
END = 1 << 30  # position after the last collective of a graph


class Watch:
    """One a process and world; see `start`."""

    def __init__(self):
        self.world = weakref.ref(dist.group.WORLD)
        self.thread = threading.get_ident()
        self.calls = self.step = 0
        self.entered: Counter[str] = Counter()  # calls of compiled modules
        self.last: deque[tuple[int, int, str]] = deque(maxlen=ALL_KEPT)  # calls: number, step, what
        self.logs = CallLogs()
        self.plans: dict[str, int] = {}  # by hash, of how many stages
        self.answers: dict[int, dict | str] = {}
        self.recording, self.recorded = threading.Lock(), False
        self.record_file: Path | None = None
        self.running: Guarded | str | None = None
        self.began, self.inside = 0.0, 0  # when the first step did, and the thread of what runs
        self.failed_at: Progress | None = None
        self.cause: Cause | None = None
        self.peers = Peers(self._answer)
        self.hook, sys.excepthook = sys.excepthook, self._excepthook
        self.heartbeat = Heartbeat(self, is_needed=dist.get_backend() != "gloo")
        comparison.start(self)

    # the points where ranks meet

    def begin_step(self) -> None:
        """Count a step; forward graphs call this. The first step may take as long as it likes, the others are held to
        its time."""
        self.step += 1
        if self.step == 1:
            self.began = time.monotonic()
        elif self.step == 2:
            process_groups.limit_waits(time.monotonic() - self.began)

    def count(self, what: str) -> None:
        """Count a call in which all ranks meet."""
        self.calls += 1
        self.last.append((self.calls, self.step, what))

    def check_alike(self, what: str) -> None:
        """Raise DesyncError before a call, `what`, if this rank was told that ranks did not call the same; on GPUs the
        error of any failure, since their collectives raise none."""
        if self.cause is not None and (self.cause.kind == "unlike" or self.heartbeat.is_needed):
            self.failed_at = Progress(self.calls, 1, self.step, what, what)
            process_groups.release()
            raise self.error(self.cause, self.failed_at)

    def enter_thread(self) -> None:
        """Raise DesyncError, on all ranks, if another thread of this process is in a call in which ranks meet: the two
        share process groups, and their collectives would meet each other's."""
        thread = threading.get_ident()
        if self.running is not None and self.inside != thread:
            error = DesyncError(
                f"two threads of rank {self.peers.rank} call compiled models at once, which share process groups",
                ranks=(self.peers.rank,), fix="call them one after the other, or in processes of their own",
            )  # fmt: skip
            self.fail(error)
            self.failed_at = Progress(self.calls, 1, self.step, "a call of another thread", "a call of another thread")
            process_groups.release()
            raise error
        self.inside = thread

    @contextlib.contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Guard a collective that is not part of a graph: if it fails, raise what `verdict` returns. After a failure
        none is begun: it is raised again."""
        self.enter_thread()
        self.count(what)
        here = Progress(self.calls, 1, self.step, what, what)
        if self.failed_at is not None and self.cause is not None:
            raise self.error(self.cause, here)
        self.running = what
        try:
            yield
        except (RuntimeError, ValueError) as error:
            is_given_up = isinstance(error, RuntimeError) or self.failed_at is not None  # by another thread
            if is_of_a_loader(error) or isinstance(error, torch.OutOfMemoryError) or not is_given_up:
                raise
            raise self.verdict(error, here) from error
        finally:
            self.running = None

    def patiently(self, run: Callable[[], object]) -> None:
        """Run a collective of the control group, for as long as those that it waits for live: in a thread that is left
        behind if they do not."""
        call = Call(run)
        patience = Patience(self.peers, range(self.peers.world))
        while not call.is_over(patience.seconds):
            if (cause := self.cause or patience.look(self._progress())) is not None:
                self.tell(cause, range(self.peers.world))
                raise RuntimeError(cause.what)  # which `collective` explains

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[Callable[[bool], None]]:
        """Let this rank wait at `what` inside, as process_groups.waiting has it, or at the collective that needs it."""
        what = self.running if isinstance(self.running, str) else what
        patience, here = Patience(self.peers, range(self.peers.world)), Progress(self.calls, 1, self.step, what, what)

        def check(in_vain: bool) -> None:
            cause = self.cause or patience.look(here) or (self.find_cause(here, everyone, True) if in_vain else None)
            if cause is not None and cause.kind != "unknown":
                self.tell(cause, everyone)
                raise self.error(cause, here)

        everyone, before, self.running = range(self.peers.world), self.running, self.running or what
        try:
            yield check
        finally:
            self.running = before

    def absent(self, ranks: list[int], what: str, fix: str) -> AutoparError | None:
        """Return the error about ranks that did not come to `what`, of which all others are told, if they are gone or
        stand still; None if they wait at something else. `fix`: where they were not meant to come."""
        here = Progress(END, 1, self.step, what, what)
        cause = causes.found(self.peers.ask({}, ranks), self.peers.rank, here, self.peers.machines, waited=True)
        if cause is None or cause.kind not in ("gone", "late", "behind", "failed"):
            return None
        self.tell(cause, range(self.peers.world))
        return self.error(cause, here, otherwise=f"; if it was not to come, {fix}")

    # what happened

    def verdict(self, error: Exception, here: Progress, node: fx.Node | None = None) -> AutoparError:
        """Return the error to raise instead of what the backend says of a collective at `here`; every rank is told the
        cause."""
        self.failed_at = here
        everyone = range(self.peers.world)
        near = (process_groups.members(node.args[-1]) if node is not None else None) or everyone
        cause = self.find_cause(here, near, timed_out="timed out" in str(error).lower())
        self.tell(cause, near, everyone)
        process_groups.release()
        return self.error(cause, here, node)

    def error(self, cause: Cause, here: Progress, node: fx.Node | None = None, otherwise: str = "") -> AutoparError:
        """Return the error of this rank, which is `here`, for a cause. `otherwise`: what else helps against a late
        rank."""
        self.record()
        folder = self.record_file.parent if self.record_file else None
        return error_of(cause, here, self.peers.rank, node, otherwise, folder)

    def find_cause(self, here: Progress, near: Sequence[int], timed_out: bool) -> Cause:
        """Return why this rank waits at `here`, asking all others, those that are `near` first."""
        deadline, far = time.monotonic() + PATIENCE_SECONDS, {*range(self.peers.world)} - {*near}
        while self.cause is None:
            answers: dict[int, dict | str] = {}
            for ranks, are_all in ((near, not far), (far, True)):
                self.answers = answers = answers | self.peers.ask(ALL, ranks)
                waited = timed_out or time.monotonic() > deadline
                cause = causes.found_by_another(answers) or unlike.found(answers | {self.peers.rank: self.logged(ALL)})
                cause = cause or causes.found(answers, self.peers.rank, here, self.peers.machines, waited)
                is_first = cause is not None and cause.kind not in ("apart", "behind", "unlike")  # which all are asked
                if cause is not None and (are_all or is_first):
                    return cause
            if time.monotonic() > deadline:
                return causes.unknown(answers)
            time.sleep(0.1)
        return self.cause

    def tell(self, cause: Cause, *of: Sequence[int]) -> None:
        """Tell ranks the first cause that this one finds or is told."""
        if self.cause is None:
            self.cause = cause
            for ranks in of:
                self.peers.ask({"cause": asdict(cause)}, ranks, seconds=0.5)
            self.record()

    def _answer(self, message: dict) -> dict:
        """Answer another rank, on the listening thread."""
        if self.cause is None and message.get("cause"):
            self.cause = Cause(**message["cause"])
            self.record()  # also where this rank stands still, and raises nothing
        answer = asdict(self._progress()) | {"cause": self.cause and asdict(self.cause), "entered": self.entered}
        return answer | self.logged(message)

    def logged(self, message: dict) -> dict:
        """Return what is asked for of what this rank called, as unlike.py takes it."""
        asked = {"digests": self.logs.last_calls()} if message.get("digests") else {}
        return asked | (packed([*self.last]) if message.get("calls") else {})

    def _excepthook(self, kind: type, value: BaseException, trace) -> None:
        """Tell the others why this rank ends, before its connections break."""
        if self.cause is None and self.world() is not None:
            self.fail(value)
        self.hook(kind, value, trace)

    def fail(self, error: BaseException) -> None:
        """Tell all others that this rank is about to end with `error`."""
        reason = f"{type(error).__name__}: {error}".splitlines()[0].strip(" :")[:300]
        cause = Cause("failed", [self.peers.rank], f"rank {self.peers.rank} failed in step {self.step} with {reason}")
        self.tell(cause, range(self.peers.world))

    def record(self) -> None:
        """Write down, the first time, where this rank is; its own thread does so when it raises, the listening thread
        when it is told."""
        with self.recording:
            if self.recorded or self.cause is None:
                return
            self.recorded, rank = True, self.peers.rank
            here, graph = self._progress(), self.running if isinstance(self.running, Guarded) else None
            frame = sys._current_frames().get(self.thread)
            lines = [f for f in traceback.extract_stack(frame) if not f.filename.startswith(_INTERNAL)] if frame else []
            self.record_file = Record(
                run=self.peers.run, rank=rank, world=self.peers.world, machine=self.peers.machines[rank],
                host=socket.gethostname(), process=os.getpid(), torch=torch.__version__,
                when=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
                plans=self.plans, place=here, cause=self.cause, answers=self.answers,
                calls=[call for call in self.last if call[0] <= here.call][-MOST:],
                collectives=self.heartbeat.standing or (graph.passed(here.position) if graph is not None else []),
                stack=[f"{f.filename}:{f.lineno} in {f.name}" for f in lines[-MOST:]],
            ).write()  # fmt: skip

    def _progress(self) -> Progress:
        """Return where this rank's own thread is, seen from the listening thread."""
        running, frame = self.running, sys._current_frames().get(self.thread)
        if running is not None and self.failed_at is not None:
            return self.failed_at
        if isinstance(running, str):
            return Progress(self.calls, 1, self.step, running, running)
        outside = ""
        while frame is not None:
            if running is not None and running.code in (None, frame.f_code):
                position, what = running.at(frame.f_lineno)[:2]
                return Progress(self.calls, position, self.step, what, running.doing)
            path = frame.f_code.co_filename
            if not outside and not path.startswith(_INTERNAL):
                outside = f"{os.path.basename(path)}:{frame.f_lineno} in {frame.f_code.co_name}"
            frame = frame.f_back
        if running is not None:
            return Progress(self.calls, 0, self.step, running.doing, running.doing)
        return Progress(self.calls, END, self.step, outside or "outside of the model")


_INTERNAL = (*(os.path.dirname(p) + os.sep for p in (torch.__file__, os.path.dirname(__file__), os.__file__)), "<")
_current: Watch | None = None
_asking = ""  # what ranks agree for


def start() -> None:
    """Watch the ranks of the world from now on. Collective; does nothing the second time, or in a world of one."""
    global _current
    if dist.get_world_size() > 1 and (_current is None or _current.world() is not dist.group.WORLD):
        _current = Watch()


def machines() -> tuple[tuple[int, ...], float]:
    """Return the number of the machine of each rank, and the cores of a rank where they are fewest, one at most."""
    return ((0,), 1.0) if _current is None else (_current.peers.machines, _current.peers.cores_per_rank)


def guarded(module: fx.GraphModule, phase: str, mesh: str, run: Callable) -> Callable:
    """Return `run`, the forward of a graph module or what it was compiled to, with its collectives watched: one that
    fails raises RankFailure or CollectiveTimeout."""
    return run if _current is None else Guarded(_current, module, phase, mesh, run)


@contextlib.contextmanager
def asking(what: str) -> Iterator[None]:
    """Call what ranks agree on inside by the name of what they call together, such as "save_checkpoint"."""
    global _asking
    before, _asking = _asking, _asking or what
    try:
        yield
    finally:
        _asking = before


def asked(default: str) -> str:
    """Return what ranks agree for now."""
    return _asking or default


def collective(what: str):
    """Return a context for a collective outside of the graphs, with the same errors. All ranks enter it."""
    return contextlib.nullcontext() if _current is None else _current.collective(what)


def patiently(run: Callable[[], object]) -> None:
    """Run a collective of gloo between steps, inside of `collective`, for as long as all ranks live."""
    run() if _current is None else _current.patiently(run)


def _waiting(what: str) -> contextlib.AbstractContextManager[Callable[[bool], None]]:
    here = _current if _current is not None and _current.world() is dist.group.WORLD else None
    return contextlib.nullcontext(lambda in_vain: None) if here is None else here.waiting(what)


process_groups.waiting = _waiting


def enter(module: str) -> None:
    """Count a call of a compiled module, which all ranks make together."""
    if _current is not None:
        _current.entered[module] += 1


def stepped(meshes: Container[str], has_gradients: bool) -> None:
    """Note an optimizer's step, which all ranks make together."""
    if _current is not None:
        _current.count(STEP)
        _current.logs.step(meshes, has_gradients)


def logged(message: dict) -> dict:
    """Return what is asked for of what this rank called."""
    return {} if _current is None else _current.logged(message)


def unlike_error(cause: Cause, what: str) -> AutoparError:
    """Return the error at `what` about ranks that did not call the same, which all ranks raise."""
    assert _current is not None
    _current.tell(cause)
    return _current.error(cause, Progress(_current.calls, 1, _current.step, what, what))


def ahead(module: str, ranks: list[int]) -> list[int]:
    """Return those of some ranks that are in a later call of a module than this one."""
    mine = 0 if _current is None else _current.entered[module]
    return [rank for rank, a in answers(ranks).items() if isinstance(a, dict) and a["entered"].get(module, 0) > mine]


def answers(ranks: Iterable[int]) -> dict[int, dict | str]:
    """Return what other ranks answer that are asked where they are, as `Peers.ask` does."""
    return {} if _current is None else _current.peers.ask({}, [*ranks])


def note(plan: Plan) -> None:
    """Note a plan that all ranks run."""
    if _current is not None:
        _current.plans[plan.hash] = plan.pipeline.ranks


def fail(error: BaseException) -> None:
    """Tell the other ranks that this one ends with `error`. Uncaught exceptions of a program do so by themselves."""
    if _current is not None and not isinstance(error, (RankFailure, CollectiveTimeout)):
        _current.fail(error)


def check_told(what: str) -> None:
    """Raise RankFailure or the like if another rank has told this one, which waits at `what`, that it failed."""
    if _current is not None and _current.cause is not None:
        raise _current.error(_current.cause, Progress(_current.calls, 1, _current.step, what, what))


def absent(ranks: list[int], what: str, fix: str) -> AutoparError | None:
    """Return the error about ranks that are gone or stand still and do not come to `what`, None if they do neither."""
    return None if _current is None else _current.absent(ranks, what, fix)


def is_first_step() -> bool:
    """Return whether no step has begun."""
    return _current is None or _current.step == 0
