"""Trains click-through-rate models with SBP parallelism.

Only the names listed in this module are public; everything else may change without notice. Each
name is imported on first use, so ``import sbpflow`` loads neither torch nor FBGEMM.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from sbpflow.runtime.compute.versions import SBPFLOW_VERSION

if TYPE_CHECKING:
    from sbpflow.api import fit, load
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

# In a source checkout, the packages sbpflow.data, sbpflow.models and sbpflow.planner are folders
# next to this one. In an installed package, they are subfolders of this one.
_CHECKOUT = Path(__file__).resolve().parents[1]
if not (_CHECKOUT / "sbpflow" / "data").is_dir() and (_CHECKOUT / "pyproject.toml").is_file():
    __path__.append(str(_CHECKOUT))

# Maps each module to its public names. The modules are ordered by topic: values, ranks,
# conversions, tensors, embeddings, models, runs.
_MODULES = {
    "sbp.sbp": ("Split", "Broadcast", "Partial"),
    "sbp.placement": ("Placement",),
    "sbp.layout": ("Layout",),
    "runtime.ranks.world": ("World",),
    "boxing.executor": ("Boxing",),
    "boxing.plan": ("plan_boxing",),
    "tensor": ("ops",),
    "tensor.global_tensor": ("GlobalTensor", "parameter"),
    "tensor.gradient_sync": ("sync_gradients",),
    "tensor.dtensor": ("from_dtensor", "to_dtensor"),
    "embedding.plan.tables": ("FeatureConfig", "TableConfig", "OutputConfig", "TableLayout"),
    "embedding.rules.base": ("SparseOptimizer", "RowBlock"),
    "embedding.rules.registry": ("sparse_optimizer",),
    "embedding.plan.embedding_plan": ("plan_embeddings",),
    "embedding.collection": ("EmbeddingCollection",),
    "embedding.ids.batch_ids": ("Bags",),
    "run.model.spec": (
        *("Fields", "ParameterSpec", "embedding_output"),
        *("make_parameters", "schemes_of"),
    ),
    "run.model.torch_model": ("TorchModel",),
    "run.execution.job": ("start_job",),
    "config.schema": ("Config", "DataConfig"),
    "config.table_rules": ("ParallelConfig",),
    "config.load": ("load_config",),
    "api": ("fit", "load"),
    "errors": ("ConfigError", "DataError", "SbpError", "TrainingError"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

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
    "fit",
    "from_dtensor",
    "load",
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
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'sbpflow' has no attribute {name!r}")
    if name == "ops":  # this public name is a module
        return import_module("sbpflow.tensor.ops")
    return getattr(import_module(f"sbpflow.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
