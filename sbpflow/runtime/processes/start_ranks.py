"""Start the ranks of one command on this machine, through torch's launcher."""

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from uuid import uuid4

from sbpflow.errors import ConfigError

_EXIT_INTERRUPT = 130


def start_ranks(words: Sequence[str], ranks: int, option: str) -> int:
    """Run ``sbpflow WORDS`` once per rank; returns 0, or the exit code of a rank that failed.

    The ranks print for themselves why they end, so the launcher's own report is left out.
    ConfigError, for ``option``, where ``ranks`` is not positive or this process is a rank itself.
    """
    if ranks < 1:
        raise ConfigError(f"{option}: {ranks} ranks; use 1 or more, for example {option} 2")
    if "RANK" in os.environ:
        raise ConfigError(
            f"{option}: {ranks}, but this process is rank {os.environ['RANK']} of a launcher that "
            f"has started the ranks; leave {option} out, or start the command without that launcher"
        )
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks are the parallelism
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
    """One code for those of the ranks that failed; a rank ended by signal n has code -n.

    A rank that says why it ends goes before one that was ended.
    """
    said = [code for code in codes.values() if code > 0]
    return said[0] if said else 128 - next(iter(codes.values()))
