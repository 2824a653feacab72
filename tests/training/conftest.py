"""Makes a small generated data set, once per session."""

import socket
from pathlib import Path

import pytest

from sbpflow.data.__main__ import main


@pytest.fixture(scope="session")
def synth_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return 6,000 generated rows with small vocabularies and the default crosses."""
    folder = tmp_path_factory.mktemp("synth") / "set"
    words = ["synth", "--rows", "6000", "--vocab-scale", "0.0005", "--output", str(folder)]
    assert main(words) == 0
    return folder


@pytest.fixture
def free_port() -> int:
    """Return a free port."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]
