"""Sums squared gradients over the ranks that store different columns of the same rows."""

from functools import lru_cache

import torch.nn.functional as F
from torch import Tensor

from sbpflow.boxing.executor import Boxing
from sbpflow.embedding.exchange.base import GRADIENTS
from sbpflow.embedding.plan.group_plan import MAX_BATCH_SIZES, GroupPlan
from sbpflow.embedding.rules.base import SumOverColumns


class SharedState:
    """Sums squared gradients for the row state of a group, in updates of up to ``batch_size``
    samples.
    """

    def __init__(self, plan: GroupPlan, boxing: Boxing) -> None:
        self._plan, self._boxing = plan, boxing
        self._steps = lru_cache(MAX_BATCH_SIZES)(plan.row_state_steps)
        self.batch_size = 0

    def sum_of(self, index: int) -> SumOverColumns | None:
        """Return a function that sums a stack's squared gradients over the ranks that share its
        rows.

        Return ``None`` if ranks do not share the row state of this stack.
        """
        if index not in self._plan.shared_state:
            return None

        def add_up(squares: Tensor) -> Tensor:
            size = self._plan.squares_sent(index, squares.shape[0], self.batch_size)
            # fixed-size buffers can contain more rows than a batch requests
            size = max(size, squares.shape[0])
            padded = F.pad(squares, (0, size - squares.shape[0]))
            total = self._boxing.run(self._steps(index, size), padded, GRADIENTS, donate=True)
            if total is None:
                raise RuntimeError(f"{self._plan.name}: the sums of squares were not received")
            return total[: squares.shape[0]]

        return add_up

    def stand_by(self, index: int) -> None:
        """Join the collectives of a stack that has no rows to update on this rank."""
        if index in self._plan.shared_state:
            size = self._plan.squares_sent(index, 0, self.batch_size)
            self._boxing.run(self._steps(index, size), None, GRADIENTS)
