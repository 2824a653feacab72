"""Runs S3 servers for tests, behind a proxy that counts requests and can inject faults."""

import http.client
import logging
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.deadlines import Deadline

KEY, SECRET = "sbpflow-test-key", "sbpflow-test-secret"
_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


class Request(NamedTuple):
    """A client's request: its method, its path with the query, and its byte range, or "" if it has
    none.
    """

    method: str
    path: str
    range: str


Fault = Callable[[Request], str]
"""Returns a request's fault: "" (none), "503", "cut" (after half of the body), "drop", or
"hang".
"""


class Proxy:
    """Forwards requests to a server on this machine; ``fault`` selects a fault for each request."""

    def __init__(self, port: int) -> None:
        self.upstream, self.requests = port, list[Request]()
        self.fault: Fault = lambda request: ""
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def clear(self) -> None:
        """Delete the recorded requests and the fault."""
        self.requests.clear()
        self.fault = lambda request: ""

    def environment(self) -> dict[str, str]:
        """Return the environment variables that make clients use this server."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            # Disable the client's retries, because sbpflow's own are tested.
            "AWS_MAX_ATTEMPTS": "1",
            "AWS_EC2_METADATA_DISABLED": "true",
            # rclone sends the whole object's checksum even if only a part is requested
            "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
        }

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def forward(
        self, request: Request, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        """Forward the request; return the server's status, headers, and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.upstream, timeout=60)
        try:
            sent = {k: v for k, v in headers.items() if k.lower() not in _HOP}
            sent["Content-Length"] = str(len(body))
            connection.request(request.method, request.path, body, sent)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: "Proxy"

    def log_message(self, *_: object) -> None:
        pass

    def handle_request(self) -> None:
        body = self._body()
        request = Request(self.command, self.path, self.headers.get("Range", ""))
        self.proxy.requests.append(request)
        fault = self.proxy.fault(request)
        self.close_connection = fault in ("drop", "hang", "cut")
        if fault == "hang":
            time.sleep(3.0)
        if fault in ("drop", "hang"):
            return
        if fault == "503":
            self._answer(503, {}, b"<Error><Code>SlowDown</Code></Error>")
            return
        status, headers, data = self.proxy.forward(request, dict(self.headers), body)
        self._answer(status, headers, data, len(data) // 2 if fault == "cut" else None)

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(parts)

    def _answer(
        self, status: int, headers: Mapping[str, str], data: bytes, sent: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in _HOP:
                self.send_header(name, value)
        size = str(len(data))
        length = headers.get("Content-Length", size) if self.command == "HEAD" else size
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:sent])

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_request


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def moto() -> Generator[Proxy]:
    """Run moto's S3 in this process."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # werkzeug logs every request
    running = server.ThreadedMotoServer("127.0.0.1", port=free_port(), verbose=False)
    running.start()
    proxy = Proxy(running.get_host_and_port()[1])
    try:
        yield proxy
    finally:
        proxy.close()
        running.stop()


@contextmanager
def rclone(folder: Path) -> Generator[Proxy]:
    """Run `rclone serve s3`, whose buckets are the folders in ``folder``."""
    pytest.importorskip("s3fs")
    program = shutil.which("rclone") or str(Path(sys.executable).with_name("rclone"))
    if not Path(program).exists():
        pytest.skip("rclone is not installed")
    port = free_port()
    process = subprocess.Popen(
        [program, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY},{SECRET}",
         "--vfs-cache-mode", "off", str(folder)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    proxy = Proxy(port)
    try:
        deadline = Deadline(20)
        while not _listens(port):
            assert not deadline.over(), "rclone does not listen"
        yield proxy
    finally:
        proxy.close()
        process.terminate()
        process.wait()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 0.2).close()
    except OSError:
        time.sleep(0.05)
        return False
    return True
