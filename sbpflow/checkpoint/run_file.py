"""Reads and writes ``run.json`` in a checkpoint folder: the ID and status of the run.

This file decides whether a run resumes or starts over, so even a single changed byte is an error.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from sbpflow.checkpoint.folder import sync_path, write_synced
from sbpflow.checkpoint.write import failed
from sbpflow.errors import CheckpointError
from sbpflow.runtime.files.json_file import json_digest, object_of, parse_json, read_text, why_not
from sbpflow.runtime.files.remote_path import AnyPath, RemotePath

RUN_FILE = "run.json"
FORMAT, VERSION = "sbpflow-run", 2
Status = Literal["training", "finished"]
MAX_BYTES = 2**24
_RUN = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The ID of a run, the configuration values that affect its results, and its status."""

    run: str
    facts: Mapping[str, str]
    status: Status


def write_run(folder: AnyPath, facts: RunFacts) -> None:
    """Write ``run.json``, atomically replacing an existing file."""
    try:
        if isinstance(folder, RemotePath):
            (folder / RUN_FILE).write_bytes(_to_text(facts).encode("ascii"))
            return
        new = folder / f".{RUN_FILE}.new"
        write_synced(new, _to_text(facts))
        new.replace(folder / RUN_FILE)
        sync_path(folder)
    except OSError as error:
        raise failed(folder / RUN_FILE, error) from error


def read_run(folder: AnyPath) -> RunFacts | None:
    """Read ``run.json``; return ``None`` if the file does not exist.

    Raise CheckpointError if the file is damaged.
    """
    path = folder / RUN_FILE
    try:
        return _from_text(read_text(path, max_bytes=MAX_BYTES))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = why_not(error).removeprefix(f"{path}: ")
        raise CheckpointError(
            f"{path} cannot be used ({reason}), but it identifies the run of these checkpoints. "
            "Restore an undamaged copy; or set checkpoint.resume=never to start over (the "
            f"checkpoints are moved aside); or set another run.dir and checkpoint.resume={folder} "
            "to resume from the newest checkpoint"
        ) from error


def _content(facts: RunFacts) -> dict[str, Any]:
    return {"run": facts.run, "facts": dict(facts.facts), "status": facts.status}


def _to_text(facts: RunFacts) -> str:
    content = _content(facts)
    head = {"format": FORMAT, "version": VERSION, "sha256": json_digest(content)}
    return json.dumps({**head, "content": content}) + "\n"


def _from_text(text: str) -> RunFacts:
    """Parse the text of version 1 or 2, which must be exactly what that version would write.

    Files of version 1 consist of the content only, without a format or checksum.
    """
    tree = object_of(parse_json(text), "the file")
    is_first = "format" not in tree and "status" in tree
    if not is_first and tree["format"] != FORMAT:
        raise ValueError(f"its format is {tree['format']!r}, not {FORMAT}")
    if not is_first and tree["version"] != VERSION:
        raise ValueError(f"its version is {tree['version']!r}, but this program reads {VERSION}")
    content = cast("dict[str, Any]", tree if is_first else tree["content"])
    run = RunFacts(run=content["run"], facts=content["facts"], status=content["status"])
    if run.status not in get_args(Status):
        raise ValueError(f"status is {run.status!r}, not one of {', '.join(get_args(Status))}")
    if not _RUN.fullmatch(run.run):
        raise ValueError(f"run is {run.run!r}, not 12 hexadecimal digits")
    facts: dict[str, object] = content["facts"]
    if not facts or not all(isinstance(value, str) for value in facts.values()):
        raise ValueError("facts must map strings to strings, with at least one entry")
    if text != (json.dumps(_content(run)) + "\n" if is_first else _to_text(run)):
        raise ValueError(
            "its checksum does not match, so the file was changed after it was written"
        )
    return run
