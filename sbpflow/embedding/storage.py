"""Where the rows of a rank's shards live, and the two kernels that look them up and update them.

A storage holds one [rows, width] block: shards of equal width stacked, addressed by local row
number. Reading (``lookup``) and writing (``update``) are apart, so an update need not happen inside
the backward. Two kernels, equal results: plain torch, and FBGEMM's table-batched embedding (TBE).
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sbpflow.embedding import memory
from sbpflow.embedding.access import Access, sum_bags
from sbpflow.embedding.optimizers import (
    RowBlock,
    SparseOptimizer,
    SumOverColumns,
    apply_step,
    row_squares,
)
from sbpflow.embedding.rounding import round_randomly

# Rows of one pass of an update: gradients, states and weights of a pass stay in cache (4096 rows of
# 16 columns are 256 KiB each), which makes Adam 2.4 times faster on 200,000 rows.
CHUNK_ROWS = 4096


class Storage(Protocol):
    """Rows of one rank's shards; a host tier fetches in ``prefetch``, may evict in ``release``.

    Every address that is looked up or updated was prefetched, and each prefetch is released once.
    """

    @property
    def weights(self) -> Tensor:
        """[rows, width]; writing to it changes what the next lookup reads."""
        ...

    @property
    def state(self) -> dict[str, Tensor]:
        """Optimizer state by name, [rows] or [rows, width], writable like ``weights``."""
        ...

    def prefetch(self, addresses: Tensor) -> None:
        """Rows that will be looked up soon."""
        ...

    def lookup(self, access: Access, lr: float | None = None) -> Tensor:
        """[bags, width]: each bag's weighted sum of rows, zeros for an empty bag; no autograd.

        ``lr`` announces an ``update`` of the same access, at that learning rate.
        """
        ...

    def update(self, access: Access, grads: Tensor, lr: float) -> None:
        """One optimizer step on the rows of ``access`` from the gradients [bags, width].

        Duplicates are summed before the rule is applied, so a row takes one step.
        """
        ...

    def release(self, addresses: Tensor) -> None:
        """Rows that are not needed until the next prefetch."""
        ...


class TorchStorage:
    """Device-resident rows with plain torch kernels: any width, dtype and optimizer.

    ``dtype`` is that of the arithmetic and of the state, ``dim`` the width of the logical table.
    Rows of half precision (``row_dtype``) are widened to it on reading and rounded at random, with
    the exact value as the mean, on writing.
    """

    def __init__(
        self,
        rows: int,
        width: int,
        *,
        dim: int,
        optimizer: SparseOptimizer,
        dtype: torch.dtype,
        device: torch.device,
        row_dtype: torch.dtype | None = None,
        sum_over_columns: SumOverColumns | None = None,
        seed: int = 0,
    ) -> None:
        self.weights = memory.zeros((rows, width), row_dtype or dtype, device)
        shape = optimizer.state_shape(rows, width)
        self.state = {name: memory.zeros(shape, dtype, device) for name in optimizer.state_names}
        for name, state in self.state.items():
            if start := optimizer.initial_state(name):
                state.fill_(start)
        self._dtype = dtype
        self._optimizer = optimizer
        self._dim = dim
        self._sum_over_columns = sum_over_columns
        self._seed = seed
        self._num_steps = 0

    def prefetch(self, addresses: Tensor) -> None:
        """Nothing to do: the rows are on the device."""

    def release(self, addresses: Tensor) -> None:
        """Nothing to do: the rows stay on the device."""

    def lookup(self, access: Access, lr: float | None = None) -> Tensor:
        del lr
        if self.weights.dtype == self._dtype:
            return sum_bags(self.weights, access)
        rows = self.weights.index_select(0, access.addresses).to(self._dtype)
        if access.offsets is None and access.weights is None:
            return rows
        return sum_bags(rows, access, torch.arange(rows.shape[0], device=rows.device))

    def update(self, access: Access, grads: Tensor, lr: float) -> None:
        self._num_steps += 1
        rows, summed = access.row_gradients(grads)
        rows = rows.to(torch.int64)
        squares = self._squares(summed)
        generator = None
        if self.weights.dtype != self._dtype:
            generator = torch.Generator(self.weights.device)
            generator.manual_seed(hash((self._seed, self._num_steps)) & 0x7FFF_FFFF_FFFF_FFFF)
        for start in range(0, rows.numel(), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            weights = self.weights.index_select(0, rows[part]).to(self._dtype)
            block = RowBlock(
                weights=weights,
                state=self.state,
                rows=rows[part],
                grads=summed[part],
                lr=lr,
                num_steps=self._num_steps,
                squares=None if squares is None else squares[part],
            )
            apply_step(self._optimizer, block)
            if generator is not None:
                weights = round_randomly(weights, self.weights.dtype, generator)
            self.weights.index_copy_(0, rows[part], weights)

    def _squares(self, grads: Tensor) -> Tensor | None:
        """Mean squares over the row that has one state; all ranks that share it take part."""
        if self._optimizer.name != "rowwise_adagrad":
            return None
        squares = row_squares(grads)
        if self._sum_over_columns is not None:
            squares = self._sum_over_columns(squares)
        width = self._dim if self._optimizer.shares_row_state else grads.shape[1]
        return squares.mul_(1.0 / max(width, 1))  # a shard of no columns has squares of nothing


class FbgemmStorage:
    """Device-resident float32 rows in one TBE table; the update is fused into its backward.

    Serves exactly the cases ``kernels.choose_kernel`` lets through: rules and widths where TBE
    means the same as ``TorchStorage``.
    """

    def __init__(
        self, rows: int, width: int, *, optimizer: SparseOptimizer, device: torch.device
    ) -> None:
        self._tbe = _make_tbe(rows, width, optimizer, device)
        self._lr = optimizer.lr
        self._state_names = optimizer.state_names
        self.weights.zero_()
        if optimizer.initial_accumulator:
            for tensor in self.state.values():
                tensor.fill_(optimizer.initial_accumulator)

    @property
    def weights(self) -> Tensor:
        # .data: writes through the view itself would invalidate a graph waiting for its backward.
        return self._tbe.split_embedding_weights()[0].data

    @property
    def state(self) -> dict[str, Tensor]:
        if not self._state_names:
            return {}
        (state,) = self._tbe.split_optimizer_states()[0]
        return {self._state_names[0]: state.data}

    def prefetch(self, addresses: Tensor) -> None:
        """Nothing to do: the rows are on the device."""

    def release(self, addresses: Tensor) -> None:
        """Nothing to do: the rows stay on the device."""

    def lookup(self, access: Access, lr: float | None = None) -> Tensor:
        if lr is None:
            return sum_bags(self.weights, access)
        access.graph = self._run(access, lr)
        return access.graph.detach()

    def update(self, access: Access, grads: Tensor, lr: float) -> None:
        graph, access.graph = access.graph, None
        if graph is None:  # rows that were not looked up here: TBE needs a forward of its own
            graph = self._run(access, lr)
        torch.autograd.backward([graph], [grads.contiguous()])

    def _run(self, access: Access, lr: float) -> Tensor:
        if lr != self._lr:  # TBE's backward takes the rate that was set at its forward
            self._tbe.set_learning_rate(lr)
            self._lr = lr
        addresses = access.addresses
        if addresses.is_cuda:  # its CUDA kernels take ids and offsets of one type
            addresses = addresses.to(torch.int64)
        with torch.enable_grad():
            return self._tbe(
                addresses, access.explicit_offsets(), per_sample_weights=access.weights
            )


class Tbe(Protocol):
    """What is used of FBGEMM's module, which is imported late and has no stubs."""

    def split_embedding_weights(self) -> list[Tensor]: ...
    def split_optimizer_states(self) -> Sequence[Sequence[Tensor]]: ...
    def set_learning_rate(self, lr: float) -> None: ...
    def __call__(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None
    ) -> Tensor: ...


