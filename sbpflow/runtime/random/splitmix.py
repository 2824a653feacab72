"""Defines SplitMix64's unsigned constants, for all code that mixes bits.

The constants are from Steele, Lea and Flood, Fast splittable pseudorandom number generators, OOPSLA
2014, with Vigna's finalizer. This module does not import torch, so that the data plane can use the
constants.
"""

GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def signed(value: int) -> int:
    """Reinterpret 64 bits as a signed integer, for arithmetic on int64 tensors."""
    return value - (1 << 64) if value >> 63 else value
