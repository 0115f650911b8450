"""`autopar`: plan, train, verify and look at models from the command line. Each command is a file in autopar/cli/.

Bad input is one line on stderr, what is wrong and how to fix it, and exit code 2. After a plan that does not fit the
memory come tables: what the smallest one holds, and what would fit.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ..errors import AutoparError, MemoryInfeasibleError
from ..planner.refusal_text import refusal_text
from . import (
    calibrate,
    checkpoint,
    compare,
    cost,
    diff,
    doctor,
    estimate,
    explain,
    graph,
    plan,
    report,
    schedule,
    trace,
    train,
    verify,
)

COMMANDS = (  # in the order of --help
    plan, estimate, explain, report, trace, schedule, compare, diff, doctor, train, checkpoint, verify, graph, cost,
    calibrate,
)  # fmt: skip


class UsageError(AutoparError):
    """A command line that cannot be read."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        """Raise UsageError where argparse would print and exit; of missing arguments with the command's example."""
        example = (self.epilog or "").rpartition("\n")[2].strip()
        shown = f"as in `{example}`; " if example and "are required" in message else ""
        raise UsageError(message, fix=f"{shown}see {self.prog} --help")


class _Version(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        from importlib.metadata import version

        print(f"autopar {version('autopar')}")
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    result = _Parser(
        prog="autopar", description="Plans how a PyTorch model runs on many devices, and compiles it to do so."
    )
    result.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    subparsers = result.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(subparsers)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 if it found something wrong, 2 on bad input."""
    try:
        args = parser().parse_args(argv)
        return args.run(args)
    except MemoryInfeasibleError as error:
        print(f"autopar: {refusal_text(error)}", file=sys.stderr)
    except AutoparError as error:
        print(f"autopar: {one_line(error)}", file=sys.stderr)
    except BrokenPipeError:  # `autopar plan | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"autopar: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    return 2


def one_line(error: AutoparError) -> str:
    """Return the first line of the message, the user's line and the fix as one line."""
    message = error.message.splitlines()[0] + (f", at {error.source}" if error.source else "")
    return f"{message}; fix: {error.fix}" if error.fix else message


if __name__ == "__main__":
    sys.exit(main())
