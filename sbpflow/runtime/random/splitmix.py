"""The constants of SplitMix64, unsigned: one place for everything that mixes bits.

Steele, Lea, Flood, Fast splittable pseudorandom number generators, OOPSLA 2014; Vigna's finaliser.
Numbers only, so that the data plane reads it without loading torch.
"""

GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def signed(value: int) -> int:
    """The same 64 bits as a signed number, for int64 tensors, whose arithmetic wraps alike."""
    return value - (1 << 64) if value >> 63 else value
