"""Rewrites checkpoints by key: erases keys, and turns fitted vocabularies into growing tables."""

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sbpflow.checkpoint.commands import check_last, checkpoints_of, held
from sbpflow.checkpoint.folder import checked, list_checkpoints, step_folder
from sbpflow.checkpoint.read import Checkpoint
from sbpflow.checkpoint.rewrite import (
    NewTensor,
    chosen_rows,
    given,
    kept_rows,
    unchanged,
    write_full,
)
from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.embedding.plan.growth import MAX_COUNT, TOTALS
from sbpflow.embedding.plan.vocabularies import VocabularyPlan
from sbpflow.embedding.rules.registry import import_rule
from sbpflow.embedding.storage.live_rows import NO_TIME
from sbpflow.errors import CheckpointError, ConfigError, DataError
from sbpflow.run.model.spec import HASHED
from sbpflow.run.planning.plan_file import plan_from_json
from sbpflow.runtime.files.remote_path import AnyPath
from sbpflow.runtime.random.streams import mix
from sbpflow.serving.cells import RARE_ID

_LIVE = ("keys", "last_uses", "counts")
_PENDING = ("pending_keys", "pending_last_uses", "pending_counts")


class Values(NamedTuple):
    """The values of a fitted field, in any order: their ids, keys, and counts (int64 [n] each)."""

    ids: Tensor
    keys: Tensor
    counts: Tensor


def import_optimizers(names: Collection[str]) -> None:
    """Import the custom table optimizers of a run, which its plan names."""
    for name in names:
        import_rule("--optimizer", name)


def check_grows(checkpoint: Checkpoint, field: str) -> VocabularyPlan:
    """Return the vocabulary of a field; raise ConfigError if the field does not grow."""
    known = _plan(checkpoint).vocabularies
    for plan in known:
        if field in (plan.name, *plan.features):
            return plan
    names = " or ".join(plan.name for plan in known) or "a checkpoint with growing tables"
    raise ConfigError(f"--field {field} does not grow in {checkpoint.path}; use {names}")


def erase(path: AnyPath, field: str, keys: Tensor) -> str:
    """Rewrite the newest checkpoint at ``path`` without some keys of a field; return a message.

    This removes the rows, optimizer state, last uses, and counts of ``keys`` (int64 [n]).
    """
    checkpoint = checked(checkpoints_of(path)[0])
    folder = checkpoint.path.parent
    with held(folder):
        check_last(checkpoint)
        plan = check_grows(checkpoint, field)
        prefix = f"vocabularies/{plan.name}"
        keeps = {
            name: ~torch.isin(checkpoint.tensor(f"{prefix}/{name}"), keys)
            for name in ("keys", "pending_keys")
        }
        # Row 0 is the shared row.
        rows = torch.cat([torch.ones(1, dtype=torch.bool), keeps["keys"]])
        changed = {f"{prefix}/{name}": keeps["keys"] for name in _LIVE}
        changed |= {f"{prefix}/{name}": keeps["pending_keys"] for name in _PENDING}
        changed |= {name: rows for table in plan.tables for name in _tensors(checkpoint, table)}
        write_full(
            folder,
            checkpoint.index,
            {
                name: kept_rows(checkpoint, name, changed[name])
                if name in changed
                else unchanged(checkpoint, name)
                for name in checkpoint.tensors
            },
        )
    live, pending = (int((~keep).sum()) for keep in keeps.values())
    text = f"{checkpoint.path}: erased {live} keys with rows and {pending} pending keys of {field}"
    others = [other.name for other in list_checkpoints(folder) if other != checkpoint.path]
    if others:
        text += (
            f"\nother checkpoints in {folder} may still contain the keys: {', '.join(others)}; "
            f"`sbpflow checkpoint prune {folder} --keep 1` removes them, except the best checkpoint"
        )
    return text


