"""Records the conversion steps of one rank without running any ranks.

Plans and tests run a model's forward and backward pass on tensors without values. ``DryBoxing``
records exactly the steps that a real run would execute.
"""

import torch
from torch import Tensor

from sbpflow.boxing.executor import Boxing, Finish
from sbpflow.boxing.plan import Conversion
from sbpflow.boxing.step import BoxingStep
from sbpflow.runtime.ranks.world import World
from sbpflow.sbp.layout import Layout


class DryBoxing(Boxing):
    """Records executed steps in ``trace`` and requested conversions in ``conversions``.

    ``trace`` lists all steps in order, including steps without communication. ``conversions`` lists
    the conversions that were passed to ``steps_of``. Parts are on ``device``: on "meta", they have
    no storage, and on "cpu", they are zeros.
    """

    is_dry = True

    def __init__(self, size: int, rank: int = 0, device: str = "meta") -> None:
        super().__init__(World(rank, size, torch.device(device), owns_default_group=False))
        self.trace: list[BoxingStep] = []
        self.conversions: list[Conversion] = []

    def steps_of(
        self, id: str, src: Layout, dst: Layout, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[BoxingStep, ...]:
        """Return the same steps as ``Boxing``, and record the conversion."""
        steps = super().steps_of(id, src, dst, shape, dtype)
        self.conversions.append(
            Conversion(id=id, src=src, dst=dst, shape=shape, dtype=dtype, steps=steps)
        )
        return steps

    def _issue(self, step: BoxingStep, part: Tensor | None, channel: str, donate: bool) -> Finish:
        self.trace.append(step)
        shape = step.dst.part_shape(step.shape, self.world.rank)
        if shape is None:
            return lambda: None
        out = torch.zeros(shape, dtype=step.dtype, device=self.world.device)
        return lambda: out
