"""SBP-parallel training of click models: layouts, conversions between them, and embeddings on top.

What is listed here is public; everything else may change without notice. Each name is loaded on
first use, so importing ``sbpflow`` loads neither torch nor FBGEMM.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sbpflow.boxing.executor import Boxing
    from sbpflow.boxing.plan import plan_boxing
    from sbpflow.config.load import load_config
    from sbpflow.embedding.collection import EmbeddingCollection
    from sbpflow.embedding.ids.reader import Bags
    from sbpflow.embedding.plan.embedding_plan import plan_embeddings
    from sbpflow.embedding.plan.optimizer import SparseOptimizer
    from sbpflow.embedding.plan.tables import FeatureConfig, OutputConfig, TableConfig, TableLayout
    from sbpflow.errors import ConfigError, DataError, SbpError, TrainingError
    from sbpflow.run.model import Fields, ModelSpec, ParameterSpec
    from sbpflow.run.torch_model import TorchModel
    from sbpflow.runtime.world import World
    from sbpflow.sbp.layout import Layout
    from sbpflow.sbp.placement import Placement
    from sbpflow.sbp.sbp import Broadcast, Partial, Split
    from sbpflow.tensor import ops
    from sbpflow.tensor.dtensor import from_dtensor, to_dtensor
    from sbpflow.tensor.global_tensor import GlobalTensor, parameter
    from sbpflow.tensor.gradient_sync import GradientSync
    from sbpflow.training.trainer import Trainer

__version__ = "0.1.0"

_HOME = {
    "Bags": "embedding.ids.reader",
    "Boxing": "boxing.executor",
    "Broadcast": "sbp.sbp",
    "ConfigError": "errors",
    "DataError": "errors",
    "EmbeddingCollection": "embedding.collection",
    "FeatureConfig": "embedding.plan.tables",
    "Fields": "run.model",
    "GlobalTensor": "tensor.global_tensor",
    "GradientSync": "tensor.gradient_sync",
    "Layout": "sbp.layout",
    "ModelSpec": "run.model",
    "OutputConfig": "embedding.plan.tables",
    "ParameterSpec": "run.model",
    "Partial": "sbp.sbp",
    "Placement": "sbp.placement",
    "SbpError": "errors",
    "SparseOptimizer": "embedding.plan.optimizer",
    "Split": "sbp.sbp",
    "TableConfig": "embedding.plan.tables",
    "TableLayout": "embedding.plan.tables",
    "TorchModel": "run.torch_model",
    "Trainer": "training.trainer",
    "TrainingError": "errors",
    "World": "runtime.world",
    "from_dtensor": "tensor.dtensor",
    "load_config": "config.load",
    "ops": "tensor",
    "parameter": "tensor.global_tensor",
    "plan_boxing": "boxing.plan",
    "plan_embeddings": "embedding.plan.embedding_plan",
    "to_dtensor": "tensor.dtensor",
}

__all__ = [  # noqa: RUF022 - grouped by what they are for
    "Split",
    "Broadcast",
    "Partial",
    "Placement",
    "Layout",
    "World",
    "Boxing",
    "plan_boxing",
    "GlobalTensor",
    "parameter",
    "ops",
    "GradientSync",
    "from_dtensor",
    "to_dtensor",
    "FeatureConfig",
    "TableConfig",
    "OutputConfig",
    "TableLayout",
    "SparseOptimizer",
    "plan_embeddings",
    "EmbeddingCollection",
    "Bags",
    "Fields",
    "ModelSpec",
    "ParameterSpec",
    "TorchModel",
    "Trainer",
    "load_config",
    "ConfigError",
    "DataError",
    "SbpError",
    "TrainingError",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'sbpflow' has no attribute {name!r}")
    value = import_module(f"sbpflow.{_HOME[name]}")
    if name != "ops" or _HOME[name] != "tensor":
        return getattr(value, name)
    return import_module("sbpflow.tensor.ops")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
