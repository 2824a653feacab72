"""Serves the records of cached tables to the ranks of a run, over TCP.

A server holds rows only for the current session, which is one launch of the ranks. A new session
drops the rows of the previous session, and closes its connections with a reason. Nothing is stored
on disk, because the ranks of a new launch load the last checkpoint and send the rows again.

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
    INVALID,
    MAX_ROWS,
    OK,
    READ,
    REFUSED,
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
from sbpflow.embedding.cache.slot_layout import warm_up_copies

logger = logging.getLogger(__name__)

GREET_S = 10.0  # time limit for a handshake
MAX_CONNECTIONS = 2048  # per session
# pause before accepting connections again when this process has too many open files
_NO_FILES_S = 0.5
# Keepalive settings: an idle connection to a machine that has disappeared ends after about a
# minute. TCP_USER_TIMEOUT is not set, because a rank reads no replies while it waits for another
# server; it would later report this server as lost, instead of the other one.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}


class _Block(NamedTuple):
    """The records of one store of one rank."""

    num_rows: int
    record_bytes: int
    records: MappedRecords


class _Refusal(NamedTuple):
    reply: int  # REFUSED or INVALID
    reason: str


_OTHER_LAUNCH = _Refusal(
    REFUSED,
    "it is serving another launch of the ranks, or was restarted; if no other launch should use "
    "it, repeat the command that started the ranks",
)


class _Session:
    """The records and connections of one launch, which lists this server at index ``server``."""

    def __init__(self, server: int) -> None:
        self.server = server
        self.blocks: dict[tuple[int, int], _Block] = {}
        self.num_bytes = 0
        self.sockets: set[socket.socket] = set()

    def end(self) -> None:
        """Free the rows, and close all connections."""
        self.blocks.clear()
        for sock in self.sockets:
            with contextlib.suppress(OSError):  # the connection has already ended
                # A thread may be sending a reply to a rank that hangs.
                milliseconds = round(1000 * GREET_S)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
                # Wake a thread that waits for a request, so that it sends the reason.
                sock.shutdown(socket.SHUT_RD)


class EmbeddingServer:
    """Holds up to ``memory_bytes`` of records for the ranks that know ``secret``."""

    def __init__(self, secret: bytes, memory_bytes: int) -> None:
        self._secret, self._memory_bytes = secret, memory_bytes
        self._lock = threading.Lock()  # Guards the sessions and their blocks.
        self._sessions: dict[bytes, _Session] = {}  # At most one, the current session.
        self._ended: set[bytes] = set()
        # Loading or compiling the copies takes seconds, for which a rank would have to wait.
        for record_bytes in (8, 4, 2, 1):
            word, length = words_of(record_bytes)
            warm_up_copies(np.empty((0, length), word))
        # Half of the slots are for handshakes, and for connections that are closing.
        self._slots = threading.BoundedSemaphore(2 * MAX_CONNECTIONS)

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
                logger.warning("%s: refused, too many connections are open", address[0])
                sock.close()
                continue
            try:
                threading.Thread(target=self._run, args=(sock, address[0]), daemon=True).start()
            except RuntimeError as error:  # the system allows no more threads
                logger.warning("%s: refused, %s", address[0], error)
                sock.close()
                self._slots.release()

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
                with self._lock:
                    for session in self._sessions.values():
                        session.sockets.discard(sock)
                self._slots.release()

    def _serve(self, sock: socket.socket) -> None:
        end = time.monotonic() + GREET_S
        greet_rank(sock, self._secret, end)
        purpose = receive_purpose(sock, end)
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        begins = purpose.purpose == BEGIN
        if refusal := self._begin(purpose) if begins else self._open(purpose, sock):
            _refuse(sock, refusal)
            return
        send_header(sock, OK, 0)
        if not begins:
            self._answer(sock, purpose)

    def _begin(self, purpose: Purpose) -> _Refusal | None:
        """Start a session and end the previous one; return the refusal, if any."""
        with self._lock:
            if purpose.session in self._ended:
                return _OTHER_LAUNCH
            if (session := self._sessions.get(purpose.session)) is not None:
                if session.server == purpose.server:
                    return None
                return _Refusal(
                    INVALID,
                    f"it is also server {session.server}, at another address; list each server "
                    "once",
                )
            if refusal := self._check_memory(purpose.num_bytes):
                return refusal
            self._ended |= set(self._sessions)
            for session in self._sessions.values():
                session.end()
            self._sessions = {purpose.session: _Session(purpose.server)}
            name = purpose.name
            logger.info("a launch begins (%s); rows of earlier launches are dropped", name)
        return None

    def _check_memory(self, num_bytes: int) -> _Refusal | None:
        if num_bytes <= self._memory_bytes:
            return None
        return _Refusal(
            INVALID,
            f"the rows need {num_bytes / 1e9:.2f} GB, but this server's limit is "
            f"{self._memory_bytes / 1e9:.2f} GB; use servers on more machines, a larger "
            "--memory-gb, or kind: file",
        )

    def _open(self, purpose: Purpose, sock: socket.socket) -> _Refusal | None:
        """Register a connection, and allocate the records of its store on the store's first
        connection; return the refusal, if any.
        """
        with self._lock:
            session = self._sessions.get(purpose.session)
            if session is None:
                return _OTHER_LAUNCH
            if session.server != purpose.server:
                return _Refusal(
                    INVALID,
                    f"rank 0 reached it as server {session.server}; use addresses that mean the "
                    "same servers on every machine",
                )
            if len(session.sockets) >= MAX_CONNECTIONS:
                return _Refusal(
                    INVALID,
                    f"it has {MAX_CONNECTIONS:,} connections, the maximum, and each rank needs 2 "
                    "for each of its stacks of tables on servers; use fewer ranks, or kind: file "
                    "for some of the tables",
                )
            if (refusal := self._allocate(session, purpose)) is None:
                session.sockets.add(sock)
            return refusal

    def _allocate(self, session: _Session, purpose: Purpose) -> _Refusal | None:
        key, p = (purpose.rank, purpose.store), purpose
        if (block := session.blocks.get(key)) is not None:
            if block[:2] == (p.num_rows, p.record_bytes):
                return None
            reason = f"store {p.store} of rank {p.rank} already exists with a different size"
            return _Refusal(REFUSED, reason)
        num_bytes = p.num_rows * p.record_bytes
        if refusal := self._check_memory(session.num_bytes + num_bytes):
            return refusal
        word, length = words_of(p.record_bytes)
        # The operating system allocates each page on its first write.
        try:
            records = MappedRecords(np.empty((p.num_rows, length), word))
        except MemoryError:
            reason = f"it cannot allocate {num_bytes / 1e9:.2f} GB; use more servers"
            return _Refusal(INVALID, reason)
        session.blocks[key] = _Block(p.num_rows, p.record_bytes, records)
        session.num_bytes += num_bytes
        return None

    def _answer(self, sock: socket.socket, purpose: Purpose) -> None:
        """Answer the requests of a connection until it or its session ends."""
        word, length = words_of(purpose.record_bytes)
        numbers, records = np.empty(MAX_ROWS, "<i4"), np.empty((MAX_ROWS, length), word)
        try:
            while True:
                request, count = receive_header(sock)
                if request not in (READ, WRITE) or not 0 < count <= MAX_ROWS:
                    raise ProtocolError(f"request {request} for {count} rows")
                rows, payload = numbers[:count], records[:count]
                receive_array(sock, rows)
                if request == WRITE:
                    receive_array(sock, payload)
                if (block := self._block(purpose)) is None:
                    break
                if rows.min() < 0 or rows.max() >= block.num_rows:
                    raise ProtocolError(f"rows {rows.min()} to {rows.max()} of {block.num_rows}")
                if request == READ:
                    block.records.read(rows, payload)
                else:
                    block.records.write(rows, payload)
                # While this thread sends and waits, a reference to the block would keep the rows of
                # an ended session in memory.
                del block
                send_header(sock, OK, count, more=request == READ)
                if request == READ:
                    send_array(sock, payload)
        except EOFError:  # also if the session has ended
            if purpose.session not in self._ended:
                raise
        _refuse(sock, _OTHER_LAUNCH)

    def _block(self, purpose: Purpose) -> _Block | None:
        session = self._sessions.get(purpose.session)
        return session and session.blocks.get((purpose.rank, purpose.store))


def _refuse(sock: socket.socket, refusal: _Refusal) -> None:
    """Send the reason for a refusal, and wait until the peer closes the connection.

    Closing a socket that has unread requests would discard the reason before the peer reads it. If
    this session has ended, the input is already closed; the peer then reads the reason even if it
    cannot send anymore (``_read_reason_later``).
    """
    end = time.monotonic() + GREET_S
    sock.settimeout(GREET_S)
    refuse(sock, *refusal)
    sock.shutdown(socket.SHUT_WR)
    while (left_s := end - time.monotonic()) > 0:
        sock.settimeout(left_s)
        if not sock.recv(1 << 16):
            return
