"""Trains the same CTR model in TorchRec, with TorchRec's plain and pipelined loops.

TorchRec makes its own plan (EmbeddingShardingPlanner) and sends ids as int64, the type of the ids
in its batches. Install TorchRec with: pip install --no-deps torchrec==1.8.0 torchmetrics==1.0.3
tensordict ...
"""

import logging
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.click_model import Rows, Shape
from benchmarks.plain_models import named_layers, start_as_sbpflow
from benchmarks.torchrec_models import dense_of_torchrec, make_torchrec
from sbpflow.runtime.random.streams import fill_uniform

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)


def make_mlp(shape: Shape, seed: int) -> nn.Sequential:
    """Return the two linear layers; all systems start with the same values."""
    mlp = nn.Sequential(nn.Linear(shape.width, shape.hidden), nn.ReLU(), nn.Linear(shape.hidden, 1))
    start_as_sbpflow(named_layers("mlp", mlp), seed)
    return mlp


class _Batch(Protocol):
    ids: Any  # a KeyedJaggedTensor
    dense: Tensor
    labels: Tensor


class TorchRecPeer:
    """Trains on this rank's batches; ``plain`` and ``pipelined`` are TorchRec's two loops."""

    def __init__(
        self,
        shape: Shape,
        batches: list[Rows],
        *,
        seed: int,
        bound: float,
        wire: torch.dtype,
        model: str = "wdl",
    ) -> None:
        from torchrec.distributed import DistributedModelParallel
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.fbgemm_qcomm_codec import (
            CommType,
            QCommsConfig,
            get_qcomm_codecs_registry,
        )
        from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
        from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

        make = _make_wdl if model == "wdl" else partial(_Public, model=model)
        made = make(shape, seed, bound)
        registry = None
        if wire != torch.float32:
            kind = CommType.BF16 if wire == torch.bfloat16 else CommType.FP16
            registry = get_qcomm_codecs_registry(
                QCommsConfig(forward_precision=kind, backward_precision=kind)
            )
        sharders: Any = [EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)]
        topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
        world: Any = dist.group.WORLD
        plan = EmbeddingShardingPlanner(topology=topology).collective_plan(made, sharders, world)
        device = torch.device("cpu")
        self._model = DistributedModelParallel(made, device=device, plan=plan, sharders=sharders)
        tables = "tables." if model == "wdl" else "embedding_bag_collection."
        dense = [p for name, p in self._model.named_parameters() if tables not in name]
        self._optimizer = torch.optim.SGD(dense, lr=shape.dense_lr)
        self._batches = [_as_torchrec(rows, shape) for rows in batches]
        self._place = 0
        self._shape = shape
        if model == "wdl":
            self._order_columns(shape)
        self._pipeline: Any = TrainPipelineSparseDist(self._model, self._optimizer, device)
        self._attached = True

    def plain(self, steps: int) -> list[float]:
        """Return the losses of this rank's rows, one per step."""
        if self._attached:
            self._pipeline.detach()
            self._attached = False
        losses: list[Tensor] = []
        for batch in self._take(steps):
            self._optimizer.zero_grad()
            loss, _ = self._model(batch)
            loss.backward()
            self._optimizer.step()
            losses.append(loss.detach())
        return [float(loss) for loss in losses]

    def pipelined(self, steps: int) -> list[float]:
        """Train like ``plain``, but exchange the next batch's ids during the step."""
        if not self._attached:
            self._pipeline.attach()
            self._attached = True
        batches, losses = self._take(steps), []
        while True:
            try:
                losses.append(self._pipeline.progress(batches)[0])
            except StopIteration:
                return [float(loss) for loss in losses]

    def dense_alone(self, steps: int) -> None:
        """Run only the dense part's forward and backward passes; only for TorchRec's own models."""
        shape, batch = self._shape, self._batches[0]
        module = self._model.module.model
        vectors = torch.zeros(len(batch.labels), shape.num_tables, shape.dim, requires_grad=True)
        for _ in range(steps):
            logits = dense_of_torchrec(module, batch.dense, vectors).squeeze(1)
            F.binary_cross_entropy_with_logits(logits, batch.labels).backward()
        self._optimizer.zero_grad()

    def _order_columns(self, shape: Shape) -> None:
        """Reorder the first layer's columns, because TorchRec orders the vectors by its plan."""
        tables, first = self._model.module.tables, self._model.module.mlp
        first = getattr(first, "module", first)[0]  # DistributedDataParallel may wrap the MLP
        with torch.no_grad():
            keys = tables(self._batches[0].ids).wait().keys()
            places = [shape.names.index(key) * shape.dim for key in keys]
            columns = [place + column for place in places for column in range(shape.dim)]
            columns += range(len(columns), shape.width)
            first.weight.copy_(first.weight[:, columns].clone())

    def _take(self, steps: int) -> Iterator[Any]:
        for _ in range(steps):
            yield self._batches[self._place % len(self._batches)]
            self._place += 1


def _make_tables(shape: Shape, seed: int, bound: float) -> nn.Module:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    def fill(name: str, table: Tensor) -> Tensor:
        rows = table.data.view(-1, shape.dim)
        fill_uniform(rows, seed=seed, name=name, bound=bound, num_columns=shape.dim)
        return table

    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name.replace(".", "_"),
                embedding_dim=shape.dim,
                num_embeddings=shape.table_rows,
                feature_names=[name],
                init_fn=partial(fill, name),
            )
            for name in shape.names
        ],
        device=torch.device("meta"),
    )


def _update_in_backward(tables: nn.Module, shape: Shape) -> None:
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": shape.lr, "eps": 1e-8})


class _Public(nn.Module):
    """Wraps one of TorchRec's models and adds a loss."""

    def __init__(self, shape: Shape, seed: int, bound: float, model: str) -> None:
        super().__init__()
        tables = _make_tables(shape, seed, bound)
        _update_in_backward(tables, shape)
        self.model = make_torchrec(model, tables, shape, seed)

    def forward(self, batch: _Batch) -> tuple[Tensor, Tensor]:
        logits = self.model(batch.dense, batch.ids).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, batch.labels), logits.detach()


def _make_wdl(shape: Shape, seed: int, bound: float) -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = _make_tables(shape, seed, bound)
            self.mlp = make_mlp(shape, seed)

        def forward(self, batch: _Batch) -> tuple[Tensor, Tensor]:
            vectors = self.tables(batch.ids).values()
            logits = self.mlp(torch.cat([vectors, batch.dense], 1)).squeeze(1)
            return F.binary_cross_entropy_with_logits(logits, batch.labels), logits.detach()

    model = Model()
    _update_in_backward(model.tables, shape)
    return model


def _as_torchrec(rows: Rows, shape: Shape) -> _Batch:
    from torchrec import KeyedJaggedTensor
    from torchrec.streamable import Pipelineable

    class Batch(Pipelineable):
        def __init__(self) -> None:
            by_table = rows.ids.long().split(list(shape.hotness), 1)
            counts = torch.tensor(shape.hotness, dtype=torch.int32)
            self.ids = KeyedJaggedTensor(
                keys=shape.names,
                values=torch.cat([ids.reshape(-1) for ids in by_table]),
                lengths=counts.repeat_interleave(len(rows.ids)),
            )
            self.dense, self.labels = rows.dense, rows.labels

        def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
            return self

        def record_stream(self, stream: object) -> None:
            pass  # CPUs have no streams

        def pin_memory(self) -> "Batch":
            return self

    return Batch()
