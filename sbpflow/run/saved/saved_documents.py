"""Validates the documents that a run stores in a checkpoint with its tensors.

A digest in the index reveals damage to these documents, but does not prove that sbpflow wrote them.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from sbpflow.checkpoint.read import Checkpoint
from sbpflow.config.parse import brief
from sbpflow.errors import CheckpointError
from sbpflow.runtime.files.json_file import is_count, is_number


def saved_set(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the path and digests of the training set; raise CheckpointError for an invalid key."""
    data = _object(checkpoint, "data", checkpoint.documents.get("data"))
    for key in ("path", "fingerprint"):
        _need(checkpoint, f"data.{key}", data.get(key), _is_text, "text")
    # Earlier versions have no ``content_id`` and no ``transforms_digest``.
    for key in ("content_id", "vocabulary_digest", "transforms_digest"):
        _need(checkpoint, f"data.{key}", data.get(key), _is_text_or_none, "text or null")
    return data


def check_start(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError, naming the key, if a run cannot resume from these documents."""
    documents = checkpoint.documents
    cursor = _object(checkpoint, "cursor", documents.get("cursor"))
    _need(checkpoint, "cursor.epoch", cursor.get("epoch"), is_count, "a whole number")
    for key in ("steps_of_before", "metrics_bytes"):
        _need(checkpoint, key, documents.get(key), is_count, "a whole number")
    check_loop(checkpoint)


def check_loop(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a state in ``loop`` is invalid. Losses may be infinite."""
    loop = _object(checkpoint, "loop", checkpoint.documents.get("loop"))
    for name, given in loop.items():
        state = _object(checkpoint, f"loop.{name}", given)
        for key in ("step", "waited"):
            _need(checkpoint, f"loop.{name}.{key}", state.get(key), is_count, "a whole number")
        value, factor = state.get("value"), state.get("factor", 1.0)
        _need(checkpoint, f"loop.{name}.value", value, _is_watched, "a number or null")
        _need(checkpoint, f"loop.{name}.factor", factor, _is_factor, "above 0 and at most 1")


def _object(checkpoint: Checkpoint, key: str, value: object) -> dict[str, Any]:
    _need(checkpoint, key, value, lambda given: isinstance(given, dict), "an object with keys")
    return cast("dict[str, Any]", value)


def _need(
    checkpoint: Checkpoint, key: str, value: object, fits: Callable[[object], bool], rule: str
) -> None:
    if not fits(value):
        given = "nothing" if value is None else brief(value)
        raise CheckpointError(
            f"{checkpoint.path}: {key} must be {rule}, got {given}; use another checkpoint"
        )


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_watched(value: object) -> bool:
    return value is None or (type(value) in (int, float) and not math.isnan(cast("float", value)))


def _is_factor(value: object) -> bool:
    return is_number(value) and 0 < cast("float", value) <= 1
