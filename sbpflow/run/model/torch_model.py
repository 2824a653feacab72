"""An ordinary ``nn.Module`` as the dense part of a model.

Its parameters are B leaves that share storage with the module: every rank runs it on its own rows,
gradients are added up in the trainer's buckets beside the embedding backward. No DDP, which would
average what the engine has already shared out by rows.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sbpflow.boxing.executor import Boxing
from sbpflow.config.table_rules import Scheme, TableRule
from sbpflow.embedding.plan.tables import OutputConfig
from sbpflow.errors import SbpError
from sbpflow.run.model.global_norm import (
    buffers_of,
    calls_of_norms,
    check_norms,
    dry_norms,
    norms_of,
    plain_name,
    replace_norms,
)
from sbpflow.run.model.spec import HashedColumn, ParameterSpec, schemes_of
from sbpflow.runtime.compute.compiler import keep_compiled_privately
from sbpflow.runtime.random.draws import seeded
from sbpflow.runtime.random.streams import stream_key
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast
from sbpflow.tensor.global_tensor import GlobalTensor, parameter
from sbpflow.training.health import check_initial

LOOKED_AT = 3  # batches after which the values of buffers are compared
RowLoss = Callable[[Tensor, Tensor], Tensor]


def bce_rows(logits: Tensor, labels: Tensor) -> Tensor:
    """Binary cross entropy of each row: [rows], [rows] -> [rows]."""
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none")


@dataclass(frozen=True, kw_only=True)
class TorchModel:
    """A ``ModelSpec`` around a module; what the ``spec`` of a model's configuration returns.

    ``make`` builds a new module at each call: once for its shapes, and once on every rank under one
    seed, so that initial values are equal. ``forward(vectors, dense)`` of the module gets this
    rank's rows, none in a short last batch: the ``outputs`` by name, [rows, width] each, and the
    dense fields [rows, fields]; it returns logits [rows] or [rows, 1], each from its own row alone.
    ``row_loss(logits, labels)``, [rows] each, gives the loss of each row; the trainer takes the
    mean over the whole batch. Modules may be compiled (``torch.compile``), and run under
    ``torch.autocast`` of a dtype. A ``BatchNorm1d`` is taken over the rows of all ranks.
    """

    outputs: tuple[OutputConfig, ...]
    make: Callable[[], nn.Module]
    row_loss: RowLoss = bce_rows
    hashed_columns: tuple[HashedColumn, ...] = ()
    splits_parameters: bool = False
    autocast: torch.dtype | None = None

    @cached_property
    def _first(self) -> nn.Module:
        """Made for its shapes."""
        module = self._make(0, torch.device("cpu"))
        _check_module(module)
        return module

    def _make(self, seed: int, device: torch.device) -> nn.Module:
        keep_compiled_privately()  # before the user's code may compile
        with seeded(seed, device):
            module = self.make()
        if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SbpError(
                f"make: returned a {type(module).__name__}, not a torch.nn.Module; for example "
                "make=lambda: nn.Linear(width, 1)"
            )
        return module

    @cached_property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """Names and shapes of what is trained; the module fills them itself.

        Raises SbpError for norms over the rows of a rank, lazy modules and sparse gradients.
        """
        return {
            name: ParameterSpec(shape=tuple(value.shape)) for name, value in _leaves(self._first)
        }

    @property
    def schemes(self) -> Mapping[Scheme, Mapping[str, TableRule]]:
        """dp, 1, 2 and 3 for the outputs; the module has no part in them."""
        return schemes_of(self.outputs)

    def build(
        self, layouts: Mapping[str, Layout], boxing: Boxing, *, seed: int, dtype: torch.dtype
    ) -> "TorchPart | ShapesOnly":
        """The module on this rank's device, all its floating tensors of ``dtype``.

        Raises SbpError if ranks start with different values.
        """
        device = boxing.world.device
        if self.autocast is not None and dtype != torch.float32:
            raise SbpError(
                f"autocast: {self.autocast} with {dtype}; it narrows float32 alone, so use "
                "parallel.dtype: float32, or leave autocast out"
            )
        if device.type == "meta":
            calls = partial(calls_of_norms, self._first)
            return ShapesOnly(self.parameters, layouts, boxing, dtype, calls)
        module = self._make(stream_key(seed, "module"), device)
        if module is self._first:
            raise SbpError(
                f"make: returned the same {type(module).__name__} twice; build a new one at each "
                "call, and load what it shall start with in there"
            )
        module = replace_norms(module).to(device=device, dtype=dtype)
        part = TorchPart(module, layouts, boxing, self.row_loss, autocast=self.autocast)
        check_initial(part.parameters, boxing)
        return part

    def plain(self, *, seed: int) -> nn.Module:
        """A new module as ``make`` gives it; what is not trained is what a run of ``seed`` has."""
        module = self._make(stream_key(seed, "module"), torch.device("cpu"))
        original: object = getattr(module, "_orig_mod", module)  # without torch.compile around it
        return original if isinstance(original, nn.Module) else module


class TorchPart:
    """The module on one rank, as the trainer sees it."""

    def __init__(
        self,
        module: nn.Module,
        layouts: Mapping[str, Layout],
        boxing: Boxing,
        row_loss: RowLoss,
        *,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.module = module
        self._autocast = autocast
        self._row_loss = row_loss
        self._world = boxing.world
        self._batches = 0
        self.parameters: dict[str, GlobalTensor] = {}
        for name, value in _leaves(module):
            if layouts[name].nd_sbp != (Broadcast(),):
                raise SbpError(
                    f"parameter {name}: {layouts[name]}; a torch module runs whole on every rank, "
                    "so its parameters are B"
                )
            self.parameters[name] = GlobalTensor(value, layouts[name], tuple(value.shape), boxing)
        self._norms = norms_of(module)
        line = Placement.line(boxing.world.device.type, boxing.world.size)
        self.buffers = buffers_of(self._norms, Layout(line, (Broadcast(),)), boxing)

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
        self.module.train(training)
        for norm in self._norms.values():
            norm.take_rows(dense)
        before = self._buffers() if training else []
        device, draws = dense.part.device, self._world.draws
        with ExitStack() as context:
            if training:
                context.enter_context(draws.of_torch(device, seed, f"module/{self._world.rank}"))
            if self._autocast is not None:
                context.enter_context(torch.autocast(device.type, self._autocast))
            logits = self.module(parts, dense.part)
        if training:
            self._check_buffers(before)
        self._check_logits(logits, dense.part.shape[0], training)
        return _over_batch(logits.reshape(-1, 1).to(dense.dtype), dense)

    def row_losses(self, logits: GlobalTensor, labels: GlobalTensor) -> GlobalTensor:
        """[batch, 1], S(0): ``row_loss`` of this rank's rows."""
        losses = self._row_loss(logits.part.squeeze(1), labels.part.squeeze(1))
        if losses.shape != (logits.part.shape[0],):
            raise SbpError(
                f"row_loss: returned {list(losses.shape)} for {logits.part.shape[0]} rows; return "
                "the loss of each row, such as reduction='none' gives, and no mean"
            )
        return _over_batch(losses.unsqueeze(1), logits)

    def _check_logits(self, logits: object, rows: int, training: bool) -> None:
        what = f"{type(self.module).__name__}.forward: returned "
        if not isinstance(logits, Tensor) or logits.shape not in ((rows,), (rows, 1)):
            given = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise SbpError(
                f"{what}{given} for {rows} rows; return their logits, [rows] or [rows, 1]"
            )
        if not logits.is_floating_point():
            raise SbpError(f"{what}{logits.dtype}; logits are floating, float32 for example")
        if training and not logits.requires_grad:
            raise SbpError(
                f"{what}logits without a gradient; compute them from the vectors, outside of "
                "torch.no_grad() and detach()"
            )

    def _buffers(self) -> list[tuple[str, int, int, Tensor | None]]:
        """Which tensors the buffers are, how often each was written to, and its values at first.

        A write through ``.data`` leaves no other trace than the values; a module that does it does
        it from the start, so the first batches are looked at.
        """
        self._batches += 1
        look = self._batches <= LOOKED_AT
        return [
            (name, id(value), value._version, value.clone() if look else None)
            for name, value in self.module.named_buffers()
            if plain_name(name) not in self.buffers
        ]

    def _check_buffers(self, before: list[tuple[str, int, int, Tensor | None]]) -> None:
        found = {
            name: value
            for name, value in self.module.named_buffers()
            if plain_name(name) not in self.buffers
        }
        for name, number, version, values in before:
            now = found.pop(name, None)
            same = now is not None and (id(now), now._version) == (number, version)
            if same and values is not None and now is not None:
                same = torch.equal(now.nan_to_num(), values.nan_to_num())
            if not same:
                self._refuse_buffer(name)
        for name in found:
            self._refuse_buffer(name)

    def _refuse_buffer(self, name: str) -> None:
        raise SbpError(
            f"{type(self.module).__name__}: forward changed the buffer {name} in training; each "
            "rank would change its own copy. Keep no state but parameters in the module"
        )


