"""Reads the current and the peak memory of this process, to check predictions."""

import resource


def resident_bytes() -> int:
    """Return the current resident size; on systems without /proc, the peak so far."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak() -> None:
    """Reset the peak to the current size, if the system supports it."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return


def peak_bytes() -> int:
    """Return the peak resident size since ``reset_peak``, or of the whole process if it cannot be
    reset.
    """
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            peaks = [line.split()[1] for line in file if line.startswith("VmHWM:")]
        return int(peaks[0]) * 1024
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
