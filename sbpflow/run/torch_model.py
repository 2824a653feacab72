"""An ordinary ``nn.Module`` as the dense part of a model.

Its parameters are B leaves that share storage with the module: every rank runs it on its own rows,
gradients are added up in the trainer's buckets beside the embedding backward. No DDP, which would
average what the engine has already shared out by rows.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sbpflow.boxing.executor import Boxing
from sbpflow.config.table_rules import Scheme, TableRule
from sbpflow.embedding.plan.tables import OutputConfig
from sbpflow.errors import SbpError
from sbpflow.run.model import ParameterSpec, schemes_of
from sbpflow.runtime.streams import stream_key
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.sbp import Broadcast
from sbpflow.tensor.global_tensor import GlobalTensor

RowLoss = Callable[[Tensor, Tensor], Tensor]


def bce_rows(logits: Tensor, labels: Tensor) -> Tensor:
    """Binary cross entropy of each row: [rows], [rows] -> [rows]."""
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none")


@dataclass(frozen=True, kw_only=True)
class TorchModel:
    """A ``ModelSpec`` around a module; what the ``spec`` of a model's configuration returns.

    ``make`` builds the module; it is called on every rank under one seed, so initial values are
    equal, and on the meta device for its shapes. ``forward(vectors, dense)`` of the module gets
    this rank's rows: the ``outputs`` by name, [rows, width] each, and the dense fields [rows,
    fields]; it returns logits [rows] or [rows, 1]. ``row_loss(logits, labels)``, [rows] each, gives
    the loss of each row; the trainer takes the mean over the whole batch. Modules may be compiled
    (``torch.compile``).
    """

    outputs: tuple[OutputConfig, ...]
    make: Callable[[], nn.Module]
    row_loss: RowLoss = bce_rows
    splits_parameters: bool = False

    @cached_property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """Names and shapes; the module fills them itself.

        Raises SbpError for buffers that training changes, and for lazy or frozen-only modules.
        """
        with torch.device("meta"):
            module = self.make()
        _check_module(module)
        return {name: ParameterSpec(shape=tuple(value.shape)) for name, value in _leaves(module)}

    @property
    def schemes(self) -> Mapping[Scheme, Mapping[str, TableRule]]:
        """dp, 1, 2 and 3 for the outputs; the module has no part in them."""
        return schemes_of(self.outputs)

    def build(
        self, layouts: Mapping[str, Layout], boxing: Boxing, *, seed: int, dtype: torch.dtype
    ) -> "TorchPart":
        """The module on this rank's device, all its floating tensors of ``dtype``."""
        device = boxing.world.device
        if device.type == "meta":
            with torch.device("meta"):
                module = self.make().to(dtype)
        else:
            with _seeded(stream_key(seed, "module"), device):
                module = self.make()
            _check_module(module)
            module = module.to(device=device, dtype=dtype)
        return TorchPart(module, layouts, boxing, self.row_loss)


class TorchPart:
    """The module on one rank, as the trainer sees it."""

    def __init__(
        self,
        module: nn.Module,
        layouts: Mapping[str, Layout],
        boxing: Boxing,
        row_loss: RowLoss,
    ) -> None:
        self.module = module
        self._row_loss = row_loss
        self._rank = boxing.world.rank
        self.parameters: dict[str, GlobalTensor] = {}
        for name, value in _leaves(module):
            if layouts[name].nd_sbp != (Broadcast(),):
                raise SbpError(
                    f"parameter {name}: {layouts[name]}; a torch module runs whole on every rank, "
                    "so its parameters are B"
                )
            self.parameters[name] = GlobalTensor(value, layouts[name], tuple(value.shape), boxing)

    def forward(
        self,
        vectors: Mapping[str, GlobalTensor],
        dense: GlobalTensor,
        *,
        training: bool,
        seed: int,
    ) -> GlobalTensor:
        """Logits [batch, 1], S(0), from this rank's rows.

        In training all of torch's random numbers inside the module are drawn from ``seed`` and the
        rank, and the generators outside keep their state.
        """
        parts = {name: one.part for name, one in vectors.items()}
        if dense.part.is_meta:  # nothing travels inside; only what comes in and out is of interest
            logits = sum(part.sum(1, keepdim=True) for part in (*parts.values(), dense.part))
            return self._over_batch(cast("Tensor", logits), dense)
        self.module.train(training)
        before = _versions(self.module) if training else {}
        random = stream_key(seed, f"module/{self._rank}")
        with _seeded(random, dense.part.device) if training else _unchanged():
            logits = self.module(parts, dense.part)
        if training and _versions(self.module) != before:
            self._refuse_buffers(before)
        rows = dense.part.shape[0]
        if not isinstance(logits, Tensor) or logits.shape not in ((rows,), (rows, 1)):
            given = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise SbpError(
                f"{type(self.module).__name__}.forward: returned {given} for {rows} rows; return "
                "their logits, [rows] or [rows, 1]"
            )
        return self._over_batch(logits.reshape(rows, 1), dense)

    def row_losses(self, logits: GlobalTensor, labels: GlobalTensor) -> GlobalTensor:
        """[batch, 1], S(0): ``row_loss`` of this rank's rows."""
        losses = self._row_loss(logits.part.squeeze(1), labels.part.squeeze(1))
        if losses.shape != (logits.part.shape[0],):
            raise SbpError(
                f"row_loss: returned {list(losses.shape)} for {logits.part.shape[0]} rows; return "
                "the loss of each row, such as reduction='none' gives, and no mean"
            )
        return self._over_batch(losses.unsqueeze(1), logits)

    def _over_batch(self, part: Tensor, like: GlobalTensor) -> GlobalTensor:
        shape = (like.shape[0], part.shape[1])
        return GlobalTensor(part, like.layout, shape, like.boxing)

    def _refuse_buffers(self, before: Mapping[str, tuple[int, int]]) -> None:
        changed = [name for name, v in _versions(self.module).items() if before.get(name) != v]
        raise SbpError(
            f"{type(self.module).__name__}: forward changed the buffer {changed[0]} in training; "
            "each rank would change its own copy. Keep no state but parameters in the module"
        )


def _leaves(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters to train, by the names they have without ``torch.compile`` around them."""
    for name, value in module.named_parameters():
        if value.requires_grad:
            yield name.replace("_orig_mod.", ""), value


def _check_module(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats:  # pyright: ignore[reportPrivateUsage]
            raise SbpError(
                f"module {name or type(part).__name__}: {type(part).__name__} keeps the buffer "
                f"{name + '.' if name else ''}running_mean of this rank's rows alone, so weights "
                "would depend on the number of ranks; use LayerNorm, or no norm"
            )
    for name, value in module.named_parameters():
        if isinstance(value, nn.parameter.UninitializedParameter):
            raise SbpError(
                f"parameter {name}: has no shape yet (a lazy module); give its sizes, for example "
                "nn.Linear(64, 1)"
            )
        if not value.is_floating_point():
            raise SbpError(f"parameter {name}: {value.dtype} is no floating dtype; use float32")


def _versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Which tensors the buffers are, and how often each was written to."""
    return {name: (id(value), value._version) for name, value in module.named_buffers()}


@contextmanager
def _seeded(seed: int, device: torch.device) -> Generator[None]:
    """torch's generators, those of all CUDA devices too, start from ``seed`` and are put back."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


@contextmanager
def _unchanged() -> Generator[None]:
    yield
