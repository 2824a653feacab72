"""Times TorchRec's two loops on the shapes of the DLPerf sweep, on one GPU, in ms per iteration.

The model has 26 tables with d columns and 2 wide tables, trained by FBGEMM's fused Adam; the MLP,
the dense Adam, and the batches are those of the sweep. FBGEMM needs widths that are multiples of 4,
so a wide table has 4 columns, of which only the first is used. The ids are int64 in a
KeyedJaggedTensor, created before timing.

    python -m benchmarks.gpu_torchrec [--max-rows N] [key=value ...]
"""

import argparse
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.device_timer import timed_ms
from benchmarks.gpu_dlperf import FIRST_ROWS, REPEATS, STEPS, WARM_UP, Rows, batches, fields_of
from benchmarks.gpu_mlp import make_mlp
from benchmarks.record import Results
from sbpflow.config.load import load_config
from sbpflow.config.schema import Config
from sbpflow.models.registry import MODELS
from sbpflow.run.model.spec import Fields, IdField
from sbpflow.runtime.ranks.world import World

WIDE_COLUMNS = 4
NUM_BATCHES = 8  # number of batches that ``batches`` prepares


def make_tables(fields: tuple[IdField, ...], dim: int) -> nn.Module:
    """Return a table for each field, on the meta device; DistributedModelParallel allocates the
    memory.
    """
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t_{field.name}",
                embedding_dim=dim,
                num_embeddings=field.rows,
                feature_names=[field.name],
            )
            for field in fields
        ],
        device=torch.device("meta"),
    )


def rows_optimizer(config: Config) -> type[torch.optim.Optimizer]:
    """Return the optimizer that FBGEMM fuses into the backward pass; FBGEMM's Adam needs CUDA."""
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    kinds = {"lazy_adam": torch.optim.Adam, "rowwise_adagrad": RowWiseAdagrad}
    return kinds[config.optimizer.sparse.name]


class _Batch(Protocol):
    deep: Any  # a KeyedJaggedTensor each
    wide: Any
    dense: Tensor
    labels: Tensor


class WideAndDeep(nn.Module):
    """The model with its loss; the forward pass returns loss and logits."""

    def __init__(self, config: Config, fields: Fields, device: torch.device) -> None:
        super().__init__()
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

        dim = config.model.embedding_dim
        self.deep = make_tables(fields.sparse, dim)
        self.wide = make_tables(fields.crosses, WIDE_COLUMNS)
        inputs = dim * len(fields.sparse) + len(fields.dense)
        self.mlp = make_mlp((inputs, *config.model.hidden, 1), config.model.dropout, device)
        rows = [*self.deep.parameters(), *self.wide.parameters()]
        rate = {"lr": config.optimizer.sparse.lr}
        apply_optimizer_in_backward(rows_optimizer(config), rows, rate)

    def forward(self, batch: _Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        vectors = self.deep(batch.deep).values()
        wide = self.wide(batch.wide).values()[:, ::WIDE_COLUMNS].sum(1)
        logits = self.mlp(torch.cat([vectors, batch.dense], 1)).squeeze(1) + wide
        loss = F.binary_cross_entropy_with_logits(logits, batch.labels)
        # The pipeline returns only the second element.
        return loss, (loss.detach(), logits.detach())


def as_torchrec(rows: Rows, fields: Fields) -> _Batch:
    """Convert a batch to the form that the pipelined loop needs."""
    from torchrec import KeyedJaggedTensor
    from torchrec.streamable import Pipelineable

    def lists(columns: Tensor, of: tuple[IdField, ...]) -> KeyedJaggedTensor:
        count = columns.shape[0] * len(of)
        return KeyedJaggedTensor(
            keys=[field.name for field in of],
            values=columns.t().reshape(-1).long(),
            lengths=torch.ones(count, dtype=torch.int32, device=columns.device),
        )

    class Batch(Pipelineable):
        def __init__(self) -> None:
            num_deep = len(fields.sparse)
            self.deep = lists(rows.ids.matrix[:, :num_deep], fields.sparse)
            self.wide = lists(rows.ids.matrix[:, num_deep:], fields.crosses)
            self.dense, self.labels = rows.dense, rows.labels

        def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
            return self  # the batches are created on the device

        def record_stream(self, stream: torch.Stream) -> None:
            for tensor in (self.deep, self.wide, self.dense, self.labels):
                tensor.record_stream(stream)

        def pin_memory(self) -> "Batch":
            return self

    return Batch()


def make_loops(
    vocabulary: int, config: Config, device: torch.device
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Return one step function for TorchRec's plain loop and one for its pipelined loop; both
    return the loss. The pipelined loop rewrites the model at its first call.
    """
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    fields = fields_of(vocabulary)
    made = WideAndDeep(config, fields, device)
    sharders: Any = [EmbeddingBagCollectionSharder()]
    on_cuda = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if on_cuda else None
    topology = Topology(world_size=1, compute_device=device.type, hbm_cap=memory)
    group: Any = dist.group.WORLD
    plan = EmbeddingShardingPlanner(topology=topology).collective_plan(made, sharders, group)
    model = DistributedModelParallel(made, device=device, plan=plan, sharders=sharders)
    dense = [value for name, value in model.named_parameters() if ".mlp." in f".{name}"]
    optimizer = torch.optim.Adam(dense, lr=config.optimizer.dense.lr)
    some = [
        as_torchrec(rows, fields) for rows in islice(batches(config, fields, device), NUM_BATCHES)
    ]

    def endless() -> Iterator[Any]:
        while True:
            yield from some

    source = endless()

    def plain() -> Tensor:
        optimizer.zero_grad()
        loss, _ = model(next(source))
        loss.backward()
        optimizer.step()
        return loss

    pipeline: Any = None

    def pipelined() -> Tensor:
        nonlocal pipeline
        if pipeline is None:
            pipeline = TrainPipelineSparseDist(model, optimizer, device)
        return pipeline.progress(source)[0]

    return plain, pipelined


def measure(
    vocabulary: int,
    config: Config,
    device: torch.device,
    *,
    timed: Callable[..., dict[str, float]] = timed_ms,
    steps: int = STEPS,
) -> dict[str, float]:
    """Return the median ms per step of each loop."""
    found: dict[str, float] = {}
    loops = make_loops(vocabulary, config, device)
    for name, step in zip(("plain", "pipelined"), loops, strict=True):
        for _ in range(WARM_UP):
            loss = step()
        if not bool(torch.isfinite(loss)):
            raise SystemExit(f"{vocabulary} rows: the loss is {float(loss)}, not a finite number")
        found[f"{name}_ms"] = timed(step, steps=steps, repeats=REPEATS)["ms"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-rows", type=int, default=2 * FIRST_ROWS)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    config = load_config(
        "configs/dlperf.yaml", ["parallel.device=cuda", *args.overrides], models=MODELS
    )
    results = Results("gpu_torchrec", recorded=not args.overrides)
    with World.start("cuda") as world:
        vocabulary = FIRST_ROWS
        while vocabulary <= args.max_rows:
            figures = measure(vocabulary, config, world.device)
            results.add(
                benchmark="torchrec_vocabulary",
                rows=vocabulary,
                batch_size=config.data.batch_size,
                world_size=1,
                **figures,
            )
            torch.cuda.empty_cache()
            vocabulary *= 2


if __name__ == "__main__":
    main()
