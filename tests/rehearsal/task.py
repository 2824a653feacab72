"""Runs one rank of a rehearsed test."""

from collections.abc import Callable
from typing import Any


def perform(world: Any, fn: Callable[..., Any], *args: Any) -> Any:
    """Run ``fn(world, *args)``. Raise AssertionError if a transfer was not waited for."""
    from tests.rehearsal.install import check_end, forget

    assert world.device.type == "cuda"
    try:
        value = fn(world, *args)
    except BaseException:
        forget()
        raise
    check_end()
    return value
