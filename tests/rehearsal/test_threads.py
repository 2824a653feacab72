"""Tests that threads can use the rehearsed device concurrently, with delays at the worst places."""

import threading

import pytest
import torch

from tests.rehearsal.memory import Pinned
from tests.rehearsal.streams import Clock, host_waits


class Other:
    """When called, runs ``action`` in another thread; the wait times out if a lock blocks that
    thread.
    """

    def __init__(self, action):
        self._thread = threading.Thread(target=action)
        self._started = False

    def __call__(self):
        if not self._started:
            self._started = True
            self._thread.start()
            self._thread.join(0.2)

    def finish(self):
        self._thread.join()


class InterruptedCounts(dict):
    """A counter that pauses after each read."""

    pause = staticmethod(lambda: None)

    def __getitem__(self, key):
        value = super().__getitem__(key)
        self.pause()
        return value

    def get(self, key, default=None):
        value = super().get(key, default)
        self.pause()
        return value


class InterruptedList(list):
    """A list that pauses after each iteration."""

    pause = staticmethod(lambda: None)

    def __iter__(self):
        yield from super().__iter__()
        self.pause()


def test_a_copy_that_starts_while_another_thread_waits_arrives():
    pinned, target = Pinned(), torch.zeros(3, dtype=torch.int64)
    other = Other(lambda: pinned.copy_later(target, torch.tensor([1, 2, 3]), stream=7, count=4))
    pinned._coming = coming = InterruptedList()
    coming.pause = other
    pinned.arrive({8: 1})
    other.finish()
    assert target[0] == torch.iinfo(torch.int64).max - 1
    pinned.arrive({7: 4})
    assert target.tolist() == [1, 2, 3]


@pytest.mark.parametrize("call", [Clock.tick, lambda clock: clock.join({clock.number: 1})])
def test_the_work_count_of_a_stream_never_decreases(call):
    clock = Clock("stream")
    other = Other(lambda: [clock.tick() for _ in range(3)])
    clock.sees = counts = InterruptedCounts(clock.sees)
    counts.pause = other
    call(clock)
    other.finish()
    assert clock.now == 4


def test_work_of_one_thread_is_ordered_after_its_own_waits():
    side, *others = (Clock("stream") for _ in range(3))
    for clock in others:
        thread = threading.Thread(target=lambda c=clock: (host_waits({c.number: 1}), side.tick()))
        thread.start()
        thread.join()
    assert {clock.number for clock in others} <= side.sees.keys()
