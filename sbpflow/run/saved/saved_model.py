"""Loads a trained model: finds the checkpoint, rebuilds its configuration and plan, and fills a
job.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from glob import escape
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from sbpflow.checkpoint.commands import checkpoint_folder
from sbpflow.checkpoint.folder import (
    best_of,
    checked,
    good_checkpoints,
    list_checkpoints,
    step_folder,
)
from sbpflow.checkpoint.format import INDEX_FILE
from sbpflow.checkpoint.read import Checkpoint
from sbpflow.checkpoint.restore import restore
from sbpflow.config.load import config_from_tree
from sbpflow.config.parse import plain
from sbpflow.config.renamed import with_current_keys
from sbpflow.config.schema import Config
from sbpflow.config.table_rules import Hosts, ParallelConfig, TableRule, rule_of
from sbpflow.embedding.plan.exchanges import legal_exchanges
from sbpflow.embedding.plan.tables import TableConfig
from sbpflow.embedding.plan.vocabularies import vocabulary_name
from sbpflow.embedding.rules.kernels import KernelRequest
from sbpflow.embedding.storage.choose import missing_kernels, request_of
from sbpflow.errors import CheckpointError, ConfigError, DataError
from sbpflow.run.execution.job import Job
from sbpflow.run.model.spec import ModelSpec
from sbpflow.run.planning.plan import RunPlan
from sbpflow.run.planning.plan_file import plan_from_json
from sbpflow.runtime.fields.keys import device_keys
from sbpflow.runtime.files.remote_path import AnyPath
from sbpflow.sbp.layout import Layout


def find_checkpoint(path: AnyPath, which: Literal["best", "last"] | None = None) -> Checkpoint:
    """Return the checkpoint at ``path``, or the best or newest good checkpoint in the folder
    ``path``. By default, the result is the best checkpoint if the run kept one, else the newest.
    Damaged checkpoints are skipped with a warning. Raises CheckpointError if no checkpoint is
    usable, or if the best checkpoint is missing or damaged.
    """
    if (path / INDEX_FILE).exists():
        if which is not None:
            raise ConfigError(
                f"--{which}: {path} is a single checkpoint; remove --{which}, or use a run folder"
            )
        return checked(path)
    folder = checkpoint_folder(path)
    if not list_checkpoints(folder):
        raise CheckpointError(
            f"--checkpoint {path} contains no checkpoint; use a run folder or a step-N folder"
        )
    for newest in good_checkpoints(folder):
        best = best_of(newest)
        if which == "last" or (which is None and best is None):
            return newest
        if best is None:
            raise CheckpointError(
                f"--best: {path} has no best checkpoint; only evaluations of a run with "
                "checkpoint.keep_best or train.stop select one; use --last"
            )
        try:
            return checked(step_folder(folder, best["step"]), run=newest.run)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; --last uses {newest.path} instead") from error
    raise CheckpointError(
        f"--checkpoint {path}: every checkpoint there is damaged (see the warnings above); use "
        "another run folder or checkpoint"
    )


def weights_text(checkpoint: Checkpoint) -> str:
    """Describe in one line which weights of the run a checkpoint contains."""
    text, best = f"weights of step {checkpoint.step} from {checkpoint.path}", best_of(checkpoint)
    if best is None:
        return text
    score = f"{best.get('metric')} on val, {best['value']:.6g}"
    if best["step"] == checkpoint.step:
        return f"{text}, with the best {score}"
    return f"{text}; step {best['step']} has the best {score}"


def saved_config(
    checkpoint: Checkpoint,
    overrides: Sequence[str],
    *,
    models: Mapping[str, type[Any]],
    own_model: str | None,
    own_optimizers: Collection[str] = (),
) -> Config:
    """Return the configuration of the checkpoint's run with the command's ``key=value``
    overrides."""
    tree = checkpoint.documents.get("config")
    if not isinstance(tree, dict):
        raise CheckpointError(
            f"{checkpoint.path} has no configuration; use a checkpoint written by `sbpflow train`"
        )
    tree = with_current_keys(cast("dict[str, Any]", tree))
    read = partial(
        config_from_tree, tree, models=models, own_model=own_model, own_optimizers=own_optimizers
    )
    try:
        return read(overrides)
    except ConfigError as error:
        key = str(error).split(" ", 1)[0].rstrip(":")
        if key.partition(".")[0] not in Config.__dataclass_fields__ or "unknown key" in str(error):
            raise
        try:  # earlier versions accepted values that this version refuses
            read()
        except ConfigError as saved:
            if str(saved) == str(error):
                raise ConfigError(
                    f"{error}; {checkpoint.path} has this value, so add an override to the "
                    f"command: {key}=VALUE"
                ) from error
        raise


_LOOKAHEAD_KEYS = ("early_rows", "late_gradients")


def saved_layouts(
    checkpoint: Checkpoint,
    config: Config,
    world_size: int,
    device_type: str = "cpu",
    hosts: Hosts | None = None,
) -> tuple[Config, dict[str, TableRule] | None]:
    """Return the saved configuration, adapted to ``world_size`` ranks on ``device_type``, and table
    rules for ``plan_run``. ``hosts`` contains the ranks of each host, if they are known.

    The rules replace ``parallel.plan``: the saved layouts on the same number of ranks, S(0) on any
    other number. Therefore neither the planner nor the plan file is needed. Rules of
    ``parallel.tables`` that do not fit this number of ranks, and all rules for two hops that do not
    fit the hosts, become S(0), and the saved ``parallel.topology`` is dropped. On another device,
    the saved kernels and keys for GPUs are dropped, too. On other ranks or another device,
    ``train.early_rows`` and ``train.late_gradients`` become auto, because they may not be possible
    there. Keys given as overrides are kept, but storage rules of kind host are always dropped on
    CPU.
    """
    given: Any = plain(config.parallel)
    plan, tree = _plan_of(checkpoint), with_current_keys(_group(checkpoint.documents, "config"))
    same_device = plan is not None and plan.embeddings.world.device_type == device_type
    if plan is None or plan.world_size != world_size or not same_device:
        of_train = _group(tree, "train")
        true = [key for key in _LOOKAHEAD_KEYS if getattr(config.train, key) is True]
        moved = {key: "auto" for key in true if of_train.get(key) is True}
        config = replace(config, train=replace(config.train, **moved))
    saved = _group(tree, "parallel")
    saved_tables = _group(saved, "tables")
    tables = {
        pattern: _fitting(rule, world_size, hosts)
        if given["tables"][pattern] == saved_tables.get(pattern)
        else rule
        for pattern, rule in config.parallel.tables.items()
    }
    topology = None if given["topology"] == saved.get("topology") else config.parallel.topology
    config = replace(config, parallel=replace(config.parallel, tables=tables, topology=topology))
    if not same_device:
        defaults, parallel = ParallelConfig(), config.parallel
        keys = [key for key in device_keys(ParallelConfig) if given[key] == saved.get(key)]
        kept = {
            pattern: rule
            for pattern, rule in parallel.storage.items()
            if rule.kind != "host" or device_type != "cpu"
        }
        parallel = replace(parallel, **{key: getattr(defaults, key) for key in keys}, storage=kept)
        config = replace(config, parallel=parallel)
    if not given["plan"] or config.parallel.plan != saved.get("plan"):
        return config, None
    default = saved.get("comm_dtype") or saved.get("dtype")
    return config, {
        pattern: replace(rule, comm_dtype=None) if rule.comm_dtype == default else rule
        for pattern, rule in _planned_rules(checkpoint, world_size, hosts).items()
    }


def _group(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the named group of keys, or {} if there is none."""
    group = tree.get(key)
    return cast("Mapping[str, Any]", group) if isinstance(group, Mapping) else {}


