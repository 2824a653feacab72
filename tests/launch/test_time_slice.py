"""Tests that threads request shorter time slices."""

import os
import threading

import pytest

from sbpflow.runtime.processes import time_slice
from sbpflow.runtime.processes.time_slice import shorten_time_slice
from tests.launch.time_slices import LINUX_SINCE_6_12, time_slice_ns


@LINUX_SINCE_6_12
def test_the_calling_thread_and_its_threads_get_a_shorter_slice():
    found = {}

    def inner():
        found["inner"] = time_slice_ns(threading.get_native_id())

    def outer():
        found["before"] = time_slice_ns(threading.get_native_id())
        assert shorten_time_slice(0.0005)
        found["outer"] = time_slice_ns(threading.get_native_id())
        thread = threading.Thread(target=inner)
        thread.start()
        thread.join()

    thread = threading.Thread(target=outer)
    thread.start()
    thread.join()
    assert found["outer"] == found["inner"] == 500_000 < found["before"]
    assert time_slice_ns(os.getpid()) == found["before"], "the other threads keep their slices"


@LINUX_SINCE_6_12
def test_the_niceness_stays():
    found = []

    def lower():
        tid = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, tid, 7)
        found.extend([shorten_time_slice(0.0001), os.getpriority(os.PRIO_PROCESS, tid)])

    thread = threading.Thread(target=lower)
    thread.start()
    thread.join()
    assert found == [True, 7]


@pytest.mark.parametrize(("name", "value"), [("machine", "riscv64"), ("platform", "darwin")])
def test_other_systems_keep_the_slice(monkeypatch, name, value):
    if name == "machine":
        monkeypatch.setattr(time_slice.platform, "machine", lambda: value)
    else:
        monkeypatch.setattr(time_slice.sys, "platform", value)
    assert not shorten_time_slice(0.0001)
