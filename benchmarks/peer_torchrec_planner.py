"""Runs TorchRec's EmbeddingShardingPlanner on our tasks and converts its plans for this engine.

Table-wise sharding becomes a whole table, column-wise sharding becomes S(1) on the ranks of the
shards, row-wise sharding becomes S(0) with ``reduce`` on all ranks, and data-parallel becomes a
copy. TorchRec's planner sorts tables by PERF, which gives better plans than its default order. The
inputs are the pooling factors, the device, and the memory of a rank. Bandwidths are set so that
TorchRec's formulas agree with a profile's prices of whole tables, because the default bandwidths
describe a GPU.
"""

from typing import Any

from sbpflow.errors import PlanError
from sbpflow.planner.published.setting import Setting
from sbpflow.planner.search.problem import Assignment, Move
from sbpflow.planner.shapes import COPIED, WHOLE, option_number
from sbpflow.planner.task import Shape


def torchrec_plan(setting: Setting) -> Assignment:
    """Return the assignment of TorchRec's plan; raise PlanError if its planner finds none that
    fits.
    """
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner, SortBy
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
    from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    task, size = setting.task, setting.num_ranks
    module = EmbeddingBagCollection(
        device="meta",
        tables=[
            EmbeddingBagConfig(
                name=table.name,
                embedding_dim=table.dim,
                num_embeddings=table.num_rows,
                feature_names=[f"{table.name}_f"],
            )
            for table in setting.tables
        ],
    )
    constraints = {
        table.name: ParameterConstraints(pooling_factors=[float(pooling)], min_partition=4)
        for table, pooling in zip(setting.tables, setting.pooling, strict=True)
    }
    topology = Topology(
        world_size=size, local_world_size=size // task.num_hosts, **machine(setting)
    )
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=task.batch_size // size,
        constraints=constraints,
        partitioner=GreedyPerfPartitioner(sort_by=SortBy.PERF),
        storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
    )
    try:
        sharding_plan = planner.plan(module, [EmbeddingBagCollectionSharder()])
    except PlannerError as error:
        raise PlanError(f"TorchRec's planner: {error}") from error
    (parameters,) = sharding_plan.plan.values()
    return tuple(
        _move(setting, number, parameters[table.name])
        for number, table in enumerate(setting.tables)
    )


def machine(setting: Setting) -> dict[str, Any]:
    """Return the arguments of TorchRec's ``Topology`` for a rank of the task's device.

    The device determines the possible shardings (row-wise only on CUDA) and whether memory and
    bandwidth describe the accelerator or the host.
    """
    limit = min(int(setting.problem.limit_bytes.min()), 2**50)
    memory, link = _bandwidths(setting)
    common = {"intra_host_bw": link, "inter_host_bw": link}
    if setting.task.device_type == "cuda":
        return {"compute_device": "cuda", "hbm_cap": limit, "hbm_mem_bw": memory, **common}
    return {"compute_device": "cpu", "ddr_cap": limit, "ddr_mem_bw": memory, **common}


def _bandwidths(setting: Setting) -> tuple[float, float]:
    """Derive the bandwidths of memory and link, in bytes per ms, from the prices of whole
    tables.
    """
    batch = setting.task.batch_size
    read = 4.0 * batch * float((setting.dims * setting.pooling).sum())
    sent = 4.0 * batch * float(setting.dims.sum())
    work, *transfers, _ = setting.rows.sum(axis=0)
    return 3.0 * read / max(float(work), 1e-9), 2.0 * sent / max(float(sum(transfers)), 1e-9)


def _move(setting: Setting, table: int, sharding: Any) -> Move:  # noqa: ANN401
    options = setting.problem.options[table]
    ranks = tuple(sorted(set(sharding.ranks or [])))
    kind, size = sharding.sharding_type, setting.num_ranks
    if kind == "data_parallel":
        shape, ranks = COPIED, ()
    elif kind == "row_wise":
        shape, ranks = Shape("S(0)", "reduce", (size, 1)), tuple(range(size))
    elif len(ranks) > 1:  # column-wise: shards on the same rank count as one shard
        shape = Shape("S(1)", "columns", (1, len(ranks)))
    else:
        shape = WHOLE
    number = option_number(options, shape)
    # If TorchRec's split is uneven, use the next narrower even split.
    while number is None and len(ranks) > 1:
        ranks = ranks[: len(ranks) // 2] if len(ranks) & (len(ranks) - 1) == 0 else ranks[:-1]
        shape = Shape("S(1)", "columns", (1, len(ranks))) if len(ranks) > 1 else WHOLE
        number = option_number(options, shape)
    if number is None:
        raise ValueError(
            f"{setting.tables[table].name}: no layout corresponds to TorchRec's {kind}"
        )
    return Move(number, ranks)
