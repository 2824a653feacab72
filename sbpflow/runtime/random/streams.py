"""Computes streams of random numbers as functions of a seed, a name, a step and an element.

There is no generator state, so a number does not depend on the rank, the time, or the layout of a
tensor. A shard can therefore be initialized without the rest of its table. The mixing function is
SplitMix64's 64-bit finalizer (Steele, Lea, Flood, OOPSLA 2014) in int64 arithmetic, which wraps the
same way on CPU and CUDA.
"""

import hashlib

import torch
from torch import Tensor

from sbpflow.runtime.random import splitmix
from sbpflow.runtime.random.splitmix import signed

GAMMA, MIX_1, MIX_2 = (signed(c) for c in (splitmix.GAMMA, splitmix.MIX_1, splitmix.MIX_2))
_INVERSE_1, _INVERSE_2 = (signed(pow(c, -1, 1 << 64)) for c in (splitmix.MIX_1, splitmix.MIX_2))
_CHUNK_ELEMENTS = 1 << 16  # at 8 bytes per element, two or three chunks fit in a core's cache


def stream_key(seed: int, name: str) -> int:
    """Return a 63-bit key for one tensor's stream of numbers."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def step_keys(keys: Tensor, step: int | Tensor) -> Tensor:
    """Return the int64 keys of the streams ``keys`` at ``step``, which is an int or a 0-d int64
    tensor.
    """
    if isinstance(step, Tensor):
        return mix(keys + step * GAMMA)
    half = 1 << 63  # makes the Python integer wrap like int64
    return mix(keys + ((step * GAMMA + half) % (2 * half) - half))


def fill_uniform(
    out: Tensor,
    *,
    seed: int,
    name: str,
    bound: float,
    num_columns: int,
    first_row: int = 0,
    first_column: int = 0,
) -> None:
    """Fill ``out`` [rows, columns], a part of a logical tensor, with values in U(-bound, bound).

    ``num_columns`` is the logical width; ``first_row`` and ``first_column`` are the part's offset.
    """
    rows, columns = out.shape
    if rows == 0 or columns == 0 or out.is_meta:  # tensors of a dry run have no values
        return
    key = stream_key(seed, name)
    step = max(1, _CHUNK_ELEMENTS // columns)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        row = torch.arange(first_row + start, first_row + stop, device=out.device)
        counters = row.mul_(num_columns).mul_(GAMMA).add_(key)
        out[start:stop].copy_(uniform_rows(counters, columns, bound, first_column))


def uniform_rows(
    counters: Tensor, columns: int, bound: float | Tensor, first_column: int = 0
) -> Tensor:
    """Return values in U(-bound, bound), as float64 [rows, columns]. ``counters`` contains each
    row's first counter; ``bound`` may be a float64 tensor [rows, 1].
    """
    column = torch.arange(first_column, first_column + columns, device=counters.device).mul_(GAMMA)
    unit = mix(counters.unsqueeze(1) + column).bitwise_and_((1 << 53) - 1).to(torch.float64)
    return unit.mul_(2.0 * bound / (1 << 53)).sub_(bound)


def mix(counters: Tensor) -> Tensor:
    """Return 64 random bits for each int64 counter (key + GAMMA * element number)."""
    z = (_shift_right(counters, 30) ^ counters).mul_(MIX_1)
    z = _shift_right(z, 27).bitwise_xor_(z).mul_(MIX_2)
    return _shift_right(z, 31).bitwise_xor_(z)


def unmix(mixed: Tensor) -> Tensor:
    """Invert ``mix``: return the int64 counters."""
    z = _shift_right(mixed, 62) ^ _shift_right(mixed, 31) ^ mixed
    z.mul_(_INVERSE_2)
    z = (_shift_right(z, 54) ^ _shift_right(z, 27) ^ z).mul_(_INVERSE_1)
    return _shift_right(z, 60) ^ _shift_right(z, 30) ^ z


def _shift_right(z: Tensor, bits: int) -> Tensor:
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)
