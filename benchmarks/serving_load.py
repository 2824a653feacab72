"""Sends HTTP requests over raw sockets in a separate process, and records every response.

Each connection sends the next request after receiving the answer to the previous request. ``load``
returns the server's answers, and the caller checks them. A raw socket needs far less client time
than an HTTP library and can send malformed requests.
"""

import multiprocessing
import multiprocessing.connection
import selectors
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from numpy.typing import NDArray

_RECEIVED = 1 << 16


@dataclass
class Answers:
    """The answers that the server sent during a load.

    ``bodies`` counts the answers by (request, version header, status, body). For each answer,
    ``latency`` contains the seconds, and ``at`` the end time (``time.time``). ``first`` contains
    the end time of the first answer of each version. ``lost`` contains (time, request) for each
    request whose connection ended without an answer.
    """

    bodies: dict[tuple[int, str, int, bytes], int] = field(default_factory=dict)
    latency: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    at: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    first: dict[str, float] = field(default_factory=dict[str, float])
    lost: list[tuple[float, int]] = field(default_factory=list)


def request(path: str, body: bytes, content_type: str = "text/tab-separated-values") -> bytes:
    """Return the bytes of a POST request."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def load(
    port: int, requests: Sequence[bytes], seconds: float, connections: int, rate: float = 0.0
) -> Answers:
    """Send the requests in round-robin order for some seconds, and return the answers.

    ``rate`` limits the number of requests started per second.
    """
    client = _Client(port, requests, rate)
    return client.run(seconds, connections)


class LoadProcess:
    """Runs ``load`` in a separate process; ``result`` waits for the answers."""

    def __init__(self, *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe(duplex=False)
        self._process = context.Process(target=_send_load, args=(other, *arguments))
        self._process.start()
        other.close()

    def result(self) -> Answers:
        """Wait for the answers."""
        answers = self._pipe.recv()
        self._process.join()
        return answers


def _send_load(pipe: multiprocessing.connection.Connection, *arguments: object) -> None:
    pipe.send(load(*arguments))


class _Connection:
    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.number, self.started = -1, 0.0
        self.unsent, self.received = memoryview(b""), bytearray()


class _Client:
    def __init__(self, port: int, requests: Sequence[bytes], rate: float) -> None:
        self._port, self._requests, self._rate = port, requests, rate
        self._selector = selectors.DefaultSelector()
        self._order: Iterator[int] = (number % len(requests) for number in count())
        self._answers = Answers()
        self._rows: list[tuple[float, float]] = []
        self._idle: list[_Connection] = []
        self._sent = 0

    def run(self, seconds: float, connections: int) -> Answers:
        self._begin = time.perf_counter()
        self._end = self._begin + seconds
        for _ in range(connections):
            self._next(_Connection(self._port))
        while self._selector.get_map() or self._idle:
            for key, events in self._selector.select(0.001 if self._idle else 1.0):
                connection: _Connection = key.data
                if events & selectors.EVENT_WRITE:
                    self._write(connection)
                if events & selectors.EVENT_READ:
                    self._read(connection)
            waiting, self._idle = self._idle, []
            for connection in waiting:
                self._next(connection)
        columns = np.array(self._rows, dtype=np.float64).reshape(-1, 2)
        self._answers.at, self._answers.latency = columns[:, 0], columns[:, 1]
        return self._answers

    def _next(self, connection: _Connection) -> None:
        now = time.perf_counter()
        if now >= self._end:
            self._select(connection, 0)
            connection.socket.close()
            return
        if self._rate and self._sent > (now - self._begin) * self._rate:
            self._idle.append(connection)
            self._select(connection, 0)
            return
        self._sent += 1
        connection.number = next(self._order)
        connection.unsent = memoryview(self._requests[connection.number])
        connection.received = bytearray()
        connection.started = now
        self._write(connection)

    def _select(self, connection: _Connection, events: int) -> None:
        known = connection.socket.fileno() in self._selector.get_map()
        if known and events:
            self._selector.modify(connection.socket, events, connection)
        elif events:
            self._selector.register(connection.socket, events, connection)
        elif known:
            self._selector.unregister(connection.socket)

    def _write(self, connection: _Connection) -> None:
        try:
            sent = connection.socket.send(connection.unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            sent = len(connection.unsent)  # reading detects an early answer or a closed connection
        connection.unsent = connection.unsent[sent:]
        writing = selectors.EVENT_WRITE if connection.unsent else 0
        self._select(connection, selectors.EVENT_READ | writing)
        if connection.received and not connection.unsent:
            self._complete(connection, closed=False)

    def _read(self, connection: _Connection) -> None:
        try:
            part = connection.socket.recv(_RECEIVED)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        connection.received += part
        # A response that arrives early is accepted only after the whole request has been sent, so
        # that the connection is free for the next request.
        if not connection.unsent or not part:
            self._complete(connection, closed=not part)

    def _complete(self, connection: _Connection, *, closed: bool) -> None:
        head, found, rest = bytes(connection.received).partition(b"\r\n\r\n")
        if found:
            status, headers = _head(head)
            size = int(headers[b"content-length"])
            if len(rest) >= size:
                self._answered(connection, status, headers, rest[:size], closed=closed)
                return
        if closed:
            self._answers.lost.append((time.time(), connection.number))
            self._replace(connection)

    def _answered(
        self, connection: _Connection, status: int, headers: Mapping[bytes, bytes], body: bytes,
        *, closed: bool,
    ) -> None:  # fmt: skip
        at, now = time.time(), time.perf_counter()
        self._rows.append((at, now - connection.started))
        version = headers.get(b"x-model-version", b"").decode()
        self._answers.first.setdefault(version, at)
        key = connection.number, version, status, body
        self._answers.bodies[key] = self._answers.bodies.get(key, 0) + 1
        if closed or headers.get(b"connection") == b"close":
            self._replace(connection)
        else:
            self._next(connection)

    def _replace(self, connection: _Connection) -> None:
        self._select(connection, 0)
        connection.socket.close()
        if time.perf_counter() < self._end:
            self._next(_Connection(self._port))


def _head(head: bytes) -> tuple[int, dict[bytes, bytes]]:
    status, *lines = head.split(b"\r\n")
    pairs = (line.partition(b": ") for line in lines)
    return int(status.split()[1]), {name.lower(): value for name, _, value in pairs}
