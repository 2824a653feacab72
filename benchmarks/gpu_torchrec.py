"""Compares training steps with TorchRec's two loops on the shapes of the DLPerf sweep, on one GPU.

The model has 26 tables with d columns and 2 wide tables, trained by FBGEMM's fused Adam; the MLP,
the dense Adam, and the batches are those of the sweep. FBGEMM needs widths that are multiples of 4,
so a wide table has 4 columns, of which only the first is used. The ids are int64 in a
KeyedJaggedTensor, created before timing. Before timing, both train from the same values without
dropout, and their losses are compared. The loops are then timed in turn, in each precision;
TorchRec's, both with and without torch.compile of its MLP.

    python -m benchmarks.gpu_torchrec [--max-rows N] [key=value ...]
"""

import argparse
import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, product
from statistics import median
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.device_timer import timed_ms
from benchmarks.gpu_dlperf import FIRST_ROWS, STEPS, WARM_UP, Rows, batches, fields_of, make_job
from benchmarks.gpu_mlp import make_mlp
from benchmarks.record import Results
from sbpflow.config.load import load_config
from sbpflow.config.schema import Config
from sbpflow.models.registry import MODELS
from sbpflow.run.execution.job import Job
from sbpflow.run.model.spec import Fields, IdField
from sbpflow.runtime.ranks.world import World

