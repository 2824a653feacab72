"""An embedding collection: the tables of a model on one rank, run as an EmbeddingPlan says.

``forward`` gives every output laid out S(0) over the batch; ``apply_gradients`` boxes the outputs'
gradients to the owners and updates the touched rows. The two are apart, so that the update can run
beside other traffic.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from sbpflow.boxing import Boxing
from sbpflow.dist import World
from sbpflow.embedding.group_plan import GroupPlan, Piece, Stack
from sbpflow.embedding.groups import GROUPS, BatchIds, Group
from sbpflow.embedding.initial import fill_uniform
from sbpflow.embedding.kernels import (
    KernelRequest,
    choose_kernels,
    make_storage,
)
from sbpflow.embedding.optimizers import SumOverColumns
from sbpflow.embedding.plan import EmbeddingPlan
from sbpflow.embedding.storage import Storage
from sbpflow.embedding.tables import OutputConfig
from sbpflow.errors import DataError, SbpError

IDS = "ids"
INITIAL_BOUND = 0.05  # U(-0.05, 0.05), as OneFlow-Benchmark's wdl_train_eval.py at de4698a7


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """One shard as this rank holds it: views into its storage, by name of optimizer state."""

    piece: Piece
    weights: Tensor  # [rows, columns]
    state: dict[str, Tensor]  # [rows] or [rows, columns]


@dataclass(frozen=True, slots=True)
class Copies:
    """Tensors that must be equal, bit by bit, within each of several sets of ranks.

    ``tensors`` are this rank's; empty on a rank that is in none of the sets.
    """

    name: str
    ranks: tuple[tuple[int, ...], ...]
    tensors: list[Tensor]


class EmbeddingCollection:
    """The embedding tables of a model, from this rank's point of view."""

    def __init__(
        self,
        plan: EmbeddingPlan,
        world: World,
        boxing: Boxing,
        *,
        seed: int,
        kernel: KernelRequest = "auto",
    ) -> None:
        self.plan = plan
        self._world = world
        self._boxing = boxing
        self.kernels = choose_kernels(plan, kernel)
        self._groups: list[Group] = [
            GROUPS[group.exchange](group, world, boxing, self._make_storage)
            for group in plan.groups
        ]
        limits = [2**31 - 1] * len(plan.features)
        for table in (table for out in plan.outputs for table in out.tables):
            column = plan.features.index(table.feature)
            limits[column] = min(limits[column], table.num_rows)
        self._limits = torch.tensor(limits, dtype=torch.int32, device=world.device)
        self._sent = torch.tensor(plan.sent_columns, dtype=torch.int64, device=world.device)
        self._my_columns = {f: place for place, f in enumerate(plan.needed[world.rank])}
        self._id_steps = cache(plan.id_steps)
        self._outputs: dict[str, Tensor] = {}
        self._assembly = {out.name: _Assembly(plan, out, world.device) for out in plan.outputs}
        self._fill(seed)

    def forward(self, ids: Tensor, num_rows: int, *, training: bool) -> dict[str, Tensor]:
        """Look a batch up: ids [local batch, features] int32 -> {output: [local batch, width]}.

        ``num_rows`` counts the whole batch. With ``training`` the outputs are leaves that require
        a gradient, which ``apply_gradients`` consumes. Raises DataError on an id out of range.
        """
        self._check_ids(ids)
        batch = BatchIds(num_rows, ids, self._everywhere(ids, num_rows), self._my_columns)
        parts = [group.forward(batch, training=training) for group in self._groups]
        outputs = {
            name: assembly.join(parts).requires_grad_(training)
            for name, assembly in self._assembly.items()
        }
        self._outputs = outputs if training else {}
        return outputs

    def apply_gradients(self) -> None:
        """Update the rows the last training ``forward`` touched, from its outputs' ``.grad``."""
        outputs, self._outputs = self._outputs, {}
        grads = {name: out.grad for name, out in outputs.items()}
        for index, group in enumerate(self._groups):
            name = group.plan.output.name
            grad = grads[name]
            if grad is None:
                raise RuntimeError(f"output {name} has no gradient; call backward() first")
            group.backward(self._assembly[name].gradient_of(index, grad))

    def stored(self) -> Iterator[StoredPiece]:
        """Every shard this rank holds, as writable views."""
        for stack, storage in self._storages():
            weights, state = storage.weights, storage.state
            for piece in stack.pieces(self._world.rank):
                rows = slice(piece.base, piece.base + piece.num_rows)
                yield StoredPiece(piece, weights[rows], {k: v[rows] for k, v in state.items()})

    def copies(self) -> list[Copies]:
        """What several ranks hold alike, in one order on all ranks.

        B tables with their state, and the state of rows whose columns are spread over ranks.
        """
        mine = {stored.piece.table.name: stored for stored in self.stored()}
        found: list[Copies] = []
        for group in self.plan.groups:
            for index, stack in enumerate(group.stacks):
                ranks = group.copy_ranks(index)
                for table in stack.tables if ranks else ():
                    stored = mine.get(table.name)
                    tensors = list(stored.state.values()) if stored else []
                    name = f"{table.name} (optimizer state)"
                    if group.exchange == "local":
                        name = table.name
                        tensors += [stored.weights] if stored else []
                    found.append(Copies(name, ranks, tensors))
        return found

    def memory_bytes(self) -> int:
        """Bytes of rows and optimizer state on this rank."""
        return sum(
            tensor.numel() * tensor.itemsize
            for _, storage in self._storages()
            for tensor in (storage.weights, *storage.state.values())
        )

    def _storages(self) -> Iterator[tuple[Stack, Storage]]:
        for group in self._groups:
            yield from group.storages()

    def _everywhere(self, ids: Tensor, num_rows: int) -> Tensor | None:
        if not self._sent.numel():
            return None
        steps = self._id_steps(num_rows)
        everywhere = self._boxing.run(steps, ids.index_select(1, self._sent), IDS)
        if not self._my_columns:
            return None
        if everywhere is None or everywhere.shape != (num_rows, len(self._my_columns)):
            raise SbpError(
                f"{steps[-1].id}: rank {self._world.rank} did not receive the batch's ids"
            )
        return everywhere

    def _check_ids(self, ids: Tensor) -> None:
        bad = (ids < 0) | (ids >= self._limits)
        if bool(bad.any()):
            row, column = (int(place) for place in bad.nonzero()[0])
            last = int(self._limits[column]) - 1
            raise DataError(
                f"field {self.plan.features[column]}: id {int(ids[row, column])} in row {row} of "
                f"rank {self._world.rank}'s part of the batch; use 0..{last}"
            )

    def _make_storage(
        self, group: GroupPlan, index: int, sum_over_columns: SumOverColumns | None
    ) -> Storage:
        stack, rank = group.stacks[index], self._world.rank
        return make_storage(
            self.kernels[stack.tables[0].name],
            stack.num_rows(rank),
            stack.width(rank) or stack.dim,
            dim=stack.dim,
            optimizer=self.plan.optimizer,
            dtype=self.plan.dtype,
            device=self._world.device,
            sum_over_columns=sum_over_columns,
        )

    def _fill(self, seed: int) -> None:
        for stored in self.stored():
            piece = stored.piece
            fill_uniform(
                stored.weights,
                seed=seed,
                name=piece.table.name,
                bound=INITIAL_BOUND,
                num_columns=piece.table.dim,
                first_row=piece.row_start,
                first_column=piece.col_start,
            )


