"""Defines a fixture for tests of servers and machines: a free port."""

import socket

import pytest


@pytest.fixture
def free_port() -> int:
    """Return a free port."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]
