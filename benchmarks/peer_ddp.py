"""Trains the same CTR model in plain PyTorch: EmbeddingBag(sparse=True) in DistributedDataParallel.

Every rank stores every table, and DDP all-reduces the sparse gradients. All tables are in one
EmbeddingBag. With one bag per table, torch 2.13's sparse all-reduces on gloo (26 at the same time)
corrupt the heap after a few hundred steps; one bag is also faster. torch.optim lacks rowwise
Adagrad, so ``plain_wdl``'s rowwise Adagrad applies the coalesced gradients. ``OneProcess`` trains
the same model without DistributedDataParallel, in one process with several threads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.click_model import Rows, Shape, make_batches
from benchmarks.peer_torchrec import make_mlp
from benchmarks.plain_wdl import RowwiseAdagrad
from sbpflow.runtime.random.streams import fill_uniform


class _Model(nn.Module):
    def __init__(self, shape: Shape, seed: int, bound: float) -> None:
        super().__init__()
        rows = shape.num_tables * shape.table_rows
        self.table = nn.EmbeddingBag(rows, shape.dim, mode="sum", sparse=True)
        self.mlp = make_mlp(shape, seed)
        parts = self.table.weight.data.split(shape.table_rows)
        for name, weight in zip(shape.names, parts, strict=True):
            fill_uniform(weight, seed=seed, name=name, bound=bound, num_columns=shape.dim)

    def forward(self, rows: Tensor, dense: Tensor) -> Tensor:
        vectors = self.table(rows.view(-1, 1)).view(rows.shape[0], -1)
        return self.mlp(torch.cat([vectors, dense], 1)).squeeze(1)


class DdpPeer:
    """Trains on this rank's batches, with the same interface as ``TorchRecPeer``."""

    def __init__(self, shape: Shape, batches: list[Rows], *, seed: int, bound: float) -> None:
        model = _Model(shape, seed, bound)
        self._sparse = RowwiseAdagrad([model.table.weight], shape.lr)
        self._dense = torch.optim.SGD(model.mlp.parameters(), lr=shape.dense_lr)
        self._model = self._wrapped(model)
        first = torch.arange(shape.num_tables) * shape.table_rows
        self._batches = [(b.ids.long() + first, b.dense, b.labels) for b in batches]
        self._place = 0

    def _wrapped(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)

    def plain(self, steps: int) -> list[float]:
        """Return the losses of the batches' rows, one per step."""
        losses: list[Tensor] = []
        for _ in range(steps):
            ids, dense, labels = self._batches[self._place % len(self._batches)]
            self._place += 1
            self._dense.zero_grad()
            loss = F.binary_cross_entropy_with_logits(self._model(ids, dense), labels)
            loss.backward()
            self._sparse.step()
            self._dense.step()
            losses.append(loss.detach())
        return [float(loss) for loss in losses]


class OneProcess(DdpPeer):
    """Trains on the batches of all ranks in rank 0's process, with a thread per rank."""

    def __init__(self, shape: Shape, world_size: int, *, seed: int, bound: float) -> None:
        of_ranks = [make_batches(shape, rank, world_size) for rank in range(world_size)]
        joined = [
            Rows(
                torch.cat([part.labels for part in parts]),
                torch.cat([part.dense for part in parts]),
                torch.cat([part.ids for part in parts]),
                parts[0].batch_size,
            )
            for parts in zip(*of_ranks, strict=True)
        ]
        super().__init__(shape, joined, seed=seed, bound=bound)
        self._threads = world_size

    def _wrapped(self, model: nn.Module) -> nn.Module:
        return model

    def plain(self, steps: int) -> list[float]:
        """Return the losses of the global batches, one per step."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            return super().plain(steps)
        finally:
            torch.set_num_threads(before)
