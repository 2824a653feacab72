"""Batch norms of torch modules, taken over the rows of all ranks.

Torch's own would normalise by the rows of one rank, and weights would depend on their number.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sbpflow.boxing.executor import Boxing
from sbpflow.errors import SbpError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.sbp import Broadcast
from sbpflow.tensor import ops
from sbpflow.tensor.global_tensor import GlobalTensor

_BatchNorm = nn.modules.batchnorm._BatchNorm  # pyright: ignore[reportPrivateUsage]


class GlobalBatchNorm(nn.Module):
    """``ops.batch_norm`` in the place of a ``BatchNorm1d``, with its parameters and buffers.

    ``take_rows`` tells it before each forward which rows of the batch this rank has.
    """

    def __init__(self, norm: nn.BatchNorm1d, name: str) -> None:
        super().__init__()
        if norm.running_mean is None or norm.running_var is None or norm.momentum is None:
            raise RuntimeError(f"module {name}: check_norms lets none such pass")
        self.name = name
        self.weight: nn.Parameter | None = norm.weight
        self.bias: nn.Parameter | None = norm.bias
        self.running_mean: Tensor
        self.running_var: Tensor
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)
        self.momentum, self.eps = norm.momentum, norm.eps
        self._batch: GlobalTensor | None = None
        self._bound_to = 0

    def take_rows(self, batch: GlobalTensor) -> None:
        """``batch`` is S(0) over the rows of the next forward."""
        self._batch = batch
        if self._bound_to != id(self):  # not yet, or this is a copy of one that was
            # Its transfer stays out of compiled graphs. Not in the class: that loads the compiler.
            own = partial(type(self).forward, self)
            self.__dict__["forward"] = torch.compiler.disable(own)
            self._bound_to = id(self)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Tensor
    ) -> Tensor:
        """[rows of this rank, n] -> the same shape; in training over the rows of all ranks."""
        x = x.to(self.running_mean.dtype)
        if not self.training:
            mean, var = self.running_mean, self.running_var
            return F.batch_norm(x, mean, var, self.weight, self.bias, eps=self.eps)
        batch = self._batch
        if batch is None or x.ndim != 2 or x.shape[0] != batch.part.shape[0]:
            rows = "the rows of a batch" if batch is None else f"{batch.part.shape[0]} rows"
            raise SbpError(
                f"module {self.name}: BatchNorm1d got {list(x.shape)} for {rows}; over all ranks "
                "it takes [rows, features], a row for each of the batch: use LayerNorm for others"
            )
        weight = torch.ones_like(self.running_mean) if self.weight is None else self.weight
        bias = torch.zeros_like(self.running_mean) if self.bias is None else self.bias
        whole = [self._everywhere(one, batch) for one in (weight, bias, *self.running)]
        rows = GlobalTensor(x, batch.layout, (batch.shape[0], x.shape[1]), batch.boxing)
        y = ops.batch_norm(
            rows,
            *whole,
            training=True,
            momentum=self.momentum,
            eps=self.eps,
            id=step_name(self.name),
        )
        return y.part

    @property
    def running(self) -> tuple[Tensor, Tensor]:
        """Mean and variance, [n] each."""
        return self.running_mean, self.running_var

    def _everywhere(self, value: Tensor, batch: GlobalTensor) -> GlobalTensor:
        layout = Layout(batch.layout.placement, (Broadcast(),))
        return GlobalTensor(value, layout, tuple(value.shape), batch.boxing)


def step_name(module: str) -> str:
    """What the transfers of a norm are called."""
    return f"module.{module}"


def check_norms(module: nn.Module) -> None:
    """Raise SbpError for batch norms that cannot be taken over the rows of all ranks."""
    for name, part in module.named_modules():
        if not isinstance(part, _BatchNorm):
            continue
        kind, where = type(part).__name__, name or type(part).__name__
        wrong = ""
        if type(part) is not nn.BatchNorm1d:
            wrong = "takes mean and variance over this rank's rows"
        elif not part.track_running_stats:
            wrong = "keeps no running statistics (track_running_stats=False)"
        elif part.momentum is None:
            wrong = "has momentum=None, an average over all batches so far"
        if wrong:
            raise SbpError(
                f"module {where}: {kind} {wrong}; nn.BatchNorm1d(features) over [rows, features] "
                "is taken over the rows of all ranks, or use LayerNorm"
            )


def replace_norms(module: nn.Module) -> nn.Module:
    """``module`` with a ``GlobalBatchNorm`` in the place of each ``BatchNorm1d``."""
    for name, part in list(module.named_modules()):
        if not isinstance(part, nn.BatchNorm1d):
            continue
        norm = GlobalBatchNorm(part, plain_name(name) or type(part).__name__)
        if not name:
            return norm
        parent, _, leaf = name.rpartition(".")
        module.get_submodule(parent).register_module(leaf, norm)
    return module


def plain_name(name: str) -> str:
    """The name that a part of a module has without ``torch.compile`` around it."""
    return name.replace("_orig_mod.", "")


def norms_of(module: nn.Module) -> dict[str, GlobalBatchNorm]:
    """The norms over all ranks, by name."""
    return {part.name: part for part in module.modules() if isinstance(part, GlobalBatchNorm)}


def buffers_of(
    norms: Mapping[str, GlobalBatchNorm], everywhere: Layout, boxing: Boxing
) -> dict[str, GlobalTensor]:
    """Running statistics by name, B, which share storage with the norms."""
    return {
        f"{name}.{what}": GlobalTensor(value, everywhere, tuple(value.shape), boxing)
        for name, norm in norms.items()
        for what, value in zip(("running_mean", "running_var"), norm.running, strict=True)
    }


def calls_of_norms(
    module: nn.Module, widths: Mapping[str, int], num_dense: int
) -> list[tuple[str, int]]:
    """(name, features) of each batch norm in the order in which a forward calls them.

    Found by a forward over two rows of zeros on the CPU, without gradients; ``module`` is one that
    nothing else uses.
    """
    called: list[tuple[str, int]] = []
    hooks = [
        part.register_forward_pre_hook(_note(called, plain_name(name) or type(part).__name__))
        for name, part in module.named_modules()
        if isinstance(part, nn.BatchNorm1d)
    ]
    if hooks:
        module.eval()
        with torch.no_grad():
            module(
                {name: torch.zeros(2, n) for name, n in widths.items()}, torch.zeros(2, num_dense)
            )
    for hook in hooks:
        hook.remove()
    return called


def _note(
    called: list[tuple[str, int]], name: str
) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        called.append((name, inputs[0].shape[-1]))

    return hook


def dry_norms(calls: Sequence[tuple[str, int]], carry: GlobalTensor) -> GlobalTensor:
    """The transfers of these norms over rows without values, each of what the one before gave.

    ``carry`` [b, 1] is on the meta device, and so is what comes out, [b, 1].
    """
    everywhere = Layout(carry.layout.placement, (Broadcast(),))
    boxing, rows = carry.boxing, carry.shape[0]
    for name, width in calls:
        vectors = [
            GlobalTensor(carry.part.new_empty(width), everywhere, (width,), boxing)
            for _ in range(4)
        ]
        wide = carry.part.expand(-1, width).contiguous()
        x = GlobalTensor(wide, carry.layout, (rows, width), boxing)
        y = ops.batch_norm(x, *vectors, training=True, id=step_name(name))
        carry = GlobalTensor(y.part.sum(1, keepdim=True), carry.layout, (rows, 1), boxing)
    return carry
