"""Builds one rank's part of a run from its plan: tables, dense part, optimizers, trainer."""

import logging
from dataclasses import dataclass, replace
from functools import partial

import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.checkpoint.read import Checkpoint
from sbpflow.checkpoint.restore import check_fits, restore
from sbpflow.config.schema import Config
from sbpflow.config.table_rules import DTYPES
from sbpflow.embedding.cache.factory import stores_of
from sbpflow.embedding.collection import EmbeddingCollection
from sbpflow.embedding.exchange.base import ExchangeOptions
from sbpflow.embedding.plan.row_storage import StorageRule
from sbpflow.embedding.state import LogicalTensor
from sbpflow.embedding.storage.store import StoreFactory
from sbpflow.errors import ConfigError, SbpError
from sbpflow.run.execution.servers import join_servers
from sbpflow.run.execution.warm_up import warm_up
from sbpflow.run.model.spec import Fields, ModelSpec
from sbpflow.run.model.torch_model import TorchModel, TorchPart
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.planning.kernels import with_measured_kernels
from sbpflow.run.planning.plan import RunPlan
from sbpflow.runtime.ranks.host_threads import host_threads
from sbpflow.runtime.ranks.world import World
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.training.clipping import Clipper
from sbpflow.training.dense_optimizers import make_dense_optimizer
from sbpflow.training.dense_part import DensePart
from sbpflow.training.dense_state import begin_state, dense_state
from sbpflow.training.learning_rate import rate_factor
from sbpflow.training.trainer import Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """One rank's part of a run: tables, dense part, optimizers, and trainer."""

    trainer: Trainer
    model: DensePart
    embeddings: EmbeddingCollection
    plan: RunPlan
    boxing: Boxing

    @property
    def constants(self) -> dict[str, GlobalTensor]:
        """Return the frozen parameters and persistent buffers of a torch module."""
        return self.model.saved_constants if isinstance(self.model, TorchPart) else {}

    @property
    def copies(self) -> dict[str, GlobalTensor]:
        """Return all dense tensors (parameters, buffers, and constants), which ``check_replicas``
        compares.
        """
        return {**self.model.parameters, **self.model.buffers, **self.constants}

    def state(self) -> dict[str, LogicalTensor]:
        """Return all state that a checkpoint contains, by logical name.

        The names are ``tables/T``, ``tables/T/STATE``, ``dense/P`` and ``dense/P/STATE``, where P
        is a parameter, a buffer, such as the running mean of a batch norm, or a constant; names of
        the state of growing fields begin with ``vocabularies/``. Each value describes the full
        shape and this rank's rectangles.
        """
        model = self.model
        buffers = {**model.buffers, **self.constants}
        dense = dense_state(model.parameters, buffers, self.trainer.optimizer)
        return {**self.embeddings.state(), **dense}

    def state_in(self, checkpoint: Checkpoint) -> dict[str, LogicalTensor]:
        """Return the state to restore from a checkpoint.

        If an earlier version wrote the checkpoint, it lacks the constants of a torch module. They
        are left out with a warning, and keep the values from ``make``.
        """
        state = self.state()
        absent = [name for name in self.constants if f"dense/{name}" not in checkpoint.tensors]
        for name in absent:
            del state[f"dense/{name}"]
        if absent and self.boxing.world.rank == 0:
            logger.warning(
                "%s does not contain the frozen parameters or buffers %s; they have the values "
                "that make returned",
                *(checkpoint.path, ", ".join(absent[:3]) + ", ..." * (len(absent) > 3)),
            )
        return state

    def restore(self, checkpoint: Checkpoint, *, grown: bool = False) -> None:
        """Restore all state and the step number from a checkpoint of any layout.

        Announced batches are canceled, because their rows may already have been read. If ``grown``,
        tables may have more rows than in the checkpoint; the new rows keep their initial values.
        Raises CheckpointError if the checkpoint is damaged or does not fit. After an error, the job
        is only partly restored and must not be used until a restore succeeds.
        """
        self.trainer.drain()
        begin_state(self.trainer.optimizer, checkpoint.step)
        state = self.state_in(checkpoint)
        check_fits(checkpoint, state, grown=grown)
        restore(checkpoint, state)
        self.trainer.num_steps = checkpoint.step
        if self.trainer.graphs is not None:
            self.trainer.graphs.forget()


