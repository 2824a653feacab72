"""Defines the ASGI application that answers HTTP requests with scores; it uses no web framework.

The application limits request sizes, and rejects bad rows with a message that names the row and
column. TLS and authentication are left to a proxy in front of the server.
"""

import asyncio
import json
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from sbpflow.runtime.files.prometheus import CONTENT_TYPE
from sbpflow.serving import inference_protocol
from sbpflow.serving.batcher import Batcher
from sbpflow.serving.bodies import BodyError, Scores, check_rows, encode, format_of
from sbpflow.serving.encoder import RowError
from sbpflow.serving.follower import ModelVersion
from sbpflow.serving.metrics import Metrics, ModelCounts
from sbpflow.serving.scorer import Model

logger = logging.getLogger(__name__)

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
_JSON = b"application/json"
_TEXT = b"text/plain; charset=utf-8"
_METRICS = CONTENT_TYPE.encode()
_ROUTES = (
    "POST /score, POST /models/NAME/score, GET /health, GET /ready, GET /metrics, GET /v2, and the "
    "paths of the Open Inference Protocol below /v2"
)
_MAX_BEHIND = 64  # Maximum number of requests queued for the shadow model.
_MAX_SHOWN = 100  # Maximum number of characters of a value in an error message.


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The maximum size of a request, in bytes and in rows, and the maximum number of rows of a
    batch.
    """

    body_bytes: int = 4 << 20
    rows: int = 8192
    batch_rows: int = 1024


class Served:
    """A name under which a model is served; ``switch`` replaces its version."""

    def __init__(self, name: str, version: ModelVersion, counts: ModelCounts) -> None:
        self.name, self.counts = name, counts
        self.switch(version)

    def switch(self, version: ModelVersion) -> None:
        """Serve another version. Requests in flight are answered by the version that they started
        with.
        """
        self.version = version
        self.counts.serve(version.text, version.trained)


@dataclass(slots=True)
class _Answer:
    body: bytes
    type: bytes = _JSON
    status: int = 200
    headers: Sequence[tuple[bytes, bytes]] = ()
    scored: "tuple[Served, Any, Scores] | None" = None


class _DisconnectedError(Exception):
    """Raised if the client closes the connection before the end of its request."""


class App:
    """The ASGI application.

    The first model is the default. ``other`` counts the requests that name no known model.
    """

    def __init__(
        self,
        models: Sequence[Served],
        shadow: str | None,
        limits: Limits,
        metrics: Metrics,
        other: ModelCounts,
    ) -> None:
        self._models: Mapping[str, Served] = {served.name: served for served in models}
        self._default = models[0]
        self._shadow = self._models[shadow] if shadow else None
        self._behind: deque[tuple[Served, Any, Scores]] = deque()
        self._limits, self._metrics, self._other = limits, metrics, other
        self._batcher = Batcher(limits.batch_rows)
        self.stopping: Callable[[], bool] = lambda: False
        self.is_alone: Callable[[], bool] = lambda: False
        """Returns whether the current request is the only one in flight. The server sets this
        function; the default returns False.
        """

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request, or the start and the end of the server (the scope lifespan)."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        started = time.perf_counter()
        served, rest = self._find(scope["path"])
        try:
            answer = await self._answer(served, rest, scope, receive)
        except _DisconnectedError:
            return
        except (BodyError, RowError) as error:
            answer = _refusal(error)
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            answer = _Answer(
                _error("internal server error; see the server's log for the reason"), status=500
            )
        headers = [
            (b"content-type", answer.type),
            (b"content-length", b"%d" % len(answer.body)),
            *answer.headers,
        ]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})
        counts = served.counts if served else self._other
        counts.answer(answer.status, time.perf_counter() - started)
        if answer.scored and self._shadow and served is not self._shadow:
            self._score_later(*answer.scored)

    def _find(self, path: str) -> tuple[Served | None, str]:
        """Return the model that a path names, if any, and the path without the model's name."""
        if path == "/score":
            return self._default, path
        for prefix in ("/models/", "/v2/models/"):
            if path.startswith(prefix):
                name, slash, rest = path.removeprefix(prefix).partition("/")
                return self._models.get(name), prefix + slash + rest
        return None, path

    async def _answer(
        self, served: Served | None, path: str, scope: Message, receive: Receive
    ) -> _Answer:
        if served is None:
            answer = self._answer_server(path)
            _check_method(scope, "GET", "HEAD")
            return answer
        if path in ("/score", "/models//score"):
            _check_method(scope, "POST")
            return await self._score(served, scope, receive)
        version, action = served.version, path.removeprefix("/v2/models/").removeprefix("/")
        if action.startswith("versions/"):
            wanted, _, action = action.removeprefix("versions/").partition("/")
            if wanted != version.text:
                text = f"version {wanted!r} is not served; {served.name} has {version.text}"
                raise BodyError(text, 404)
        if path.startswith("/v2/") and action == "infer":
            _check_method(scope, "POST")
            return await self._infer(served, scope, receive)
        if path.startswith("/v2/") and action in ("", "ready"):
            _check_method(scope, "GET", "HEAD")
            if action:
                return self._readiness()
            return _Answer(inference_protocol.model_metadata(served.name, version))
        raise _unknown_path(scope["path"])

    def _answer_server(self, path: str) -> _Answer:
        if path in ("/health", "/v2/health/live"):
            return _Answer(b"ok\n", _TEXT)
        if path in ("/ready", "/v2/health/ready"):
            return self._readiness()
        if path == "/metrics":
            return _Answer(self._metrics.text(datetime.now(UTC).timestamp()).encode(), _METRICS)
        if path == "/v2":
            return _Answer(inference_protocol.server_metadata())
        if path.startswith(("/models/", "/v2/models/")):
            raise BodyError(f"no model has this name; the names are {', '.join(self._models)}", 404)
        raise _unknown_path(path)

    def _readiness(self) -> _Answer:
        if self.stopping():
            return _Answer(b"stopping\n", _TEXT, 503)
        return _Answer(b"ready\n", _TEXT)

    async def _score(self, served: Served, scope: Message, receive: Receive) -> _Answer:
        content_type, body = await self._body(scope, receive)
        form = format_of(content_type)
        version = served.version
        rows = form.read(body, self._limits.rows)
        scores = await self._scores(served, version.model, rows)
        headers = (b"x-model", served.name.encode()), (b"x-model-version", version.text.encode())
        text = form.write(scores, served.name, version.text)
        return _Answer(text, form.type, headers=headers, scored=(served, rows, scores))

    async def _infer(self, served: Served, scope: Message, receive: Receive) -> _Answer:
        if any(name == b"inference-header-content-length" for name, _ in scope["headers"]):
            raise BodyError(
                "Inference-Header-Content-Length: binary tensors are not supported; put the values "
                'of each input into its list "data" (in tritonclient, binary_data=False)',
                415,
            )
        _, body = await self._body(scope, receive)
        version = served.version
        number, rows = inference_protocol.read_request(body, self._limits.rows)
        scores = await self._scores(served, version.model, rows)
        text = inference_protocol.write_response(served.name, version.text, number, scores)
        return _Answer(text, scored=(served, rows, scores))

    async def _scores(self, served: Served, model: Model, rows: Any) -> Scores:
        counts = served.counts
        try:
            encoded = encode(model, rows)
        except (BodyError, RowError):
            raise
        except ValueError as error:
            raise BodyError(str(error)) from error
        check_rows(len(encoded.ids), self._limits.rows)
        if self.is_alone() or (model.program is not None and len(encoded.ids) == 1):
            # Batching would not pay: no other request is in flight, or the program scores the row
            # in one call. The batcher would add two passes of the event loop.
            scores = model.score_encoded(encoded)
        else:
            scores = await self._batcher.score(model, encoded)
        _check_scores(scores)
        counts.count("rows", len(scores))
        counts.observe("score", scores)
        counts.values(encoded.names, encoded.counts)
        return scores

    async def _body(self, scope: Message, receive: Receive) -> tuple[str, bytes]:
        """Return the content type and the body; raise BodyError if the body is too large."""
        limit, headers = self._limits.body_bytes, dict[bytes, bytes](scope["headers"])
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise BodyError("Content-Encoding is not supported; send the body uncompressed", 415)
        size = headers.get(b"content-length", b"0")
        digits = size.lstrip(b"0") or b"0"
        # int() raises ValueError for a text of more than 4300 digits
        if not size.isdigit() or len(digits) > 18 or int(digits) > limit:
            raise self._too_large()
        parts: list[bytes] = []
        num_bytes, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _DisconnectedError
            part, more = message.get("body", b""), message.get("more_body", False)
            parts.append(part)
            num_bytes += len(part)
            if num_bytes > limit:
                raise self._too_large()
        return headers.get(b"content-type", b"").decode("latin-1"), b"".join(parts)

    def _too_large(self) -> BodyError:
        limit = self._limits.body_bytes
        return BodyError(f"the body has more than {limit:,} bytes (--max-body-bytes)", 413)

    def _score_later(self, served: Served, rows: Any, scores: Scores) -> None:
        if len(self._behind) == _MAX_BEHIND:
            served.counts.count("shadow_dropped")
            return
        self._behind.append((served, rows, scores))
        if len(self._behind) == 1:
            asyncio.get_running_loop().call_soon(self._score_shadow)

    def _score_shadow(self) -> None:
        """Compare the shadow model's scores of one queued request with the served scores; schedule
        the next comparison.
        """
        served, rows, scores = self._behind[0]
        try:
            model = self._shadow.version.model if self._shadow else served.version.model
            other = model.score_encoded(encode(model, rows))
            _check_scores(other)
            served.counts.observe("shadow_difference", np.abs(other - scores))
            served.counts.count("shadow_rows", len(scores))
        except Exception:
            served.counts.count("shadow_errors")
            logger.debug("the shadow model failed", exc_info=True)
        self._behind.popleft()
        if self._behind:
            asyncio.get_running_loop().call_soon(self._score_shadow)


