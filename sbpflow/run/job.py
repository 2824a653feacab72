"""A run on one rank, built from its plan: tables, dense part, optimizers, trainer."""

from dataclasses import dataclass

from sbpflow.boxing.executor import Boxing
from sbpflow.config.schema import Config
from sbpflow.config.table_rules import DTYPES
from sbpflow.embedding.collection import EmbeddingCollection
from sbpflow.run.model import ModelSpec
from sbpflow.run.plan import RunPlan
from sbpflow.training.dense_optimizers import make_dense_optimizer
from sbpflow.training.dense_part import DensePart
from sbpflow.training.learning_rate import rate_factor
from sbpflow.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Job:
    """What one rank needs to train, predict and be looked into."""

    trainer: Trainer
    model: DensePart
    embeddings: EmbeddingCollection
    plan: RunPlan
    boxing: Boxing


def build_job(config: Config, spec: ModelSpec, plan: RunPlan, boxing: Boxing) -> Job:
    """Allocate and fill this rank's part of everything."""
    dtype, seed = DTYPES[config.parallel.dtype], config.run.seed
    embeddings = EmbeddingCollection(plan.embeddings, boxing, seed=seed, kernel=plan.kernels)
    layouts = {parameter.name: parameter.layout for parameter in plan.dense}
    model = spec.build(layouts, boxing, seed=seed, dtype=dtype)
    parts = [parameter.part for parameter in model.parameters.values()]
    trainer = Trainer(
        model,
        embeddings,
        make_dense_optimizer(config.optimizer.dense, parts),
        boxing,
        dtype=dtype,
        seed=seed,
        rate_factor=rate_factor(config.optimizer.schedule),
        schedule=plan.schedule,
        gradients=plan.dense_gradients,
    )
    return Job(trainer, model, embeddings, plan, boxing)