def build_job(
    config: Config,
    spec: ModelSpec,
    plan: RunPlan,
    boxing: Boxing,
    *,
    stores: StoreFactory | None = None,
    training: bool = True,
    compiled: bool = True,
) -> Job:
    """Allocate and initialize this rank's part of the run, whose transfers go through ``boxing``.

    See ``EmbeddingCollection`` for ``stores`` and ``compiled``; by default, ``parallel.storage``
    selects the stores. If not ``training``, the job can only predict, and the caller must load the
    table values. Such a job has no dense optimizer, because importing its class takes a second.
    """
    boxing.follow(plan.dense_conversions)
    if boxing.world.backend == "nccl":
        warm_up(plan, boxing)
    dtype, seed = DTYPES[config.parallel.dtype], config.run.seed
    if boxing.world.device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = config.parallel.tf32
    embeddings = EmbeddingCollection(
        plan.embeddings,
        boxing,
        seed=seed,
        kernel=plan.kernels,
        stores=stores or _stores(config, plan, boxing, training),
        initialize=training,
        compiled=compiled,
        options=ExchangeOptions.of(config.parallel),
    )
    layouts = {parameter.name: parameter.layout for parameter in plan.dense}
    model = spec.build(layouts, boxing, seed=seed, dtype=dtype)
    if not hasattr(model, "buffers"):
        raise SbpError(
            f"model {config.model.name}: its dense part {type(model).__name__} has no attribute "
            "buffers (state that no optimizer changes); without such state, set self.buffers = {}"
        )
    parts = [parameter.part for parameter in model.parameters.values()]
    use_graph = training and _uses_graph(config, spec, boxing.world)
    if use_graph:
        _check_no_transfers(plan)
    clip, clipper = config.optimizer.clip, None
    if clip is not None:
        clipper = Clipper(clip, model.parameters, embeddings, boxing, plan.clip)
    optimizer = None
    if training:
        optimizer = make_dense_optimizer(config.optimizer.dense, parts, capturable=use_graph)
    trainer = Trainer(
        model,
        embeddings,
        optimizer,
        boxing,
        dtype=dtype,
        seed=seed,
        rate_factor=rate_factor(config.optimizer.of_dense),
        table_rate_factor=rate_factor(config.optimizer.of_tables),
        clipper=clipper,
        loss=config.train.loss,
        schedule=plan.schedule,
        gradients=plan.dense_gradients,
        planned=(plan.batch_size, plan.dense_conversions),
        cuda_graph=use_graph,
        lookahead=plan.lookahead,
    )
    if boxing.world.rank == 0:
        _log_fixed_sizes(config, trainer, embeddings)
    return Job(trainer, model, embeddings, plan, boxing)


def _stores(config: Config, plan: RunPlan, boxing: Boxing, training: bool) -> StoreFactory:
    servers = join_servers(config, plan, boxing) if training else None
    world = boxing.world
    return stores_of(partial(_storage_rule, config), world.device, servers, host_threads(world))


def _storage_rule(config: Config, key: str) -> StorageRule:
    """Return the ``parallel.storage`` rule with this key; ``path`` is ``run.dir`` by default."""
    rule = config.parallel.storage[key.removeprefix("parallel.storage.")]
    return replace(rule, path=rule.path or config.run.dir)


def _log_fixed_sizes(config: Config, trainer: Trainer, embeddings: EmbeddingCollection) -> None:
    """Log which parts CUDA graphs capture and which transfers use fixed-size buffers."""
    if trainer.graphs is not None:
        logger.info("parallel.cuda_graph: %s", trainer.graphs.describe())
    if config.parallel.row_buffer_fraction is not None:
        no_effect = "no effect: no table that exchanges single rows uses the kernel torch or triton"
        for line in embeddings.describe_buffers() or [no_effect]:
            logger.info("parallel.row_buffer_fraction: %s", line)


def _uses_graph(config: Config, spec: ModelSpec, world: World) -> bool:
    """Resolve ``parallel.cuda_graph``."""
    parallel = config.parallel
    if parallel.cuda_graph != "auto":
        return parallel.cuda_graph
    return (
        world.device.type == "cuda"
        and world.size == 1  # speed on several GPUs has not been measured
        and not isinstance(spec, TorchModel)
        and all(map(_is_own, (spec, config.optimizer.sparse, *config.optimizer.tables.values())))
        and not parallel.checked
        and config.train.accumulate == 1
        and config.checkpoint.deltas == 0
    )


def _is_own(part: object) -> bool:
    """Return True if ``part`` belongs to sbpflow. A user's model or optimizer may synchronize with
    the device, which a graph cannot do.
    """
    return type(part).__module__.partition(".")[0] == "sbpflow"


def _check_no_transfers(plan: RunPlan) -> None:
    """Raise ConfigError if the dense part communicates, because sbpflow's graphs do not
    contain communication."""
    steps = [*plan.dense_forward, *plan.dense_backward]
    if steps:
        raise ConfigError(
            "parallel.cuda_graph: true is not supported, because the dense part communicates "
            f"between ranks ({steps[0].id}) for a batch norm or for parallel.dense; use "
            "neither batch norms nor parallel.dense, or use parallel.cuda_graph=false"
        )


def start_job(config: Config, fields: Fields, boxing: Boxing) -> Job:
    """Plan and build a run over the columns in ``fields``; the calling program provides the
    batches.
    """
    world = boxing.world
    spec, plan = plan_run(
        config,
        fields,
        world_size=world.size,
        device_type=world.device.type,
        topology=world.topology,
    )
    plan = with_measured_kernels(plan, config.parallel.kernel, boxing)
    return build_job(config, spec, plan, boxing)
