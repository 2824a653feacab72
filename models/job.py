"""A run on one rank, built from its plan: tables, dense part, optimizers, trainer."""

from dataclasses import dataclass

from models.run_plan import DTYPES
from models.wdl import WdlSpec, WideDeep
from sbpflow.boxing.executor import Boxing
from sbpflow.config.schema import Config
from sbpflow.embedding.collection import EmbeddingCollection
from sbpflow.run.plan import RunPlan
from sbpflow.training.dense_optimizers import make_dense_optimizer
from sbpflow.training.learning_rate import rate_factor
from sbpflow.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Job:
    """What one rank needs to train, predict and be looked into."""

    trainer: Trainer
    model: WideDeep
    embeddings: EmbeddingCollection
    plan: RunPlan
    boxing: Boxing


def build_job(config: Config, spec: WdlSpec, plan: RunPlan, boxing: Boxing) -> Job:
    """Allocate and fill this rank's part of everything."""
    dtype, seed = DTYPES[config.parallel.dtype], config.run.seed
    embeddings = EmbeddingCollection(
        plan.embeddings, boxing.world, boxing, seed=seed, kernel=config.parallel.kernel
    )
    layouts = {parameter.name: parameter.layout for parameter in plan.dense}
    model = WideDeep(spec, layouts, boxing, seed=seed, dtype=dtype)
    parts = [parameter.part for parameter in model.parameters.values()]
    optimizer = make_dense_optimizer(config.optimizer.dense, parts)
    trainer = Trainer(
        model,
        embeddings,
        optimizer,
        boxing,
        dtype=dtype,
        seed=seed,
        rate_factor=rate_factor(config.optimizer.schedule),
        schedule=plan.schedule,
    )
    return Job(trainer, model, embeddings, plan, boxing)
