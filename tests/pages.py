"""Extracts a page's instructions: files to save, commands to run, and their output.

A code block that is a file begins with the line ``# NAME``. A block without a language contains
commands. A ``text`` block contains the end of the previous command's output.
"""

import os
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

from tests.deadlines import run

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = {"sbpflow": [sys.executable, "-m", "sbpflow"], "python": [sys.executable]}


class Step(NamedTuple):
    """A command and the output that the page shows for this command, or ""."""

    command: str
    shown: str


class Page:
    """A page's ``files`` by name, and its ``steps`` in page order."""

    def __init__(self, path: str) -> None:
        text = (ROOT / path).read_text()
        self.files: dict[str, str] = {}
        self.steps: list[Step] = []
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            if language == "text":
                self.steps[-1] = self.steps[-1]._replace(shown=block)
            elif language and (name := re.match(r"# ([\w.]+)\n", block)):
                self.files[name[1]] = block
            elif not language:
                lines = block.replace("\\\n", " ").splitlines()
                self.steps += [Step(line.partition(" #")[0].strip(), "") for line in lines]

    def save_files(self, folder: Path) -> None:
        """Save the files that the page asks the reader to save."""
        for name, text in self.files.items():
            (folder / name).write_text(text)


def follow(command: str, folder: Path, limit_s: float = 180) -> str:
    """Run the command in ``folder`` and return its output; fail unless it succeeds."""
    program, *words = shlex.split(command)
    done = run(
        [*PROGRAMS[program], *words],
        limit_s,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def missing_lines(printed: str, shown: str) -> list[str]:
    """Return lines that a page shows but a command did not print, ignoring numbers and digests."""
    found = _words(printed)
    return [
        line
        for line in shown.splitlines()
        if (words := _words(line))
        and not any(found[at : at + len(words)] == words for at in range(len(found)))
    ]


def _words(text: str) -> list[str]:
    """Return the text without numbers, digests, and column layout, which vary."""
    return re.sub(r"\b[\da-f]{16}\b|[\d.,:%|_+-]+", " ", text).split()
