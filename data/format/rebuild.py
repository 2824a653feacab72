"""Reconstruct the command that made a set, given the set's manifest in this or an earlier
format.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_CRITEO_DENSE = 13


def how_to_rebuild(folder: Path, content: Mapping[str, Any]) -> str:
    """Return the ``sbpflow prepare`` or ``synth`` command that made the set in ``folder``.

    Names that are not in the manifest (the input folder, a schema file) become placeholders in
    capitals, and some options, such as ``--keys``, are omitted. A command is returned even for an
    invalid manifest.
    """
    try:
        words = _synth(content) if content.get("source") == "synth" else _prepare(content)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        words = ["prepare", "--input", "ROWS"]
    return shlex.join(["sbpflow", *words, "--output", str(folder)])


def _prepare(content: Mapping[str, Any]) -> list[str]:
    words = ["prepare", "--input", *(f"FOLDER/{entry['name']}" for entry in content["inputs"])]
    schema = content["schema"]
    if list(schema["columns"][:2]) != ["label", "I1"] or len(schema["dense"]) != _CRITEO_DENSE:
        words += ["--schema", "SCHEMA"]
    split = content["split"]
    kind = split["kind"]
    if kind == "file":
        rule = ",".join(f"{name}={pattern}" for name, pattern in split["patterns"])
    elif kind in ("time", "ratio"):
        rule = ",".join(map(_number, split["fractions"]))
    elif kind == "date":
        kind, rule = "time", ",".join(f"{split['column']}<{time}" for time in split["times"])
    else:
        raise ValueError(f"split.kind: {kind!r} is not a split kind")
    words += ["--split", f"{kind}:{rule}"]
    fields = content["fields"]
    crosses = [entry["name"] for entry in fields if "x" in entry["name"]]
    words += ["--crosses", ",".join(crosses) or "none"]
    if hashed := [f"{entry['name']}={entry['rows']}" for entry in fields if entry.get("hashed")]:
        words += ["--hash-size", ",".join(hashed)]
    words += ["--min-count", str(content["min_count"]), "--seed", str(content["seed"])]
    if transforms := {entry["transform"] for entry in content["dense"]}:
        words += ["--dense", min(transforms)]
    return words


def _synth(content: Mapping[str, Any]) -> list[str]:
    options = content["options"]
    words = ["synth", "--rows", str(options["rows"])]
    for key in ("vocab_scale", "ctr", "auc", "drift", "seed"):
        words += [f"--{key.replace('_', '-')}", _number(options[key])]
    if skew := options["skew"]:
        words += ["--skew", ",".join(f"{name}={_number(value)}" for name, value in skew)]
    if hot := options["hot"]:
        words += ["--hot", ",".join(f"{name}={least}-{most}" for name, (least, most) in hot)]
    return words


def _number(value: float) -> str:
    """Return a short text of exactly this number; that of an integer has no exponent."""
    short = f"{value:g}"
    return short if isinstance(value, float) and float(short) == value else str(value)
