"""Starts the ranks of one command on this machine, through torch's launcher."""

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from uuid import uuid4

from sbpflow.errors import ConfigError

_EXIT_INTERRUPT = 130


def start_ranks(words: Sequence[str], ranks: int, option: str) -> int:
    """Run ``sbpflow WORDS`` on each rank; return 0, or the exit code of a rank that failed.

    The ranks print their own errors, so the launcher's report is disabled. Raises ConfigError,
    naming ``option``, if ``ranks`` is not positive or this process is itself a rank.
    """
    if ranks < 1:
        raise ConfigError(f"{option}: {ranks} ranks; use 1 or more (for example, {option} 2)")
    if "RANK" in os.environ:
        raise ConfigError(
            f"{option}: {ranks}, but this process is already rank {os.environ['RANK']} of another "
            f"launcher; leave {option} out, or start the command without that launcher"
        )
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks already run in parallel
    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "sbpflow", *words)
    except ChildFailedError as error:
        return _exit_code({rank: failure.exitcode for rank, failure in error.failures.items()})
    except (SignalException, KeyboardInterrupt):
        return _EXIT_INTERRUPT
    return 0


def _exit_code(codes: Mapping[int, int]) -> int:
    """Return one exit code for the failed ranks; a rank killed by signal n has code -n.

    Ranks that exited by themselves take precedence over ranks that were killed.
    """
    exited = [code for code in codes.values() if code > 0]
    return exited[0] if exited else 128 - next(iter(codes.values()))
