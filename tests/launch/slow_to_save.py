"""Defines ranks that take longer to save after a signal than ``run_main`` waits for its thread."""

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType


def main() -> None:
    """Write ``ready<rank>`` to the folder in the first argument, and ``saved<rank>`` four seconds
    after a signal.
    """
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]

    def save(number: int, frame: FrameType | None) -> None:
        del number, frame
        time.sleep(4)
        (folder / f"saved{rank}").touch()
        sys.exit(0)

    signal.signal(signal.SIGTERM, save)
    signal.signal(signal.SIGINT, save)
    (folder / f"ready{rank}").touch()
    time.sleep(60)


if __name__ == "__main__":
    main()