Loop = Literal["plain", "pipelined", "prefetched"]
WIDE_COLUMNS = 4
NUM_BATCHES = 8  # number of batches that ``batches`` prepares
CHECKED_STEPS = 5
ROUNDS = 5  # each loop is timed once per round
# TorchRec's loops, and whether its MLP is compiled.
PEERS: dict[str, tuple[Loop, bool]] = {
    "plain": ("plain", False),
    "pipelined": ("pipelined", False),
    "compiled": ("plain", True),
    "compiled_pipelined": ("pipelined", True),
}
# The settings of each precision; both systems use the same ones.
PRECISIONS = {
    "float32": [],
    "tf32": ["parallel.tf32=true"],
    "bfloat16": ["model.autocast=bf16"],
}
GRAPH = {
    False: ["parallel.cuda_graph=false"],
    True: ["parallel.cuda_graph=true"],
}  # only ours; TorchRec has no graphs


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
    return {"lazy_adam": torch.optim.Adam, "sgd": torch.optim.SGD}[config.optimizer.sparse.name]


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
        # torch.fx, with which TorchRec traces the model, cannot read the type from a tensor.
        self.autocast = {
            "device_type": device.type,
            "dtype": torch.bfloat16,
            "enabled": config.model.autocast is not None,
        }
        inputs = dim * len(fields.sparse) + len(fields.dense)
        self.mlp = make_mlp((inputs, *config.model.hidden, 1), config.model.dropout, device)
        rows = [*self.deep.parameters(), *self.wide.parameters()]
        rate = {"lr": config.optimizer.sparse.lr}
        apply_optimizer_in_backward(rows_optimizer(config), rows, rate)

    def forward(self, batch: _Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        vectors = self.deep(batch.deep).values()
        wide = self.wide(batch.wide).values()[:, ::WIDE_COLUMNS].sum(1)
        inputs = torch.cat([vectors, batch.dense], 1)
        with torch.autocast(**self.autocast):
            logits = self.mlp(inputs).squeeze(1).float() + wide
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
            ids = rows.ids if isinstance(rows.ids, Tensor) else rows.ids.matrix
            self.deep = lists(ids[:, :num_deep], fields.sparse)
            self.wide = lists(ids[:, num_deep:], fields.crosses)
            self.dense, self.labels = rows.dense, rows.labels

        def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
            return self  # the batches are created on the device

        def record_stream(self, stream: torch.Stream) -> None:
            for tensor in (self.deep, self.wide, self.dense, self.labels):
                tensor.record_stream(stream)

        def pin_memory(self) -> "Batch":
            return self

    return Batch()


class Peer:
    """TorchRec's model and its loops, each of which returns the loss of a step.

    With ``share``, FBGEMM keeps deep rows in host memory, and this share of them on the GPU. With
    ``compiled``, torch.compile compiles the MLP.
    """

    def __init__(
        self,
        vocabulary: int,
        config: Config,
        device: torch.device,
        *,
        share: float | None = None,
        loop: Loop = "plain",
        compiled: bool = False,
    ) -> None:
        from torchrec.distributed import DistributedModelParallel
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology

        fields = fields_of(vocabulary)
        made = WideAndDeep(config, fields, device)
        if compiled:
            made.mlp.compile()
        sharders: Any = [EmbeddingBagCollectionSharder()]
        on_cuda = device.type == "cuda"
        memory = torch.cuda.get_device_properties(device).total_memory if on_cuda else None
        topology = Topology(world_size=1, compute_device=device.type, hbm_cap=memory)
        group: Any = dist.group.WORLD
        constraints = None if share is None else _cached(fields, share, loop)
        planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
        plan = planner.collective_plan(made, sharders, group)
        self.model = DistributedModelParallel(made, device=device, plan=plan, sharders=sharders)
        self._device = device
        dense = [value for name, value in self.model.named_parameters() if ".mlp." in f".{name}"]
        self._optimizer = torch.optim.Adam(dense, lr=config.optimizer.dense.lr)
        some = islice(batches(config, fields, device), NUM_BATCHES)
        self._batches = [as_torchrec(rows, fields) for rows in some]
        self.source = self._endless()
        self.step = {
            "plain": self.plain,
            "pipelined": self.pipelined,
            "prefetched": self.prefetched,
        }[loop]
        self._pipeline: Any = None

    def copy(self, job: Job) -> None:
        """Set all parameters to those of ``job``."""
        values = {name: parameter.part for name, parameter in job.model.parameters.items()}
        values |= {stored.shard.table.name: stored.weights for stored in job.embeddings.stored()}
        filled = 0
        with torch.no_grad():
            for name, target in self.model.state_dict().items():
                first, _, rest = name.partition(".")
                shards = getattr(target, "local_shards", None)
                target = shards()[0].tensor if shards else target
                if first == "mlp":
                    number, kind = rest.split(".")
                    value = values[f"mlp.{int(number) // 3}.{kind}"]
                else:
                    value = values[f"{first}.{rest.split('.')[1].removeprefix('t_')}"]
                target[:, : value.shape[1]].copy_(value) if value.ndim == 2 else target.copy_(value)
                filled += 1
        if filled != len(values):
            raise RuntimeError(f"copied {filled} parameters of {len(values)}: {sorted(values)}")

    def plain(self) -> Tensor:
        self._optimizer.zero_grad()
        loss, _ = self.model(next(self.source))
        loss.backward()
        self._optimizer.step()
        return loss

    def pipelined(self) -> Tensor:
        """Take a step of the pipelined loop, which rewrites the model at its first step."""
        from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

        return self._progress(TrainPipelineSparseDist)

    def prefetched(self) -> Tensor:
        """Take a step of the pipelined loop that also brings rows into the cache one batch
        ahead.
        """
        from torchrec.distributed.train_pipeline import PrefetchTrainPipelineSparseDist

        return self._progress(PrefetchTrainPipelineSparseDist)

    def _progress(self, pipeline: Callable[..., Any]) -> Tensor:
        if self._pipeline is None:
            self._pipeline = pipeline(self.model, self._optimizer, self._device)
        return self._pipeline.progress(self.source)[0]

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self._batches


def _cached(fields: Fields, share: float, loop: Loop) -> dict[str, Any]:
    """Return the constraints of a cache in which ``share`` of each deep table's rows fit."""
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import CacheParams

    params = CacheParams(load_factor=share, prefetch_pipeline=loop == "prefetched")
    rule = ParameterConstraints(compute_kernels=["fused_uvm_caching"], cache_params=params)
    return {f"t_{field.name}": rule for field in fields.sparse}


def check(vocabulary: int, config: Config, world: World) -> float:
    """Train both from the same values; return the largest relative difference of their losses."""
    config = replace(config, model=replace(config.model, dropout=0.0))
    job, fields = make_job(vocabulary, config, world)
    peer = Peer(vocabulary, config, world.device)
    peer.copy(job)
    source = batches(config, fields, world.device)
    largest = 0.0
    for number in range(CHECKED_STEPS):
        ours, theirs = float(job.trainer.step(next(source))), float(peer.plain())
        largest = max(largest, abs(ours - theirs) / abs(theirs))
        if not largest < 1e-4:
            raise SystemExit(f"step {number + 1}: the losses are {ours} and, of TorchRec, {theirs}")
    return largest


def measure(
    vocabulary: int,
    config: Config,
    world: World,
    *,
    timed: Callable[..., dict[str, float]] = timed_ms,
    steps: int = STEPS,
) -> dict[str, object]:
    """Return the ms per step of each loop, and the ratios of TorchRec's times to ours, by round."""
    torch.backends.cuda.matmul.allow_tf32 = config.parallel.tf32
    job, fields = make_job(vocabulary, config, world)
    source = batches(config, fields, world.device)
    loops: dict[str, Callable[[], Tensor]] = {"sbpflow": lambda: job.trainer.step(next(source))}
    # The pipelined loop rewrites its model, so each loop has its own.
    for name, (loop, compiled) in PEERS.items():
        loops[name] = Peer(vocabulary, config, world.device, loop=loop, compiled=compiled).step
    for name, step in loops.items():
        for _ in range(WARM_UP):
            loss = step()
        if not bool(torch.isfinite(loss)):
            raise SystemExit(f"{name}, {vocabulary} rows: the loss is {float(loss)}, not finite")
    rounds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(ROUNDS):
        for name, step in loops.items():
            rounds[name].append(timed(step, steps=steps, repeats=1)["ms"])
    best = [min(times) for times in zip(*(rounds[name] for name in PEERS), strict=True)]
    ratios = [theirs / ours for theirs, ours in zip(best, rounds["sbpflow"], strict=True)]
    figures = {f"{name}_ms": round(median(times), 3) for name, times in rounds.items()}
    return {**figures, "ratios": [round(ratio, 3) for ratio in ratios]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-rows", type=int, default=FIRST_ROWS)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    results = Results("gpu_torchrec", recorded=not args.overrides)
    with World.start("cuda") as world:
        vocabulary = FIRST_ROWS
        while vocabulary <= args.max_rows:
            for precision, graph in product(PRECISIONS, GRAPH):
                settings = ["parallel.device=cuda", *PRECISIONS[precision], *GRAPH[graph]]
                overrides = [*settings, *args.overrides]
                config = load_config("configs/dlperf.yaml", overrides, models=MODELS)
                line: dict[str, object] = {"precision": precision, "cuda_graph": graph}
                if precision == "float32":
                    line["largest_difference_of_losses"] = check(vocabulary, config, world)
                results.add(
                    benchmark="torchrec_vocabulary",
                    rows=vocabulary,
                    batch_size=config.data.batch_size,
                    world_size=1,
                    **line,
                    **measure(vocabulary, config, world),
                )
                gc.collect()
                torch.cuda.empty_cache()
            vocabulary *= 2


if __name__ == "__main__":
    main()
