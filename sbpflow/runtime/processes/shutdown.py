"""Closes the process groups with a time limit, because a dead peer can block closing forever. This
module uses torch only if it is already loaded, because ``launch`` must not depend on torch.
"""

import sys
from concurrent.futures import wait
from typing import Any

from sbpflow.runtime.processes.background import in_background

_CLOSE_S = 10.0


def close_process_groups(groups: list[Any] | None = None) -> None:
    """Destroy ``groups`` or, by default, all process groups. Raises RuntimeError if they do not
    close within 10 s. Without this call, gloo aborts about every second process at exit.
    """
    if "torch" not in sys.modules:
        return
    from torch import distributed

    if not distributed.is_initialized():
        return

    def close() -> None:
        if groups is None:
            distributed.destroy_process_group()
        # This thread must not keep the last reference to a group, because destroying the group's
        # threads during the interpreter's exit would abort the process.
        while groups:
            distributed.destroy_process_group(groups.pop())

    closing = in_background(close, "close process groups")
    wait([closing], _CLOSE_S)
    if not closing.done():
        raise RuntimeError(f"the process groups did not close in {_CLOSE_S:g} s")
    closing.result()
