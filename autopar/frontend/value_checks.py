"""Checks of arguments in a traced model: `if (var < 0).any(): raise ValueError(...)`.

Tracing knows no values, so a line that asks for one cannot be traced, unless only one answer leads anywhere: an
`assert`, or an `if` one of whose branches always raises, as in torch.distributions' `validate_args` and
`gaussian_nll_loss`. Inside of `checks_pass` such a question gets the answer that does not raise. For input that passes
the checks the program computes what the module does; input that does not pass them is not refused in a compiled module:
it computes on, to whatever its operations give (for a negative variance, say, the logarithm's NaN). So it is with
checks of libraries, and with asserts, which `python -O` leaves out as well; an `if ...: raise` of the user's own is
refused.

Whether a branch always raises is read in the source of the line that asks. A question is left alone, and tracing
refuses it, if the source cannot be found, if both branches go on, or if something in the module would catch what is
raised.
"""

from __future__ import annotations

import ast
import dis
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType, FrameType

import torch
from torch.distributions import constraints

from .. import _torch
from ..errors import CaptureError
from .names import is_library

ASKS = ("POP_JUMP", "JUMP_IF", "UNARY_NOT", "TO_BOOL")  # instructions that take the truth of a value by themselves
TORCH = os.path.dirname(torch.__file__) + os.sep
ANSWERS = {"bool", "any", "all"}  # functions that return the truth of what they ask
# what checks of arguments do not raise: a handler of these alone lets them through
UNRELATED = {"NotImplementedError", "ImportError", "ModuleNotFoundError", "AttributeError", "StopIteration"}

Range = tuple[tuple[int, int], tuple[int, int]]  # (line, column) of the start and of the end


@contextmanager
def checks_pass(asked: Callable[[object], None] = lambda value: None) -> Iterator[None]:
    """Inside, tensors without values answer checks so that nothing is raised; `asked` is called with every value whose
    truth is read."""
    with _answering(torch.Tensor, asked), _answering(torch.SymBool, asked), _only_definite():
        yield


@contextmanager
def _only_definite() -> Iterator[None]:
    """Inside, torch.distributions asks of a covariance matrix whether it is positive definite, and not first whether it
    is symmetric, with another way to go on if it is not."""
    kind = type(constraints.positive_definite)
    before = kind.check
    kind.check = lambda self, value: torch.linalg.cholesky_ex(value).info.eq(0)
    try:
        yield
    finally:
        kind.check = before


@contextmanager
def _answering(kind: type, asked: Callable[[object], None]) -> Iterator[None]:
    own, plain = kind.__dict__.get("__bool__"), kind.__bool__

    def truth(value) -> bool:
        asked(value)
        answer = valid_answer(sys._getframe(1)) if _torch.has_no_value(value) else None
        return plain(value) if answer is None else answer

    kind.__bool__ = truth
    try:
        yield
    finally:
        if own is None:
            del kind.__bool__
        else:
            kind.__bool__ = own


def valid_answer(frame: FrameType) -> bool | None:
    """Return the answer to the truth that a frame asks for now which does not raise; None if neither answer, or both,
    may go on. Raises CaptureError for an `if ...: raise` of the user's own, which would be dropped in silence."""
    tree, position = _parsed(frame.f_code.co_filename), _asked(frame)
    if tree is None or position is None:
        return None
    asks_itself = _instructions(frame.f_code)[frame.f_lasti][0].startswith(ASKS)
    for node in _around(tree, position):
        wanted = _wanted(node)
        if wanted is not None and _contains(_range(node.test), position):
            answer = _answer(node.test, wanted, position, asks_itself)
            if answer is None or _is_caught(frame):
                return None
            if isinstance(node, ast.If) and not is_library(frame.f_globals.get("__name__")):
                raise CaptureError(
                    "this line raises an error if a value of a tensor says so, and a graph does not know it",
                    source=f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}",
                    fix="check values before the call, or write an assert, which is left out of a compiled model",
                )
            return answer
    return None


def _wanted(node: ast.AST) -> bool | None:
    """Return the truth of the test of an `if` or `assert` that does not raise; None if the statement is no check."""
    if isinstance(node, ast.Assert):
        return True
    if not isinstance(node, ast.If):
        return None
    if _raises(node.body):
        return None if _raises(node.orelse) else False
    return True if _raises(node.orelse) else None