def _fitting(rule: TableRule, world_size: int, hosts: Hosts | None) -> TableRule:
    """Return the rule, or S(0) if the rule does not fit these ranks or hosts."""
    if not _needs_other_ranks(rule, world_size, hosts):
        return rule
    return TableRule(sbp="S(0)", comm_dtype=rule.comm_dtype)


def _needs_other_ranks(rule: TableRule, world_size: int, hosts: Hosts | None) -> bool:
    """Return whether a rule names ranks that this world lacks, or needs another number of ranks
    (also for its exchange) or, for two hops, other hosts.
    """
    if _names_other_ranks(rule, world_size, hosts):
        return True
    if rule.exchange is None or rule.splits_rows_twice:
        return False
    layout = Layout(rule.placement("", "cpu", world_size, hosts), rule.parsed(""))
    return rule.exchange not in legal_exchanges(layout, world_size)


def _names_other_ranks(rule: TableRule, world_size: int, hosts: Hosts | None) -> bool:
    if rule.ranks is None:
        uneven = len(set(map(len, hosts or ()))) > 1
        if rule.splits_rows_twice and uneven:
            return True
        return rule.sizes is not None and len(rule.sizes) != world_size
    rows = [row if isinstance(row, tuple) else (row,) for row in rule.ranks]
    ranks = [rank for row in rows for rank in row]
    if rule.splits_rows_twice:  # needs all ranks, and each row on one host
        known = hosts or (tuple(ranks),)
        together = all(any(set(row) <= set(host) for host in known) for row in rows)
        return len(ranks) != world_size or not together
    if rule.sbp == "B" and len(ranks) not in (1, world_size):
        return True
    return max(ranks) >= world_size


