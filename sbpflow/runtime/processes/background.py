"""Work in a thread that does not keep the process alive, and how it ended."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def in_background(work: Callable[[], Result], name: str) -> Future[Result]:
    """Start ``work`` in a daemon thread of this ``name``; the future has its result or its error.

    An executor's threads are waited for when the interpreter ends: a rank that leaves early could
    not.
    """
    ended: Future[Result] = Future()

    def run() -> None:
        try:
            ended.set_result(work())
        except BaseException as error:  # noqa: BLE001  (raised again by who asks for the result)
            ended.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return ended
