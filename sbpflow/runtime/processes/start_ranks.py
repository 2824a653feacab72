"""Starts the ranks of a command on this machine with torch's launcher."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from uuid import uuid4

from sbpflow.errors import ConfigError
from sbpflow.runtime.processes.launch import EXIT_INTERRUPT, EXIT_LOST_PEER

_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher")
_NEVER_S = 365 * 24 * 3600  # longer than any run lasts


def start_ranks(
    words: Sequence[str],
    ranks: int,
    option: str,
    *,
    module: str = "sbpflow",
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run ``python -m MODULE WORDS`` on each rank; return 0, a failed rank's exit code, or 130
    after a stop signal.

    The ranks print their own errors, so the launcher's report is disabled. ``environment`` contains
    additional environment variables. Raises ConfigError, naming ``option``, if ``ranks`` is not
    positive or this process is itself a rank.
    """
    if ranks < 1:
        raise ConfigError(f"{option} must be 1 or more, got {ranks}; for example, {option} 2")
    if "RANK" in os.environ:
        raise ConfigError(
            f"{option} is {ranks}, but this process is already rank {os.environ['RANK']} of "
            f"another launcher; omit {option}, or start the command without that launcher"
        )
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    try:
        # By default, torch would leave a folder in TMPDIR.
        with TemporaryDirectory(prefix="sbpflow-") as logs, _launcher_settings():
            os.environ.update(environment or {})
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=ranks,
                run_id=uuid4().hex,
                rdzv_backend="c10d",
                rdzv_endpoint="127.0.0.1:0",
                local_addr="127.0.0.1",  # the name of this machine may not resolve
                # Heartbeats are only for other nodes. After a signal, torch leaves their thread
                # running, and a heartbeat during the exit of this process would abort it.
                rdzv_configs={"keep_alive_interval": _NEVER_S},
                max_restarts=0,
                monitor_interval=0.1,
                signals_to_handle=",".join(_handled_signals()),
                logs_specs=DefaultLogsSpecs(logs),
            )
            elastic_launch(config, sys.executable)("-m", module, *words)
    except ChildFailedError as error:
        return _exit_code({rank: failure.exitcode for rank, failure in error.failures.items()})
    except (SignalException, KeyboardInterrupt):
        return EXIT_INTERRUPT
    return 0


def _handled_signals() -> list[str]:
    """Return the names of the signals that torch's launcher passes on to the ranks: by default, it
    would also end the ranks at a SIGHUP that this process ignores (nohup).
    """
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    return [number.name for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


def _exit_code(codes: Mapping[int, int]) -> int:
    """Return one exit code for all failed ranks. A rank killed by signal n has code -n. The code of
    a rank that exited by itself takes precedence.
    """
    killed = [code for code in codes.values() if code < 0]
    exited = [code for code in codes.values() if code > 0]
    if not exited:
        return 128 - killed[0]
    if killed:  # the launcher stopped the others with SIGTERM, unless they failed before
        exited = [code for code in exited if code != EXIT_INTERRUPT] or [EXIT_LOST_PEER]
    return exited[0]


@contextmanager
def _launcher_settings() -> Generator[None]:
    """Within the context, set the environment and log levels that the ranks inherit, and leave
    signals to torch's launcher, which passes them on and waits until the ranks have saved.

    The thread of ``run_main`` that watches for signals must not see these signals: it would end
    this process after two seconds, and with it the store that the ranks need. At the end, the
    signal handlers are restored, because those of torch's launcher would raise SignalException at
    every later Ctrl-C, for example in a notebook.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    watched = signal.set_wakeup_fd(-1) if in_main_thread else -1
    environment = dict(os.environ)
    # Some loggers of the launcher set their own levels.
    names = (*_LOGGERS, *(n for n in logging.root.manager.loggerDict if n.startswith(_LOGGERS)))
    loggers = {logging.getLogger(name): logging.getLogger(name).level for name in names}
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    # one thread each, because ranks already run in parallel
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        for logger, level in loggers.items():
            logger.setLevel(level)
        if in_main_thread:
            for number, handler in handlers.items():
                if signal.getsignal(number) is not handler:
                    signal.signal(number, handler)
            signal.set_wakeup_fd(watched, warn_on_full_buffer=False)
