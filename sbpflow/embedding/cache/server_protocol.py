"""Defines the messages between the ranks of a run and embedding servers.

A connection starts with a handshake: the server sends its hello, the rank answers with a hello and
a proof that it knows the secret, and the server answers with its own proof. The rank then sends its
session (the launch that it belongs to) and the purpose of the connection. A connection for records
carries requests, each with a number of rows, and replies in the same order. The receiver derives
all sizes from these numbers and checks them before it allocates memory. Numbers and records are
little-endian.
"""

import hashlib
import hmac
import logging
import math
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sbpflow.embedding.cache.slot_layout import Array
from sbpflow.errors import ConfigError

PROTOCOL = 2  # version of the messages; ranks and servers must use the same version
MAGIC = b"sbprows\n"
MIN_SECRET_BYTES = 16
MAX_ROWS = 4096  # per request
MAX_TEXT_BYTES = 1024
MAX_RECORD_BYTES = 1 << 16
MAX_ROW_NUMBER = 2**31 - 1

BEGIN, OPEN = 1, 2  # Purposes of a connection: begin a session, or move the records of a store.
READ, WRITE = 1, 2  # Requests.
# Replies. REFUSED: the server serves another launch. INVALID: the configuration is wrong. In both,
# the count is the length of an explanation.
OK, REFUSED, INVALID = 0, 1, 2

logger = logging.getLogger(__name__)

# With this flag, Linux waits for more data before it sends a packet.
_MORE: int = getattr(socket, "MSG_MORE", 0)
_HELLO = struct.Struct("<8sI32s")  # magic, protocol, nonce
_NAME_BYTES = 64
# purpose, session, server, rank, store number, number of rows, bytes per record, bytes of all rows,
# name of the rank
_PURPOSE = struct.Struct(f"<B16sIIIQIQ{_NAME_BYTES}s")
_HEADER = struct.Struct("<BxxxI")  # request or reply, count


class ProtocolError(Exception):
    """The peer sent something that the protocol does not allow."""