class _Assembly:
    """Puts the groups' parts of one output together, and takes its gradient apart.

    A group's part has its tables in the group's order; ``places`` are their columns in the output.
    """

    def __init__(self, plan: EmbeddingPlan, output: OutputConfig, device: torch.device) -> None:
        self._sum = output.combine == "sum"
        self._groups = {i: g for i, g in enumerate(plan.groups) if g.output.name == output.name}
        starts: dict[str, int] = {}
        width = 0
        for table in output.tables:
            starts[table.name] = width
            width += table.dim
        places = {
            index: [
                column
                for table in group.tables
                for column in range(starts[table.name], starts[table.name] + table.dim)
            ]
            for index, group in self._groups.items()
        }
        joined = [place for index in self._groups for place in places[index]]
        self._in_order = joined == list(range(len(joined)))
        self._to_output = torch.argsort(torch.tensor(joined, device=device))
        self._places = {index: torch.tensor(p, device=device) for index, p in places.items()}

    def join(self, parts: list[Tensor]) -> Tensor:
        """[local batch, output width] from every group's part."""
        mine = [self._summed(group, parts[index]) for index, group in self._groups.items()]
        if self._sum:
            return torch.stack(mine).sum(0) if len(mine) > 1 else mine[0]
        joined = torch.cat(mine, 1) if len(mine) > 1 else mine[0]
        return joined if self._in_order else joined.index_select(1, self._to_output)

    def gradient_of(self, index: int, grad: Tensor) -> Tensor:
        """The part of the output's gradient that belongs to group ``index``."""
        group = self._groups[index]
        if self._sum:
            return grad if group.pooled else grad.repeat(1, len(group.tables))
        if len(self._groups) == 1 and self._in_order:
            return grad
        return grad.index_select(1, self._places[index])

    def _summed(self, group: GroupPlan, part: Tensor) -> Tensor:
        if not self._sum or group.pooled:
            return part
        return part.view(part.shape[0], len(group.tables), group.output.width).sum(1)
