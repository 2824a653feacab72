"""``run.json`` in the folder of a run's checkpoints: whose they are, and whether it ended.

Whether a run continues or starts anew depends on this file, so a single changed byte is an error.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from sbpflow.checkpoint.folder import sync_folder, write_synced
from sbpflow.checkpoint.write import failed
from sbpflow.errors import CheckpointError
from sbpflow.runtime.files.json_file import object_of, parse_json, read_text, why_not

RUN_FILE = "run.json"
FORMAT, VERSION = "sbpflow-run", 2
Status = Literal["training", "finished"]
MOST_BYTES = 2**24
_RUN = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The ID of a run, the keys that its results depend on, and whether it has ended."""

    run: str
    facts: Mapping[str, str]
    status: Status


def write_run(folder: Path, facts: RunFacts) -> None:
    """Write ``run.json``, replacing it as a whole."""
    new = folder / f".{RUN_FILE}.new"
    try:
        write_synced(new, _to_text(facts))
        new.replace(folder / RUN_FILE)
        sync_folder(folder)
    except OSError as error:
        raise failed(folder / RUN_FILE, error) from error


def read_run(folder: Path) -> RunFacts | None:
    """What ``write_run`` wrote; None without a file, CheckpointError for a damaged one."""
    path = folder / RUN_FILE
    try:
        return _from_text(read_text(path, max_bytes=MOST_BYTES))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = why_not(error).removeprefix(f"{path}: ")
        raise CheckpointError(
            f"{path}: cannot be used ({why}); it says which run these checkpoints belong to. Put "
            "an undamaged copy back, or use checkpoint.resume=never to start anew (they are moved "
            f"aside), or another run.dir with checkpoint.resume={folder} to go on from the newest"
        ) from error


def _content(facts: RunFacts) -> dict[str, Any]:
    return {"run": facts.run, "facts": dict(facts.facts), "status": facts.status}


def _to_text(facts: RunFacts) -> str:
    content = _content(facts)
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    head = {"format": FORMAT, "version": VERSION, "sha256": digest}
    return json.dumps({**head, "content": content}) + "\n"


def _from_text(text: str) -> RunFacts:
    """Files of version 1 are the bare content; both must be byte for byte what is written."""
    tree = object_of(parse_json(text), "the file")
    is_first = "format" not in tree and "status" in tree
    if not is_first and tree["format"] != FORMAT:
        raise ValueError(f"its format is {tree['format']!r}, not {FORMAT}")
    if not is_first and tree["version"] != VERSION:
        raise ValueError(f"it has version {tree['version']!r}, this program reads {VERSION}")
    content = cast("dict[str, Any]", tree if is_first else tree["content"])
    found = RunFacts(run=content["run"], facts=content["facts"], status=content["status"])
    if found.status not in get_args(Status):
        raise ValueError(f"status: {found.status!r} is not one of {', '.join(get_args(Status))}")
    if not _RUN.fullmatch(found.run):
        raise ValueError(f"run: {found.run!r} is not 12 hexadecimal digits")
    facts: dict[str, object] = content["facts"]
    if not facts or not all(isinstance(value, str) for value in facts.values()):
        raise ValueError("facts: not texts by key")
    if text != (json.dumps(_content(found)) + "\n" if is_first else _to_text(found)):
        raise ValueError("its checksum does not fit: it was changed after it was written")
    return found
