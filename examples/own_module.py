"""Train a plain torch module on sharded tables: torchrun --nproc-per-node 2 examples/own_module.py

This file contains the data, model, and training loop. Losses do not depend on the number of ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import sbpflow

FIELDS = sbpflow.Fields.of(dense=["price"], sparse={"user": 10_000, "item": 2_000})
BATCH = 512  # global batch size


@dataclass(frozen=True)
class Batch:
    """One rank's rows of a batch."""

    labels: Tensor  # [rows] float32
    dense: Tensor  # [rows, 1] float32
    ids: Tensor  # [rows, 2] int32: user, item
    batch_size: int  # over all ranks


def make_batch(step: int, rank: int, num_ranks: int) -> Batch:
    """Return this rank's part of a batch; every rank generates the same batch."""
    rng = torch.Generator().manual_seed(step)
    sizes = torch.tensor([field.rows for field in FIELDS.ids])
    ids = (torch.rand(BATCH, 2, generator=rng) ** 3 * sizes).int()
    dense = torch.randn(BATCH, 1, generator=rng)
    chance = torch.sigmoid(dense[:, 0] + (ids % 7 - 3).sum(1) / 3)
    labels = (torch.rand(BATCH, generator=rng) < chance).float()
    parts = (tensor.tensor_split(num_ranks)[rank] for tensor in (labels, dense, ids))
    return Batch(*parts, batch_size=BATCH)


class Net(nn.Module):
    """Computes logits from this rank's rows, independent of tables and ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, vectors: dict[str, Tensor], dense: Tensor) -> Tensor:
        """Map {"fields": [rows, 2 x dim]} and dense [rows, 1] to logits [rows, 1]."""
        return self.layers(torch.cat([vectors["fields"], dense], 1))


@dataclass(frozen=True, kw_only=True)
class OwnModel:
    """The keys of the ``model`` group if ``model.name`` is this class."""

    name: str = "own"
    dim: int = 8

    def spec(self, fields: sbpflow.Fields) -> sbpflow.TorchModel:
        """Return one table per field, and the module that computes logits from the tables'
        vectors.
        """
        output = sbpflow.embedding_output("fields", fields.sparse, dim=self.dim)
        width = output.width + len(fields.dense)
        return sbpflow.TorchModel(outputs=(output,), make=lambda: Net(width))


def main() -> None:
    """Train for 60 steps. Rank 0 prints the loss over the rows of all ranks."""
    config = sbpflow.Config(
        model=OwnModel(),
        data=sbpflow.DataConfig(batch_size=BATCH),
        parallel=sbpflow.ParallelConfig(scheme="3"),  # splits the rows of every table
    )
    with sbpflow.World.start(config.parallel.device) as world:
        job = sbpflow.start_job(config, FIELDS, sbpflow.Boxing(world))
        for step in range(60):
            loss = job.trainer.step(make_batch(step, world.rank, world.size))
            if world.rank == 0 and step % 20 == 19:
                print(f"step {step + 1}: loss {float(loss):.4f}")


if __name__ == "__main__":
    main()
