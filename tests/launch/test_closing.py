"""Tests that an error is raised if process groups do not close in time."""

import threading

import pytest
import torch
import torch.distributed as dist

from sbpflow.runtime.processes import shutdown as closing
from sbpflow.runtime.ranks.world import World


@pytest.fixture
def stuck(monkeypatch):
    """Simulate open groups whose destruction takes 3 s, with a limit of 0.2 s."""
    ended = threading.Event()
    monkeypatch.setattr(closing, "_CLOSE_S", 0.2)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ended.wait(3))
    yield
    ended.set()


def make_world(*, owns: bool = True) -> World:
    return World(0, 2, torch.device("cpu"), owns_default_group=owns)


def test_a_world_that_does_not_close_raises(stuck):
    with pytest.raises(RuntimeError, match=r"the process groups did not close in 0\.2 s"):
        make_world().close()
    make_world(owns=False).close()


def test_an_error_inside_the_context_is_preserved(stuck):
    with pytest.raises(ZeroDivisionError) as caught, make_world():
        raise ZeroDivisionError("why the block ended")
    assert caught.value.__notes__ == ["then the process groups did not close in 0.2 s"]
    with pytest.raises(RuntimeError, match="did not close"), make_world():
        pass


def test_an_error_of_destroying_the_groups_reaches_the_caller(monkeypatch):
    def fail() -> None:
        raise ValueError("no such group")

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", fail)
    with pytest.raises(ValueError, match="no such group"):
        make_world().close()


def test_a_world_closes_at_the_end_of_its_context():
    with World.start("cpu") as world:
        assert dist.is_initialized()
        world.barrier()
    assert not dist.is_initialized()
    world.close()  # a second call has no effect
