"""Uses an ordinary ``nn.Module`` as the dense part of a model.

The module's parameters share storage with global tensors of layout B. Every rank runs the module on
its own rows, and the trainer sums the gradients in buckets, overlapped with the embedding backward.
DDP is not used, because it would average gradients that the engine already scales by the
number of rows.
"""

import gc
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
    NormCall,
    buffers_of,
    calls_of_norms,
    check_norms,
    dry_norms,
    norms_of,
    plain_name,
    replace_norms,
)
from sbpflow.run.model.spec import (
    HashedColumn,
    ParameterSpec,
    check_buffers,
    make_parameters,
    schemes_of,
)
from sbpflow.runtime.compute.compiler import keep_compiled_privately
from sbpflow.runtime.random.draws import seeded
from sbpflow.runtime.random.streams import stream_key
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.training.health import check_initial

LOOKED_AT = 3  # buffer values are compared for this many batches
RowLoss = Callable[[Tensor, Tensor], Tensor]


def bce_rows(logits: Tensor, labels: Tensor) -> Tensor:
    """Return each row's binary cross entropy ([rows]) from logits and labels ([rows] each)."""
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none")


@dataclass(frozen=True, kw_only=True)
class TorchModel:
    """A ``ModelSpec`` around a module, for the ``spec`` method of a model's configuration.

    ``make`` must build a new module at each call: it is called for the shapes, and again on every
    rank with the same seed, so that initial values are equal. The module's
    ``forward(vectors, dense)`` receives this rank's rows: the ``outputs`` by name ([rows, width]
    each) and the dense fields ([rows, fields]). In a short last batch, a rank may have 0 rows.
    ``forward`` returns logits [rows] or [rows, 1], each computed from its own row only.
    ``row_loss(logits, labels)`` takes two tensors [rows] and returns the loss of each row, which
    the trainer averages over the whole batch. The module may be compiled (``torch.compile``); with
    ``autocast=torch.bfloat16``, it runs under ``torch.autocast``. A ``BatchNorm1d`` is computed
    over the rows of all ranks.
    """

    outputs: tuple[OutputConfig, ...]
    make: Callable[[], nn.Module]
    row_loss: RowLoss = bce_rows
    hashed_columns: tuple[HashedColumn, ...] = ()
    splits_parameters: bool = False
    autocast: torch.dtype | None = None

    @cached_property
    def _first(self) -> nn.Module:
        """Return the module from which planning takes parameter shapes and batch norms."""
        module = self._make(0, torch.device("cpu"))
        _check_module(module)
        return module

    def _make(self, seed: int, device: torch.device) -> nn.Module:
        keep_compiled_privately()  # must precede the user's code, which may call ``torch.compile``
        with seeded(seed, device):
            module = self.make()
        if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SbpError(
                f"make returned a {type(module).__name__}, not a torch.nn.Module; return a new "
                "module whose forward(vectors, dense) returns one logit per row"
            )
        return module

    @cached_property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """Return names and shapes of the trained parameters; the module sets their initial values.
        Raises SbpError for lazy modules, sparse gradients, parameters that are not floating-point,
        complex buffers, and batch norms that cannot be computed over the rows of all ranks.
        """
        return {
            name: ParameterSpec(shape=tuple(value.shape)) for name, value in _leaves(self._first)
        }

    @property
    def schemes(self) -> Mapping[Scheme, Mapping[str, TableRule]]:
        """Return every scheme's layout rules, which depend only on the outputs."""
        return schemes_of(self.outputs)

    def build(
        self, layouts: Mapping[str, Layout], boxing: Boxing, *, seed: int, dtype: torch.dtype
    ) -> "TorchPart | ShapesOnly":
        """Build the module on this rank's device, with floating-point tensors in ``dtype``; in a
        dry run, build only the shapes. Raises SbpError if the initial values differ between ranks,
        if ``make`` returns the same module twice, or if ``autocast`` is not supported.
        """
        device = boxing.world.device
        if self.autocast not in (None, torch.bfloat16):
            raise SbpError(
                f"autocast: {self.autocast} is not supported, because the loss is not scaled, so "
                "the gradients of large batches would become 0; use torch.bfloat16"
            )
        if self.autocast is not None and dtype != torch.float32:
            raise SbpError(
                f"autocast: {self.autocast} applies only to float32, got {dtype}; use "
                "parallel.dtype: float32, or omit autocast"
            )
        if boxing.is_dry:
            calls = partial(calls_of_norms, self._first)
            return ShapesOnly(self.parameters, layouts, boxing, dtype, calls)
        module = self._make(stream_key(seed, "module"), device)
        if module is self._first:
            raise SbpError(
                f"make returned the same {type(module).__name__} twice; build a new module at "
                "each call, and load any initial values inside that call"
            )
        # A run starts without collections, and the user's code may leave large tensors in cycles.
        gc.collect()
        _own_memory(module)
        module = replace_norms(module).to(device=device, dtype=dtype)
        part = TorchPart(module, layouts, boxing, self.row_loss, autocast=self.autocast)
        check_initial({**part.parameters, **part.constants}, boxing)
        return part

    def plain(self, *, seed: int) -> nn.Module:
        """Build a new module on the CPU with the same initial values as a run with ``seed``."""
        module = self._make(stream_key(seed, "module"), torch.device("cpu"))
        _own_memory(module)
        return _uncompiled(module)


