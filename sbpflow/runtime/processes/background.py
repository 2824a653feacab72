"""Runs work in a daemon thread and returns its result or error."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def in_background(work: Callable[[], Result], name: str) -> Future[Result]:
    """Start ``work`` in a daemon thread; return a future for its result or error.

    An executor is unsuitable: the interpreter waits for executor threads at exit, so a rank could
    not exit early.
    """
    ended: Future[Result] = Future()

    def run() -> None:
        try:
            ended.set_result(work())
        except BaseException as error:  # noqa: BLE001  (raised again by ``ended.result``)
            ended.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return ended
