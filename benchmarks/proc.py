"""Reads the memory and the CPU time of processes from /proc."""

import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def status_bytes(name: str, process: int | str = "self") -> int:
    """Return a size in /proc/PROCESS/status, or 0 if the process has ended: for example, VmRSS (the
    resident memory), VmHWM (its peak), or RssAnon (the memory that is not backed by files).
    """
    try:
        status = Path(f"/proc/{process}/status").read_text(errors="replace")
    except OSError:
        return 0
    lines = (line.split() for line in status.splitlines() if line.startswith(f"{name}:"))
    return sum(int(words[1]) * 1024 for words in lines)


def reset_peak() -> None:
    """Set the peak of this process's resident memory to its present size, if this is Linux."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def cpu_s(process: int) -> float:
    """Return the CPU time in seconds of a process and its threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
