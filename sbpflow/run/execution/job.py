"""A run on one rank, built from its plan: tables, dense part, optimizers, trainer."""

import logging
from dataclasses import dataclass

import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.checkpoint.read import Checkpoint
from sbpflow.checkpoint.restore import check_fits, restore
from sbpflow.config.schema import Config
from sbpflow.config.table_rules import DTYPES
from sbpflow.embedding.collection import EmbeddingCollection
from sbpflow.embedding.state import LogicalTensor
from sbpflow.embedding.storage.store import StoreFactory, device_store
from sbpflow.errors import ConfigError, SbpError
from sbpflow.run.execution.warm_up import warm_up
from sbpflow.run.model.spec import Fields, ModelSpec
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.planning.kernels import with_measured_kernels
from sbpflow.run.planning.plan import RunPlan
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
    """What one rank needs to train, predict and be looked into."""

    trainer: Trainer
    model: DensePart
    embeddings: EmbeddingCollection
    plan: RunPlan
    boxing: Boxing

    @property
    def copies(self) -> dict[str, GlobalTensor]:
        """Dense parameters and buffers, for ``check_replicas``."""
        return {**self.model.parameters, **self.model.buffers}

    def state(self) -> dict[str, LogicalTensor]:
        """Everything that training changes, by logical name: ``tables/T``, ``tables/T/STATE``,
        ``dense/P``, ``dense/P/STATE``; full shapes, and this rank's rectangles. P is a
        parameter, or a buffer such as the running mean of a batch norm.
        """
        model = self.model
        dense = dense_state(model.parameters, model.buffers, self.trainer.optimizer)
        return {**self.embeddings.state(), **dense}

    def restore(self, checkpoint: Checkpoint, *, grown: bool = False) -> None:
        """Be the job that was saved, whatever it was laid out like: go on from its step.

        With ``grown`` tables may have more rows than were saved; those are as they were made.
        CheckpointError where the checkpoint does not fit, or is damaged: then restore another.
        """
        begin_state(self.trainer.optimizer, checkpoint.step)
        state = self.state()
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
    stores: StoreFactory = device_store,
) -> Job:
    """Allocate and fill this rank's part of everything; ``boxing`` follows the plan from now on.

    ``stores`` as ``EmbeddingCollection`` takes it.
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
        row_buffer_fraction=config.parallel.row_buffer_fraction,
        stores=stores,
    )
    layouts = {parameter.name: parameter.layout for parameter in plan.dense}
    model = spec.build(layouts, boxing, seed=seed, dtype=dtype)
    if not hasattr(model, "buffers"):
        raise SbpError(
            f"model {config.model.name}: its dense part {type(model).__name__} has no buffers, the "
            "state that no optimizer changes; without such state write self.buffers = {}"
        )
    parts = [parameter.part for parameter in model.parameters.values()]
    captured = config.parallel.cuda_graph
    if captured:
        _check_captured(plan)
    clip, clipper = config.optimizer.clip, None
    if clip is not None:
        clipper = Clipper(clip, model.parameters, embeddings, boxing, plan.clip)
    trainer = Trainer(
        model,
        embeddings,
        make_dense_optimizer(config.optimizer.dense, parts, capturable=captured),
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
        cuda_graph=captured,
        lookahead=plan.lookahead,
    )
    if boxing.world.rank == 0:
        _say_what_is_fixed(config, trainer, embeddings)
    return Job(trainer, model, embeddings, plan, boxing)


def _say_what_is_fixed(config: Config, trainer: Trainer, embeddings: EmbeddingCollection) -> None:
    """In a line each: what is replayed, and what travels in buffers of a fixed size."""
    if trainer.graphs is not None:
        logger.info("parallel.cuda_graph: %s", trainer.graphs.describe())
    if config.parallel.row_buffer_fraction is not None:
        found = embeddings.describe_buffers()
        nothing = "nothing to do: of no table do single rows travel to a kernel torch or triton"
        for line in found or [nothing]:
            logger.info("parallel.row_buffer_fraction: %s", line)


def _check_captured(plan: RunPlan) -> None:
    """ConfigError for a dense part that sends, which a graph of one rank cannot hold."""
    sends = [*plan.dense_forward, *plan.dense_backward]
    if sends:
        raise ConfigError(
            f"parallel.cuda_graph: true, but the dense part sends ({sends[0].id}) between ranks: "
            "by a batch norm over all of them, or by parallel.dense; use model.norm: layer or "
            "none, and leave parallel.dense out, or use parallel.cuda_graph=false"
        )


def start_job(config: Config, fields: Fields, boxing: Boxing) -> Job:
    """Plan a run over these columns and build it: for programs that bring their own batches."""
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
