"""Computes the batch norms of torch modules over the rows of all ranks.

torch's own batch norm would normalize over the rows of one rank, so the trained weights would
depend on the number of ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    """Replaces a ``BatchNorm1d`` with ``ops.batch_norm``, keeping its parameters and buffers.

    ``take_rows`` must be called before each forward pass.
    """

    def __init__(self, norm: nn.BatchNorm1d, name: str) -> None:
        super().__init__()
        if norm.running_mean is None or norm.running_var is None or norm.momentum is None:
            raise RuntimeError(f"module {name}: check_norms should have rejected this norm")
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
        """Use the row layout of ``batch``, which is S(0), for the next forward pass."""
        self._batch = batch
        if self._bound_to != id(self):  # Not yet bound, or a copy of a bound module.
            # The transfers of ``ops.batch_norm`` cannot be compiled, so the compiler must skip this
            # forward. The instance is decorated, because decorating the class would load the
            # compiler on import.
            forward = partial(type(self).forward, self)
            self.__dict__["forward"] = torch.compiler.disable(forward)
            self._bound_to = id(self)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input: Tensor
    ) -> Tensor:
        """Normalize this rank's rows [rows, n]. The argument has the name of torch's batch norm.

        In training, the statistics cover the rows of all ranks.
        """
        x = input.to(self.running_mean.dtype)
        if not self.training:
            mean, var = self.running_mean, self.running_var
            return F.batch_norm(x, mean, var, self.weight, self.bias, eps=self.eps)
        batch = self._batch
        if batch is None or x.ndim != 2 or x.shape[0] != batch.part.shape[0]:
            rows = "the rows of a batch" if batch is None else f"{batch.part.shape[0]} rows"
            raise SbpError(
                f"module {self.name}: BatchNorm1d got an input of shape {list(x.shape)} for "
                f"{rows}; its input must be [rows, features], with one row for each row of the "
                "batch; for other inputs, use LayerNorm"
            )
        weight = torch.ones_like(self.running_mean) if self.weight is None else self.weight
        bias = torch.zeros_like(self.running_mean) if self.bias is None else self.bias
        whole = [self._everywhere(value, batch) for value in (weight, bias, *self.running)]
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
        """Return the running mean and the running variance, [n] each."""
        return self.running_mean, self.running_var

    def _everywhere(self, value: Tensor, batch: GlobalTensor) -> GlobalTensor:
        layout = Layout(batch.layout.placement, (Broadcast(),))
        return GlobalTensor(value, layout, tuple(value.shape), batch.boxing)


def step_name(module: str) -> str:
    """Return the step ID of the transfers of the named norm."""
    return f"module.{module}"


def check_norms(module: nn.Module) -> None:
    """Raise SbpError for batch norms that cannot be computed over the rows of all ranks."""
    for name, part in module.named_modules():
        if not isinstance(part, _BatchNorm):
            continue
        kind, where = type(part).__name__, name or type(part).__name__
        fault = ""
        if type(part) is not nn.BatchNorm1d:
            fault = "is not supported"
        elif not part.track_running_stats:
            fault = "has no running statistics (track_running_stats=False)"
        elif part.momentum is None:
            fault = "has momentum=None, which averages over all batches so far"
        if fault:
            raise SbpError(
                f"module {where}: {kind} {fault}; use LayerNorm, or nn.BatchNorm1d(features) over "
                "[rows, features], which is computed over the rows of all ranks"
            )


def replace_norms(module: nn.Module) -> nn.Module:
    """Replace each ``BatchNorm1d`` in ``module`` with a ``GlobalBatchNorm``; return the result."""
    norms: dict[int, GlobalBatchNorm] = {}  # by the id of the replaced module
    for name, part in list(module.named_modules(remove_duplicate=False)):
        if not isinstance(part, nn.BatchNorm1d):
            continue
        if id(part) not in norms:
            norms[id(part)] = GlobalBatchNorm(part, plain_name(name) or type(part).__name__)
        norm = norms[id(part)]
        if not name:
            return norm
        parent, _, leaf = name.rpartition(".")
        module.get_submodule(parent).register_module(leaf, norm)
    return module


def plain_name(name: str) -> str:
    """Return a submodule's or parameter's name without the prefixes that ``torch.compile`` adds."""
    return name.replace("_orig_mod.", "")


def norms_of(module: nn.Module) -> dict[str, GlobalBatchNorm]:
    """Return the ``GlobalBatchNorm`` modules by name."""
    return {part.name: part for part in module.modules() if isinstance(part, GlobalBatchNorm)}


def buffers_of(
    norms: Mapping[str, GlobalBatchNorm], everywhere: Layout, boxing: Boxing
) -> dict[str, GlobalTensor]:
    """Return the running statistics by name, as tensors with layout B that share storage with the
    norms."""
    return {
        f"{name}.{statistic}": GlobalTensor(value, everywhere, tuple(value.shape), boxing)
        for name, norm in norms.items()
        for statistic, value in zip(("running_mean", "running_var"), norm.running, strict=True)
    }


@dataclass(frozen=True, slots=True)
class NormCall:
    """A call of the batch norm ``name``; ``needs_grad`` is whether its input needs a gradient."""

    name: str
    num_features: int
    needs_grad: bool


def calls_of_norms(module: nn.Module, widths: Mapping[str, int], num_dense: int) -> list[NormCall]:
    """Return the calls of batch norms in order.

    If there are any, runs a forward pass over two rows of zeros on the CPU, and leaves ``module``
    in evaluation mode.
    """
    calls: list[NormCall] = []

    def record(
        name: str, _: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]
    ) -> None:
        x = (*args, *kwargs.values())[0]
        calls.append(NormCall(name, x.shape[-1], x.requires_grad and torch.is_grad_enabled()))

    hooks = [
        part.register_forward_pre_hook(
            partial(record, plain_name(name) or type(part).__name__), with_kwargs=True
        )
        for name, part in module.named_modules()
        if isinstance(part, nn.BatchNorm1d)
    ]
    if hooks:
        module.eval()
        vectors = {n: torch.zeros(2, width, requires_grad=True) for n, width in widths.items()}
        with torch.enable_grad():
            module(vectors, torch.zeros(2, num_dense))
    for hook in hooks:
        hook.remove()
    return calls


def dry_norms(calls: Sequence[NormCall], carry: GlobalTensor) -> GlobalTensor:
    """Run the transfers of these calls in a dry run, one after another. ``carry`` ([b, 1]) passes
    through all calls that need a gradient, so that autograd sees one chain.
    """
    everywhere = Layout(carry.layout.placement, (Broadcast(),))
    boxing, rows = carry.boxing, carry.shape[0]
    for call in calls:
        width = call.num_features
        vectors = [
            GlobalTensor(carry.part.new_zeros(width), everywhere, (width,), boxing)
            for _ in range(4)
        ]
        wide = carry.part.expand(-1, width).contiguous()
        x = GlobalTensor(wide, carry.layout, (rows, width), boxing)
        x = x if call.needs_grad else x.detach()
        y = ops.batch_norm(x, *vectors, training=True, id=step_name(call.name))
        if call.needs_grad:
            carry = GlobalTensor(y.part.sum(1, keepdim=True), carry.layout, (rows, 1), boxing)
    return carry
