"""Maps the sparse optimizers that FBGEMM supports to the arguments of its TBE module."""

from typing import Any

from sbpflow.embedding.rules.adagrad import Adagrad
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.embedding.rules.rowwise_adagrad import RowwiseAdagrad


def _kind(name: str) -> object:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    return EmbOptimType[name]


def sgd(optimizer: SparseOptimizer) -> dict[str, Any]:
    return {"optimizer": _kind("EXACT_SGD")}


def adagrad(optimizer: Adagrad) -> dict[str, Any]:
    return {"optimizer": _kind("EXACT_ADAGRAD"), "eps": optimizer.eps}


def rowwise_adagrad(optimizer: RowwiseAdagrad) -> dict[str, Any]:
    return {"optimizer": _kind("EXACT_ROWWISE_ADAGRAD"), "eps": optimizer.eps}
