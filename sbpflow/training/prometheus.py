"""Serves the current values of a run to Prometheus, at /metrics on rank 0's machine."""

import logging
import math
import socket
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from sbpflow.boxing.agreement import run_on_all_ranks
from sbpflow.boxing.executor import Boxing
from sbpflow.config.schema import Config
from sbpflow.config.train_options import PrometheusConfig
from sbpflow.errors import ConfigError
from sbpflow.runtime.files.prometheus import CONTENT_TYPE, head, line
from sbpflow.training.metrics import Evaluation
from sbpflow.training.rank_watch import RankTimes
from sbpflow.training.report import figures_of

logger = logging.getLogger(__name__)

_RANK_TIMES = {
    "step": "Seconds per step of a rank in the last log interval.",
    "data": "Seconds per step that a rank waits for data.",
    "wait": "Seconds per step that a rank waits for transfers from other ranks.",
}


class _Server6(ThreadingHTTPServer):
    address_family = socket.AF_INET6


class PrometheusReporter:
    """A ``Reporter`` whose thread answers requests with the values of the last log interval.

    Raises ConfigError if the server cannot listen on the address.
    """

    def __init__(self, address: PrometheusConfig) -> None:
        self._step: list[str] = []
        self._ranks: list[str] = []
        self._scores: dict[str, list[str]] = {}
        try:
            kind = _Server6 if ":" in address.host else ThreadingHTTPServer
            self._server = kind((address.host, address.port), self._handler())
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(
                f"train.prometheus: cannot listen on {address.host}:{address.port} ({reason}); use "
                "a free port, and an address of rank 0's machine (for example, host: 127.0.0.1)"
            ) from error
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        shown = f"[{address.host}]" if ":" in address.host else address.host
        logger.info("metrics for Prometheus: http://%s:%d/metrics", shown, self.port)

    @staticmethod
    def of(config: Config, boxing: Boxing) -> "PrometheusReporter | None":
        """Return the reporter on rank 0 if ``train.prometheus`` is given, else None.

        Every rank must call this method; if rank 0 fails, every rank raises rank 0's error.
        """
        address, rank = config.train.prometheus, boxing.world.rank
        if address is None:
            return None
        return run_on_all_ranks(boxing, lambda: None if rank else PrometheusReporter(address))

    def close(self) -> None:
        """Stop answering requests."""
        self._server.shutdown()
        self._server.server_close()

    def step(
        self, step: int, loss: float, samples_per_s: float, extra: Mapping[str, float]
    ) -> None:
        """Replace the values of the log interval."""
        lines = _gauge("train_step", step, "Number of trained steps.")
        lines += _gauge("train_loss", loss, "Loss of the last step.")
        if math.isfinite(samples_per_s):
            text = "Training rows per second over all ranks."
            lines += _gauge("train_samples_per_second", samples_per_s, text)
        lines += _gauge("train_report_seconds", time.time(), "Unix time of this report.")
        lines += head("train_value", "gauge", "Other values of a step event in metrics.jsonl.")
        lines += [line("train_value", value, name=name) for name, value in extra.items()]
        self._step = lines

    def advance(self, step: int, loss: float) -> None:
        """Do nothing, because the served values change only at the end of a log interval."""

    def evaluation(self, split: str, step: int, evaluation: Evaluation) -> None:
        """Replace the scores of a split."""
        figures = figures_of(evaluation)
        self._scores[split] = [
            line("train_score", value, split=split, metric=name)
            for name, value in figures.items()
            if value is not None
        ]

    def ranks(self, times: RankTimes) -> None:
        """Replace the step times of the ranks."""
        lines: list[str] = []
        by_kind = {"step": times.step_ms, "data": times.data_ms, "wait": times.wait_ms}
        for kind, text in _RANK_TIMES.items():
            lines += head(f"train_rank_{kind}_seconds", "gauge", text)
            lines += [
                line(f"train_rank_{kind}_seconds", ms / 1e3, rank=str(rank), host=host)
                for rank, (ms, host) in enumerate(zip(by_kind[kind], times.hosts, strict=True))
            ]
        self._ranks = lines

    def text(self) -> str:
        """Return all values in Prometheus' text format."""
        scores = [text for lines in list(self._scores.values()) for text in lines]
        if scores:
            scores = (
                head("train_score", "gauge", "Metrics of the last evaluation of each split.")
                + scores
            )
        return "\n".join([*self._step, *self._ranks, *scores]) + "\n"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        reporter = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 10  # seconds that a client has to send its request

            def do_GET(self) -> None:
                if self.path != "/metrics":
                    self.send_error(404, "use /metrics")
                    return
                body = reporter.text().encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                logger.debug(format, *args)

        return Handler


def _gauge(name: str, value: float, text: str) -> list[str]:
    return [*head(name, "gauge", text), line(name, value)]