def _raises(body: list[ast.stmt]) -> bool:
    """Return whether statements always end in a raise."""
    if not body or any(
        isinstance(n, (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.Try)) for s in body for n in ast.walk(s)
    ):
        return False
    last = body[-1]
    return isinstance(last, ast.Raise) or (isinstance(last, ast.If) and _raises(last.body) and _raises(last.orelse))


def _answer(test: ast.expr, wanted: bool, position: Range, asks_itself: bool) -> bool | None:
    """Return the truth of the part of `test` at `position` that makes `test` come out as wanted; None if that cannot be
    told."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _answer(test.operand, not wanted, position, asks_itself)
    if isinstance(test, ast.BoolOp):
        parts = [part for part in test.values if _contains(_range(part), position)]
        return _answer(parts[0], wanted, position, asks_itself) if parts else None
    if position != _range(test):
        return None
    if isinstance(test, ast.Compare):
        return wanted if asks_itself and not any(isinstance(op, (ast.In, ast.NotIn)) for op in test.ops) else None
    is_answer = isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id in ANSWERS
    return wanted if asks_itself or is_answer else None


def _is_caught(frame: FrameType | None) -> bool:
    """Return whether the module itself would catch what is raised here: then it goes on, in another way. (torch does
    not.)"""
    while frame is not None and not _is_capture(frame):
        if frame.f_code.co_filename.startswith(TORCH):
            frame = frame.f_back
            continue
        tree, position = _parsed(frame.f_code.co_filename), _position(frame, frame.f_lasti)
        if tree is None or position is None:
            return True
        for node in _around(tree, position):
            if (
                isinstance(node, ast.Try)
                and any(_contains(_range(s), position) for s in node.body)
                and any(map(_catches, node.handlers))
            ):
                return True
        frame = frame.f_back
    return False


def _is_capture(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == f"{__package__}.flat_call"


def _catches(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler takes what a check raises, and does not raise again."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    is_unrelated = all(isinstance(kind, ast.Name) and kind.id in UNRELATED for kind in kinds)
    return not is_unrelated and not _raises(handler.body)


@lru_cache(maxsize=256)
def _instructions(code: CodeType) -> dict[int, tuple[str, int | None]]:
    """Return the name of each instruction and the offset of the one before, by its own offset."""
    found = list(dis.get_instructions(code))
    before = [None, *(i.offset for i in found)]
    return {i.offset: (i.opname, b) for i, b in zip(found, before)}


def _asked(frame: FrameType) -> Range | None:
    """Return where in the source the value is made whose truth a frame asks for: by the instruction before a jump, or
    by a call itself."""
    name, before = _instructions(frame.f_code)[frame.f_lasti]
    if not name.startswith(ASKS):
        return _position(frame, frame.f_lasti)
    return None if before is None else _position(frame, before)


def _position(frame: FrameType, offset: int) -> Range | None:
    """Return where in the source an instruction of a frame comes from."""
    positions, at = list(frame.f_code.co_positions()), offset // 2
    if not 0 <= at < len(positions) or None in positions[at]:
        return None
    line, last_line, column, last_column = positions[at]
    return (line, column), (last_line, last_column)


def _range(node: ast.AST) -> Range:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _contains(outer: Range, inner: Range) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _around(tree: ast.AST, position: Range) -> list[ast.stmt]:
    """Return the statements that a position is in, the innermost first."""
    found, bodies = [], [tree]
    while bodies:
        node = bodies.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                continue
            if not hasattr(child, "lineno") or _contains(_range(child), position):
                bodies.append(child)
                found += [child] if isinstance(child, ast.stmt) else []
    return sorted(found, key=lambda node: _range(node)[0], reverse=True)


@lru_cache(maxsize=256)
def _parsed(filename: str) -> ast.Module | None:
    """Return the syntax tree of a source file, None if there is none to be read."""
    lines = linecache.getlines(filename)
    try:
        return ast.parse("".join(lines)) if lines else None
    except SyntaxError:
        return None
