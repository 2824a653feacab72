"""Tests that after a signal on one rank, all ranks stop after the same step and name that rank's
machine.
"""

import time
from types import SimpleNamespace
from unittest import mock

import pytest

from sbpflow.errors import PeerStoppedError
from sbpflow.run.saved import coordinated_stop
from sbpflow.run.saved.coordinated_stop import CoordinatedStop
from sbpflow.runtime.processes.exit_messages import Reason, compose
from sbpflow.runtime.processes.launch import EXIT_INTERRUPT, EXIT_LOST_PEER, classify
from sbpflow.runtime.processes.store import TimedStore

SIGNAL_STEP = 5


def _train(world, who):
    """Run steps that need all ranks, until they stop; return the last step and the exit code."""
    coordinated_stop._LOOK_S = 0.0
    signals = SimpleNamespace(signum=0, leave=lambda saved: None)
    stop = CoordinatedStop(signals, world, timeout_s=20.0)
    for step in range(1, 100):
        world.barrier()
        if step == SIGNAL_STEP and world.rank == who:
            signals.signum = 15
        if stop.after(step):
            try:
                stop.leave("step 6 is saved")
            except PeerStoppedError as error:
                return step, classify(error)[1]
            # The real ``signals.leave`` would raise the signal again.
            return step, EXIT_INTERRUPT
    raise AssertionError("it did not stop")


@pytest.mark.parametrize("who", [0, 2])
def test_a_signal_on_one_rank_stops_all_after_the_same_step(ranks, who):
    ends = ranks(3, _train, who)
    steps = {step for step, _ in ends}
    assert len(steps) == 1
    assert SIGNAL_STEP < steps.pop() < 20
    codes = [code for _, code in ends]
    assert codes.pop(who) == EXIT_INTERRUPT
    assert codes == [EXIT_LOST_PEER, EXIT_LOST_PEER]


class _Lagging(TimedStore):
    """Stands in for a store on another machine: a write is not acknowledged, and takes effect only
    shortly before the answer to this client's next read.
    """

    def set(self, key, value):
        self.late = (key, value)

    def check(self, keys):
        if late := self.__dict__.pop("late", None):
            time.sleep(0.2)
            super().set(*late)
        return super().check(keys)


def _train_with_lag(world):
    store_of = CoordinatedStop._store_of_votes

    def lagging(stop):
        store = store_of(stop)
        if world.rank == 0:
            store.__class__ = _Lagging
        return store

    with mock.patch.object(CoordinatedStop, "_store_of_votes", lagging):
        return _train(world, 1)


def test_all_ranks_learn_the_last_step_before_it_ends(ranks):
    """Otherwise, a rank would start another step, and the others would wait for it in the save."""
    steps = [step for step, _ in ranks(2, _train_with_lag)]
    assert steps[0] == steps[1]


def test_the_signaled_machine_is_named_whichever_rank_left_first():
    signaled, stopped = Reason("terminated", order=2), Reason("peer_stopped", order=1)
    posts = {0: stopped, 1: signaled}
    for machines in ({0: "a", 1: "b"}, {0: "a", 1: "a"}):
        assert compose(posts, 2, machines).startswith("stopped by SIGTERM")
    assert compose(posts, 2, {0: "a", 1: "b"}).endswith("sent to rank 1 on b")