def to_keys(
    checkpoint: Checkpoint, values: Mapping[str, Values], data: Mapping[str, Any], output: AnyPath
) -> str:
    """Write a copy of ``checkpoint`` to the folder ``output``, with growing tables for the fields
    in ``values``.

    The rows of values become the rows of their keys, and the row for rare values becomes the shared
    row. ``data`` identifies the set, prepared with keys, on which a run can continue.
    """
    tensors: dict[str, NewTensor] = {
        name: unchanged(checkpoint, name) for name in checkpoint.tensors
    }
    done: dict[str, str] = {}
    plan = _plan(checkpoint)
    known = [feature.name for feature in plan.features]
    for table in plan.tables:
        own = [name for name in table.features if name in values]
        if not own:
            _check_crosses(table.features, known, values)
            continue
        if len(own) < len(table.features):
            other = next(name for name in table.features if name not in values)
            raise ConfigError(
                f"field {other} has no keys, but shares table {table.name} with {own[0]}, which "
                "has keys; prepare the data with keys for both"
            )
        name = "+".join(table.features)
        ids, keys, counts = values[own[0]]
        order = mix(keys).argsort()
        rows = torch.cat([torch.tensor([RARE_ID]), ids[order]])
        for tensor in _tensors(checkpoint, table.name):
            new = chosen_rows(checkpoint, tensor, rows)
            saved = replace(new.saved, keys=f"vocabularies/{name}/keys")
            tensors[tensor] = replace(new, saved=saved)
        if name not in done:
            done[name] = f"{name}: {keys.numel():,} keys"
            tensors |= _new_vocabulary(name, keys[order], counts[order])
    if not done:
        raise ConfigError(
            f"--data {data['path']} has no keys for the fields of {checkpoint.path}; use a set "
            "that was prepared with keys (sbpflow prepare --keys)"
        )
    documents = {**checkpoint.documents, "data": dict(data)}
    output.mkdir(parents=True, exist_ok=True)
    with held(output):
        if step_folder(output, checkpoint.step).exists():
            raise ConfigError(
                f"--output {output} already has a checkpoint of step {checkpoint.step}; use an "
                "empty folder"
            )
        write_full(output, replace(checkpoint.index, documents=documents), tensors)
    path = step_folder(output, checkpoint.step)
    return "\n".join([*done.values(), f"continue with checkpoint.resume={path}"])


def _check_crosses(
    features: Collection[str], known: Collection[str], fields: Collection[str]
) -> None:
    """Raise ConfigError if one of ``features`` is a hashed cross of one of ``fields``: keys have
    other hashes than ids, so the values of the cross would have other rows. ``known`` contains the
    names of all columns.
    """
    for name in (name for name in features if name.startswith(HASHED)):
        columns = _crossed(name.removeprefix(HASHED), known)
        if field := next((field for field in fields if field in columns), None):
            raise ConfigError(
                f"field {field}: the cross {name} hashes its ids, and would look up other rows if "
                f"it hashed keys instead; prepare the data without keys for {field}, or start a "
                "new run"
            )


def _crossed(name: str, known: Collection[str]) -> set[str]:
    """Return the columns of a cross, whose names are joined by x. If the names of other columns
    joined by x are the same, return those columns, too.
    """
    columns: set[str] = set()
    for column in (column for column in known if name.startswith(f"{column}x")):
        rest = name[len(column) + 1 :]
        others = _crossed(rest, known) | ({rest} & {*known})
        columns |= {column, *others} if others else set()
    return columns


def _new_vocabulary(name: str, keys: Tensor, counts: Tensor) -> dict[str, NewTensor]:
    none = torch.empty(0, dtype=torch.int32)
    columns = {
        "keys": keys,
        "last_uses": torch.zeros(keys.numel(), dtype=torch.int32),
        "counts": counts.clamp(max=MAX_COUNT).to(torch.int32),
        "pending_keys": none.to(torch.int64),
        "pending_last_uses": none,
        "pending_counts": none,
        "clock": torch.zeros(2, dtype=torch.int64),  # no batches and no samples so far
        "times": torch.tensor([NO_TIME]),
        "totals": torch.zeros(len(TOTALS), dtype=torch.int64),
    }
    return {f"vocabularies/{name}/{kind}": given(value) for kind, value in columns.items()}


def _plan(checkpoint: Checkpoint) -> EmbeddingPlan:
    if "plan" not in checkpoint.documents:
        raise CheckpointError(
            f"{checkpoint.path} contains no plan; use a checkpoint written by `sbpflow train`"
        )
    try:
        return plan_from_json(json.dumps(checkpoint.documents["plan"])).embeddings
    except DataError as error:
        raise CheckpointError(
            f"{checkpoint.path}: {error}; if the run has a custom table optimizer, name its class "
            "(--optimizer my_rules:MyOptimizer)"
        ) from error


def _tensors(checkpoint: Checkpoint, table: str) -> list[str]:
    """Return the names of a table's tensors."""
    name = f"tables/{table}"
    return [each for each in checkpoint.tensors if each == name or each.startswith(f"{name}/")]
