"""Chooses which cases of a parametrized test `make test` runs; `make test-slow` runs the others."""

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def quick(cases: Iterable[Any], keep: Callable[[int], bool]) -> list[Any]:
    """Return the cases, with case number n marked slow unless ``keep(n)`` is true."""
    return [_param(case, slow=not keep(number)) for number, case in enumerate(cases)]


def diagonal(*columns: Sequence[Any]) -> list[Any]:
    """Return all combinations of values; those that are not slow contain every value at least
    once.
    """
    kept = {
        tuple(number % len(column) for column in columns)
        for number in range(max(map(len, columns)))
    }
    places = product(*(range(len(column)) for column in columns))
    return [
        _param(values, slow=place not in kept)
        for place, values in zip(places, product(*columns), strict=True)
    ]


def _param(case: Any, *, slow: bool) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=[pytest.mark.slow] * slow)
