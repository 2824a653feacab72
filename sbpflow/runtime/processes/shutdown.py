"""The end of the process groups, with a limit: a peer that has just died can make it wait for ever.

Imports torch only where it was imported before, for ``launch`` must stay light.
"""

import sys
import threading

_CLOSE_S = 10.0


def close_process_groups() -> None:
    """Destroy all process groups, if there are any; RuntimeError if they do not close in 10 s.

    Left open, gloo aborts about every second exit.
    """
    if "torch" not in sys.modules:
        return
    from torch import distributed

    if not distributed.is_initialized():
        return
    failed: list[Exception] = []

    def destroy() -> None:
        try:
            distributed.destroy_process_group()
        except (RuntimeError, ValueError) as error:  # what c10d raises; told in the caller's thread
            failed.append(error)

    thread = threading.Thread(target=destroy, daemon=True)
    thread.start()
    thread.join(_CLOSE_S)
    if thread.is_alive():
        raise RuntimeError(f"the process groups did not close in {_CLOSE_S:g} s")
    if failed:
        raise failed[0]
