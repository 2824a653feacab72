"""Serves the records of cached tables to the ranks of a run, over TCP.

A server holds rows only for the current session, which is one launch of the ranks. A new session
drops the rows of the previous session and refuses its connections. Nothing is stored on disk,
because the ranks of a new launch load the last checkpoint and send the rows again.

Each connection has its own thread. Rows are not locked, because a rank never requests a row from a
server while a write to that row is unconfirmed (see ``remote_records``).
"""

import contextlib
import errno
import logging
import socket
import threading
import time
from typing import NamedTuple

import numpy as np

from sbpflow.embedding.cache.records import MappedRecords
from sbpflow.embedding.cache.server_protocol import (
    BEGIN,
    MAX_ROWS,
    OK,
    READ,
    WRITE,
    ProtocolError,
    Purpose,
    SecretError,
    greet_rank,
    receive_array,
    receive_header,
    receive_purpose,
    refuse,
    send_array,
    send_header,
    words_of,
)

logger = logging.getLogger(__name__)

GREET_S = 10.0  # time limit for a handshake
MAX_CONNECTIONS = 2048
_UNKNOWN = (
    "it is serving another launch of the ranks, or was restarted; if no other launch should use "
    "it, repeat the command that started the ranks"
)
# pause before accepting connections again when this process has too many open files
_NO_FILES_S = 0.5
# Keepalive settings: an idle connection to a machine that has disappeared ends after about a
# minute.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
_SEND_S = 60  # time limit for the peer to acknowledge sent bytes


class _Block(NamedTuple):
    """The records of one store of one rank."""

    num_rows: int
    record_bytes: int
    records: MappedRecords


class _Session:
    """The records of one launch."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.blocks: dict[tuple[int, int], _Block] = {}
        self.num_bytes = 0


class EmbeddingServer:
    """Holds up to ``memory_bytes`` of records for the ranks that know ``secret``."""

    def __init__(self, secret: bytes, memory_bytes: int) -> None:
        self._secret, self._memory_bytes = secret, memory_bytes
        self._lock = threading.Lock()  # Guards the sessions and their blocks.
        self._sessions: dict[bytes, _Session] = {}  # At most one, the current session.
        self._ended: set[bytes] = set()
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def serve(self, listener: socket.socket) -> None:
        """Accept connections until the listener is closed or the process ends."""
        while True:
            try:
                sock, address = listener.accept()
            except ConnectionError:  # the peer has already gone
                continue
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                logger.warning("cannot accept connections: %s", error.strerror)
                time.sleep(_NO_FILES_S)
                continue
            if not self._slots.acquire(blocking=False):
                logger.warning("%s: refused, %d connections are open", address[0], MAX_CONNECTIONS)
                sock.close()
                continue
            threading.Thread(target=self._run, args=(sock, address[0]), daemon=True).start()

    def _run(self, sock: socket.socket, address: str) -> None:
        """Serve one connection, and log why the connection ended unless the peer closed it."""
        with contextlib.closing(sock):
            try:
                self._serve(sock)
            except SecretError:
                logger.warning("%s: refused, its secret differs", address)
            except ProtocolError as error:
                logger.warning("%s: refused, %s", address, error)
            except (EOFError, OSError) as error:
                logger.debug("%s: closed (%s)", address, error)
            finally:
                self._slots.release()

    def _serve(self, sock: socket.socket) -> None:
        sock.settimeout(GREET_S)
        greet_rank(sock, self._secret)
        purpose = receive_purpose(sock)
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SEND_S)
        for option, value in _KEEPALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        if reason := self._begin(purpose) if purpose.purpose == BEGIN else self._open(purpose):
            _refuse(sock, reason)
            return
        send_header(sock, OK, 0)
        if purpose.purpose != BEGIN:
            self._answer(sock, purpose)

    def _begin(self, purpose: Purpose) -> str:
        """Start a session and end the previous one; return the reason for a refusal, or ""."""
        with self._lock:
            if purpose.session in self._ended:
                return _UNKNOWN
            if purpose.session not in self._sessions:
                self._ended |= set(self._sessions)
                for session in self._sessions.values():
                    session.blocks.clear()
                self._sessions = {purpose.session: _Session(purpose.name)}
                name = purpose.name
                logger.info("a launch begins (%s); rows of earlier launches are dropped", name)
        return ""

    def _open(self, purpose: Purpose) -> str:
        """Allocate a store's records on its first connection; return the reason for a refusal, or
        "".
        """
        key, p = (purpose.rank, purpose.store), purpose
        with self._lock:
            session = self._sessions.get(p.session)
            if session is None:
                return _UNKNOWN
            if (block := session.blocks.get(key)) is not None:
                if block[:2] != (p.num_rows, p.record_bytes):
                    return f"store {p.store} of rank {p.rank} already exists with a different size"
                return ""
            needed = session.num_bytes + p.num_rows * p.record_bytes
            if needed > self._memory_bytes:
                return (
                    f"the rows need {needed / 1e9:.2f} GB, but this server's limit is "
                    f"{self._memory_bytes / 1e9:.2f} GB; use more servers, or a larger --memory-gb"
                )
            word, length = words_of(p.record_bytes)
            # The operating system allocates each page on its first write.
            try:
                records = MappedRecords(np.empty((p.num_rows, length), word))
            except MemoryError:
                return f"it cannot allocate {p.num_rows * p.record_bytes / 1e9:.2f} GB"
            session.blocks[key] = _Block(p.num_rows, p.record_bytes, records)
            session.num_bytes = needed
        return ""

    def _answer(self, sock: socket.socket, purpose: Purpose) -> None:
        """Answer the requests of a connection until it ends."""
        word, length = words_of(purpose.record_bytes)
        numbers, records = np.empty(MAX_ROWS, "<i4"), np.empty((MAX_ROWS, length), word)
        while True:
            request, count = receive_header(sock)
            if request not in (READ, WRITE) or not 0 < count <= MAX_ROWS:
                raise ProtocolError(f"request {request} for {count} rows")
            rows, payload = numbers[:count], records[:count]
            receive_array(sock, rows)
            if request == WRITE:
                receive_array(sock, payload)
            # Look up the block for every request: a reference kept here would keep the rows of an
            # ended session in memory.
            session = self._sessions.get(purpose.session)
            block = session and session.blocks.get((purpose.rank, purpose.store))
            if block is None:
                _refuse(sock, _UNKNOWN)
                return
            if rows.min() < 0 or rows.max() >= block.num_rows:
                raise ProtocolError(f"rows {rows.min()} to {rows.max()} of {block.num_rows}")
            if request == READ:
                block.records.read(rows, payload)
                send_header(sock, OK, count, more=True)
                send_array(sock, payload)
            else:
                block.records.write(rows, payload)
                send_header(sock, OK, count)


def _refuse(sock: socket.socket, reason: str) -> None:
    """Send the reason for a refusal, and wait until the peer closes the connection.

    Closing a socket that has unread requests would discard the reason before the peer reads it.
    """
    refuse(sock, reason)
    sock.shutdown(socket.SHUT_WR)
    sock.settimeout(GREET_S)
    while sock.recv(1 << 16):
        pass
