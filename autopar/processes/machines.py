"""Find which ranks share a machine, as the processes see it, and what that means for a profile of links and cores.

A machine is told by its boot, its network namespace and its address: host names are equal in containers of one image,
and boots in restored snapshots. Containers of one boot are machines of their own and share its cores.
"""

from __future__ import annotations

import os
import socket
import uuid
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from pathlib import Path

from ..errors import HardwareError
from ..hardware.cores import on_cores
from ..hardware.schema import Hardware

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Machine:
    """Tells where a process runs: `identity` (its boot and network) is the same in all processes of a machine, and
    theirs alone; others reach it at `address`. `cores`: those that the process may run on, a bit each."""

    identity: tuple[str, str]
    address: str
    cores: int = field(default=0, compare=False)

    @classmethod
    def of_this_process(cls) -> Machine:
        """Return the machine on which this process runs."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            network = str(os.stat("/proc/self/ns/net").st_ino)
        except OSError:  # not Linux
            boot, network = f"{uuid.getnode():x}", ""
        return cls((boot, network), own_address(), own_cores())


def own_address() -> str:
    """Return the address of this machine on the way to MASTER_ADDR, where torchrun's processes meet; without one that
    others can reach, its host name."""
    try:
        family, kind, _, _, there = socket.getaddrinfo(os.environ["MASTER_ADDR"], 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as way:
            way.connect(there)  # of datagrams: nothing is sent
            return way.getsockname()[0]
    except (KeyError, OSError):
        return socket.gethostname()


def own_cores() -> int:
    """Return the cores that this process may run on, a bit each."""
    try:
        return sum(1 << core for core in os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return (1 << (os.cpu_count() or 1)) - 1


def cores_per_rank(machines: Sequence[Machine]) -> float:
    """Return the cores that a rank has where they are fewest, at most one, given the machine of each rank."""
    shared: dict[str, list[int]] = {}
    for machine in machines:
        shared.setdefault(machine.identity[0], []).append(machine.cores)
    return min(1.0, *(reduce(or_, cores).bit_count() / len(cores) for cores in shared.values()))


def numbered(machines: Sequence[Machine]) -> tuple[int, ...]:
    """Return, by rank, the number of its machine, in the order in which they come."""
    known = {machine: number for number, machine in enumerate(dict.fromkeys(machines))}
    return tuple(known[machine] for machine in machines)


def equal_machines(numbers: Sequence[int]) -> int:
    """Return how many ranks each machine has. Raise HardwareError where they are not equally many in a row."""
    shared = list(Counter(numbers).values())
    if list(numbers) != sorted(numbers) or len(set(shared)) > 1:
        raise HardwareError(
            f"ranks are on machines {', '.join(map(str, numbers))}, not equally many in a row on each",
            fix="start as many on each, ordered by machine",
        )
    return shared[0]


def on_machines(hardware: Hardware, numbers: Sequence[int]) -> tuple[Hardware, str]:
    """Return the profile with its closest links within a machine, and what does not fit together, as a sentence;
    nothing if all does. `numbers`: the machine of each rank."""
    closest, *farther = hardware.links
    if not any(numbers):
        return hardware, ""
    try:
        ranks = equal_machines(numbers)
    except HardwareError as error:
        return hardware, f"{error.message}: prices are of machines that are; {error.fix}"
    if closest.devices is not None and closest.devices <= ranks:
        return hardware, ""
    if farther:
        fitting = replace(hardware, links=(replace(closest, devices=ranks), *farther))
        return fitting, (
            f"{hardware.name} joins {closest.devices} devices by {closest.name}, but a machine has {ranks} ranks: "
            f"priced with {ranks} a machine and {farther[0].name} between"
        )
    return hardware, (
        f"{hardware.name} has one kind of links, {closest.name}, but ranks are on {max(numbers) + 1} machines: what "
        "passes between them is priced as if it stayed in one; measure both with autopar calibrate under torchrun on "
        "all machines, and pass hardware= that profile"
    )


def fitted_to_machines(hardware: Hardware, numbers: Sequence[int], cores: float = 1.0) -> Hardware:
    """Return the profile as `on_machines` has it, of ranks that have so many cores each, and warn of links that do not
    fit together."""
    fitting, sentence = on_machines(hardware, numbers)
    if sentence:
        warnings.warn(sentence, stacklevel=2)
    return on_cores(fitting, cores)