class ShapesOnly:
    """Stands for a module in a dry run: only batch norms send anything inside one.

    ``calls`` gives theirs, in order, from the widths of the vectors and of the dense fields.
    """

    def __init__(
        self,
        specs: Mapping[str, ParameterSpec],
        layouts: Mapping[str, Layout],
        boxing: Boxing,
        dtype: torch.dtype,
        calls: Callable[[Mapping[str, int], int], list[tuple[str, int]]] | None = None,
    ) -> None:
        self._calls = calls
        self.buffers: dict[str, GlobalTensor] = {}
        self.parameters = {
            name: parameter(
                torch.empty(spec.shape, dtype=dtype, device="meta"),
                layouts[name],
                spec.shape,
                boxing,
            )
            for name, spec in specs.items()
        }

    def forward(
        self,
        vectors: Mapping[str, GlobalTensor],
        dense: GlobalTensor,
        *,
        training: bool,
        seed: int,
    ) -> GlobalTensor:
        """Logits [batch, 1] without values, which all that goes in has a part in."""
        del seed
        sums = [one.part.sum(1, keepdim=True) for one in (*vectors.values(), dense)]
        logits = _over_batch(torch.stack(sums).sum(0), dense)
        if not training or self._calls is None:
            return logits
        widths = {name: one.shape[1] for name, one in vectors.items()}
        return dry_norms(self._calls(widths, dense.shape[1]), logits)

    def row_losses(self, logits: GlobalTensor, labels: GlobalTensor) -> GlobalTensor:
        """[batch, 1] without values."""
        return _over_batch(logits.part * labels.part, logits)


def _over_batch(part: Tensor, like: GlobalTensor) -> GlobalTensor:
    return GlobalTensor(part, like.layout, (like.shape[0], part.shape[1]), like.boxing)


def _leaves(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters to train, by the names they have without ``torch.compile`` around them."""
    for name, value in module.named_parameters():
        if value.requires_grad:
            yield plain_name(name), value


def _check_module(module: nn.Module) -> None:
    check_norms(module)
    for name, part in module.named_modules():
        kind, where = type(part).__name__, name or type(part).__name__
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise SbpError(
                f"module {where}: {kind} with sparse=True has sparse gradients, which dense "
                "buckets do not take; leave sparse out, or make it a table of an output"
            )
    for name, value in module.named_parameters():
        if isinstance(value, nn.parameter.UninitializedParameter):
            raise SbpError(
                f"parameter {name}: has no shape yet (a lazy module); give its sizes, for example "
                "nn.Linear(64, 1)"
            )
        if not value.is_floating_point():
            raise SbpError(f"parameter {name}: {value.dtype} is no floating dtype; use float32")