class TorchPart:
    """Runs the module on one rank, with the trainer's ``DensePart`` interface."""

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
        self._boxing, self._world = boxing, boxing.world
        self._batches = 0
        self.parameters: dict[str, GlobalTensor] = {}
        for name, value in _leaves(module):
            if layouts[name].nd_sbp != (Broadcast(),):
                raise SbpError(
                    f"parameter {name} has layout {layouts[name]}, but a torch module needs whole "
                    "parameters on every rank; use B"
                )
            self.parameters[name] = GlobalTensor(value, layouts[name], tuple(value.shape), boxing)
        self._norms = norms_of(module)
        line = Placement.line(boxing.world.device.type, boxing.world.size)
        self._whole = Layout(line, (Broadcast(),))
        self.buffers = buffers_of(self._norms, self._whole, boxing)
        self._persistent = frozenset(map(plain_name, module.state_dict()))

    @property
    def constants(self) -> dict[str, GlobalTensor]:
        """Return the frozen parameters, and the buffers except those of global batch norms."""
        named = (*self.module.named_parameters(), *self._own_buffers().items())
        return {
            plain_name(name): GlobalTensor(
                value.detach(), self._whole, tuple(value.shape), self._boxing
            )
            for name, value in named
            if plain_name(name) not in self.parameters
        }

    @property
    def saved_constants(self) -> dict[str, GlobalTensor]:
        """Return the constants that checkpoints contain: all except non-persistent buffers."""
        constants = self.constants.items()
        return {name: value for name, value in constants if name in self._persistent}

    def forward(
        self,
        vectors: Mapping[str, GlobalTensor],
        dense: GlobalTensor,
        *,
        training: bool,
        seed: int,
    ) -> GlobalTensor:
        """Compute logits ([batch, 1] with layout S(0)) from this rank's rows.

        In training, torch's random numbers inside the module depend on ``seed`` and the rank. The
        state of torch's generators is restored afterwards.
        """
        parts = {name: vector.part for name, vector in vectors.items()}
        self.module.train(training)
        for norm in self._norms.values():
            norm.take_rows(dense)
        before = self._buffers() if training else {}
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
        """Compute ``row_loss`` for this rank's rows ([batch, 1] with layout S(0))."""
        losses = self._row_loss(logits.part.squeeze(1), labels.part.squeeze(1)).to(logits.dtype)
        if losses.shape != (logits.part.shape[0],):
            raise SbpError(
                f"row_loss returned {list(losses.shape)} for {logits.part.shape[0]} rows; return "
                "a tensor [rows] with one loss per row, as with reduction='none'"
            )
        return _over_batch(losses.unsqueeze(1), logits)

    def _check_logits(self, logits: object, rows: int, training: bool) -> None:
        returned = f"{type(self.module).__name__}.forward: returned"
        if not isinstance(logits, Tensor) or logits.shape not in ((rows,), (rows, 1)):
            given = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise SbpError(
                f"{returned} {given} for {rows} rows; return one logit per row, as [rows] or "
                "[rows, 1]"
            )
        if not logits.is_floating_point():
            raise SbpError(
                f"{returned} {logits.dtype} logits; use a floating-point dtype such as float32"
            )
        if training and not logits.requires_grad:
            raise SbpError(
                f"{returned} logits without a gradient; compute them from the vectors, without "
                "torch.no_grad() or detach()"
            )

    def _buffers(self) -> dict[str, tuple[int, int, Tensor | None]]:
        """Return the identity, the version, and (for the first batches) the values of each buffer.
        Values are needed because a write through ``.data`` does not change the version. A module
        that writes through ``.data`` is assumed to do so from the start.
        """
        self._batches += 1
        compare = self._batches <= LOOKED_AT
        return {
            name: (id(value), value._version, value.clone() if compare else None)
            for name, value in self._own_buffers().items()
        }

    def _own_buffers(self) -> dict[str, Tensor]:
        """Return the module's buffers except the buffers of global batch norms."""
        buffers = self.module.named_buffers()
        return {name: value for name, value in buffers if plain_name(name) not in self.buffers}

    def _check_buffers(self, before: Mapping[str, tuple[int, int, Tensor | None]]) -> None:
        """Raise SbpError if the forward pass replaced, added, removed, or modified a buffer."""
        after = self._own_buffers()
        for name in {**before, **after}:
            value, (number, version, values) = after.get(name), before.get(name, (0, 0, None))
            same = value is not None and (id(value), value._version) == (number, version)
            if same and values is not None and value is not None:
                same = torch.equal(value.nan_to_num(), values.nan_to_num())
            if not same:
                raise SbpError(
                    f"{type(self.module).__name__}: forward changed the buffer {name} in training, "
                    "so the copies on different ranks could differ; use parameters as the only "
                    "state of the module"
                )


