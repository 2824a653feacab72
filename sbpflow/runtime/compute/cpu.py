"""Identifies the CPU."""

import os
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path


@cache
def cpu_facts() -> Mapping[str, str]:
    """Return what /proc/cpuinfo says about the first CPU; empty without this file."""
    try:
        first, *_ = Path("/proc/cpuinfo").read_text("utf-8", "replace").split("\n\n")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def cpu_name() -> str:
    """Return the CPU model with the numbers of its family and model (x86) or its part (ARM).

    The numbers are needed because virtual machines give the same name to CPUs of different
    generations. Without a name, use the processor or machine name from Python.
    """
    facts = cpu_facts()
    name = facts.get("model name") or platform.processor() or platform.machine()
    numbers = {"family": "cpu family", "model": "model", "part": "CPU part"}
    return ", ".join([name, *(f"{k} {facts[v]}" for k, v in numbers.items() if v in facts)])


def machine_key() -> str:
    """Return a name for this kind of machine, for file names; machines may share a home folder."""
    words = f"{cpu_name()} {os.cpu_count()}".split()
    return "-".join("".join(c for c in word if c.isalnum()) for word in words).lower()
