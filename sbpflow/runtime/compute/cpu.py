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
    """Return the CPU model, with its family and model number, because virtual machines give the
    same name to CPUs of different generations. Without /proc/cpuinfo, return the processor name
    from Python.
    """
    facts = cpu_facts()
    if "model name" not in facts:
        return platform.processor()
    numbers = [f"{key} {facts[key]}" for key in ("cpu family", "model") if key in facts]
    return ", ".join([facts["model name"], *numbers]).replace("cpu family", "family")


def machine_key() -> str:
    """Return a name for this kind of machine, for file names; machines may share a home folder."""
    words = f"{cpu_name()} {os.cpu_count()}".split()
    return "-".join("".join(c for c in word if c.isalnum()) for word in words).lower()
