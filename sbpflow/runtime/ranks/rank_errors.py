"""Passes the errors of ranks to the process that started them, through files in a shared folder."""

import json
from dataclasses import asdict
from pathlib import Path

from sbpflow.errors import (
    MESSAGE_ERRORS,
    AbsentError,
    CheckpointError,
    ConfigError,
    DataError,
    PeerLostError,
)
from sbpflow.runtime.files.json_file import object_of, read_json
from sbpflow.runtime.processes.exit_messages import Reason, compose
from sbpflow.runtime.processes.launch import classify

_KINDS = {kind.__name__: kind for kind in (*MESSAGE_ERRORS, AbsentError, PeerLostError)}


def save_error(folder: Path, rank: int, error: Exception) -> None:
    """Write the error that ended ``rank`` to ``folder``."""
    entry = {**asdict(classify(error)[0]), "name": type(error).__name__}
    _file(folder, rank).write_text(json.dumps(entry), encoding="utf-8")


def error_of_ranks(folder: Path, ranks: int, code: int) -> Exception:
    """Combine the saved errors into one exception, which has the joint message and the class of the
    first cause.

    A crash becomes a RuntimeError with the traceback. ``code`` is the exit code of the ranks.
    """
    reasons: dict[int, Reason] = {}
    names: dict[str, str] = {}
    for rank in range(ranks):
        if (file := _file(folder, rank)).is_file():
            entry = object_of(read_json(file), str(file))
            reasons[rank] = Reason(entry["kind"], entry["text"])
            names.setdefault(entry["kind"], entry["name"])
    text = compose(reasons, ranks).removeprefix("error: ")
    causes = [names[kind] for kind in ("crash", "mistake", "absent", "lost_peer") if kind in names]
    if not causes:
        return RuntimeError(f"the ranks ended with exit code {code}; their messages are above")
    kind = _KINDS.get(causes[0], RuntimeError)
    is_one_line = issubclass(kind, ConfigError | DataError | CheckpointError)
    return kind(*text.split("\n")) if is_one_line else kind(text)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"error-{rank}.json"
