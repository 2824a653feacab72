"""Scores a few rows in one compiled call. After a pause, when the CPU's caches are cold, the dozens
of torch calls for a few rows take several times as long as the arithmetic. Only ``encoder_loops``
imports this module, which needs numba.

The dense part is compiled into a program over one array of float32 values per row. Models with
operations that are not in ``_COMPILERS``, and larger requests, are scored with torch.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from sbpflow.runtime.compute.compiled import Array, compiled, compiled_fast
from sbpflow.serving.lookups import Gather, Segment

LINEAR, RELU, SIGMOID, ADD, SUB, MUL, SUM, MEAN, COPY = range(9)
# For more multiplications than this, torch is faster, although its calls take longer.
_MOST_PRODUCTS = 16_000_000
_BLOCK_ROWS = 64  # rows for which all steps run before the next rows, while they are cached
_Span = tuple[int, int]  # the columns of a value: start and size
_Step = tuple[int, int, int, int, int, int, int]


@compiled_fast  # may reorder the terms of a sum, which allows vector instructions
def multiply(weights: Array, bias: Array, x: Array, a: int, start: int) -> None:
    """Multiply ``weights`` [outputs, inputs] by a vector in each row of ``x`` [n, values], and add
    ``bias`` [outputs].

    The vector starts at column ``a``. The result is written to the same row, starting at column
    ``start``. The loop handles four rows and four outputs at a time, so that it uses each value
    that it reads for four products.
    """
    zero = np.float32(0)
    outputs, inputs = weights.shape
    blocks = outputs // 4 * 4
    fours = x.shape[0] // 4 * 4
    for k in range(0, blocks, 4):
        w0, w1, w2, w3 = weights[k], weights[k + 1], weights[k + 2], weights[k + 3]
        added = bias[k : k + 4]
        for row in range(0, fours, 4):
            x0, x1 = x[row, a : a + inputs], x[row + 1, a : a + inputs]
            x2, x3 = x[row + 2, a : a + inputs], x[row + 3, a : a + inputs]
            s00, s01, s02, s03 = zero, zero, zero, zero
            s10, s11, s12, s13 = zero, zero, zero, zero
            s20, s21, s22, s23 = zero, zero, zero, zero
            s30, s31, s32, s33 = zero, zero, zero, zero
            for term in range(inputs):
                v0, v1, v2, v3 = x0[term], x1[term], x2[term], x3[term]
                u = w0[term]
                s00, s10, s20, s30 = s00 + u * v0, s10 + u * v1, s20 + u * v2, s30 + u * v3
                u = w1[term]
                s01, s11, s21, s31 = s01 + u * v0, s11 + u * v1, s21 + u * v2, s31 + u * v3
                u = w2[term]
                s02, s12, s22, s32 = s02 + u * v0, s12 + u * v1, s22 + u * v2, s32 + u * v3
                u = w3[term]
                s03, s13, s23, s33 = s03 + u * v0, s13 + u * v1, s23 + u * v2, s33 + u * v3
            at, (b0, b1, b2, b3) = start + k, (added[0], added[1], added[2], added[3])
            out = x[row : row + 4, at : at + 4]
            out[0, 0], out[0, 1], out[0, 2], out[0, 3] = s00 + b0, s01 + b1, s02 + b2, s03 + b3
            out[1, 0], out[1, 1], out[1, 2], out[1, 3] = s10 + b0, s11 + b1, s12 + b2, s13 + b3
            out[2, 0], out[2, 1], out[2, 2], out[2, 3] = s20 + b0, s21 + b1, s22 + b2, s23 + b3
            out[3, 0], out[3, 1], out[3, 2], out[3, 3] = s30 + b0, s31 + b1, s32 + b2, s33 + b3
    for row in range(x.shape[0]):
        values = x[row, a : a + inputs]
        for k in range(blocks if row < fours else 0, outputs):
            own, total = weights[k], zero
            for term in range(inputs):
                total += own[term] * values[term]
            x[row, start + k] = total + bias[k]


@compiled
def _run_step(operation: int, x: Array, start: int, a: int, b: int, size: int, terms: int) -> None:
    """Run one step, other than LINEAR, for all rows of ``x``."""
    out, left, right = x[:, start : start + size], x[:, a : a + size], x[:, b : b + size]
    if operation == RELU:
        for row in range(x.shape[0]):
            for k in range(size):  # unlike np.maximum, this needs no memory for the result
                out[row, k] = max(left[row, k], np.float32(0))
    elif operation == SIGMOID:
        out[:] = np.float32(1) / (np.float32(1) + np.exp(-left))
    elif operation == COPY:
        out[:] = left
    elif operation == ADD:
        out[:] = left + right
    elif operation == SUB:
        out[:] = left - right
    elif operation == MUL:
        out[:] = left * right
    elif operation == SUM or operation == MEAN:
        out[:] = left
        for term in range(1, terms):
            out += x[:, a + term * size : a + (term + 1) * size]
        if operation == MEAN:
            out /= np.float32(terms)
    else:
        raise ValueError("an operation must be one of the constants of this module")


@compiled
def probabilities(logits: Array, out: Array) -> None:
    """Write the probabilities (float32 [n]) of ``logits`` to ``out``."""
    for i in range(logits.size):
        out[i] = 1.0 / (1.0 + np.exp(min(-np.float64(logits[i]), 700.0)))


@compiled
def run_steps(steps: Array, weights: Array, x: Array) -> None:
    """Run ``steps`` [n, 7] for each row of ``x`` [n, values]. A step is (operation, output, a, b,
    size, terms, bias). Output, a, and b are columns of ``x``, except that b of LINEAR, like bias,
    is a position in ``weights``.
    """
    for first in range(0, x.shape[0], _BLOCK_ROWS):
        rows = x[first : first + _BLOCK_ROWS]
        for number in range(steps.shape[0]):
            operation, start, a, b, size, terms, bias = steps[number]
            if operation == LINEAR:
                added = weights[bias : bias + size] if bias >= 0 else np.zeros(size, np.float32)
                multiply(weights[b : b + size * terms].reshape(size, terms), added, rows, a, start)
            else:
                _run_step(operation, rows, start, a, b, size, terms)


class CompiledModel:
    """A program, made by ``compile_model``, that computes a model's logits for a few rows."""

    def __init__(
        self, spans: Sequence[_Span], dense: _Span, output: int, size: int, steps: Array,
        names: Sequence[str], weights: Array,
    ) -> None:  # fmt: skip
        self._spans, self._dense, self._output, self._size = spans, dense, output, size
        self._steps, self._names, self._weights = steps, names, weights
        products = int((steps[:, 4] * steps[:, 5])[steps[:, 0] == LINEAR].sum())
        self.max_rows = max(_MOST_PRODUCTS // max(products, 1), 1)
        """The largest number of rows to score with the program; for more rows, torch is faster."""

    def with_weights(self, weights: Mapping[str, Any]) -> "CompiledModel":
        """Return the same program with other weights, given as tensors by name."""
        flat = _flat([weights[name] for name in self._names])
        rest = self._output, self._size, self._steps, self._names
        return CompiledModel(self._spans, self._dense, *rest, flat)

    def scores(
        self, gathers: Sequence[Gather], stores: Sequence[Any], ids: Array, dense: Array
    ) -> Array | None:
        """Return the probabilities (float32 [n]) of rows with ``ids`` [n, columns] and ``dense``
        [n, values].

        Returns None if an id is not a row of its table, or if the store must convert its rows.
        """
        x = np.empty((len(ids), self._size), dtype=np.float32)
        for gather, store, (start, _) in zip(gathers, stores, self._spans, strict=True):
            if not gather.read(store, ids, x, start):
                return None
        start, size = self._dense
        x[:, start : start + size] = dense
        run_steps(self._steps, self._weights, x)
        scores = np.empty(len(ids), dtype=np.float32)
        probabilities(x[:, self._output], scores)
        return scores


class _Unsupported(Exception):
    """Raised if a program cannot express a model."""


class _Program:
    """A program under construction: the steps so far, and the place of each value."""

    def __init__(self, weights: Mapping[str, tuple[int, Sequence[int]]]) -> None:
        self.size, self.steps = 0, list[_Step]()
        self.weights, self.values = weights, dict[str, _Span]()

    def take(self, size: int) -> _Span:
        self.size += size
        return self.size - size, size

    def add(
        self, operation: int, out: _Span, a: int, b: int = 0, terms: int = 0, bias: int = -1
    ) -> _Span:
        self.steps.append((operation, out[0], a, b, out[1], terms, bias))
        return out

    def value(self, argument: Any) -> _Span:
        """Return the place of an argument that depends on the row."""
        if not isinstance(argument, dict) or argument.get("ref") not in self.values:
            raise _Unsupported
        return self.values[argument["ref"]]

    def weight(self, argument: Any) -> tuple[int, Sequence[int]]:
        if not isinstance(argument, dict) or argument.get("ref") not in self.weights:
            raise _Unsupported
        return self.weights[argument["ref"]]

    def concatenated(self, parts: Sequence[_Span]) -> _Span:
        if all(a + size == b for (a, size), (b, _) in pairwise(parts)):
            return parts[0][0], sum(size for _, size in parts)
        out = self.take(sum(size for _, size in parts))
        ends = accumulate(size for _, size in parts)
        for (start, size), end in zip(parts, ends, strict=True):
            self.add(COPY, (out[0] + end - size, size), start)
        return out


def _linear(program: _Program, args: Sequence[Any]) -> _Span:
    (start, size), (at, shape) = program.value(args[0]), program.weight(args[1])
    if len(shape) != 2 or shape[1] != size:
        raise _Unsupported
    bias = program.weight(args[2])[0] if len(args) > 2 else -1
    return program.add(LINEAR, program.take(shape[0]), start, at, size, bias)


def _unary(operation: int) -> "_Compiler":
    def compile_step(program: _Program, args: Sequence[Any]) -> _Span:
        (value,) = args
        start, size = program.value(value)
        return program.add(operation, program.take(size), start)

    return compile_step


def _binary(operation: int) -> "_Compiler":
    def compile_step(program: _Program, args: Sequence[Any]) -> _Span:
        left, right = map(program.value, args)
        if left[1] != right[1]:
            raise _Unsupported
        return program.add(operation, program.take(left[1]), left[0], right[0])

    return compile_step


def _cat(program: _Program, args: Sequence[Any]) -> _Span:
    parts, dim = args
    if dim not in (1, -1):
        raise _Unsupported
    return program.concatenated([program.value(part) for part in parts])


def _dropout(program: _Program, args: Sequence[Any]) -> _Span:
    value, _, train = args
    if train:
        raise _Unsupported
    return program.value(value)


_Compiler = Callable[[_Program, Sequence[Any]], _Span]
_COMPILERS: dict[str, _Compiler] = {
    "aten.linear.default": _linear,
    "aten.relu.default": _unary(RELU),
    "aten.sigmoid.default": _unary(SIGMOID),
    "aten.add.Tensor": _binary(ADD),
    "aten.sub.Tensor": _binary(SUB),
    "aten.mul.Tensor": _binary(MUL),
    "aten.cat.default": _cat,
    "aten.dropout.default": _dropout,
}


def compile_model(
    content: Mapping[str, Any],
    segments: Mapping[str, Sequence[Segment]],
    gathers: Sequence[Gather],
    dims: Sequence[int],
    weights: Mapping[str, Any],
) -> CompiledModel | None:
    """Return the program of a model of float32 values, or None if a program cannot express the
    model.

    ``dims`` are the widths of the rows in the stores.
    """
    graph = content["graph"]
    if content["dtype"] != "float32" or any(gather.ragged for gather in gathers):
        return None
    names = sorted(set(graph["weights"].values()))
    sizes = [weights[name].numel() for name in names]
    starts = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
    places = {
        name: (start, tuple(weights[name].shape)) for name, start in zip(names, starts, strict=True)
    }
    program = _Program({node: places[name] for node, name in graph["weights"].items()})
    spans = [
        program.take(len(gather.columns) * dim) for gather, dim in zip(gathers, dims, strict=True)
    ]
    dense = program.take(content["num_dense"])
    inputs = {"dense": dense} | {
        "vectors." + output["name"]: _output(
            program, segments[output["name"]], spans, dims, sums=output["sums"]
        )
        for output in content["outputs"]
    }
    program.values = {node: inputs[name] for name, node in graph["inputs"].items()}
    try:
        for operation, out, args, kwargs in graph["nodes"]:
            if kwargs or operation not in _COMPILERS:
                raise _Unsupported
            program.values[out] = _COMPILERS[operation](program, args)
        start, size = program.value({"ref": graph["output"]})
    except _Unsupported:
        return None
    if size != 1:
        return None
    steps = np.array(program.steps, dtype=np.int64)
    flat = _flat([weights[name] for name in names])
    return CompiledModel(spans, dense, start, program.size, steps, names, flat)


def _output(
    program: _Program, segments: Sequence[Segment], spans: Sequence[_Span], dims: Sequence[int],
    *, sums: bool,
) -> _Span:  # fmt: skip
    """Return the place of an output's vectors after pooling and their sum or concatenation."""
    parts: list[_Span] = []
    for segment in segments:
        dim, count = dims[segment.store], segment.stop - segment.start
        start = spans[segment.store][0] + segment.start * dim
        if segment.pools or sums:
            mean = segment.pools and segment.lookup.averages
            operation = MEAN if mean else SUM
            parts.append(program.add(operation, program.take(dim), start, terms=count))
        else:
            parts.append((start, count * dim))
    joined = program.concatenated(parts)
    if len(parts) == 1 or not sums:
        return joined
    return program.add(SUM, program.take(parts[0][1]), joined[0], terms=len(parts))


def _flat(weights: Sequence[Any]) -> Array:
    if not weights:
        return np.empty(0, dtype=np.float32)
    return np.concatenate([weight.numpy().reshape(-1) for weight in weights]).astype(np.float32)
