"""SBP-parallel training of click models: layouts, conversions between them, and embeddings on top.

What is listed here is public; everything else may change without notice. Each name is loaded on
first use, so importing ``sbpflow`` loads neither torch nor FBGEMM.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from sbpflow.runtime.compute.versions import SBPFLOW_VERSION

if TYPE_CHECKING:
    from sbpflow.boxing.executor import Boxing
    from sbpflow.boxing.plan import plan_boxing
    from sbpflow.config.load import load_config
    from sbpflow.config.schema import Config, DataConfig
    from sbpflow.config.table_rules import ParallelConfig
    from sbpflow.embedding.collection import EmbeddingCollection
    from sbpflow.embedding.ids.batch_ids import Bags
    from sbpflow.embedding.plan.embedding_plan import plan_embeddings
    from sbpflow.embedding.plan.tables import FeatureConfig, OutputConfig, TableConfig, TableLayout
    from sbpflow.embedding.rules.base import RowBlock, SparseOptimizer
    from sbpflow.embedding.rules.registry import sparse_optimizer
    from sbpflow.errors import ConfigError, DataError, SbpError, TrainingError
    from sbpflow.run.execution.job import start_job
    from sbpflow.run.model.spec import (
        Fields,
        ParameterSpec,
        embedding_output,
        make_parameters,
        schemes_of,
    )
    from sbpflow.run.model.torch_model import TorchModel
    from sbpflow.runtime.ranks.world import World
    from sbpflow.sbp.layout import Layout
    from sbpflow.sbp.placement import Placement
    from sbpflow.sbp.sbp import Broadcast, Partial, Split
    from sbpflow.tensor import ops
    from sbpflow.tensor.dtensor import from_dtensor, to_dtensor
    from sbpflow.tensor.global_tensor import GlobalTensor, parameter
    from sbpflow.tensor.gradient_sync import sync_gradients

__version__ = SBPFLOW_VERSION

# In a checkout sbpflow.data, .models and .planner are folders next to this one; an installed
# package has them inside.
_CHECKOUT = Path(__file__).resolve().parents[1]
if not (_CHECKOUT / "sbpflow" / "data").is_dir() and (_CHECKOUT / "pyproject.toml").is_file():
    __path__.append(str(_CHECKOUT))

# Where each public name lives: values, ranks and conversions, tensors, embeddings, models and runs.
_HOME = {
    "Split": "sbp.sbp",
    "Broadcast": "sbp.sbp",
    "Partial": "sbp.sbp",
    "Placement": "sbp.placement",
    "Layout": "sbp.layout",
    "World": "runtime.ranks.world",
    "Boxing": "boxing.executor",
    "plan_boxing": "boxing.plan",
    "GlobalTensor": "tensor.global_tensor",
    "parameter": "tensor.global_tensor",
    "ops": "tensor",
    "sync_gradients": "tensor.gradient_sync",
    "from_dtensor": "tensor.dtensor",
    "to_dtensor": "tensor.dtensor",
    "FeatureConfig": "embedding.plan.tables",
    "TableConfig": "embedding.plan.tables",
    "OutputConfig": "embedding.plan.tables",
    "TableLayout": "embedding.plan.tables",
    "SparseOptimizer": "embedding.rules.base",
    "RowBlock": "embedding.rules.base",
    "sparse_optimizer": "embedding.rules.registry",
    "plan_embeddings": "embedding.plan.embedding_plan",
    "EmbeddingCollection": "embedding.collection",
    "Bags": "embedding.ids.batch_ids",
    "Fields": "run.model.spec",
    "ParameterSpec": "run.model.spec",
    "embedding_output": "run.model.spec",
    "make_parameters": "run.model.spec",
    "schemes_of": "run.model.spec",
    "TorchModel": "run.model.torch_model",
    "Config": "config.schema",
    "DataConfig": "config.schema",
    "ParallelConfig": "config.table_rules",
    "load_config": "config.load",
    "start_job": "run.execution.job",
    "ConfigError": "errors",
    "DataError": "errors",
    "SbpError": "errors",
    "TrainingError": "errors",
}

__all__ = [
    "Bags",
    "Boxing",
    "Broadcast",
    "Config",
    "ConfigError",
    "DataConfig",
    "DataError",
    "EmbeddingCollection",
    "FeatureConfig",
    "Fields",
    "GlobalTensor",
    "Layout",
    "OutputConfig",
    "ParallelConfig",
    "ParameterSpec",
    "Partial",
    "Placement",
    "RowBlock",
    "SbpError",
    "SparseOptimizer",
    "Split",
    "TableConfig",
    "TableLayout",
    "TorchModel",
    "TrainingError",
    "World",
    "embedding_output",
    "from_dtensor",
    "load_config",
    "make_parameters",
    "ops",
    "parameter",
    "plan_boxing",
    "plan_embeddings",
    "schemes_of",
    "sparse_optimizer",
    "start_job",
    "sync_gradients",
    "to_dtensor",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'sbpflow' has no attribute {name!r}")
    if name == "ops":  # a module
        return import_module("sbpflow.tensor.ops")
    return getattr(import_module(f"sbpflow.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
