"""Times work on a CUDA device with CUDA events: medians over repeats after a warm-up."""

from collections.abc import Callable

import torch


def timed_ms(work: Callable[[], object], *, steps: int, repeats: int = 5) -> dict[str, float]:
    """Return the median, minimum, and maximum ms per call to ``work``, over ``repeats`` repeats of
    ``steps`` calls.
    """
    work()
    times: list[float] = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(steps):
            work()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / steps)
    times.sort()
    return {"ms": times[repeats // 2], "min_ms": times[0], "max_ms": times[-1]}
