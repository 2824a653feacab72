"""Keeps the records of a rank's stores on embedding servers.

With n servers, row r of a store is on server r % n, at place r // n. Every server thus has an equal
share of every table, even if a table assigns row numbers in the order of first use. Reads wait for
the answers of all servers that have the rows. Writes are copied, and then sent by one thread per
server. Until all servers have confirmed a write, reads take its rows from the copy. Reads and
writes can therefore use separate connections and both directions of a link, yet a read never misses
an earlier write to the same row.
"""

import contextlib
import logging
import queue
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from sbpflow.embedding.cache.server_protocol import (
    BEGIN,
    INVALID,
    MAX_RECORD_BYTES,
    MAX_ROWS,
    OK,
    OPEN,
    READ,
    REFUSED,
    WRITE,
    ProtocolError,
    Purpose,
    SecretError,
    greet_server,
    receive_array,
    receive_header,
    receive_reason,
    send_array,
    send_header,
    send_purpose,
)
from sbpflow.embedding.cache.slot_layout import Array, find_loops, warm_up_copies
from sbpflow.errors import ConfigError, ServerLostError
from sbpflow.runtime.processes.store import first_line

# Maximum number of read requests in flight per server. While a server sends an answer, it does not
# read requests, so the requests must fit into the socket buffers: 3 requests take up to about 48
# KiB.
READS_IN_FLIGHT = 3
WRITES_IN_FLIGHT = 4  # Maximum number of unconfirmed writes per store.
_PAUSE_S = 0.2  # Pause between attempts to connect.
_MESSAGE_S = 30.0  # Time between messages about a server that does not answer yet.

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """The servers of a run, as seen by one rank.

    ``session`` identifies the launch of the ranks. ``limit_s`` is the maximum time to wait for a
    server. ``key`` is the configuration key of the storage rule.
    """

    key: str
    addresses: tuple[tuple[str, int], ...]
    secret: bytes
    session: bytes
    rank: int
    machine: str
    limit_s: float

    def begin(self, stores: Sequence[tuple[int, int]] = ()) -> None:
        """Begin the session on every server, within ``limit_s`` in total. One rank must call this
        method before any rank connects. ``stores`` lists the number of rows and the bytes per
        record of each store of each rank.
        """
        end = time.monotonic() + self.limit_s
        for index in range(len(self.addresses)):
            num_bytes = sum(self.share(index, rows) * size for rows, size in stores)
            self.connect(index, BEGIN, end=end, num_bytes=num_bytes).close()

    def share(self, index: int, num_rows: int) -> int:
        """Return how many of a store's rows are on a server."""
        return len(range(index, num_rows, len(self.addresses)))

    def connect(
        self,
        index: int,
        purpose: int,
        *,
        end: float | None = None,
        **sizes: int,  # fields of ``Purpose``
    ) -> socket.socket:
        """Connect to a server. Wait for its answer until the monotonic time ``end``, by default for
        ``limit_s``.

        Raise ConfigError for an unknown host, for a wrong secret or version, and if the server
        cannot serve this configuration, and ServerLostError for any other failure.
        """
        end = time.monotonic() + self.limit_s if end is None else end
        name = self.name(index)
        next_message = time.monotonic() + 5.0
        while True:
            try:
                sock = _connect(self.addresses[index], max(0.01, end - time.monotonic()))
                break
            except OSError as error:
                failure = error
            now = time.monotonic()
            if now + _PAUSE_S >= end:
                raise self._unreachable(index, failure) from failure
            if now >= next_message:
                logger.warning(
                    "%s does not answer yet (%s); waiting for at most %.0f s more",
                    name, first_line(failure), end - now,
                )  # fmt: skip
                next_message = now + _MESSAGE_S
            time.sleep(_PAUSE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.ExitStack() as opened:
            opened.callback(sock.close)
            try:
                greet_server(sock, self.secret, end)
                send_purpose(
                    sock,
                    Purpose(
                        purpose=purpose,
                        session=self.session,
                        name=f"rank {self.rank} on {self.machine}",
                        server=index,
                        rank=self.rank,
                        **sizes,
                    ),
                )
                self._confirm(sock, index, end=end)
            except SecretError as error:
                raise ConfigError(
                    f"{self.key}.secret_file: {name} has a different secret; use the same secret "
                    "file for all servers and ranks"
                ) from error
            except ProtocolError as error:
                raise ConfigError(
                    f"{self.key}.addresses: {name} is not an embedding server of this version "
                    f"({error}); check the address, and use the same version of sbpflow everywhere"
                ) from error
            except (EOFError, OSError) as error:
                raise self.lost(index, error) from error
            opened.pop_all()
        sock.settimeout(self.limit_s)
        return sock

    def _unreachable(self, index: int, error: OSError) -> ServerLostError | ConfigError:
        """Return the error for a server that cannot be reached."""
        host, limit = self.addresses[index][0], f"within {self.limit_s:g} s ({first_line(error)})"
        if isinstance(error, socket.gaierror):
            return ConfigError(
                f"{self.key}.addresses: the host {host!r} of embedding server {index} was not "
                f"found {limit}; use a name that every rank's machine resolves, or an IP address"
            )
        return ServerLostError(
            f"{self.name(index)} does not answer {limit} (a fraction of parallel.timeout_s); "
            f"{self.advice(index)}"
        )

    def _confirm(
        self, sock: socket.socket, index: int, expected: int = 0, end: float | None = None
    ) -> None:
        """Receive the header of a reply; raise ServerLostError or ConfigError if the request was
        refused.
        """
        reply, count = receive_header(sock, end)
        if reply in (REFUSED, INVALID):
            text = f"{self.name(index)} refused: {receive_reason(sock, count)}"
            if reply == INVALID:
                raise ConfigError(f"{self.key}: {text}")
            raise ServerLostError(text)
        if (reply, count) != (OK, expected):
            raise ProtocolError(f"reply {reply} for {count} rows")

    def confirm(self, sock: socket.socket, index: int, expected: int) -> None:
        """Receive the header of the reply to a request for ``expected`` rows."""
        try:
            self._confirm(sock, index, expected)
        except (EOFError, OSError, ProtocolError) as error:
            raise self.lost(index, error) from error

    def lost(self, index: int, error: BaseException) -> ServerLostError:
        """Return the error for a failed connection."""
        name = self.name(index)
        if isinstance(error, TimeoutError):
            return ServerLostError(
                f"{name} does not answer within {self.limit_s:g} s; check that it is not stuck, "
                f"that {self.key}.addresses is right, and that the network works"
            )
        reason = "it closed the connection" if isinstance(error, EOFError) else first_line(error)
        return ServerLostError(f"{name} died or cannot be reached ({reason}); {self.advice(index)}")

    def name(self, index: int) -> str:
        host, port = self.addresses[index]
        return f"embedding server {index} of {len(self.addresses)} at {host}:{port}"

    def advice(self, index: int) -> str:
        place = f"{index}/{len(self.addresses)}"
        return (
            f"start it with `sbpflow embedding-server --config FILE --index {place}`, and repeat "
            "the command that started the ranks; they resume from the last checkpoint, if any"
        )


def _connect(address: tuple[str, int], limit_s: float) -> socket.socket:
    """Return a connection; raise OSError if nothing listens at the address."""
    sock = socket.create_connection(address, limit_s)
    # If nothing listens on a port of this host, TCP may choose that port for this end of the
    # connection. The socket is then connected to itself: it answers its own greeting, and the
    # server cannot use the port.
    if sock.getsockname() == sock.getpeername():
        sock.close()
        raise ConnectionRefusedError("connection refused: nothing listens there")
    return sock


def _read_reason_later() -> AbstractContextManager[None]:
    """Ignore that the server has closed the connection: it may have sent a reason first, and the
    next attempt to receive a reply raises this reason, or else that the connection is closed.
    """
    return contextlib.suppress(ConnectionError)


@dataclass(slots=True, eq=False)
class _Write:
    """One call to ``write``; ``records`` are ordered by server."""

    rows: Array  # Sorted.
    order: Array  # For each row, its position in ``records``.
    records: Array
    unconfirmed: int  # number of servers that have not confirmed the write


class _Writes:
    """The writes that servers have not confirmed, oldest first, and the first failure.

    A confirmed write stays until all older writes are confirmed. If a confirmed write were removed
    earlier, a read could find one of its rows in an older write that another server has not yet
    confirmed, and would return an outdated value.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._writes: deque[_Write] = deque()
        self._failure: Exception | None = None

    def add(self, write: _Write) -> None:
        """Add a write; first wait while too many writes are unconfirmed."""
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._writes) < WRITES_IN_FLIGHT or self._failure is not None
            )
            self._check()
            self._writes.append(write)

    def confirm(self, write: _Write) -> None:
        """Record that one more server has confirmed a write."""
        with self._changed:
            write.unconfirmed -= 1
            while self._writes and not self._writes[0].unconfirmed:
                self._writes.popleft()
                self._changed.notify_all()

    def newest_first(self) -> Sequence[_Write]:
        with self._changed:
            self._check()
            return tuple(reversed(self._writes))

    def fail(self, error: Exception) -> None:
        """Make all later calls raise ``error``."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure


class _Writer:
    """Sends writes to one server, in a thread that holds no reference to ``RemoteRecords``."""

    def __init__(self, servers: Servers, index: int, sock: socket.socket, writes: _Writes) -> None:
        self._servers, self._index, self._sock, self._writes = servers, index, sock, writes
        # (write, rows on the server, records)
        self.tasks: queue.SimpleQueue[tuple[_Write, Array, Array] | None] = queue.SimpleQueue()
        self._sent: deque[tuple[_Write, list[int]]] = deque()
        threading.Thread(target=self._run, name="row writer", daemon=True).start()

    def _run(self) -> None:
        with contextlib.closing(self._sock):
            try:
                self._work()
            except (EOFError, OSError) as error:
                self._writes.fail(self._servers.lost(self._index, error))
            except Exception as error:  # noqa: BLE001  (raised by the next read or write)
                self._writes.fail(error)

    def _work(self) -> None:
        """Send queued writes; wait for a confirmation only if the queue is empty."""
        while True:
            if self._sent and self.tasks.empty():
                self._receive()
            elif (task := self.tasks.get()) is None:
                return
            else:
                self._send(*task)

    def _send(self, write: _Write, rows: Array, records: Array) -> None:
        counts: list[int] = []
        for start in range(0, rows.size, MAX_ROWS):
            part = slice(start, min(start + MAX_ROWS, rows.size))
            counts.append(part.stop - start)
            with _read_reason_later():
                send_header(self._sock, WRITE, counts[-1], more=True)
                send_array(self._sock, rows[part], more=True)
                send_array(self._sock, records[part])
        self._sent.append((write, counts))

    def _receive(self) -> None:
        write, counts = self._sent.popleft()
        for count in counts:
            self._servers.confirm(self._sock, self._index, count)
        self._writes.confirm(write)


class RemoteRecords:
    """Keeps the records of a store on ``servers``. The records have the dtype and length of those
    in ``like`` ([n, words]).

    ``store`` is the number of this store on this rank.
    """

    num_bytes = 0  # no records are in the memory of this process

    def __init__(self, servers: Servers, store: int, num_rows: int, like: Array) -> None:
        self._servers, self._num = servers, len(servers.addresses)
        self._word, self._length = like.dtype, like.shape[1]
        record_bytes = self._word.itemsize * self._length
        if record_bytes > MAX_RECORD_BYTES:
            raise ConfigError(
                f"{servers.key}.kind: a row and its optimizer state have {record_bytes:,} bytes on "
                f"this rank, but servers store at most {MAX_RECORD_BYTES:,} bytes per row; use "
                "kind: file, or split the columns of the table, S(1)"
            )
        self._loops = find_loops()
        warm_up_copies(np.empty((0, self._length), self._word), rows=np.empty(0, np.int64))
        self._writes = _Writes()
        self._lock = threading.Lock()  # one read at a time
        self._buffer = np.empty((0, self._length), self._word)
        self._readers: list[socket.socket] = []
        self._writers: list[_Writer] = []
        weakref.finalize(self, _close, self._readers, self._writers)
        for index in range(self._num):
            rows = servers.share(index, num_rows)
            both = [
                servers.connect(index, OPEN, store=store, num_rows=rows, record_bytes=record_bytes)
                for _ in range(2)
            ]
            self._readers.append(both[0])
            self._writers.append(_Writer(servers, index, both[1], self._writes))

    def read(self, rows: Array, out: Array) -> None:
        """See ``RecordStore.read``; raise ServerLostError if a server does not answer."""
        with self._lock:
            try:
                self._read(rows, out)
            except BaseException as error:
                # Replies that were not received would be taken for those of the next read. The
                # traceback of ``error`` refers to this object, so do not keep it.
                self._writes.fail(ServerLostError(f"an earlier read failed: {first_line(error)}"))
                raise

    def _read(self, rows: Array, out: Array) -> None:
        left = self._read_unconfirmed(rows, out)
        wanted = rows if left is None else rows[left]
        if not wanted.size:
            return
        if left is None and self._num == 1:
            self._fetch([wanted.astype("<i4")], out)
            return
        order, parts = self._split(wanted)
        if len(self._buffer) < wanted.size:
            self._buffer = np.empty((wanted.size * 5 // 4, self._length), self._word)
        received = self._buffer[: wanted.size]
        self._fetch(parts, received)
        self._loops.put(out, order if left is None else left[order], received, 0)

    def write(self, rows: Array, records: Array) -> None:
        """See ``RecordStore.write``; return before the servers have the records."""
        if not rows.size:
            return
        order, parts = self._split(rows)
        sent = np.empty((rows.size, self._length), self._word)
        self._loops.take(records, order, sent, 0)
        by_server = rows[order]
        by_row = by_server.argsort()
        write = _Write(by_server[by_row], by_row, sent, sum(part.size > 0 for part in parts))
        self._writes.add(write)
        start = 0
        for writer, part in zip(self._writers, parts, strict=True):
            if part.size:
                writer.tasks.put((write, part, sent[start : start + part.size]))
            start += part.size

    def _split(self, rows: Array) -> tuple[Array, list[Array]]:
        """Return the order that sorts rows by server and, for each server, the positions of its
        rows on that server.
        """
        # uint16, because numpy sorts 16-bit integers in linear time.
        where = (rows % self._num).astype(np.uint16)
        order = where.argsort(kind="stable")
        ends = np.bincount(where, minlength=self._num).cumsum()
        return order, np.split((rows[order] // self._num).astype("<i4"), ends[:-1])

    def _read_unconfirmed(self, rows: Array, out: Array) -> Array | None:
        """Fill ``out`` with those of ``rows`` that are in unconfirmed writes; return the positions
        of the other rows.

        The result is ``None`` if all writes are confirmed, so that all positions remain.
        """
        left: Array | None = None
        for write in self._writes.newest_first():
            left = np.arange(rows.size) if left is None else left
            place = np.searchsorted(write.rows, rows[left]).clip(max=write.rows.size - 1)
            matches = write.rows[place] == rows[left]
            if matches.any():
                self._loops.put(out, left[matches], write.records[write.order[place[matches]]], 0)
                left = left[~matches]
        return left

    def _fetch(self, parts: Sequence[Array], out: Array) -> None:
        """Read each server's rows into consecutive parts of ``out``."""
        starts = np.cumsum([0, *(part.size for part in parts)])
        chunks = [
            slice(start, start + MAX_ROWS)
            for start in range(0, max(part.size for part in parts), MAX_ROWS)
        ]
        requested = 0
        for number, chunk in enumerate(chunks):
            while requested < min(len(chunks), number + READS_IN_FLIGHT):
                for index, rows in enumerate(parts):
                    self._request(index, rows[chunks[requested]])
                requested += 1
            for index, rows in enumerate(parts):
                self._receive(index, out[starts[index] : starts[index] + rows.size][chunk])

    def _request(self, index: int, rows: Array) -> None:
        if not rows.size:
            return
        try:
            with _read_reason_later():
                send_header(self._readers[index], READ, rows.size, more=True)
                send_array(self._readers[index], rows)
        except OSError as error:
            raise self._servers.lost(index, error) from error

    def _receive(self, index: int, out: Array) -> None:
        if not len(out):
            return
        self._servers.confirm(self._readers[index], index, len(out))
        try:
            receive_array(self._readers[index], out)
        except (EOFError, OSError) as error:
            raise self._servers.lost(index, error) from error


def _close(readers: Sequence[socket.socket], writers: Sequence[_Writer]) -> None:
    for writer in writers:
        writer.tasks.put(None)
    for reader in readers:
        reader.close()
