"""Initial values as a pure function of (seed, name, row, column).

A shard is filled without the rest of its table, so every layout, world size and single process
starts from the same numbers. The mixing function is the 64-bit finaliser of SplitMix64 (Steele,
Lea, Flood, OOPSLA 2014), in int64 arithmetic that wraps alike on CPU and CUDA.
"""

import hashlib

import torch
from torch import Tensor

_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_CHUNK_ELEMENTS = 1 << 22


def stream_key(seed: int, name: str) -> int:
    """A 63-bit key for one tensor's stream of numbers."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


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
    """Fill ``out`` [rows, columns] with U(-bound, bound) of its place in a wider logical tensor.

    ``num_columns`` is the logical width; ``first_row`` and ``first_column`` say where ``out`` lies.
    """
    rows, columns = out.shape
    if rows == 0 or columns == 0:
        return
    key = stream_key(seed, name)
    column = torch.arange(first_column, first_column + columns, device=out.device)
    step = max(1, _CHUNK_ELEMENTS // columns)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        row = torch.arange(first_row + start, first_row + stop, device=out.device)
        counter = (row * num_columns).unsqueeze(1) + column
        unit = _mix(counter * _GAMMA + key).bitwise_and_((1 << 53) - 1).to(torch.float64)
        out[start:stop].copy_(unit.mul_(2.0 * bound / (1 << 53)).sub_(bound))


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)
