"""Tests that after a signal on one rank, all ranks stop after the same step and name that rank's
machine.
"""

from types import SimpleNamespace

import pytest

from sbpflow.errors import PeerStoppedError
from sbpflow.run.saved import coordinated_stop
from sbpflow.run.saved.coordinated_stop import CoordinatedStop
from sbpflow.runtime.processes.exit_messages import Reason, compose
from sbpflow.runtime.processes.launch import EXIT_INTERRUPT, EXIT_LOST_PEER, classify

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


def test_the_signaled_machine_is_named_whichever_rank_left_first():
    signaled, stopped = Reason("terminated", order=2), Reason("peer_stopped", order=1)
    posts = {0: stopped, 1: signaled}
    for machines in ({0: "a", 1: "b"}, {0: "a", 1: "a"}):
        assert compose(posts, 2, machines).startswith("stopped by SIGTERM")
    assert compose(posts, 2, {0: "a", 1: "b"}).endswith("sent to rank 1 on b")
