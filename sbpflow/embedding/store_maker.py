"""Defines ``StoreMaker``, which creates the row store and kernel of each stack of a collection."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.embedding.plan.group_plan import GroupPlan
from sbpflow.embedding.rules.base import SumOverColumns
from sbpflow.embedding.storage.base import RowKernel
from sbpflow.embedding.storage.choose import KernelChoice, make_kernel
from sbpflow.embedding.storage.initial import RowInitializer
from sbpflow.embedding.storage.rounding import RowNoise
from sbpflow.embedding.storage.store import DeviceStore, RowStore, StoreFactory, StoreRequest
from sbpflow.errors import ConfigError
from sbpflow.runtime.ranks.world import World

if TYPE_CHECKING:
    from sbpflow.embedding.growing import Growing


@dataclass(frozen=True, slots=True)
class StoreMaker:
    """Creates row stores with ``factory``; ``kernels`` maps each table to its chosen kernel."""

    plan: EmbeddingPlan
    kernels: Mapping[str, KernelChoice]
    seed: int
    world: World
    growing: "Growing | None"
    factory: StoreFactory

    def __call__(
        self, group: GroupPlan, index: int, sum_over_columns: SumOverColumns | None
    ) -> RowStore:
        """Return the store of stack ``index`` of a group, as ``base.MakeStore`` describes it.

        Raise ConfigError if the factory's stores cannot hold a table that every rank updates.
        """
        stack, rank, plan = group.stacks[index], self.world.rank, self.plan
        shards, table = stack.shards(rank), stack.tables[0]
        noise: RowNoise | None = None
        if plan.row_dtype != plan.dtype:
            addresses_of = self.growing.numbers_of(shards) if stack.grows and self.growing else None
            noise = RowNoise(shards, self.seed, self.world.device, addresses_of)
        rows, width = stack.num_rows(rank), stack.width(rank) if stack.uses_on(rank) else stack.dim

        def kernel_of(slots: int) -> RowKernel:
            return make_kernel(
                self.kernels[table.name],
                rows,
                width,
                dim=stack.dim,
                optimizer=stack.optimizer,
                dtype=plan.dtype,
                row_dtype=plan.row_dtype,
                device=self.world.device,
                sum_over_columns=sum_over_columns,
                noise=noise,
                slots=slots,
            )

        initial = RowInitializer(
            shards,
            seed=self.seed,
            optimizer=stack.optimizer,
            width=width,
            dtype=plan.dtype,
            row_dtype=plan.row_dtype,
        )
        if stack.grows and self.growing is not None:
            self.growing.initial[table.name] = initial
        store = self.factory(
            StoreRequest(
                shards=shards,
                num_rows=rows,
                width=width,
                optimizer=stack.optimizer,
                make_kernel=kernel_of,
                initial=initial,
            )
        )
        is_copied = group.kind.copies and self.world.size > 1
        if is_copied and not isinstance(store, DeviceStore):
            raise ConfigError(
                f"table {table.name}: {type(store).__name__} cannot store a B table on several "
                "ranks, because every rank also updates rows that it did not look up; use "
                "DeviceStore or another layout such as S(0)"
            )
        return store