def _make_tbe(rows: int, width: int, optimizer: SparseOptimizer, device: torch.device) -> Tbe:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        BoundsCheckMode,
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    kinds: dict[str, Any] = {
        "sgd": EmbOptimType.EXACT_SGD,
        "adagrad": EmbOptimType.EXACT_ADAGRAD,
        "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    }
    on_cuda = device.type == "cuda"
    make: Callable[..., Any] = SplitTableBatchedEmbeddingBagsCodegen
    return make(
        [
            (
                rows,
                width,
                EmbeddingLocation.DEVICE if on_cuda else EmbeddingLocation.HOST,
                ComputeDevice.CUDA if on_cuda else ComputeDevice.CPU,
            )
        ],
        optimizer=kinds[optimizer.name],
        learning_rate=optimizer.lr,
        eps=optimizer.eps,
        pooling_mode=PoolingMode.SUM,
        # Ids are checked once per batch, with field and row named; TBE's default trains row 0 on
        # a bad id. NONE also leaves the caller's tensors untouched.
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
    """Memory of our own for TBE on CPU, where this release of FBGEMM takes it (1.8 does)."""
    argument = "preallocated_host_buffers"
    if argument not in inspect.signature(make).parameters:
        return {}
    buffers = {"weights": memory.zeros((rows * width,), torch.float32, device)}
    if optimizer.state_names:
        size = torch.Size(optimizer.state_shape(rows, width)).numel()
        buffers["momentum1"] = memory.zeros((size,), torch.float32, device)
    return {argument: buffers}
