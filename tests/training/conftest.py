"""A small generated set, made once per session."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def synth_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6,000 generated rows, small vocabularies, the default crosses."""
    folder = tmp_path_factory.mktemp("synth") / "set"
    command = [sys.executable, "-m", "data", "synth", "--rows", "6000", "--vocab-scale", "0.0005"]
    subprocess.run([*command, "--output", str(folder)], check=True, cwd=ROOT, capture_output=True)
    return folder


@pytest.fixture
def free_port() -> int:
    """A port that nothing listens on just now."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]
