"""Runs the server: loads the models once and forks workers, which answer requests. A worker has an
event loop, which parses, encodes, and scores rows, and a thread that watches the models' folders.
"""

import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httptools
import numpy as np
import torch
import uvicorn

from sbpflow.errors import ConfigError, DataError
from sbpflow.runtime.processes.time_slice import shorten_time_slice
from sbpflow.serving.app import App, Limits, Served
from sbpflow.serving.bodies import TEXT, format_of
from sbpflow.serving.follower import Follower
from sbpflow.serving.metrics import Metrics
from sbpflow.serving.scorer import BundleError, Model, load
from sbpflow.serving.supervisor import Supervisor

logger = logging.getLogger(__name__)

# Lowest priority and short time slices, so that requests take precedence over the delta thread.
_NICENESS = 19
_SLICE_S = 0.0001
_SWITCH_S = 0.0005  # How long requests may wait for the delta thread; Python's default is 5 ms.
_MAX_CONNECTIONS = 1024
_KEEP_ALIVE_S = 75  # Longer than proxies keep idle connections, so that a proxy closes first.
_MAX_WAITING = 2048  # Maximum number of connections that are not yet accepted.


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Options of the server."""

    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    shadow: str | None = None
    compiled: bool = False
    limits: Limits = field(default_factory=Limits)
    poll_s: float = 1.0
    grace_s: int = 10


def run_server(folders: Mapping[str, Path], settings: Settings) -> int:
    """Serve the models in ``folders``, given by name, until SIGTERM; return the exit code. Raises
    DataError for a bundle that is damaged or does not reproduce its sample scores.
    """
    torch.set_num_threads(1)  # workers use one core each, and threads do not survive a fork
    followers, metrics = _load(folders, settings, settings.workers)
    with _listen(settings.host, settings.port) as listener:
        host, port = listener.getsockname()[:2]
        for name, follower in followers.items():
            sys.stdout.write(f"{name}: version {follower.version.text}\n")
        shown = f"[{host}]" if ":" in host else host
        sys.stdout.write(f"serving on http://{shown}:{port}, workers: {settings.workers}\n")
        sys.stdout.flush()
        gc.collect()
        # Without freeze, garbage collection in a worker would copy the pages of all these objects.
        gc.freeze()

        def work(number: int) -> None:
            _run_worker(_make_app(number, followers, settings, metrics), listener, settings)

        def before_replacing() -> None:
            metrics.restarted()
            for name, follower in followers.items():
                _try(name, partial(_catch_up, follower))

        def follow_bundles() -> None:
            # The supervisor must not keep an old bundle, whose files may already be deleted.
            for name, follower in followers.items():
                _try(name, follower.poll_for_bundle)

        between_s = max(settings.poll_s, 1.0)
        supervisor = Supervisor(
            work, listener, settings.workers, before_replacing, follow_bundles, between_s
        )
        return supervisor.run(settings.grace_s + 2)


def asgi_app(folders: Mapping[str, Path], settings: Settings | None = None) -> App:
    """Return an application for another ASGI server. It watches the folders of its models."""
    settings = settings or Settings()
    followers, metrics = _load(folders, settings, 1)
    return _make_app(0, followers, settings, metrics)


def _load(
    folders: Mapping[str, Path], settings: Settings, num_workers: int
) -> tuple[dict[str, Follower], Metrics]:
    try:
        load_bundle = partial(load, check=True, compiled=settings.compiled)
        followers = {name: Follower(folder, load_bundle) for name, folder in folders.items()}
        columns = {
            name: follower.version.model.encode([]).names for name, follower in followers.items()
        }
    except BundleError as error:
        raise DataError(str(error)) from error
    for follower in followers.values():
        _compile(follower.version.model)
    return followers, Metrics(columns, num_workers)


def _compile(model: Model) -> None:
    """Encode a row of missing values as text and as JSON, and write and count a score, so that
    requests do not wait for compilation.
    """
    content, names = model.content["input"], [column.name for column in model.columns]
    model.encode_json(json.dumps([dict.fromkeys(names)]).encode())
    separator, quote = content["separator"], content["quote"]
    lines = [[_quoted(name, separator, quote) for name in names]] * content["header"]
    lines.append([""] * len(names))
    if len(names) > 1:  # a blank line is not a row
        model.score("\n".join(map(separator.join, lines)))
    score = np.array([0.5], dtype=np.float32)
    format_of(TEXT).write(score, "", "")
    Metrics({"": ()}, 1).worker(0)[""].observe("score", score)


def _quoted(cell: str, separator: str, quote: str | None) -> str:
    """Return a cell as it is written in a text line."""
    if quote is None or not any(mark in cell for mark in (separator, quote, "\n", "\r")):
        return cell
    return quote + cell.replace(quote, quote + quote) + quote


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_MAX_WAITING)
        # Connections inherit TCP_NODELAY. Without this option, the response body would wait about
        # 40 ms until the client acknowledges the headers.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port}: {error.strerror or error}; use an address of this "
            "machine, and a free port (0 chooses one)"
        ) from error


def _make_app(
    number: int, followers: Mapping[str, Follower], settings: Settings, metrics: Metrics
) -> App:
    """Return the application of worker ``number``, and start the thread that watches the models'
    folders.
    """
    counts = metrics.worker(number)
    models: list[Served] = []
    for name, follower in followers.items():
        follower.count = counts[name].count
        models.append(Served(name, follower.version, counts[name]))
    pairs = list(zip(models, followers.values(), strict=True))
    threading.Thread(target=_follow, args=(pairs, settings.poll_s), daemon=True).start()
    return App(models, settings.shadow, settings.limits, metrics, counts[""])


def _run_worker(app: App, listener: socket.socket, settings: Settings) -> None:
    """Answer requests until SIGTERM, and then finish the requests in flight."""
    supervisor = os.getppid()
    sys.setswitchinterval(_SWITCH_S)
    shorten_time_slice(_SLICE_S)  # not for the delta thread, which is already running

    async def check_supervisor() -> None:
        if os.getppid() != supervisor:  # the supervisor has died, so this worker must stop
            signal.raise_signal(signal.SIGTERM)

    config = uvicorn.Config(
        app,
        http=httptools.__name__,  # imported above, so that a missing package is reported early
        ws="none",
        timeout_keep_alive=_KEEP_ALIVE_S,
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # the application does not use the client's address
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=settings.grace_s,
        callback_notify=check_supervisor,
        timeout_notify=1,
    )
    server = uvicorn.Server(config)
    app.stopping = lambda: server.should_exit
    requests = server.server_state.tasks
    app.is_alone = lambda: len(requests) == 1
    # The event loop's thread enters inference mode once, instead of once for each request.
    with torch.inference_mode():
        server.run(sockets=[listener])


def _catch_up(follower: Follower) -> None:
    while follower.poll():
        pass


def _try(name: str, follow: Callable[[], object]) -> bool:
    """Call ``follow``; log an exception, because the server must keep running, and return whether
    there was none.
    """
    try:
        follow()
    except Exception:
        logger.exception("%s: watching the folder failed", name)
        return False
    return True


def _follow(pairs: Sequence[tuple[Served, Follower]], poll_s: float) -> None:
    if sys.platform == "linux":  # on Linux, each thread has its own niceness
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    while True:
        time.sleep(poll_s)
        for served, follower in pairs:
            if not _try(served.name, partial(_serve_newest, served, follower)):
                served.counts.count("delta_errors")


def _serve_newest(served: Served, follower: Follower) -> None:
    while follower.poll():
        _warn_of_new_columns(served, follower)
        served.switch(follower.version)


def _warn_of_new_columns(served: Served, follower: Follower) -> None:
    names = follower.version.model.encode([]).names
    if new := [name for name in names if name not in served.counts.columns]:
        logger.warning(
            "%s: the metrics do not count missing and unknown values of %s, which the first bundle "
            "did not have; restart the server to count them",
            *(served.name, ", ".join(new)),
        )
