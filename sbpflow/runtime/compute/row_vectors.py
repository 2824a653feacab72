"""Operations on rows, for functions that numba compiles. Requires numba.

LLVM compiles a loop over the columns of a row for many more columns than a usual row has, and then
handles nearly all columns one by one. These operations process 16 columns at a time, the rest with
8 and 4, and only the last 3 or fewer one by one. The arguments ``out`` and ``rows`` are
C-contiguous matrices of the same dtype and width, and results are bit-equal to those of a loop.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.errors import TypingError
from numba.extending import intrinsic

from sbpflow.runtime.compute.compiled import Array, Node

_LANES = (16, 8, 4, 1)
_Combine = Callable[[Node, Sequence[Node]], Node]


@intrinsic
def _copy(_: Node, out: Node, i: Node, rows: Node, j: Node) -> Node:
    _check(out, rows)
    return types.void(out, types.intp, rows, types.intp), _by_lanes(lambda _, v: v[1])


@intrinsic
def _add(_: Node, out: Node, i: Node, rows: Node, j: Node) -> Node:
    _check(out, rows)
    return (
        types.void(out, types.intp, rows, types.intp),
        _by_lanes(lambda builder, v: builder.fadd(v[0], v[1])),
    )


@intrinsic
def _add_two(
    _: Node, out: Node, i: Node, rows: Node, j: Node, adds_j: Node, k: Node, adds_k: Node
) -> Node:
    _check(out, rows)
    kinds = types.void(out, types.intp, rows, types.intp, types.boolean, types.intp, types.boolean)

    def generate(context: Node, builder: Node, signature: Node, values: Node) -> Node:
        target, source = (_Matrix(context, builder, signature.args[n], values[n]) for n in (0, 2))

        def each(column: Node, vector: Node) -> None:
            bits = ir.VectorType(ir.IntType(8 * source.itemsize), vector.count)
            total = ir.Constant(vector, [0.0] * vector.count)
            for row, adds in (values[3:5], values[5:7]):
                # A mask, because the CPU cannot predict a branch.
                mask = _repeated(builder, builder.sext(adds, bits.element), bits)
                value = builder.bitcast(source.load(source.address(row, column, vector)), bits)
                added = builder.bitcast(builder.and_(value, mask), vector)
                total = builder.fadd(total, added)
            target.store(total, target.address(values[1], column, vector))

        target.for_lanes(each)
        return context.get_dummy_value()

    return kinds, generate


@intrinsic
def _add_scaled(_: Node, out: Node, i: Node, rows: Node, j: Node, scale: Node, keep: Node) -> Node:
    _check(out, rows)
    return (
        types.void(out, types.intp, rows, types.intp, out.dtype, out.dtype),
        _by_lanes(lambda builder, v: _fma(builder, v[1], v[2], builder.fmul(v[0], v[3]))),
    )


def _check(out: Node, rows: Node) -> None:
    form = (2, "C", rows.dtype)
    if any((array.ndim, array.layout, array.dtype) != form for array in (out, rows)):
        raise TypingError(
            f"operations on rows need two C-contiguous matrices of the same dtype, got {out} and "
            f"{rows}"
        )


class _Matrix:
    """An argument that is a matrix, in generated code."""

    def __init__(self, context: Node, builder: Node, kind: Node, array: Node) -> None:
        self._context, self._builder, self._kind = context, builder, kind
        self._view = context.make_array(kind)(context, builder, array)
        self.itemsize = context.get_abi_sizeof(context.get_value_type(kind.dtype))

    def address(self, row: Node, column: Node, vector: Node) -> Node:
        """Return a pointer to the ``vector`` that starts at ``column`` of ``row``."""
        pointer = cast(Any, cgutils).get_item_pointer(
            self._context, self._builder, self._kind, self._view, [row, column]
        )
        return self._builder.bitcast(pointer, vector.as_pointer())

    def load(self, pointer: Node) -> Node:
        """Load the vector at ``pointer``, which need not be aligned."""
        value = self._builder.load(pointer)
        value.align = self.itemsize
        return value

    def store(self, value: Node, pointer: Node) -> None:
        """Store a vector at ``pointer``, which need not be aligned."""
        self._builder.store(value, pointer).align = self.itemsize

    def for_lanes(self, each: Callable[[Node, Node], None]) -> None:
        """Generate loops over the columns, with ``each(column, vector)`` as their bodies."""
        tools, builder = cast(Any, cgutils), self._builder
        integer = self._context.get_value_type(types.intp)
        element = self._context.get_value_type(self._kind.dtype)
        width, start = tools.unpack_tuple(builder, self._view.shape)[1], integer(0)
        for lanes in _LANES:
            rest = builder.and_(width, integer(-lanes))
            with tools.for_range_slice(builder, start, rest, integer(lanes), integer) as (k, _):
                each(k, ir.VectorType(element, lanes))
            start = rest


def _by_lanes(combine: _Combine) -> Callable[..., Node]:
    """Return a code generator that sets row i of ``out`` to ``combine(builder, [out, row j of rows,
    *numbers])``, where each value is a vector.
    """

    def generate(context: Node, builder: Node, signature: Node, values: Node) -> Node:
        matrices = [
            _Matrix(context, builder, kind, array)
            for kind, array in zip(signature.args[:4:2], values[:4:2], strict=True)
        ]
        out = matrices[0]

        def each(column: Node, vector: Node) -> None:
            pointers = [
                matrix.address(row, column, vector)
                for matrix, row in zip(matrices, values[1:4:2], strict=True)
            ]
            loaded = [out.load(pointer) for pointer in pointers]
            numbers = [_repeated(builder, number, vector) for number in values[4:]]
            out.store(combine(builder, [*loaded, *numbers]), pointers[0])

        out.for_lanes(each)
        return context.get_dummy_value()

    return generate


def _over_list(*, gathers: bool) -> Callable[..., Node]:
    """Return a code generator for one row of a matrix and a list of rows of another matrix.

    It sets the row to the sum of the rows in the list or, unless it ``gathers``, adds the row to
    each row in the list. If there is a seventh argument, it contains factors of the added values.
    """

    def generate(context: Node, builder: Node, signature: Node, values: Node) -> Node:
        tools, kinds = cast(Any, cgutils), signature.args
        one, listed = (_Matrix(context, builder, kinds[n], values[n]) for n in (0, 2))
        integer = context.get_value_type(types.intp)

        def item(argument: int, n: Node) -> Node:
            kind = kinds[argument]
            view = context.make_array(kind)(context, builder, values[argument])
            return builder.load(tools.get_item_pointer(context, builder, kind, view, [n]))

        def each(column: Node, vector: Node) -> None:
            place = one.address(values[1], column, vector)
            held = tools.alloca_once(builder, vector)  # LLVM keeps it in a register
            zeros = ir.Constant(vector, [0.0] * vector.count)
            builder.store(zeros if gathers else one.load(place), held)
            with tools.for_range_slice(builder, *values[4:6], integer(1), integer) as (n, _):
                row = listed.address(builder.sext(item(3, n), integer), column, vector)
                total, added = builder.load(held), listed.load(row)
                if not gathers:
                    total, added = added, total
                if len(kinds) == 6:
                    total = builder.fadd(total, added)
                else:
                    total = _fma(builder, added, _repeated(builder, item(6, n), vector), total)
                if gathers:
                    builder.store(total, held)
                else:
                    listed.store(total, row)
            if gathers:
                one.store(builder.load(held), place)

        one.for_lanes(each)
        return context.get_dummy_value()

    return generate


def _on_list(*, gathers: bool) -> tuple[Node, Node]:
    """Return the intrinsic of ``_over_list``, and the one with factors."""

    @intrinsic
    def plain(_: Node, one: Node, i: Node, listed: Node, at: Node, begin: Node, end: Node) -> Node:
        _check(one, listed)
        kinds = types.void(one, types.intp, listed, at, types.intp, types.intp)
        return kinds, _over_list(gathers=gathers)

    @intrinsic
    def scaled(
        _: Node, one: Node, i: Node, listed: Node, at: Node, begin: Node, end: Node, scales: Node
    ) -> Node:
        _check(one, listed)
        kinds = types.void(one, types.intp, listed, at, types.intp, types.intp, scales)
        return kinds, _over_list(gathers=gathers)

    return plain, scaled


def _fma(builder: Node, a: Node, b: Node, c: Node) -> Node:
    name = f"llvm.fma.v{a.type.count}{a.type.element.intrinsic_name}"
    kind = ir.FunctionType(a.type, [a.type] * 3)
    return builder.call(
        cast(Any, cgutils).get_or_insert_function(builder.module, kind, name), [a, b, c]
    )


def _repeated(builder: Node, number: Node, vector: Node) -> Node:
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), number, ir.IntType(32)(0))
    order = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count)
    return builder.shuffle_vector(one, one, order)


copy_row = cast("Callable[[Array, Any, Array, Any], None]", _copy)
"""``copy_row(out, i, rows, j)`` computes ``out[i] = rows[j]``."""
add_row = cast("Callable[[Array, Any, Array, Any], None]", _add)
"""``add_row(out, i, rows, j)`` computes ``out[i] += rows[j]``."""
add_two_rows = cast("Callable[[Array, Any, Array, Any, bool, Any, bool], None]", _add_two)
"""``add_two_rows(out, i, rows, j, adds_j, k, adds_k)`` sets ``out[i]`` to the sum of ``rows[j]`` if
``adds_j`` and ``rows[k]`` if ``adds_k``, added in order to 0. Both rows must exist.
"""
add_scaled_row = cast("Callable[[Array, Any, Array, Any, float, float], None]", _add_scaled)
"""``add_scaled_row(out, i, rows, j, scale, keep)`` computes ``out[i] = rows[j] * scale + out[i] *
keep``, rounding the first product and the sum together (fma).
"""
_sum, _sum_scaled = _on_list(gathers=True)
_add_to, _add_scaled_to = _on_list(gathers=False)
sum_of_rows = cast("Callable[[Array, Any, Array, Array, Any, Any], None]", _sum)
"""``sum_of_rows(out, i, rows, at, begin, end)`` sets ``out[i]`` to the sum of ``rows[at[n]]`` for
n in ``range(begin, end)``, added in order to 0. ``at`` is int32 or int64.
"""
sum_of_scaled_rows = cast(
    "Callable[[Array, Any, Array, Array, Any, Any, Array], None]", _sum_scaled
)
"""``sum_of_scaled_rows(out, i, rows, at, begin, end, scales)`` is like ``sum_of_rows``, but adds
``rows[at[n]] * scales[n]`` with fma.
"""
add_to_rows = cast("Callable[[Array, Any, Array, Array, Any, Any], None]", _add_to)
"""``add_to_rows(rows, i, out, at, begin, end)`` computes ``out[at[n]] += rows[i]`` for n in
``range(begin, end)``, in order. ``at`` is int32 or int64.
"""
add_scaled_to_rows = cast(
    "Callable[[Array, Any, Array, Array, Any, Any, Array], None]", _add_scaled_to
)
"""``add_scaled_to_rows(rows, i, out, at, begin, end, scales)`` is like ``add_to_rows``, but adds
``rows[i] * scales[n]`` with fma.
"""
