"""The Triton kernel: the operations of ``TorchStorage`` in a few launches of fixed size.

The kernel computes in float32. Tests compare it with the torch kernel, in Triton's interpreter if
there is no GPU.
"""

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sbpflow.embedding.rules.base import StepNumbers
from sbpflow.embedding.rules.registry import kernel_function
from sbpflow.embedding.storage import triton_kernels as kernels
from sbpflow.embedding.storage.base import notify
from sbpflow.embedding.storage.lookup import Lookup
from sbpflow.embedding.storage.torch_storage import TorchStorage
from sbpflow.errors import SbpError
from sbpflow.runtime.random.streams import step_keys

# Any, because the type stubs do not support ``function[grid]`` for jitted functions.
_launch: Any = kernels
# Maximum numbers of constants and states of a step function (see ``triton_rules``).
MOST_CONSTANTS, MOST_STATES = 4, 2
_ROWS_AS = {
    torch.float32: kernels.FLOAT32,
    torch.bfloat16: kernels.BFLOAT16,
    torch.float16: kernels.FLOAT16,
}


class TritonStorage(TorchStorage):
    """Float32, bfloat16, or float16 rows with float32 state, as in ``TorchStorage``."""

    name = "triton"
    always_fixed = True

    @cached_property
    def _columns(self) -> int:
        """Return the number of columns of a tile, a power of two."""
        return 1 << max(self.weights.shape[1] - 1, 0).bit_length()

    @cached_property
    def _block(self) -> int:
        """Return the number of positions of a tile: fewer for wide rows, so that a tile fits in
        registers.
        """
        return max(1, min(kernels.BLOCK, 2048 // self._columns))

    @cached_property
    def _step(self) -> tuple[Any, tuple[float, ...]]:
        """Return the optimizer's step function and its constants, padded with zeros."""
        step, constants = kernel_function(self.optimizer, "triton")(self.optimizer)
        if len(constants) > MOST_CONSTANTS or len(self.state) > MOST_STATES:
            raise SbpError(
                f"kernel triton: sparse optimizer {self.optimizer.name} has {len(constants)} "
                f"constants and {len(self.state)} states, but the limits are {MOST_CONSTANTS} and "
                f"{MOST_STATES}; use parallel.kernel: torch"
            )
        return step, (*constants, *[0.0] * (MOST_CONSTANTS - len(constants)))

    def pool(self, block: Tensor, lookup: Lookup) -> Tensor:
        bags, width = lookup.num_bags, block.shape[1]
        out = torch.empty(bags, width, device=block.device)
        if out.numel() == 0:
            return out
        if lookup.addresses.numel() == 0:
            return out.zero_()
        _launch.lookup[self._grid(bags)](
            block,
            lookup.slots,
            lookup.slots if lookup.offsets is None else lookup.offsets,
            out if lookup.weights is None else lookup.weights,
            out,
            bags,
            width,
            HAS_OFFSETS=lookup.offsets is not None,
            HAS_WEIGHTS=lookup.weights is not None,
            BLOCK=self._block,
            COLUMNS=self._columns,
        )
        return out

    def update(self, lookup: Lookup, grads: Tensor, lr: float, step: int) -> None:
        if lookup.addresses.numel() == 0:
            if self.optimizer.has_row_state:
                # This call is collective: every rank must make it, even if it has no rows.
                self._squares(grads.new_zeros(0, grads.shape[1]))
            return
        if self.listeners:
            notify(self.listeners, lookup.addresses.unique())
        numbers = self.numbers(lr, step)
        runs, width = lookup.runs(), self.weights.shape[1]
        grads = grads.contiguous()
        count = runs.keys.numel()
        weights = lookup.weights
        scale = grads if weights is None else weights.index_select(0, runs.order)
        tile = {"SPLIT": kernels.SPLIT, "BLOCK": self._block, "COLUMNS": self._columns}
        flags = {"HAS_SCALE": weights is not None, **tile}
        partial = grads.new_empty(count // kernels.SPLIT + 1, width, dtype=torch.float32)
        source = lookup.bags_of(runs.order)
        where = {"start": runs.start, "stop": runs.stop, "source": source, "scale": scale}
        grid = self._grid(count)
        _launch.sum_long_runs[grid](
            **where, grads=grads, partial=partial, n=count, width=width, **flags
        )
        squares = grads
        if self._sum_over_columns is not None:
            # Ranks that share rows must also add up the squares of their gradients, so a separate
            # launch sums the gradients first.
            sums = grads.new_empty(count, width, dtype=torch.float32)
            _launch.sum_runs[grid](
                **where, grads=grads, partial=partial, out=sums, n=count, width=width, **flags
            )
            grads, flags = sums, flags | {"HAS_SCALE": False}
            squares = self._squares(sums)
        placed = lookup.placed
        _launch.update[grid](
            runs.keys,
            runs.keys if placed is None else placed.index_select(0, runs.order),
            **where,
            grads=grads,
            partial=partial,
            squares=squares,
            n=count,
            num_rows=self._num_rows,
            width=width,
            HAS_SUMS=self._sum_over_columns is not None,
            IN_SLOTS=placed is not None,
            **self._rule(numbers),
            **self._rounding(numbers),
            **flags,
        )

    def _grid(self, positions: int) -> tuple[int]:
        return (-(-positions // self._block),)

    def _rule(self, numbers: StepNumbers) -> dict[str, Any]:
        """Return the kernel arguments for the optimizer and for the ``StepNumbers`` of its step."""
        optimizer, states = self.optimizer, list(self.state.values())
        on_device = self.device_numbers
        step, constants = self._step
        row_width = self._dim if optimizer.shares_row_state else self.weights.shape[1]
        return {
            "table": self.weights,
            "state_a": states[0] if states else self.weights,
            "state_b": states[1] if len(states) > 1 else self.weights,
            "numbers": self.weights if on_device is None else on_device.floats,
            "rate": numbers.rate if on_device is None else 0.0,
            "decay": numbers.decay if on_device is None else 0.0,
            "correction": numbers.correction if on_device is None else 0.0,
            **dict(zip("abcd", constants, strict=True)),
            "squares_factor": 1.0 / max(row_width, 1),
            "STEP": step,
            "ROWWISE": optimizer.has_row_state,
            "ON_DEVICE": on_device is not None,
        }

    def _rounding(self, numbers: StepNumbers) -> dict[str, Any]:
        """Return the kernel arguments for rounding."""
        rows_as = _ROWS_AS[self.weights.dtype]
        if rows_as == kernels.FLOAT32:  # these arguments are unused, so they may have any value
            noise = dict.fromkeys(("noise_keys", "noise_bases", "noise_shift"), self.weights)
            ones = dict.fromkeys(("words_per_row", "SHARDS", "HALVINGS"), 1)
            return {**noise, **ones, "first_column": 0, "ROWS_AS": rows_as}
        noise_of = self.noise_of_rows()
        shards = noise_of.bases.numel()
        return {
            "noise_keys": step_keys(noise_of.keys, numbers.step),
            "noise_bases": noise_of.bases,
            "noise_shift": noise_of.shift,
            "words_per_row": noise_of.words_per_row,
            "first_column": noise_of.first_column,
            "SHARDS": shards,
            "HALVINGS": max(1, math.ceil(math.log2(shards))) + 1,
            "ROWS_AS": rows_as,
        }