class SecretError(Exception):
    """The peer does not know the secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Purpose:
    """The purpose of a connection."""

    purpose: int
    session: bytes
    name: str  # Name of the rank and its machine, for messages.
    server: int = 0  # Index of this server in the list of addresses.
    num_bytes: int = 0  # For BEGIN: size of all rows that the session will store on this server.
    # The other fields are for OPEN.
    rank: int = 0
    store: int = 0  # Each store of a rank has a different number.
    num_rows: int = 0  # Number of the store's rows on this server.
    record_bytes: int = 0


def read_secret(path: Path, key: str) -> bytes:
    """Return the content of a secret file without surrounding whitespace."""
    try:
        secret = path.read_bytes().strip()
        mode = path.stat().st_mode
    except OSError as error:
        reason = (error.strerror or "cannot be read").lower()
        raise ConfigError(
            f"{key}.secret_file: {path} cannot be read ({reason}); make it readable, or create it "
            f"with `(umask 077; head -c 32 /dev/urandom | base64 > {path})` and copy it to all "
            "machines"
        ) from error
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"{key}.secret_file: {path} contains only {len(secret)} bytes; use {MIN_SECRET_BYTES} "
            "or more, such as the output of `head -c 32 /dev/urandom | base64`"
        )
    if mode & 0o077:
        logger.warning(
            "%s.secret_file: other users can read or change %s (mode %03o); use chmod 600",
            key, path, mode & 0o777,
        )  # fmt: skip
    return secret


def words_of(record_bytes: int) -> tuple[np.dtype[Any], int]:
    """Return the largest integer type whose size divides ``record_bytes``, and the length of a
    record in words of this type.
    """
    word = math.gcd(8, record_bytes)
    return np.dtype(f"<i{word}"), record_bytes // word


# Handshake


def greet_rank(sock: socket.socket, secret: bytes, end: float) -> None:
    """Authenticate a rank, as the server, before the monotonic time ``end``; raise SecretError or
    ProtocolError.
    """
    nonce = secrets.token_bytes(32)
    sock.sendall(_HELLO.pack(MAGIC, PROTOCOL, nonce))
    magic, protocol, other = _HELLO.unpack(receive(sock, _HELLO.size, end))
    _check_hello(magic, protocol)
    proof = receive(sock, 32, end)
    if not hmac.compare_digest(proof, _proof(secret, b"rank", nonce, other)):
        send_header(sock, REFUSED, 0)
        raise SecretError
    send_header(sock, OK, 0)
    sock.sendall(_proof(secret, b"server", nonce, other))


def greet_server(sock: socket.socket, secret: bytes, end: float) -> None:
    """Authenticate a server, as a rank, before the monotonic time ``end``; raise SecretError or
    ProtocolError.
    """
    magic, protocol, other = _HELLO.unpack(receive(sock, _HELLO.size, end))
    nonce = secrets.token_bytes(32)
    sock.sendall(_HELLO.pack(MAGIC, PROTOCOL, nonce))
    _check_hello(magic, protocol)
    sock.sendall(_proof(secret, b"rank", other, nonce))
    reply, _ = receive_header(sock, end)
    if reply == REFUSED:
        raise SecretError
    if not hmac.compare_digest(receive(sock, 32, end), _proof(secret, b"server", other, nonce)):
        raise SecretError


def _check_hello(magic: bytes, protocol: int) -> None:
    if magic != MAGIC:
        raise ProtocolError(f"the first bytes are {magic!r}, not {MAGIC!r}")
    if protocol != PROTOCOL:
        raise ProtocolError(
            f"the other side uses protocol {protocol}, but this side uses {PROTOCOL}"
        )


def _proof(secret: bytes, role: bytes, *nonces: bytes) -> bytes:
    """Return a MAC of both nonces. The role prevents a peer from passing off the other side's proof
    as its own.
    """
    return hmac.digest(secret, b"".join((role, *nonces)), hashlib.sha256)


def send_purpose(sock: socket.socket, purpose: Purpose) -> None:
    """Send the purpose of the connection; the server answers with OK, REFUSED, or INVALID."""
    p, name = purpose, purpose.name.encode()[:_NAME_BYTES]
    sizes = (p.num_rows, p.record_bytes, p.num_bytes)
    sock.sendall(_PURPOSE.pack(p.purpose, p.session, p.server, p.rank, p.store, *sizes, name))


def receive_purpose(sock: socket.socket, end: float) -> Purpose:
    """Receive and check the purpose of the connection, before the monotonic time ``end``."""
    kind, session, server, rank, store, num_rows, record_bytes, num_bytes, name = _PURPOSE.unpack(
        receive(sock, _PURPOSE.size, end)
    )
    if kind not in (BEGIN, OPEN):
        raise ProtocolError(f"the purpose of the connection, {kind}, is unknown")
    if kind == OPEN and not (num_rows <= MAX_ROW_NUMBER and 0 < record_bytes <= MAX_RECORD_BYTES):
        raise ProtocolError(f"a store of {num_rows} rows of {record_bytes} bytes is not supported")
    text = name.rstrip(b"\0").decode(errors="replace")
    return Purpose(
        purpose=kind,
        session=session,
        name="".join(c if c.isprintable() else "?" for c in text),
        server=server,
        num_bytes=num_bytes,
        rank=rank,
        store=store,
        num_rows=num_rows,
        record_bytes=record_bytes,
    )


# Requests and replies


def send_header(sock: socket.socket, kind: int, count: int, *, more: bool = False) -> None:
    """Send the header of a request or reply. With ``more``, the operating system delays the header
    until the data follows.
    """
    sock.sendall(_HEADER.pack(kind, count), _MORE if more else 0)


def receive_header(sock: socket.socket, end: float | None = None) -> tuple[int, int]:
    """Receive the header of a request or reply; return its kind and its count."""
    return _HEADER.unpack(receive(sock, _HEADER.size, end))


def refuse(sock: socket.socket, reply: int, reason: str) -> None:
    """Send the reply REFUSED or INVALID with an explanation."""
    text = reason.encode()[:MAX_TEXT_BYTES]
    send_header(sock, reply, len(text), more=True)
    sock.sendall(text)


def receive_reason(sock: socket.socket, count: int) -> str:
    """Return the explanation of a refusal."""
    if count > MAX_TEXT_BYTES:
        raise ProtocolError(f"an explanation of {count} bytes is too long")
    text = receive(sock, count).decode(errors="replace")
    return "".join(c if c.isprintable() else "?" for c in text)


def send_array(sock: socket.socket, array: Array, *, more: bool = False) -> None:
    """Send a contiguous array. The socket's time limit applies to each chunk, not to the whole
    array.
    """
    view, flags = array.data.cast("B"), _MORE if more else 0
    while view:
        view = view[sock.send(view, flags) :]


def receive_array(sock: socket.socket, out: Array) -> None:
    """Fill a contiguous array. The socket's time limit applies to each chunk, not to the whole
    array.
    """
    view = out.data.cast("B")
    while view:
        count = sock.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]


def receive(sock: socket.socket, count: int, end: float | None = None) -> bytes:
    """Receive exactly ``count`` bytes; raise EOFError if the peer closes the connection.

    With ``end``, raise TimeoutError at this monotonic time. The time limit of the socket alone
    would let a peer send one byte at a time.
    """
    data = bytearray()
    while len(data) < count:
        if end is not None:
            sock.settimeout(max(end - time.monotonic(), 0.001))
        part = sock.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
