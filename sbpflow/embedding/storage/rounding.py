"""Rounding at random to half precision, so that updates smaller than half a step still add up."""

import torch
from torch import Tensor

# Mantissa bits that float32 has and the narrow dtype has not.
_DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}
HALF_DTYPES = tuple(_DROPPED_BITS)


def round_randomly(values: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """``values`` in ``dtype``, up or down with the chances that make the exact value the mean.

    Exact for numbers in the normal range of ``dtype``; float16 rounds its subnormals (below
    6.1e-5) to the nearest once more. Infinity and NaN stay; a finite value never becomes infinite.
    """
    bits = _DROPPED_BITS[dtype]
    narrow = values.to(torch.float32)
    raw = narrow.view(torch.int32)
    noise = torch.empty_like(raw).random_(0, 1 << bits, generator=generator)
    finite = torch.isfinite(narrow)
    rounded = torch.where(finite, (raw + noise) & -(1 << bits), raw).view(torch.float32)
    top = torch.finfo(dtype).max
    return torch.where(finite, rounded.clamp(-top, top), narrow).to(dtype)
