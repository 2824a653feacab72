"""Postpones Python's garbage collection until a command has started."""

import gc
from collections.abc import Callable, Generator
from contextlib import contextmanager


@contextmanager
def collecting_later() -> Generator[Callable[[], None]]:
    """Disable garbage collection until the end of the context, or until the yielded function is
    called: during startup, each collection would scan all imported objects. Collections after the
    call do not scan the objects that exist at the call.
    """
    gc.disable()

    def begin() -> None:
        gc.freeze()
        gc.enable()

    try:
        yield begin
    finally:
        gc.unfreeze()
        gc.enable()
