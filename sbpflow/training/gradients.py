"""Dense gradients from the dual of their layout to the layout of their parameter, in one exchange.

The gradient of a B parameter arrives as P: every rank has the term of its own rows. All of them
and the loss travel in one flat buffer, P -> B. Parameters in other layouts whose dual is
themselves (S) need nothing.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from sbpflow.boxing import Boxing, Pending
from sbpflow.boxing_plan import BoxingStep, plan_boxing
from sbpflow.errors import SbpError
from sbpflow.global_tensor import GlobalTensor
from sbpflow.layout import Layout
from sbpflow.placement import Placement
from sbpflow.sbp import Broadcast, Partial

CHANNEL = "dense"


def dense_steps(
    num_elements: int, world: Placement, dtype: torch.dtype, backend: str
) -> tuple[BoxingStep, ...]:
    """P -> B of ``num_elements`` gradient numbers and the loss."""
    return plan_boxing(
        Layout(world, (Partial(),)),
        Layout(world, (Broadcast(),)),
        (num_elements + 1,),
        dtype,
        id="dense/bwd/gradients",
        backend=backend,
    )


class DenseGradients:
    """Brings the gradients of a model's parameters, and its loss, to every rank."""

    def __init__(
        self, parameters: Mapping[str, GlobalTensor], boxing: Boxing, dtype: torch.dtype
    ) -> None:
        self._boxing = boxing
        world = boxing.world
        placement = Placement.line(world.device.type, world.size)
        self._summed: list[GlobalTensor] = []
        for name, parameter in parameters.items():
            if parameter.layout == Layout(placement, (Broadcast(),)):
                self._summed.append(parameter)
            elif parameter.layout.dual() != parameter.layout:
                raise SbpError(
                    f"{name}: gradients of {parameter.layout} are not exchanged here; lay dense "
                    "parameters out as B on all ranks, or as a split"
                )
        self._sizes = [parameter.part.numel() for parameter in self._summed]
        self.steps = dense_steps(sum(self._sizes), placement, dtype, world.backend)

    def start(self, loss: GlobalTensor) -> "PendingGradients":
        """Begin the exchange of ``.part.grad`` of every parameter and of a P or B scalar loss."""
        summed = loss if isinstance(loss.layout.nd_sbp[0], Partial) else loss.to("P", id="loss")
        flat = [_gradient(parameter).reshape(-1) for parameter in self._summed]
        buffer = torch.cat([*flat, summed.part.detach().reshape(1)])
        return PendingGradients(
            self._boxing.start(self.steps, buffer, CHANNEL), self._summed, self._sizes
        )


class PendingGradients:
    """An exchange under way; ``wait`` puts the sums into the parameters' ``.grad``."""

    def __init__(self, pending: Pending, summed: list[GlobalTensor], sizes: list[int]) -> None:
        self._pending = pending
        self._summed = summed
        self._sizes = sizes

    def wait(self) -> Tensor:
        """The summed loss, 0-d; afterwards every ``.part.grad`` holds the full gradient."""
        total = self._pending.wait()
        if total is None:
            raise SbpError("dense gradients live on all ranks, yet this rank received none")
        *grads, loss = total.split([*self._sizes, 1])
        for parameter, grad in zip(self._summed, grads, strict=True):
            parameter.part.grad = grad.view(parameter.part.shape)
        return loss.squeeze(0)


def _gradient(parameter: GlobalTensor) -> Tensor:
    grad = parameter.part.grad
    return torch.zeros_like(parameter.part) if grad is None else grad