class ShapesOnly:
    """Stands in for a module in a dry run, where only its batch norms communicate.

    ``calls`` takes the widths of the vectors and the number of dense fields, and returns the calls
    of batch norms in order.
    """

    def __init__(
        self,
        specs: Mapping[str, ParameterSpec],
        layouts: Mapping[str, Layout],
        boxing: Boxing,
        dtype: torch.dtype,
        calls: Callable[[Mapping[str, int], int], list[NormCall]] | None = None,
    ) -> None:
        self._calls = calls
        self.buffers: dict[str, GlobalTensor] = {}
        self.parameters = make_parameters(specs, layouts, boxing, seed=0, dtype=dtype)

    def forward(
        self,
        vectors: Mapping[str, GlobalTensor],
        dense: GlobalTensor,
        *,
        training: bool,
        seed: int,
    ) -> GlobalTensor:
        """Return meaningless logits [batch, 1] that are connected to all inputs for autograd."""
        del seed
        sums = [x.part.sum(1, keepdim=True) for x in (*vectors.values(), dense)]
        logits = _over_batch(torch.stack(sums).sum(0), dense)
        if not training or self._calls is None:
            return logits
        widths = {name: vector.shape[1] for name, vector in vectors.items()}
        return dry_norms(self._calls(widths, dense.shape[1]), logits)

    def row_losses(self, logits: GlobalTensor, labels: GlobalTensor) -> GlobalTensor:
        """Return meaningless row losses [batch, 1]."""
        return _over_batch(logits.part * labels.part, logits)


def _over_batch(part: Tensor, like: GlobalTensor) -> GlobalTensor:
    return GlobalTensor(part, like.layout, (like.shape[0], part.shape[1]), like.boxing)


def _leaves(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the trainable parameters with their names, without the prefixes that ``torch.compile``
    adds.
    """
    for name, value in module.named_parameters():
        if value.requires_grad:
            yield plain_name(name), value


def _own_memory(module: nn.Module) -> None:
    """Copy tensors whose elements share memory, such as ``torch.ones(1).expand(8)``, because a
    checkpoint cannot be restored into them.
    """
    for value in (*module.parameters(), *module.buffers()):
        if 0 in value.stride():
            value.data = value.data.contiguous()


def _uncompiled(module: nn.Module) -> nn.Module:
    """Return the module without the wrappers that ``torch.compile`` adds to it or its parts."""
    original: object = getattr(module, "_orig_mod", module)
    module = original if isinstance(original, nn.Module) else module
    # ``named_children`` would omit the second name of a part that has two.
    for name, part in list(module.named_modules(remove_duplicate=False)):
        if name and "." not in name:
            setattr(module, name, _uncompiled(part))
    return module


def _check_module(module: nn.Module) -> None:
    check_norms(module)
    check_buffers(module)
    for name, part in module.named_modules():
        kind, where = type(part).__name__, name or type(part).__name__
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise SbpError(
                f"module {where}: {kind} with sparse=True has sparse gradients, which gradient "
                "buckets do not support; use sparse=False, or make the module an embedding table "
                "of an output"
            )
    for name, value in module.named_parameters():
        if isinstance(value, nn.parameter.UninitializedParameter):
            raise SbpError(
                f"parameter {name} belongs to a lazy module and has no shape yet; give its sizes "
                "(for example, nn.Linear(64, 1))"
            )
        if not value.is_floating_point():
            raise SbpError(
                f"parameter {name} has dtype {value.dtype}; use a floating-point dtype such as "
                "float32"
            )