def _check_scores(scores: Scores) -> None:
    """Raise RowError for NaN, which JSON cannot express and which would spoil the metrics' sums."""
    if (bad := np.isnan(scores)).any():
        rule = "is the score of this row, because its numbers are too large; send smaller numbers"
        raise RowError(int(bad.argmax()), None, math.nan, rule)


async def _live(receive: Receive, send: Send) -> None:
    """Confirm the start and the end of the server, which some servers, such as Ray Serve, need."""
    for event in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{event}.complete"})


def _check_method(scope: Message, *methods: str) -> None:
    if scope["method"] not in methods:
        text = f"{scope['method']} {scope['path']} is not supported; use {methods[0]}"
        raise BodyError(text, 405)


def _unknown_path(path: str) -> BodyError:
    return BodyError(f"{path[:_MAX_SHOWN]!r} is not a path of this server; use {_ROUTES}", 404)


def _refusal(error: BodyError | RowError) -> _Answer:
    if isinstance(error, BodyError):
        return _Answer(_error(str(error)), status=error.status)
    value = error.value if isinstance(error.value, str) else repr(error.value)
    place = {"row": error.row, "column": error.column, "value": value[:_MAX_SHOWN]}
    return _Answer(_error(str(error), **place), status=400)


def _error(text: str, **place: str | int | None) -> bytes:
    return json.dumps({"error": text, **place}).encode() + b"\n"
