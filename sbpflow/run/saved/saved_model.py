"""A trained model out of a checkpoint: which one, its configuration, and its values into a job."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from glob import escape
from pathlib import Path
from typing import Any, cast

from sbpflow.checkpoint.commands import checkpoint_folder
from sbpflow.checkpoint.folder import checked, good_checkpoints, list_checkpoints
from sbpflow.checkpoint.format import INDEX_FILE
from sbpflow.checkpoint.read import Checkpoint
from sbpflow.checkpoint.restore import restore
from sbpflow.config.load import config_from_tree
from sbpflow.config.parse import plain
from sbpflow.config.renamed import with_current_keys
from sbpflow.config.schema import Config
from sbpflow.config.table_rules import TableRule, rule_of
from sbpflow.embedding.plan.tables import KernelRequest
from sbpflow.embedding.state import KEYS
from sbpflow.embedding.storage.choose import missing_kernels, request_of
from sbpflow.errors import CheckpointError, DataError
from sbpflow.run.execution.job import Job
from sbpflow.run.planning.plan import RunPlan
from sbpflow.run.planning.plan_file import plan_from_json


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at ``path``, or the newest good one of a run or a folder of checkpoints.

    Damaged ones are named in a warning and skipped. Raises CheckpointError if there is none.
    """
    if (path / INDEX_FILE).exists():
        return checked(path)
    folder = checkpoint_folder(path)
    if not list_checkpoints(folder):
        raise CheckpointError(
            f"--checkpoint {path}: holds no checkpoint; give a folder of a run, or one step-N"
        )
    for found in good_checkpoints(folder):
        return found
    raise CheckpointError(
        f"--checkpoint {path}: every checkpoint there is damaged, as the warnings say; use another"
    )


def saved_config(
    checkpoint: Checkpoint,
    overrides: Sequence[str],
    *,
    models: Mapping[str, type[Any]],
    own_model: str | None,
    own_optimizers: Collection[str] = (),
) -> Config:
    """The configuration of the run, with ``key=value`` overrides of the command."""
    tree = checkpoint.documents.get("config")
    if not isinstance(tree, dict):
        raise CheckpointError(f"{checkpoint.path}: has no configuration; use one that a run wrote")
    tree = with_current_keys(cast("dict[str, Any]", tree))
    return config_from_tree(
        tree, overrides, models=models, own_model=own_model, own_optimizers=own_optimizers
    )


def saved_layouts(
    checkpoint: Checkpoint, config: Config, world_size: int
) -> tuple[Config, dict[str, TableRule] | None]:
    """The configuration for so many ranks, and what stands for ``parallel.plan`` in ``plan_run``.

    In place of the plan that the run was made with are the layouts that it had, on as many ranks,
    and S(0) on another number: nothing is planned anew, and no file need be there. Rules of
    ``parallel.tables`` on ranks that are not there become S(0), too. The hosts that the run had are
    not described any more (``parallel.topology``). What overrides name is left.
    """
    given: Any = plain(config.parallel)
    saved = _group(with_current_keys(_group(checkpoint.documents, "config")), "parallel")
    saved_tables = _group(saved, "tables")
    tables = {
        pattern: TableRule(sbp="S(0)", comm_dtype=rule.comm_dtype)
        if _outside(rule, world_size) and given["tables"][pattern] == saved_tables.get(pattern)
        else rule
        for pattern, rule in config.parallel.tables.items()
    }
    topology = None if given["topology"] == saved.get("topology") else config.parallel.topology
    config = replace(config, parallel=replace(config.parallel, tables=tables, topology=topology))
    same = config.parallel.plan == saved.get("plan")
    return config, _planned_rules(checkpoint, world_size) if given["plan"] and same else None


def _group(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The group of keys there; none where it is not given."""
    found = tree.get(key)
    return cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else {}


def _outside(rule: TableRule, world_size: int) -> bool:
    """Whether it names ranks, or sizes of as many parts, that are not there."""
    if rule.ranks is None:
        return rule.sizes is not None and len(rule.sizes) != world_size
    flat = [rank for one in rule.ranks for rank in (one if isinstance(one, tuple) else (one,))]
    return max(flat) >= world_size


def _planned_rules(checkpoint: Checkpoint, world_size: int) -> dict[str, TableRule]:
    try:
        kept = plan_from_json(json.dumps(checkpoint.documents.get("plan")))
    except DataError:
        kept = None
    if kept is None or kept.world_size != world_size:
        return {"*": TableRule(sbp="S(0)")}
    return {escape(name): rule_of(layout) for name, layout in kept.layouts.items()}


def saved_plan(checkpoint: Checkpoint, plan: RunPlan, request: KernelRequest) -> RunPlan | None:
    """The plan that the run followed, kernels included, if ``plan`` is that but for these.

    Kernels are chosen by their times, which another start would measure anew, and they differ in
    the last bits: so a run that goes on and a prediction take those that there were, where the
    ``request`` (``parallel.kernel``) is auto. None too if one of them is not to be had here.
    """
    try:
        kept = plan_from_json(json.dumps(checkpoint.documents.get("plan")))
    except DataError:
        return None
    kept = replace(kept, topology=plan.topology)
    if replace(kept, kernels=plan.kernels, priced=plan.priced) != plan:
        return None
    if kept.kernels.keys() != plan.kernels.keys():
        return None
    asked = {
        table.name
        for group in plan.embeddings.groups
        for stack in group.stacks
        for table in stack.tables
        if request_of(stack, request) != "auto"
    }
    kernels = {
        name: plan.kernels[name] if name in asked else kernel
        for name, kernel in kept.kernels.items()
    }
    missing = missing_kernels("auto")
    if any(one.name in missing for one in kernels.values()):
        return None
    return replace(kept, kernels=kernels)


def load_values(job: Job, checkpoint: Checkpoint) -> None:
    """Fill tables and the dense part of this rank; state of optimizers stays as it is.

    Raises CheckpointError for a tensor that is absent or has another shape.
    """
    tables = [table for out in job.plan.embeddings.outputs for table in out.tables]
    wanted = {f"tables/{table.name}" for table in tables}
    wanted |= {f"tables/{table.name}/{KEYS}" for table in tables if table.by_key}
    wanted |= {f"dense/{name}" for name in (*job.model.parameters, *job.model.buffers)}
    state = {name: tensor for name, tensor in job.state().items() if name in wanted}
    for name, tensor in state.items():
        saved = checkpoint.saved(name)
        if saved.shape[tensor.by_key :] != tensor.shape[tensor.by_key :]:  # keys: any number
            raise CheckpointError(
                f"{checkpoint.path}: {name} is {list(saved.shape)}, this model has "
                f"{list(tensor.shape)}; use the model and the set that it was trained with"
            )
    restore(checkpoint, state)
