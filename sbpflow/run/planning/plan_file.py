"""Reads and writes the plan of a run as JSON. Reading a file constructs only ``RunPlan`` and the
classes of its fields. A dataclass becomes an object with the class name under "is"; a dtype becomes
{"dtype": name}, a mapping becomes {"map": [[key, value], ...]}, and a tuple becomes a list. A
sparse optimizer is identified by its name or, for a custom optimizer, by "class".
"""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, cast

import torch

from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.embedding.rules.registry import known_rules, rule_class
from sbpflow.errors import DataError
from sbpflow.run.planning.plan import RunPlan
from sbpflow.runtime.files.json_file import json_digest, object_of, parse_json, why_not
from sbpflow.runtime.files.run_folder import PLAN_FILE
from sbpflow.runtime.ranks.topology import Topology
from sbpflow.training.step_schedule import (
    CLIP,
    CLIP_ROWS,
    OVERLAPPED,
    SERIAL,
    Move,
    StepSchedule,
    clipped,
    saved_move,
)

FORMAT, WITHOUT_LOOKAHEAD = 3, 2  # Format 2 marks moves of the next batch as "ahead".
# The names of fields and classes in older files, and their present names.
_RENAMED = {"wire": "comm_dtype", "whole_gradients": "dense_allreduce"}
_RENAMED_CLASSES = {"Stack": "TableBatch", "Use": "FeatureLookup"}


@cache
def _classes() -> dict[str, type[Any]]:
    """Return ``RunPlan`` and the dataclasses that its field types mention, recursively, by name."""
    classes: dict[str, type[Any]] = {}

    def add(hint: Any) -> None:  # noqa: ANN401 (an annotation)
        if dataclasses.is_dataclass(hint) and hint not in classes.values():
            kind = cast("type[Any]", hint)
            classes[kind.__name__] = kind
            for field_type in _hints(kind).values():
                add(field_type)
        for argument in typing.get_args(hint):
            add(argument)

    add(RunPlan)
    del classes[SparseOptimizer.__name__]  # Optimizers have a separate encoding.
    return classes


def plan_to_json(plan: RunPlan) -> str:
    """Encode the plan as text; ``plan_from_json`` decodes it into an equal plan."""
    content = _encode(plan)
    return json.dumps({"format": FORMAT, "sha256": json_digest(content), "plan": content})


def plan_from_json(text: str) -> RunPlan:
    """Decode the text of ``plan_to_json`` without importing anything.

    Raises DataError for any other text.
    """
    try:
        content = object_of(parse_json(text), "the file")
        version = content["format"]
        if json_digest(content["plan"]) != content["sha256"]:
            raise ValueError("its checksum does not match, so the file was changed")
        known = version is not True and version in (FORMAT, WITHOUT_LOOKAHEAD)
        plan = _decode(content["plan"]) if known else None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise DataError(
            f"the plan is not a valid {PLAN_FILE} ({why_not(error)}); use the {PLAN_FILE} that a "
            "run wrote"
        ) from error
    if not isinstance(plan, RunPlan):
        raise DataError(
            f"the file (format {version!r}) is not a run plan of format {WITHOUT_LOOKAHEAD} or "
            f"{FORMAT}; use the {PLAN_FILE} that a run of this version wrote"
        )
    return plan


def _encode(value: object) -> object:
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = type(value).__name__
        if isinstance(value, SparseOptimizer):
            return _encode_rule(value)
        if _classes().get(name) is not type(value):
            raise TypeError(f"a plan contains a {name}, which cannot be encoded")
        fields = {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"is": name, **fields}
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return {"map": [[_encode(key), _encode(item)] for key, item in items]}
    if isinstance(value, tuple | list):
        return [_encode(item) for item in cast("Sequence[object]", value)]
    return value


def _encode_rule(rule: SparseOptimizer) -> object:
    content = {f.name: _encode(getattr(rule, f.name)) for f in dataclasses.fields(rule)}
    if known_rules(rule.name).get(rule.name) is not type(rule):
        content["class"] = f"{type(rule).__module__}:{type(rule).__qualname__}"
    return {"is": "SparseOptimizer", **content}


def _decode_rule(content: dict[str, Any]) -> SparseOptimizer:
    """Decode an optimizer; constants of other optimizers, in older files, are ignored."""
    kind: type[Any] = rule_class(content.get("class", content["name"]))
    names = [field.name for field in dataclasses.fields(kind)]
    return kind(**{key: _decode(content[key]) for key in names})


def _decode_older_schedule(content: dict[str, Any]) -> StepSchedule:
    """Convert a schedule of format 2: serial or overlapped, and with or without a clip move."""
    schedule = SERIAL if content["wait_at_once"] else OVERLAPPED
    moves = {move["says"] for move in content["each_step"]}
    for clip in (CLIP, CLIP_ROWS):
        if clip.says in moves:
            return clipped(schedule, rows=clip is CLIP_ROWS)
    return schedule


def _decode(value: object) -> object:
    if isinstance(value, list):
        return tuple(_decode(item) for item in cast("list[object]", value))
    if not isinstance(value, dict):
        return value
    content = cast("dict[str, Any]", value)
    if "dtype" in content and "is" not in content:
        dtype = getattr(torch, content["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{content['dtype']!r} is not a torch dtype")
        return dtype
    if "map" in content and "is" not in content:
        return {_decode(key): _decode(item) for key, item in content["map"]}
    if content["is"] == "SparseOptimizer":
        return _decode_rule(content)
    if content["is"] == "StepSchedule" and "ahead" in content["each_batch"][0]:
        return _decode_older_schedule(content)
    if content["is"] == "RunPlan" and "topology" not in content:  # written by an older version
        ranks = content["embeddings"]["world"]["ranks"]
        content["topology"] = _encode(Topology.one_host(len(ranks)))
    kind = _classes()[_RENAMED_CLASSES.get(content["is"], content["is"])]
    values = {_RENAMED.get(key, key): _decode(i) for key, i in content.items() if key != "is"}
    for key, item in values.items():
        if not _fits(item, _hints(kind)[key]):
            raise TypeError(f"{kind.__name__}.{key} cannot be {str(item)[:80]}")
    if kind is Move:
        return saved_move(content["name"], content["says"])
    return kind(**values)


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _fits(value: object, hint: Any) -> bool:  # noqa: ANN401 (an annotation)
    """Return whether a decoded value has type ``hint``; nested dataclasses were checked earlier."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, arg) for arg in args)
    if origin is Literal:
        return value in args
    if origin is tuple or origin is Sequence:
        if not isinstance(value, tuple):
            return False
        items = cast("tuple[object, ...]", value)
        if args[-1] is Ellipsis or origin is Sequence:
            return all(_fits(item, args[0]) for item in items)
        return len(items) == len(args) and all(map(_fits, items, args))
    if origin is Mapping or origin is dict:
        if not isinstance(value, dict):
            return False
        entries = cast("dict[object, object]", value).items()
        return all(_fits(key, args[0]) and _fits(item, args[1]) for key, item in entries)
    if hint is float:
        return type(value) in (int, float)
    if hint in (int, str, bool):
        return type(value) is hint
    return hint in (Any, object) or isinstance(value, origin or hint)
