"""Find what would fit instead of a plan that does not: one change at a time to what was asked for, each priced by
planning again.

    recomputation      as much as the memory demands, if a level was asked for
    strategy           a free one, and the next stages of ZeRO (zero1 -> zero2 -> fsdp), if a strategy was asked for
    mesh               an axis twice as large, or as much larger as the smallest plan is than the limit
    offload            parameters on the host, with their gradients and optimizer state
    micro-batches      twice as many of half the size, or as many as the activations of the smallest plan must shrink
    adapters           LoRA on all linear layers instead of training the model

All but the last of these plan the call that is there; that one traces the model again. Of several steps of one change
the gentlest that fits is told, else the last. If nothing fits alone, numbers are doubled once more, and what costs no
devices is tried together. Searches stop at a larger gap than those for plans. What cannot be planned at all is left
out, so that the refusal that it is for is never hidden by another error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..adapt import LoRA
from ..adapt.targets import ALL_LINEAR
from ..cost.compute import EAGER
from ..errors import MemoryInfeasibleError
from ..frontend.export import Captured
from ..ir.mesh import Mesh
from ..utils.format import ms, size
from .objective.memory_timeline import RECOMPUTED, SAVED, TRANSIENT
from .problem import offload
from .problem.recipes import ALIASES, RECIPES, Restriction
from .request import PlanRequest
from .solver.minimize import Search
from .spmd import fixed_recompute, plan
from .spmd.batch import in_micro_batches, samples_of
from .spmd.plan_options import PlanOptions
from .spmd.planned import Planned

SEARCH = Search(gap=2e-2, rounds=8, largest_program=0)
STAGES = {  # that hold less of every device, by what they follow
    "ddp": ("zero1", "zero2", "fsdp"), "zero1": ("zero2", "fsdp"), "zero2": ("fsdp",), "hsdp": ("fsdp",),
}  # fmt: skip
MOST_NAMED = 3  # in a sentence
RANK = 16


@dataclass(frozen=True)
class Fix:
    """A change, as arguments of `autopar.plan` and as options of the command line, and the plan that it leads to:
    seconds of a step on so many `devices` and bytes of each. Without seconds it does not fit, and these are the bytes
    of the smallest plan."""

    argument: str
    option: str
    devices: int
    peak_bytes: float
    missing_bytes: float = 0.0
    step_seconds: float | None = None

    @property
    def fits(self) -> bool:
        """Return whether a plan was found with it."""
        return self.step_seconds is not None

    @property
    def device_seconds(self) -> float:
        """Return what a step costs, in seconds of one device, infinite if the plan does not fit."""
        return math.inf if self.step_seconds is None else self.step_seconds * self.devices

    def __str__(self) -> str:
        many = "s" if self.devices > 1 else ""
        return (
            f"{self.argument} ({ms(self.step_seconds)} a step on {self.devices} device{many}, {size(self.peak_bytes)})"
        )


@dataclass(frozen=True)
class _Change:
    argument: str
    option: str
    mesh: Mesh
    options: PlanOptions
    captured: Callable[[], Captured]


@dataclass(frozen=True)
class Refused:
    """Holds what was asked for and did not fit: the call of a whole batch, on a mesh without stages. `adapts`: whether
    there are adaptations already. `retrace` traces the model again with more adaptations."""

    captured: Captured
    mesh: Mesh
    options: PlanOptions
    adapts: bool
    retrace: Callable[[Sequence[LoRA]], Captured]

    @property
    def samples(self) -> int:
        """Return the samples of a micro-batch."""
        return samples_of(self.captured.signature) // self.options.micro_batches

    def change(
        self,
        argument: str,
        option: str,
        mesh: Mesh | None = None,
        captured: Callable[[], Captured] | None = None,
        **options,
    ) -> _Change:
        """Return a change of what was asked for: another mesh, another capture of the model or other `options` of
        planning."""
        options = replace(self.options, baselines=False, search=SEARCH, **options)
        return _Change(argument, option, mesh or self.mesh, options, captured or (lambda: self.captured))


def planned_or_fixes(
    request: PlanRequest,
    captured: Captured,
    adapts: bool,
    retrace: Callable[..., Captured],
    fixes: bool = True,
    report: Callable[[str], None] = lambda text: None,
) -> Planned:
    """Return what is found for a captured call; raise a refusal with what would fit instead, if `fixes` are wanted.
    `retrace(more)` traces the same call with more adaptations."""
    try:
        return request.find(captured, report)
    except MemoryInfeasibleError as error:
        if not fixes or request.has_stages or not isinstance(error.mesh, Mesh):
            raise
        options = replace(request.options, micro_batches=error.micro_batches)
        raise with_fixes(error, Refused(captured, error.mesh, options, adapts, retrace), report) from None


def with_fixes(
    error: MemoryInfeasibleError, request: Refused, report: Callable[[str], None] = lambda text: None
) -> MemoryInfeasibleError:
    """Return the refusal of a request with what would fit instead, cheapest first, and after that what would not,
    nearest first."""
    found: dict[str, Fix] = {}
    for changes in (_changes, _further_changes):  # the second only if nothing fits yet
        for kind, steps in changes(error, request):
            for change in steps:
                report(f"no plan fits, trying {change.argument}")
                led_to = _evaluated(change)
                found |= {kind: led_to} if led_to else {}
                if led_to and led_to.fits:
                    break
        if any(fix.fits for fix in found.values()):
            break
    fixes = sorted(found.values(), key=lambda fix: (fix.device_seconds, fix.missing_bytes, fix.argument))
    fitting = [str(fix) for fix in fixes if fix.fits]
    return MemoryInfeasibleError(
        error.message,
        missing_bytes=error.missing_bytes,
        breakdown=error.breakdown,
        fixes=fixes,
        mesh=error.mesh,
        fix=", or ".join(fitting[:MOST_NAMED]) or error.fix,
    )


def _evaluated(change: _Change) -> Fix | None:
    """Plan a change and return what it leads to, None if it cannot be planned for another reason than memory."""
    try:
        planned = _planned(change)
    except MemoryInfeasibleError as error:
        need = sum(error.breakdown.values())
        return Fix(change.argument, change.option, change.mesh.devices, need, error.missing_bytes)
    except Exception:  # the user's error is the refusal
        return None
    e, micro_batches = planned.evaluation, change.options.micro_batches
    return Fix(
        change.argument,
        change.option,
        change.mesh.devices,
        e.bytes_,
        step_seconds=planned.chosen.seconds * micro_batches + planned.pricer.tail.seconds,
    )


def _planned(change: _Change) -> Planned:
    """Search the plan that a change asks for, if its smallest plan fits. Raise AutoparError if there is none."""
    change.options.check(change.mesh)
    return in_micro_batches(change.captured(), change.options, partial(_searched, change.mesh))


def _searched(mesh: Mesh, captured: Captured, options: PlanOptions) -> Planned:
    solvers = plan.solvers_of(captured, mesh, options)
    restriction = Restriction.of(options.strategy, mesh, options.forbid)
    least = [(solver, solver.run(restriction, dict(options.pin)).smallest()) for solver in solvers]
    solver, smallest = min(least, key=lambda pair: pair[1].bytes_)
    if smallest.bytes_ > solver.limit_bytes:
        raise solver.refusal("the smallest plan needs", smallest)
    return plan.search(captured, mesh, options, solvers=solvers)


def _changes(error: MemoryInfeasibleError, request: Refused) -> Iterator[tuple[str, Iterator[_Change]]]:
    """Iterate over kinds of change, each as steps of which a later one gains more memory."""
    yield "recomputation", _recomputation(request)
    yield "strategy", _free_strategy(request)
    yield "stage", _higher_stages(request)
    yield "offload", _offload(request)
    yield from _larger_changes(error, request, 1)
    yield "adapters", _adapters(request)


def _further_changes(error: MemoryInfeasibleError, request: Refused) -> Iterator[tuple[str, Iterator[_Change]]]:
    yield from _larger_changes(error, request, 2)
    yield "together", _together(request)


def _larger_changes(
    error: MemoryInfeasibleError, request: Refused, times: int
) -> Iterator[tuple[str, Iterator[_Change]]]:
    """Iterate over changes by a number, `times` as large as the smallest plan seems to need."""
    for axis in request.mesh.names:
        yield axis, _larger_axis(error, request, axis, times)
    yield "micro-batches", _micro_batches(error, request, times)


def _recomputation(request: Refused) -> Iterator[_Change]:
    if request.options.recompute != fixed_recompute.AUTO:
        yield request.change('recompute="auto"', "--recompute auto", recompute=fixed_recompute.AUTO)


def _free_strategy(request: Refused) -> Iterator[_Change]:
    if ALIASES.get(request.options.strategy, request.options.strategy):
        yield request.change('strategy="auto"', "--strategy auto", strategy=None)


def _higher_stages(request: Refused) -> Iterator[_Change]:
    """Iterate over the higher stages of ZeRO; with a tensor-parallel strategy they are for its data axes."""
    name = ALIASES.get(request.options.strategy, request.options.strategy) or ""
    tensor, plus, data = name.rpartition("+")
    if data in RECIPES and not RECIPES[data].data:
        tensor, plus, data = name, "+", "ddp"
    for stage in STAGES.get(data, ()):
        strategy = f"{tensor}{plus}{stage}"
        yield request.change(f'strategy="{strategy}"', f"--strategy {strategy}", strategy=strategy)


def _offload(request: Refused) -> Iterator[_Change]:
    if request.options.offload == offload.NONE and request.options.hardware.host is not None:
        argument, option = f'offload="{offload.AUTO}"', f"--offload {offload.AUTO}"
        yield request.change(argument, option, offload=offload.AUTO, execution=EAGER)  # as compile() then runs it


def _larger_axis(error: MemoryInfeasibleError, request: Refused, axis: str, times: int) -> Iterator[_Change]:
    need = sum(error.breakdown.values())
    factor = times * _power_of_two(need / (need - error.missing_bytes))
    sizes = [size_ * factor if name == axis else size_ for name, size_ in request.mesh.axis_sizes.items()]
    mesh = Mesh(request.mesh.names, tuple(sizes))
    yield request.change(f'mesh="{mesh}"', f"--mesh {mesh}", mesh=mesh)


def _micro_batches(error: MemoryInfeasibleError, request: Refused, times: int) -> Iterator[_Change]:
    """Yield as many more micro-batches as seem to be needed; yield nothing if what does not shrink with the samples has
    no room, or if the samples cannot be divided so."""
    shrinking = sum(error.breakdown.get(kind, 0.0) for kind in (SAVED, RECOMPUTED, TRANSIENT))
    room = shrinking - error.missing_bytes
    factor = times * _power_of_two(shrinking / room) if room > 0 else math.inf
    if factor in _divisions(request):
        yield _more_micro_batches(request, factor)


def _together(request: Refused) -> Iterator[_Change]:
    """Yield a free strategy and recomputation with some micro-batches, then with as many as there can be."""
    possible = _divisions(request)
    for factor in dict.fromkeys((possible[len(possible) // 2], possible[-1]) if possible else ()):
        yield _more_micro_batches(
            request,
            factor,
            'strategy="auto", recompute="auto", ',
            "--strategy auto --recompute auto ",
            strategy=None,
            recompute=fixed_recompute.AUTO,
        )


def _divisions(request: Refused) -> list[int]:
    """Return the powers of two that divide the samples and leave a number that the first axis divides, if it divides
    them now."""
    samples, ways = request.samples, request.mesh.sizes[0]
    powers = (2**i for i in range(1, samples.bit_length()))
    return [k for k in powers if samples % k == 0 and (samples % ways or samples // k % ways == 0)]


def _more_micro_batches(request: Refused, factor: int, arguments: str = "", flags: str = "", **options) -> _Change:
    """Return the change to `factor` times as many micro-batches with as many times fewer samples each."""
    micro_batches, samples = request.options.micro_batches * factor, request.samples // factor
    return request.change(
        f"{arguments}micro_batches={micro_batches} of {samples} samples",
        f"{flags}--micro-batches {micro_batches}",
        micro_batches=micro_batches,
        **options,
    )


def _adapters(request: Refused) -> Iterator[_Change]:
    if not request.adapts:
        lora = LoRA(r=RANK, target_modules=ALL_LINEAR)
        yield request.change(
            f'adapt=[LoRA(r={RANK}, target_modules="{ALL_LINEAR}")]',
            f"--lora r={RANK}",
            captured=lambda: request.retrace((lora,)),
        )


def _power_of_two(at_least: float) -> int:
    return 2 ** max(1, math.ceil(math.log2(at_least)))
