"""Closes the process groups with a time limit, because a dead peer can block closing forever.

This module imports torch only if torch is loaded already, because ``launch`` must not need torch.
"""

import sys
from collections.abc import Sequence
from concurrent.futures import wait
from typing import Any

from sbpflow.runtime.processes.background import in_background

_CLOSE_S = 10.0


def close_process_groups(groups: Sequence[Any] | None = None) -> None:
    """Destroy ``groups``, or else all process groups, if any; raise RuntimeError if they do not
    close in 10 s.

    Without this, gloo aborts about every second process at exit.
    """
    if "torch" not in sys.modules:
        return
    from torch import distributed

    if not distributed.is_initialized():
        return

    def close() -> None:
        for group in [None] if groups is None else groups:
            distributed.destroy_process_group(group)

    closing = in_background(close, "close process groups")
    wait([closing], _CLOSE_S)
    if not closing.done():
        raise RuntimeError(f"the process groups did not close in {_CLOSE_S:g} s")
    closing.result()
