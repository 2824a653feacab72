"""Reads and writes the JSON of the Open Inference Protocol, version 2, as defined by KServe and
Triton.

Each input is a column of the training data, with shape [rows] or [rows, 1]; its datatype is BYTES
for text cells, or a numeric type. The output ``score`` [rows] is FP32. The binary tensor extension
is not supported.
"""

import json
import math
import sys
from typing import Any, cast

from sbpflow.runtime.compute.versions import SBPFLOW_VERSION
from sbpflow.serving.bodies import BodyError, Scores, check_rows, read_json_body
from sbpflow.serving.cells import FLOAT32_MAX
from sbpflow.serving.columns import RowError, brief
from sbpflow.serving.follower import ModelVersion

_KINDS: dict[str, tuple[type, ...]] = {
    "BYTES": (str,),
    **{f"FP{bits}": (float, int) for bits in (16, 32, 64)},
    **{f"{sign}INT{bits}": (int,) for sign in ("", "U") for bits in (8, 16, 32, 64)},
}
_MOST = float(f"{FLOAT32_MAX:.7e}")  # JSON has the largest float32 rounded up to eight digits
_RANGES: dict[object, tuple[float, float]] = {
    **{f"INT{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
    "FP16": (-65504.0, 65504.0),
    "FP32": (-_MOST, _MOST),
    "FP64": (-sys.float_info.max, sys.float_info.max),
}
_EXAMPLE = '{"name": "C1", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]}'


def server_metadata() -> bytes:
    """Return the body of the response to ``/v2``."""
    return _body({"name": "sbpflow", "version": SBPFLOW_VERSION, "extensions": []})


def model_metadata(name: str, version: ModelVersion) -> bytes:
    """Return the body of the response to ``/v2/models/NAME``."""
    inputs = [
        {"name": column.name, "datatype": "BYTES", "shape": [-1]}
        for column in version.model.columns
        if column.required
    ]
    output = {"name": "score", "datatype": "FP32", "shape": [-1]}
    return _body(
        {
            "name": name,
            "versions": [version.text],
            "platform": "sbpflow",
            "inputs": inputs,
            "outputs": [output],
        }
    )


def read_request(body: bytes, max_rows: int) -> tuple[str | None, dict[str, list[Any]]]:
    """Return the ``id`` and the columns of a request. Raises BodyError if the body is not a valid
    request, and RowError for a value that does not fit its shape or datatype.
    """
    request = read_json_body(body)
    if not isinstance(request, dict) or not isinstance(request.get("inputs"), list):
        raise BodyError(f'the body has no list "inputs"; use {{"inputs": [{_EXAMPLE}, ..]}}')
    request = cast("dict[str, Any]", request)
    columns: dict[str, list[Any]] = {}
    for number, tensor in enumerate(request["inputs"]):
        name, values = _column(tensor, f"inputs[{number}]")
        check_rows(len(values), max_rows)
        if name in columns:
            raise BodyError(
                f"inputs[{number}]: the name {name!r} is used twice; use one input per column"
            )
        columns[name] = values
    number = request.get("id")
    if number is not None and not isinstance(number, str):
        raise BodyError(f"id must be a string, got {brief(number)}")
    outputs = request.get("outputs") or [{"name": "score"}]
    if not isinstance(outputs, list) or any(
        not isinstance(output, dict) or output.get("name") != "score" for output in outputs
    ):
        raise BodyError('outputs may list only "score", the only output of the model')
    return number, columns


def _column(tensor: object, where: str) -> tuple[str, list[Any]]:
    if not isinstance(tensor, dict):
        raise BodyError(f"{where} is not an object; use {_EXAMPLE}")
    tensor = cast("dict[str, Any]", tensor)
    name, shape, values = tensor.get("name"), tensor.get("shape"), tensor.get("data")
    if not isinstance(name, str) or not isinstance(values, list):
        raise BodyError(f'{where} needs a string "name" and a list "data"; use {_EXAMPLE}')
    values = cast("list[Any]", values)
    if shape == [len(values), 1] and any(isinstance(value, list) for value in values):
        for row, value in enumerate(values):
            if not isinstance(value, list) or len(cast("list[Any]", value)) != 1:
                rule = f"does not fit the shape {shape}; use a list of one value"
                raise RowError(row, name, value, rule)
        values = [value[0] for value in values]
    if shape not in ([len(values)], [len(values), 1]):
        raise BodyError(
            f"{where}: shape {brief(shape)} does not fit {len(values)} values of {name!r}; use "
            f"[{len(values)}] or [{len(values)}, 1]"
        )
    datatype = tensor.get("datatype")
    kinds = _KINDS.get(datatype) if isinstance(datatype, str) else None
    if kinds is None:
        raise BodyError(
            f"{where}: datatype {brief(datatype)} is not supported; use one of {', '.join(_KINDS)}"
        )
    low, high = _RANGES.get(datatype, (-math.inf, math.inf))
    for row, value in enumerate(values):
        if value is None or (type(value) in kinds and (kinds == (str,) or low <= value <= high)):
            continue
        raise RowError(row, name, value, f"is not {datatype}; use null for a missing value")
    return name, values


def write_response(name: str, version: str, number: str | None, scores: Scores) -> bytes:
    """Return the body of an inference response."""
    output = {"name": "score", "datatype": "FP32", "shape": [len(scores)], "data": scores.tolist()}
    response: dict[str, Any] = {"model_name": name, "model_version": version, "outputs": [output]}
    return _body(response if number is None else {"id": number, **response})


def _body(value: object) -> bytes:
    return json.dumps(value).encode()
