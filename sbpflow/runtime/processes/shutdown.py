"""Close the process groups within a time limit, because a dead peer can block it forever.

Imports torch only if it was imported before, because ``launch`` must not depend on it.
"""

import sys
from concurrent.futures import wait

from sbpflow.runtime.processes.background import in_background

_CLOSE_S = 10.0


def close_process_groups() -> None:
    """Destroy all process groups, if any; RuntimeError if they do not close in 10 s.

    If they stay open, gloo aborts about every second exit.
    """
    if "torch" not in sys.modules:
        return
    from torch import distributed

    if not distributed.is_initialized():
        return
    closing = in_background(distributed.destroy_process_group, "close process groups")
    wait([closing], _CLOSE_S)
    if not closing.done():
        raise RuntimeError(f"the process groups did not close in {_CLOSE_S:g} s")
    closing.result()
