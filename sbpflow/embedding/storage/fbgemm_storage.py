"""Stores rows in FBGEMM's table-batched embedding (TBE), whose backward updates the rows."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.embedding.rules.registry import kernel_function
from sbpflow.embedding.storage import huge_pages
from sbpflow.embedding.storage.base import RowKernel, RowListener, notify
from sbpflow.embedding.storage.lookup import Lookup
from sbpflow.embedding.storage.torch_storage import TorchStorage
from sbpflow.runtime.compute.versions import import_fbgemm


class FbgemmStorage:
    """Stores float32 rows in one TBE table and updates them in its backward pass.

    The kernel supports only what ``rules.kernels`` allows: optimizers and widths for
    which TBE gives the same results as ``TorchStorage``.
    """

    name = "fbgemm"

    def __init__(
        self, rows: int, width: int, *, optimizer: SparseOptimizer, device: torch.device
    ) -> None:
        self._tbe = _make_tbe(rows, width, optimizer, device)
        self._lr = optimizer.lr
        self.listeners: list[RowListener] = []
        self._state_names = tuple(optimizer.state)
        self.weights.zero_()
        for name, tensor in self.state.items():
            if start := optimizer.initial_state(name):
                tensor.fill_(start)

    @property
    def absent(self) -> None:
        """Return ``None``, because TBE would update the row at an address for absent rows."""
        return None

    @property
    def weights(self) -> Tensor:
        # Return ``.data``: autograd would notice a write through the view itself, and the backward
        # of a pending graph would fail.
        return self._tbe.split_embedding_weights()[0].data

    @property
    def state(self) -> dict[str, Tensor]:
        if not self._state_names:
            return {}
        (state,) = self._tbe.split_optimizer_states()[0]
        return {self._state_names[0]: state.data}

    def sort_ahead(self, lookup: Lookup) -> None:
        """Do nothing, because TBE sorts in its backward pass."""

    def lookup(self, lookup: Lookup, lr: float | None = None) -> Tensor:
        if lr is None:
            return self.pool(self.weights, lookup)
        lookup.graph = self._run(lookup, lr)
        return lookup.graph.detach()

    def pool(self, block: Tensor, lookup: Lookup) -> Tensor:
        return lookup.pool(block)

    def row_gradients(self, lookup: Lookup, grads: Tensor) -> tuple[Tensor, Tensor]:
        return lookup.row_gradients(grads)

    def update(self, lookup: Lookup, grads: Tensor, lr: float, step: int) -> None:
        if self.listeners:
            notify(self.listeners, lookup.rows())
        graph, lookup.graph = lookup.graph, None
        # If TBE has not run a forward pass for this lookup (for example, a merged one), run it now.
        if graph is None:
            graph = self._run(lookup, lr)
        torch.autograd.backward([graph], [grads.contiguous()])

    def _run(self, lookup: Lookup, lr: float) -> Tensor:
        if lr != self._lr:  # TBE's backward uses the learning rate that was set at the forward pass
            self._tbe.set_learning_rate(lr)
            self._lr = lr
        slots = lookup.slots
        if slots.is_cuda:  # TBE's CUDA kernels require ids and offsets of the same dtype
            slots = slots.to(torch.int64)
        with torch.enable_grad():
            return self._tbe(slots, lookup.explicit_offsets(), per_sample_weights=lookup.weights)


def fbgemm_storage(
    rows: int,
    width: int,
    *,
    slots: int,
    dim: int,
    optimizer: SparseOptimizer,
    dtype: torch.dtype,
    device: torch.device,
    **unused: object,
) -> RowKernel:
    """Allocate a block with the arguments of ``TorchStorage``; the ``unused`` ones are for half
    precision and for state that ranks share, which FBGEMM does not support.

    An empty block uses torch, because FBGEMM's table cannot be empty. Like FBGEMM, it has no
    ``absent`` address, because groups send rows in the same way on all ranks.
    """
    if slots:
        return FbgemmStorage(slots, width, optimizer=optimizer, device=device)
    return TorchStorage(
        rows,
        width,
        slots=0,
        dim=dim,
        optimizer=optimizer,
        dtype=dtype,
        device=device,
        fixed_size=False,
    )


class Tbe(Protocol):
    """The part of FBGEMM's module that this file uses. FBGEMM has no type stubs and is imported
    late.
    """

    def split_embedding_weights(self) -> list[Tensor]: ...
    def split_optimizer_states(self) -> Sequence[Sequence[Tensor]]: ...
    def set_learning_rate(self, lr: float) -> None: ...
    def __call__(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None
    ) -> Tensor: ...


def _make_tbe(rows: int, width: int, optimizer: SparseOptimizer, device: torch.device) -> Tbe:
    import_fbgemm()  # reports a build that does not load
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        BoundsCheckMode,
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    on_cuda = device.type == "cuda"
    make: Callable[..., Any] = SplitTableBatchedEmbeddingBagsCodegen
    location = EmbeddingLocation.DEVICE if on_cuda else EmbeddingLocation.HOST
    compute = ComputeDevice.CUDA if on_cuda else ComputeDevice.CPU
    return make(
        [(rows, width, location, compute)],
        **kernel_function(optimizer, "fbgemm")(optimizer),
        learning_rate=optimizer.lr,
        pooling_mode=PoolingMode.SUM,
        # The id reader has already checked the ids and reports the field and row of a bad id; TBE's
        # default mode would silently train row 0. With NONE, TBE also leaves the caller's tensors
        # unchanged.
        bounds_check_mode=BoundsCheckMode.NONE,
        device=device if on_cuda else None,
        **({} if on_cuda else _host_buffers(make, rows, width, optimizer, device)),
    )


def _host_buffers(
    make: Callable[..., Any],
    rows: int,
    width: int,
    optimizer: SparseOptimizer,
    device: torch.device,
) -> dict[str, Any]:
    """Return the arguments that pass huge-page memory to TBE on CPU, or {} if this version of
    FBGEMM does not accept preallocated memory.
    """
    argument = "preallocated_host_buffers"
    if argument not in inspect.signature(make).parameters:
        return {}
    buffers = {"weights": huge_pages.zeros((rows * width,), torch.float32, device)}
    for name in optimizer.state:
        size = torch.Size(optimizer.state_shape(name, rows, width)).numel()
        buffers["momentum1"] = huge_pages.zeros((size,), torch.float32, device)
    return {argument: buffers}
