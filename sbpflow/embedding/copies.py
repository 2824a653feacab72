"""Lists the tensors that are replicated on several ranks."""

from dataclasses import dataclass

from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.embedding.state import StoredShard, Values


@dataclass(frozen=True, slots=True)
class Copies:
    """Tensors that must be bit-equal within each of several sets of ranks.

    ``tensors`` are this rank's copies; the list is empty on a rank outside the sets.
    """

    name: str
    ranks: tuple[tuple[int, ...], ...]
    tensors: list[Values]


def copies_of(plan: EmbeddingPlan, stored: list[StoredShard]) -> list[Copies]:
    """Return the copies on this rank, in the same order on all ranks."""
    stored_by_table = {one.shard.table.name: one for one in stored}
    copies: list[Copies] = []
    for group in plan.groups:
        for index, stack in enumerate(group.stacks):
            ranks = group.copy_ranks(index)
            for table in stack.tables if ranks else ():
                held = stored_by_table.get(table.name)
                name = f"{table.name} (optimizer state)"
                tensors = held.values() if held else {}
                keys = {key for key, size in stack.optimizer.state.items() if size == "row"}
                if group.kind.copies:
                    name, keys = table.name, tensors.keys()
                equal = [tensor for key, tensor in tensors.items() if key in keys]
                copies.append(Copies(name, ranks, equal))
    return copies
