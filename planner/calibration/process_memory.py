"""The memory that this process holds, and held at most: what predictions are checked with."""

import resource


def resident_bytes() -> int:
    """Of this process now; on systems without /proc, its highest so far."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak() -> None:
    """Let the highest resident size start from now, where the system can."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return


def peak_bytes() -> int:
    """Highest resident size since ``reset_peak``, or of the process where it cannot be reset."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            found = [line.split()[1] for line in file if line.startswith("VmHWM:")]
        return int(found[0]) * 1024
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
