"""Small models of every kind, each with its twin in plain PyTorch (benchmarks/plain_models.py).

Only the starting values are shared: they are looked up by the name that a run has for them.
"""

import dataclasses
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.plain_models import PlainDcn, PlainDeepFm, PlainDlrm, PlainModel, PlainWide
from models.dcnv2 import DcnV2Config
from models.deepfm import DeepFmConfig
from models.dlrm import DlrmConfig
from models.wdl import WdlConfig, WideConfig
from sbpflow.config.schema import Config
from sbpflow.embedding.collection import INITIAL_BOUND
from sbpflow.runtime.streams import fill_uniform
from tests.training.wdl_case import FIELDS, make_batches, make_config

ROWS = [one.rows for one in FIELDS.sparse]
NAMES = [one.name for one in FIELDS.sparse]
DIM, BATCH, STEPS = 5, 30, 50

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
    """A run of the model in float64; Adagrad on the tables, SGD with momentum elsewhere."""
    config = make_config(scheme, "adagrad", **more)
    return dataclasses.replace(config, model=MODELS[name])


def make_twin(name: str) -> PlainModel:
    """With the starting values of a run."""
    kinds = {
        "wdl": lambda: PlainWide(ROWS, 3, DIM, (7, 6), "batch"),
        "deepfm": lambda: PlainDeepFm(ROWS, 3, DIM, (7, 6), "batch"),
        "dlrm": lambda: PlainDlrm(ROWS, 3, DIM, (9,), (8, 6), "batch"),
        "dcnv2": lambda: PlainDcn(ROWS, 3, DIM, (7, 6), 2, norm="layer"),
        "dcnv2 low rank": lambda: PlainDcn(ROWS, 3, DIM, (7, 6), 2, rank=4, bottom=(9,)),
    }
    twin = kinds[name]().double()
    seed = make_config("1", "sgd").run.seed
    with torch.no_grad():
        for key, (value, bound) in named(twin).items():
            if bound:
                fill_uniform(value.data, seed=seed, name=key, bound=bound,
                             num_columns=value.shape[-1])  # fmt: skip
            elif not key.endswith("norm.weight"):
                value.zero_()
    return twin


def named(twin: PlainModel) -> dict[str, tuple[Tensor, float]]:
    """Every parameter by the name that a run has for it, and the bound of its starting values."""
    found: dict[str, tuple[Tensor, float]] = {}
    for kind in ("wide", "deep"):
        for field, table in zip(NAMES, getattr(twin, kind), strict=False):
            found[f"{kind}.{field}"] = table.weight, INITIAL_BOUND
    if hasattr(twin, "numbers"):
        found["numeric.weight"] = twin.numbers, 0.05
    if len(twin.wide):
        found |= _linear("wide_numeric", twin.wide_numeric)
    for index, cross in enumerate(getattr(twin, "cross", ())):
        if isinstance(cross, nn.Linear):
            found |= _linear(f"cross.{index}", cross)
        else:
            found |= _linear(f"cross.{index}.v", cross[0]) | _linear(f"cross.{index}.w", cross[1])
    for part in ("mlp", "bottom", "top"):
        if isinstance(layers := getattr(twin, part, None), nn.Sequential):
            found |= _layers(part, layers)
    if isinstance(twin, PlainDcn):
        found |= _linear("output" if twin.bottom is None else "mlp.2", twin.output)
    return found


def _layers(name: str, layers: nn.Sequential) -> dict[str, tuple[Tensor, float]]:
    found: dict[str, tuple[Tensor, float]] = {}
    index = -1
    for layer in layers:
        if isinstance(layer, nn.Linear):
            index += 1
            found |= _linear(f"{name}.{index}", layer)
        elif isinstance(layer, nn.BatchNorm1d | nn.LayerNorm):
            found[f"{name}.{index}.norm.weight"] = layer.weight, 0.0
            found[f"{name}.{index}.norm.bias"] = layer.bias, 0.0
    return found


def _linear(name: str, linear: nn.Linear) -> dict[str, tuple[Tensor, float]]:
    bound = (6 / (linear.in_features + linear.out_features)) ** 0.5
    found = {f"{name}.weight": (linear.weight, bound)}
    return found if linear.bias is None else found | {f"{name}.bias": (linear.bias, 0.0)}


@functools.cache
def twin_run(name: str) -> tuple[list[float], PlainModel, Tensor]:
    """Losses of ``STEPS`` steps, the twin after them, and its logits of the first batch then."""
    twin = make_twin(name).train()
    config = config_of(name, "1")
    sparse, dense = config.optimizer.sparse, config.optimizer.dense
    optimizers = [
        torch.optim.Adagrad(twin.tables(), lr=sparse.lr, eps=sparse.eps),
        torch.optim.SGD(twin.others(), lr=dense.lr, momentum=dense.momentum),
    ]
    losses = []
    batches = make_batches(STEPS, BATCH)
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
