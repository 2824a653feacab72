"""Defines small models of every kind, each with its twin in plain PyTorch
(benchmarks/plain_models.py).

A model and its twin share only their initial values, which are matched by parameter name.
"""

import dataclasses
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.plain_models import (
    PlainDcn,
    PlainDeepFm,
    PlainDlrm,
    PlainModel,
    PlainWide,
    start_as_sbpflow,
)
from sbpflow.config.schema import Config
from sbpflow.models.dcnv2 import DcnV2Config
from sbpflow.models.deepfm import DeepFmConfig
from sbpflow.models.dlrm import DlrmConfig
from sbpflow.models.wdl import WdlConfig, WideConfig
from tests.training.wdl_case import FIELDS, make_batches, make_config

ROWS = [field.rows for field in FIELDS.sparse]
NAMES = [field.name for field in FIELDS.sparse]
DIM, BATCH, STEPS, FEW = 5, 30, 50, 15

MODELS: dict[str, Any] = {
    "wdl": WdlConfig(
        embedding_dim=DIM,
        hidden=(7, 6),
        dropout=0.0,
        norm="batch",
        numeric="vectors",
        wide=WideConfig(columns=tuple(NAMES), crosses=(), numeric=True),
    ),
    "deepfm": DeepFmConfig(embedding_dim=DIM, hidden=(7, 6), norm="batch"),
    "dlrm": DlrmConfig(embedding_dim=DIM, bottom=(9,), top=(8, 6), norm="batch"),
    "dcnv2": DcnV2Config(embedding_dim=DIM, cross_layers=2, hidden=(7, 6), norm="layer"),
    "dcnv2 low rank": DcnV2Config(
        embedding_dim=DIM,
        cross_layers=2,
        cross_rank=4,
        structure="stacked",
        numeric="bottom",
        bottom=(9,),
        hidden=(7, 6),
    ),
}


def config_of(name: str, scheme: str | None, **more: Any) -> Config:
    """Return a config of the model in float64, with Adagrad on the tables and SGD with momentum
    elsewhere.
    """
    config = make_config(scheme, "adagrad", **more)
    return dataclasses.replace(config, model=MODELS[name])


def make_twin(name: str) -> PlainModel:
    """Make the twin with a run's initial values."""
    kinds = {
        "wdl": lambda: PlainWide(ROWS, 3, DIM, (7, 6), "batch"),
        "deepfm": lambda: PlainDeepFm(ROWS, 3, DIM, (7, 6), "batch"),
        "dlrm": lambda: PlainDlrm(ROWS, 3, DIM, (9,), (8, 6), "batch"),
        "dcnv2": lambda: PlainDcn(ROWS, 3, DIM, (7, 6), 2, norm="layer"),
        "dcnv2 low rank": lambda: PlainDcn(ROWS, 3, DIM, (7, 6), 2, rank=4, bottom=(9,)),
    }
    twin = kinds[name]().double()
    seed = make_config("1", "sgd").run.seed
    start_as_sbpflow(named(twin), seed)
    return twin


def named(twin: PlainModel) -> dict[str, tuple[Tensor, float]]:
    """Return the twin's parameters by the names that a run gives them."""
    return twin.named(NAMES)


@functools.cache
def twin_run(name: str, steps: int) -> tuple[list[float], PlainModel, Tensor]:
    """Train the twin; return the losses, the trained twin, and its logits for the first batch."""
    twin = make_twin(name).train()
    config = config_of(name, "1")
    sparse, dense = config.optimizer.sparse, config.optimizer.dense
    optimizers = [
        torch.optim.Adagrad(twin.tables(), lr=sparse.lr, eps=sparse.eps),
        torch.optim.SGD(twin.others(), lr=dense.lr, momentum=dense.momentum),
    ]
    losses = []
    batches = make_batches(steps, BATCH)
    for batch in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        logits = twin(batch.dense.double(), batch.ids.long())
        loss = F.binary_cross_entropy_with_logits(logits, batch.labels.double())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    twin.eval()
    with torch.no_grad():
        logits = twin(batches[0].dense.double(), batches[0].ids.long())
    return losses, twin, logits
