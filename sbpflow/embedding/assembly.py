"""Joins the vectors of groups into the outputs of a collection, and splits their gradients."""

import torch
from torch import Tensor

from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.embedding.plan.group_plan import GroupPlan
from sbpflow.embedding.plan.tables import OutputConfig


class Assembly:
    """Joins the groups' parts of one output, and splits its gradient.

    A part contains the vectors of its group's tables, in the group's order; ``places`` gives the
    columns of these tables in the output.
    """

    def __init__(self, plan: EmbeddingPlan, output: OutputConfig, device: torch.device) -> None:
        self._sum = output.sums
        self._groups = {i: g for i, g in enumerate(plan.groups) if g.output.name == output.name}
        starts, names = output.starts(), [feature.name for feature in plan.features]
        places = {
            index: [
                column
                for use in group.uses
                for start in (starts[use.table.name, names[use.feature]],)
                for column in range(start, start + use.table.dim)
            ]
            for index, group in self._groups.items()
        }
        joined = [place for index in self._groups for place in places[index]]
        self._in_order = joined == list(range(len(joined)))
        self._to_output = torch.argsort(torch.tensor(joined, device=device))
        self._places = {index: torch.tensor(p, device=device) for index, p in places.items()}

    def join(self, parts: list[Tensor]) -> Tensor:
        """Return the output [local batch, width], joined from the parts of all groups."""
        parts = [self._summed(group, parts[index]) for index, group in self._groups.items()]
        if self._sum:
            return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]
        joined = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        return joined if self._in_order else joined.index_select(1, self._to_output)

    def gradient_of(self, index: int, grad: Tensor) -> Tensor:
        """Given the gradient of the output, return the gradient for the part of group ``index``."""
        group = self._groups[index]
        if self._sum:
            return grad if group.pooled else grad.repeat(1, len(group.uses))
        if len(self._groups) == 1 and self._in_order:
            return grad
        return grad.index_select(1, self._places[index])

    def _summed(self, group: GroupPlan, part: Tensor) -> Tensor:
        if not self._sum or group.pooled:
            return part
        return part.view(part.shape[0], len(group.uses), group.output.width).sum(1)
