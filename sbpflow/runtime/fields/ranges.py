"""Defines ``Range``, which annotates a configuration field with the bounds of its number."""

import math
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from sbpflow.runtime.fields.keys import Key


@dataclass(frozen=True, slots=True)
class Range:
    """The bounds of a number; ``above`` and ``below`` exclude the bound itself."""

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """Return whether ``value`` is within the bounds."""
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        parts = [(">=", self.low), (">", self.above), ("<=", self.high), ("<", self.below)]
        return " and ".join(f"{sign} {_exact(bound)}" for sign, bound in parts if bound is not None)


def _exact(bound: float) -> str:
    short = f"{bound:g}"
    return short if float(short) == bound else str(bound)


Rate = Annotated[float, Range(above=0)]
NonNegative = Annotated[float, Range(low=0)]
Beta = Annotated[float, Range(low=0, below=1)]
Count = Annotated[int, Range(low=1)]
# torch raises an error for numbers that float32 cannot represent.
LearningRate = Annotated[float, Range(above=0, high=1e30), Key("results", "Learning rate.")]
Float32 = Annotated[float, Range(low=0, high=1e30)]
Epsilon = Annotated[
    Rate, Key("results", "Constant added to the denominator of an update to avoid division by 0.")
]
Betas = Annotated[
    tuple[Beta, Beta], Key("results", "Decay rates of the averages of gradients and their squares.")
]
Accumulator = Annotated[Float32, Key("results", "Initial value of the sums of squared gradients.")]


def broken_rule(value: Any, kind: Any) -> str | None:
    """Return the rule of the annotation ``kind`` if ``value`` breaks that rule, else None. Supports
    numbers with a Range, tuples of such numbers, ``Literal``, and unions of these with None. A
    value with any other annotation passes.
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        bounds = [mark for mark in args[1:] if isinstance(mark, Range)]
        if not bounds:
            return broken_rule(value, args[0])
        passes = math.isfinite(value) and all(bound.holds(value) for bound in bounds)
        return None if passes else " ".join(["a finite number", *map(str, bounds)])
    if origin is tuple:
        broken = len(value) != len(args) or any(map(broken_rule, value, args))
        texts = ", ".join(str(mark) for mark in get_args(args[0])[1:])
        return f"{len(args)} numbers, each {texts}" if broken else None
    if origin in (Union, UnionType):
        return (
            None
            if value is None
            else next(filter(None, (broken_rule(value, k) for k in args)), None)
        )
    if origin is Literal:
        return None if value in args else f"one of {', '.join(map(str, args))}"
    return None