def _planned_rules(
    checkpoint: Checkpoint, world_size: int, hosts: Hosts | None
) -> dict[str, TableRule]:
    saved = _plan_of(checkpoint)
    if saved is None or saved.world_size != world_size:
        return {"*": TableRule(sbp="S(0)")}
    rules = {escape(name): rule_of(layout) for name, layout in saved.layouts.items()}
    return {pattern: _fitting(rule, world_size, hosts) for pattern, rule in rules.items()}


def _plan_of(checkpoint: Checkpoint) -> RunPlan | None:
    try:
        return plan_from_json(json.dumps(checkpoint.documents.get("plan")))
    except DataError:
        return None


def saved_plan(checkpoint: Checkpoint, plan: RunPlan, request: KernelRequest) -> RunPlan | None:
    """Return the saved plan with its kernels if it differs from ``plan`` only in kernels, prices,
    and topology, else None. ``auto`` selects kernels by measured times, which vary between
    launches, and kernels differ in the last bits of their results. If ``request``
    (``parallel.kernel``) is auto, resumed runs and predictions therefore keep the saved kernels.
    Also returns None if a saved kernel is unavailable.
    """
    saved = _plan_of(checkpoint)
    if saved is None:
        return None
    saved = replace(saved, topology=plan.topology)
    if replace(saved, kernels=plan.kernels, priced=plan.priced) != plan:
        return None
    if saved.kernels.keys() != plan.kernels.keys():
        return None
    requested = {
        table.name
        for group in plan.embeddings.groups
        for stack in group.stacks
        for table in stack.tables
        if request_of(stack, request) != "auto"
    }
    kernels = {
        name: plan.kernels[name] if name in requested else kernel
        for name, kernel in saved.kernels.items()
    }
    missing = missing_kernels("auto")
    if any(kernel.name in missing for kernel in kernels.values()):
        return None
    return replace(saved, kernels=kernels)


def table_of(spec: ModelSpec, table: str) -> TableConfig:
    """Return the table of this name; raise ConfigError for an unknown table."""
    tables = {each.name: each for output in spec.outputs for each in output.tables}
    if table not in tables:
        near = get_close_matches(table, tables, 1) or list(tables)[:1]
        raise ConfigError(
            f"table {table!r} is not a table of this model; use one of {', '.join(tables)} (for "
            f"example, {near[0]})"
        )
    return tables[table]


def keys_of(checkpoint: Checkpoint, table: TableConfig) -> NDArray[np.int64] | None:
    """Return the keys of rows 1 to n of a growing table ([n]), or None for other tables."""
    if table.growth is None:
        return None
    return checkpoint.tensor(f"vocabularies/{vocabulary_name(table.features)}/keys").numpy()


def load_values(job: Job, checkpoint: Checkpoint) -> None:
    """Fill the tables and the dense part of this rank, but not the optimizer state.

    Raises CheckpointError if a tensor is missing or has a different shape.
    """
    wanted = {f"tables/{table.name}" for table in job.plan.embeddings.tables}
    wanted |= {f"dense/{name}" for name in job.copies}
    state = {
        name: tensor
        for name, tensor in job.state_in(checkpoint).items()
        if name in wanted or name.startswith("vocabularies/")
    }
    for name, tensor in state.items():
        saved = checkpoint.saved(name)
        skip = tensor.by_key  # a growing table may have any number of rows
        if saved.shape[skip:] != tensor.shape[skip:]:
            raise CheckpointError(
                f"{checkpoint.path}: {name} has shape {list(saved.shape)}, but "
                f"{list(tensor.shape)} in this model; use the model and the set of the training "
                "run"
            )
    restore(checkpoint, state)
