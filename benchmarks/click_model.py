"""Defines the CTR model that the training benchmarks share: its shape and its batches.

The model has tables of one width with Zipf ids, dense fields, and one hidden layer. Batches are
created once and reused by every system, so that all systems see the same rows.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Number of ids per sample in each of the 26 fields of MLPerf's DLRMv2 (Criteo has one each).
# Source: facebookresearch/dlrm, torchrec_dlrm/README.md, "multi_hot_sizes", at 090956ee.
MLPERF_HOTNESS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
EARLY = "unique_early"  # layout name: exchange unique with early rows
LATE = "unique_late"  # layout name: exchange unique with early rows and late gradients
HOTNESS = {"one": (1,) * 26, "ten": (10,) * 26, "mlperf": MLPERF_HOTNESS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The work of a run, with ``rows_per_rank`` samples per batch on each rank.

    ``hotness`` is the number of ids per sample for each table; the vectors that a sample looks up
    in a table are summed.
    """

    num_tables: int = 26
    table_rows: int = 200_000
    dim: int = 16
    num_dense: int = 13
    hidden: int = 64
    rows_per_rank: int = 4096
    zipf: float = 1.2
    lr: float = 0.05
    dense_lr: float = 0.1
    num_batches: int = 24
    hotness: tuple[int, ...] = HOTNESS["one"]

    @property
    def names(self) -> list[str]:
        return [f"deep.C{index + 1}" for index in range(self.num_tables)]

    @property
    def width(self) -> int:
        return self.num_tables * self.dim + self.num_dense


@dataclass(frozen=True, slots=True)
class Rows:
    """This rank's rows of a batch; ``batch_size`` counts the rows of all ranks."""

    labels: Tensor  # [b] float32
    dense: Tensor  # [b, num_dense] float32
    ids: Tensor  # int32 [b, sum of hotness]
    batch_size: int


SHAPES = {
    "usual": Shape(),
    "t510": Shape(
        num_tables=510, table_rows=2000, rows_per_rank=512, num_batches=8, hotness=(1,) * 510
    ),
    "d64": Shape(dim=64),
    "d128": Shape(dim=128),
}


def zipf_ids(shape: Shape, count: int, generator: np.random.Generator) -> np.ndarray:
    """Return ids (int32 [count, sum of hotness]) with probability proportional to rank^-zipf,
    spread over the table by a fixed permutation, as in prepared data.
    """
    weights = np.arange(1, shape.table_rows + 1, dtype=np.float64) ** -shape.zipf
    edges = np.cumsum(weights)
    drawn = np.searchsorted(edges, generator.random((count, sum(shape.hotness))) * edges[-1])
    place = np.random.default_rng(3).permutation(shape.table_rows).astype(np.int32)
    return place[np.minimum(drawn, shape.table_rows - 1)]


def make_batches(shape: Shape, rank: int, world_size: int) -> list[Rows]:
    """Return this rank's part of ``num_batches`` batches. Labels depend on a few ids, so that the
    loss can decrease.
    """
    batches: list[Rows] = []
    for number in range(shape.num_batches):
        generator = np.random.default_rng((17, number, rank))
        ids = zipf_ids(shape, shape.rows_per_rank, generator)
        dense = generator.standard_normal((shape.rows_per_rank, shape.num_dense), dtype=np.float32)
        score = (ids[:, :4] % 7 - 3).sum(1) * 0.4 + dense[:, 0] - 1.0
        labels = generator.random(shape.rows_per_rank) < 1.0 / (1.0 + np.exp(-score))
        batches.append(
            Rows(
                torch.from_numpy(labels.astype(np.float32)),
                torch.from_numpy(dense),
                torch.from_numpy(ids),
                shape.rows_per_rank * world_size,
            )
        )
    return batches
