"""Defines tasks for workers, in a separate module that a worker process imports quickly."""

import os
import signal
import threading
import time
from multiprocessing import connection

from sbpflow.errors import DataError


def surroundings(item):
    names = ("POLARS_MAX_THREADS", "MALLOC_TRIM_THRESHOLD_")
    return *(os.environ.get(name) for name in names), os.nice(0)


def fails(item):
    raise DataError(f"item {item}", "second line")


def sleeps(item):
    time.sleep(600)


def process_of(item):
    return os.getpid()


def dies_in_the_middle_of_its_result(item, dead):
    if item == 1 and not dead.exists():
        dead.touch()
        send = connection.Connection._send

        def send_half(self, buf):
            send(self, buf[: len(buf) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        connection.Connection._send = send_half
    return bytes([item]) * (1 << 20)


def returns_a_lock(item):
    return threading.Lock()


def fails_unexpectedly(item):
    raise ValueError(item)
