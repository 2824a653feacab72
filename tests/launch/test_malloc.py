"""Tests that the process keeps freed memory."""

import subprocess
import sys

import pytest

from sbpflow.__main__ import COMMANDS
from sbpflow.errors import ConfigError

FAULTS = """
import resource
import numpy as np
from sbpflow.runtime.compute.malloc import keep_freed_memory
if {keep}:
    keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    np.ones(48 << 17)
before = faults()
for _ in range(20):
    np.ones(48 << 17)
print(faults() - before)
"""


def page_faults(*, keep: bool) -> int:
    """Allocate 20 arrays of 48 MB one after another, after three warm-up arrays; return the number
    of page faults.
    """
    words = [sys.executable, "-c", FAULTS.format(keep=keep)]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="of the GNU C library")
def test_freed_memory_is_reused():
    assert 5 * page_faults(keep=True) < page_faults(keep=False)


@pytest.mark.parametrize(
    "words",
    [
        "train --config configs/scheme1.yaml data.path=nowhere",
        "prepare --input nowhere.tsv --output set",
        "encode --like nowhere --input nowhere.tsv --output set",
    ],
)
def test_commands_that_allocate_much_keep_freed_memory(words, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "sbpflow.runtime.compute.malloc.keep_freed_memory", lambda: asked.append(words)
    )
    command, *others = words.split()
    try:
        assert COMMANDS[command](others) == 2
    except ConfigError:
        assert command == "train"
    assert asked == [words]
