"""The file format of plans: JSON of one fixed form, with a version, a hash of the content and, with a key, a signature.

A file is data from elsewhere. It is read in steps that each refuse what the next one must not see: size and depth, JSON
without duplicate keys, infinite or huge numbers, then the schema, then the hash. Nothing in it names a path, a class or
code.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

from ..errors import InputError, PlanFormatError, PlanTampered
from ..hardware.profile import LOWERINGS

Json = dict[str, Any]
VERSION = 10
LARGEST_FILE_BYTES = 64 * 2**20
DEEPEST = 64
MOST_DIGITS = 18  # of an integer
MEMORY_KINDS = (  # in the order of the plan's text
    "parameters", "gradients", "optimizer", "buffers", "gathered parameters kept", "gathered parameters", "activations",
    "kept keys", "recomputed block", "values between ops", "collective buffers", "op workspace", "allocator reserve",
)  # fmt: skip


def write(path: str | Path, data: Json, key: str | bytes | None = None) -> None:
    """Write a plan's data, which holds its hash; with `key` also sign it (HMAC-SHA256)."""
    _check_key(key)
    if key is not None:
        data = data | {"signature": signature(data, key)}
    Path(path).write_text(json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n")


def read(path: str | Path, key: str | bytes | None = None) -> Json:
    """Return the data of a plan file. Raise PlanFormatError, or PlanTampered if hash or signature do not fit."""
    _check_key(key)
    try:
        with open(path, "rb") as file:
            content = file.read(LARGEST_FILE_BYTES + 1)
        if len(content) > LARGEST_FILE_BYTES:
            raise PlanFormatError(f"{path} is larger than any plan", fix="pass a file written by plan.save")
        data = parse(content.decode())
    except (OSError, ValueError, RecursionError) as error:
        raise PlanFormatError(
            f"{path} cannot be read as a plan: {error}", fix="pass a file written by plan.save"
        ) from None
    return check(data, str(path), key)


# Whole strings, the last one even without an end, and brackets. Possessive: the time is linear in the length of any
# text, and a string takes no memory.
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[][{}]', re.DOTALL)
_DEEPER = {"[": 1, "{": 1, "]": -1, "}": -1}


def parse(text: str) -> object:
    """Parse JSON. Raise ValueError for anything else, for duplicate keys, for infinite or huge numbers, and for what is
    nested too deep."""
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += _DEEPER.get(token[0], 0)
        if depth > DEEPEST:
            raise ValueError(f"it is nested deeper than {DEEPEST}")
    return json.loads(
        text,
        object_pairs_hook=_without_duplicates,
        parse_int=_short_integer,
        parse_float=_finite,
        parse_constant=_finite,
    )


def _check_key(key: object) -> None:
    """Raise InputError for a key that is none, or that everybody has."""
    if key is not None and (not isinstance(key, (str, bytes)) or not key):
        what = f"a {type(key).__name__}" if key else "empty"
        raise InputError(f"the key of a plan is {what}", fix="pass a secret, as text or bytes")


def check(data: object, name: str, key: str | bytes | None = None) -> Json:
    """Return `data`, a plan's. Raise PlanFormatError if it is not a plan of this version, PlanTampered if it was
    changed or not signed with `key`."""
    version = data.get("version") if isinstance(data, dict) else None
    if not isinstance(data, dict) or type(version) is not int or version != VERSION:
        raise PlanFormatError(
            f"{name} has plan version {version!r:.40}, not {VERSION}", fix="plan again with this autopar"
        )
    body = {k: v for k, v in data.items() if k != "signature"}
    if wrong := _mismatch(OPTIONAL | _in_full(body), SCHEMA, ""):
        raise PlanFormatError(f"{name} lacks or misstates a field: {wrong}", fix="plan again")
    if body["hash"] != content_hash(body):
        raise PlanTampered(f"{name} was changed after it was written: its hash does not match", fix="plan again")
    if key is not None:
        signed = data.get("signature")
        if not isinstance(signed, str) or not hmac.compare_digest(signed.encode(), signature(body, key).encode()):
            raise PlanTampered(
                f"{name} is not signed with this key", fix="use a plan saved with plan.save(path, key=...)"
            )
    return data


def content_hash(data: Json) -> str:
    """Return the SHA-256 of everything but the hash itself and the signature, in canonical form."""
    return hashlib.sha256(_canonical(data)).hexdigest()


def signature(data: Json, key: str | bytes) -> str:
    """Return the HMAC-SHA256 by a key of everything but the hash and the signature, in canonical form."""
    return hmac.new(key.encode() if isinstance(key, str) else key, _canonical(data), hashlib.sha256).hexdigest()


def _canonical(data: Json) -> bytes:
    body = {k: v for k, v in data.items() if k not in ("hash", "signature")}
    return json.dumps(body, sort_keys=True, allow_nan=False).encode()


def _without_duplicates(pairs: list[tuple[str, object]]) -> Json:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has two values under one key")
    return found


def _short_integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value


# The schema: a predicate, [kind] for lists, (kind, ...) for lists of fixed length, {"field": kind} for records,
# Values(kind) for objects with any keys, Either(kind) for what may be null. `IN_WORDS` says what predicates ask for.


class Values:
    """Objects with texts as keys and values of one kind."""

    def __init__(self, kind: Kind):
        self.kind = kind


class Either:
    """Values of one kind, or null."""

    def __init__(self, kind: Kind):
        self.kind = kind


Kind: TypeAlias = "Callable[[object], bool] | Values | Either | list[Kind] | tuple[Kind, ...] | dict[str, Kind]"


def text(value: object) -> TypeGuard[str]:
    """Return whether a value is printable text."""
    return isinstance(value, str) and value.replace("\n", "").isprintable()


def number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number."""
    return isinstance(value, (int, float)) and type(value) in (int, float) and math.isfinite(value)


def amount(value: object) -> bool:
    """Return whether a value is a number of 0 or more."""
    return number(value) and value >= 0


def speed(value: object) -> bool:
    """Return whether a value is a number above 0."""
    return number(value) and value > 0


def capacity(value: object) -> bool:
    """Return whether a value is a number of 1 or more."""
    return number(value) and value >= 1


def count(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer of 0 or more."""
    return isinstance(value, int) and type(value) is int and value >= 0


def size(value: object) -> bool:
    """Return whether a value is an integer from 1 to 65536."""
    return count(value) and 0 < value <= 2**16


def flag(value: object) -> bool:
    """Return whether a value is true or false."""
    return type(value) is bool


def lowering(value: object) -> bool:
    """Return whether a value is a lowering of reduce-scatter."""
    return text(value) and value in LOWERINGS


def by_tier(value: object) -> bool:
    """Return whether a value is a kind of collective that goes tier by tier."""
    return text(value) and value in ("all_reduce", "all_gather", "reduce_scatter")


def narrow_reduction(value: object) -> bool:
    """Return whether a value is a type that gradients are reduced in."""
    return text(value) and value in ("bf16", "fp16")


def narrow_state(value: object) -> bool:
    """Return whether a value is a type that the state of an optimizer is kept in."""
    return text(value) and value == "bf16"


def execution(value: object) -> bool:
    """Return whether a value is a way in which graphs run."""
    return text(value) and value in ("eager", "compiled")


def rank(value: object) -> bool:
    """Return whether a value is a number of dims, 64 at most."""
    return count(value) and value <= 64


IN_WORDS: dict[Callable[[object], bool], str] = {
    text: "printable text",
    number: "a number",
    amount: "a number of 0 or more",
    speed: "a number above 0",
    capacity: "a number of 1 or more",
    count: "an integer of 0 or more",
    size: "an integer from 1 to 65536",
    flag: "true or false",
    lowering: "a lowering of reduce-scatter",
    by_tier: "a kind of collective that goes tier by tier",
    narrow_reduction: "a type that gradients are reduced in",
    narrow_state: "a type that the state of an optimizer is kept in",
    execution: "a way in which graphs run",
    rank: "a number of dims, 64 at most",
}
SHARDING: Kind = {
    "links": Values((amount, speed, Either(speed))),
    "memory_bytes_per_second": speed,
    "nodes": Values(([count], [count], [text])),
    "leaves": Values(count),
    "outputs": [Either(count)],
    "kept": [(text, count, count)],
    "again": [text],
    "on_host": [text],
    "hierarchy": [(by_tier, [text], [text], count, count)],
    "layouts": [(rank, text)],
    "loops": [(by_tier, text, count, text, [text])],
    "exchanges": [(text, [text])],
}
# What a file may leave out, and what it could be.
NO_FLOPS: Json = {"model": 0.0, "dtype": "fp32", "peak_per_second": 0.0, "published": 0.0, "closed": 0.0}
NO_ROUTING: Json = {"load": 1.0, "worst_peak_bytes": 0.0, "sent_bytes": 0.0, "gathered_bytes": 0.0,
                    "beside_seconds": 0.0, "gained_seconds": 0.0}  # fmt: skip
NO_COPIES: Json = {"load": 1.0, "sent_bytes": 0.0, "held_bytes": 0.0, "seconds": 0.0}
NO_PROGRAM: Json = {"choices": 0, "excluded": 0, "decided": 0, "variables": 0, "proved": False}
OPTIONAL: Json = {
    "reduce_dtype": "bf16",
    "state_dtype": "bf16",
    "execution": "eager",
    "outputs": [],
    "batches": [],
    "tiled": [],
    "shardings": [],
    "packed": 0,
    "attentions": [],
    "fp8": "",
    "unmade_bytes": 0.0,
    "beside_seconds": 0.0,
    "routing": NO_ROUTING,
    "expert_capacity": 1.0,
    "hot_experts": 0,
    "expert_copies": NO_COPIES,
    "saved_on_host": {"values": [], "bytes_": 0.0, "seconds": 0.0, "exposed_seconds": 0.0},
    "update_seconds": 0.0,
    "flops": NO_FLOPS,
    "program": NO_PROGRAM,
}
# The same of each of the alternatives.
OF_ALTERNATIVES: Json = {"micro_batches": 1, "recomputed_blocks": 0, "offload": "none", "mesh": "", "schedule": ""}
OF_TILED: Json = {"kind": ""}
OF_PAIRS: Json = {"gained_by_stage": []}
OF_PIPELINE: Json = {"row_chunks": 1, "attention_share": 0.0, "pairs": None}
SCHEMA: Kind = {
    "version": count, "hash": text, "fingerprint": text, "model": text, "mesh": text, "hardware": text,
    "precision": text, "reduce_dtype": narrow_reduction, "state_dtype": narrow_state, "execution": execution,
    "optimizer": text, "strategy": text,
    "memory_limit_bytes": amount, "step_seconds": amount,
    "compute_seconds": amount, "communication_seconds": amount, "recompute_seconds": amount,
    "update_seconds": amount, "exposed_seconds": amount,
    "bound": amount, "gap": number, "peak_bytes": amount,
    "memory": Values(amount), "at_peak": Values(amount),
    "collectives": [{"kind": text, "axes": [text], "phase": text, "count": count, "wire_bytes": amount,
                     "seconds": amount}],
    "regions": [{
        "name": text, "copies": count, "ops": count, "weights": text, "activations": text, "compute_seconds": amount,
        "communication_seconds": amount, "bytes_": amount, "collectives": Values(count),
    }],
    "alternatives": [{
        "name": text, "step_seconds": Either(amount), "communication_seconds": Either(amount),
        "peak_bytes": Either(amount), "fits": flag, "note": text, "micro_batches": size, "recomputed_blocks": count,
        "offload": text, "mesh": text, "schedule": text,
    }],
    "recomputed": [text], "recomputed_selectively": [text], "recomputed_kinds": [text],
    "warnings": [text], "layouts": Values(text), "sharding": SHARDING,
    "reduce_scatter": lowering, "bucket_bytes": amount, "parameter_elements": count, "trained_elements": count,
    "offloaded": {"parameters": count, "host_bytes": amount, "copy_seconds": amount, "optimizer_seconds": amount},
    "flops": {"model": amount, "dtype": text, "peak_per_second": amount, "published": amount,
              "closed": amount},
    "program": {"choices": count, "excluded": count, "decided": count, "variables": count, "proved": flag},
    "outputs": [{"name": text, "shape": [count], "layout": text, "wire_bytes": amount, "seconds": amount}],
    "routing": {"load": amount, "worst_peak_bytes": amount, "sent_bytes": amount, "gathered_bytes": amount,
                "beside_seconds": amount, "gained_seconds": amount},
    "expert_capacity": capacity, "hot_experts": count,
    "expert_copies": {"load": amount, "sent_bytes": amount, "held_bytes": amount, "seconds": amount},
    "unmade_bytes": amount, "beside_seconds": amount, "packed": count, "fp8": text,
    "attentions": [{"name": text, "copies": size, "scheme": text, "pairs": amount, "balance": amount,
                    "sent_bytes": amount}],
    "saved_on_host": {"values": [(text, count)], "bytes_": amount, "seconds": amount, "exposed_seconds": amount},
    "shardings": [{"stages": [count], "layouts": Values(text)}],
    "tiled": [{"node": text, "layer": text, "bytes_": amount, "seconds": amount, "pieces": count, "kind": text}],
    "reduces_once": flag, "overlaps": flag, "samples": count,
    "pipeline": {
        "axis": text, "ranks": size, "schedule": text, "micro_batches": size, "stages_per_rank": size, "cuts": [text],
        "costs": [{
            "forward_seconds": amount, "input_seconds": amount, "weight_seconds": amount, "transfer_seconds": amount,
            "sent_bytes": amount, "state_bytes": amount, "activation_bytes": amount, "peak_bytes": amount,
            "parameters": count, "name": text,
        }],
        "owners": [[text]], "samples": count, "row_chunks": size, "attention_share": amount,
        "pairs": Either({
            "turns": [text], "beside_seconds": amount, "gained_seconds": amount, "gained_by_stage": [amount],
        }),
    },
    "meshes": [{
        "mesh": text, "bound": amount, "step_seconds": Either(amount), "peak_bytes": Either(amount),
        "gap": Either(number), "note": text,
    }],
    "batches": [{"samples": size, "tokens": count, "step_seconds": Either(amount), "peak_bytes": Either(amount)}],
}  # fmt: skip


def _in_full(body: Json) -> Json:
    """Return a plan's data with what its alternatives, pieces, pipeline, sharding and routing leave out."""
    rows, sharding = body.get("alternatives"), body.get("sharding")
    if isinstance(sharding, dict):
        body = body | {"sharding": {"loops": [], "exchanges": []} | sharding}
    if isinstance(tiled := body.get("tiled"), list):
        body = body | {"tiled": [OF_TILED | one if isinstance(one, dict) else one for one in tiled]}
    if isinstance(routing := body.get("routing"), dict):
        body = body | {"routing": NO_ROUTING | routing}
    if isinstance(pipeline := body.get("pipeline"), dict):
        if isinstance(pairs := pipeline.get("pairs"), dict):
            pipeline = pipeline | {"pairs": OF_PAIRS | pairs}
        body = body | {"pipeline": OF_PIPELINE | pipeline}
    if not isinstance(rows, list):
        return body
    return body | {"alternatives": [OF_ALTERNATIVES | row if isinstance(row, dict) else row for row in rows]}


def _mismatch(value: object, kind: Kind, where: str) -> str:
    """Return what is wrong with a value, "" if nothing is."""
    if not isinstance(kind, (Values, Either, list, tuple, dict)):
        return "" if kind(value) else f"{where or 'it'} is not {IN_WORDS[kind]}"
    if isinstance(kind, Either):
        return "" if value is None else _mismatch(value, kind.kind, where)
    if isinstance(kind, (dict, Values)):
        if not isinstance(value, dict):
            return f"{where or 'it'} is not an object"
        if isinstance(kind, dict) and kind.keys() != value.keys():
            odd = sorted(kind.keys() ^ value.keys())[0]
            return f"{where}.{odd:.80} is {'missing' if odd in kind else 'unknown'}".lstrip(".")
        items = [(key, item, kind[key] if isinstance(kind, dict) else kind.kind) for key, item in value.items()]
    else:
        if not isinstance(value, list) or isinstance(kind, tuple) and len(value) != len(kind):
            return f"{where} is not a list{f' of {len(kind)}' if isinstance(kind, tuple) else ''}"
        items = [(i, item, kind[i] if isinstance(kind, tuple) else kind[0]) for i, item in enumerate(value)]
    for key, item, inner in items:
        if not text(str(key)):
            return f"{where} has a key that is not printable"
        if wrong := _mismatch(item, inner, f"{where}.{key}".lstrip(".")):
            return wrong
    return ""
