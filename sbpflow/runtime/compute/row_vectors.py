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


def _by_lanes(combine: _Combine) -> Callable[..., Node]:
    """Return a code generator that sets row i of ``out`` to ``combine(builder, [out, row j of rows,
    *numbers])``, where each value is a vector.
    """

    def generate(context: Node, builder: Node, signature: Node, values: Node) -> Node:
        tools, integer = cast(Any, cgutils), context.get_value_type(types.intp)
        element = context.get_value_type(signature.args[0].dtype)
        views = [
            (kind, context.make_array(kind)(context, builder, array))
            for kind, array in zip(signature.args[:4:2], values[:4:2], strict=True)
        ]
        width, start = tools.unpack_tuple(builder, views[0][1].shape)[1], integer(0)
        for lanes in _LANES:
            vector = ir.VectorType(element, lanes)
            rest = builder.and_(width, integer(-lanes))
            with tools.for_range_slice(builder, start, rest, integer(lanes), integer) as (k, _):
                pointers = [
                    builder.bitcast(
                        tools.get_item_pointer(context, builder, kind, view, [row, k]),
                        vector.as_pointer(),
                    )
                    for (kind, view), row in zip(views, values[1:4:2], strict=True)
                ]
                loaded = [builder.load(pointer) for pointer in pointers]
                for value in loaded:
                    value.align = context.get_abi_sizeof(element)
                numbers = [_repeated(builder, number, vector) for number in values[4:]]
                store = builder.store(combine(builder, [*loaded, *numbers]), pointers[0])
                store.align = context.get_abi_sizeof(element)
            start = rest
        return context.get_dummy_value()

    return generate


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
add_scaled_row = cast("Callable[[Array, Any, Array, Any, float, float], None]", _add_scaled)
"""``add_scaled_row(out, i, rows, j, scale, keep)`` computes ``out[i] = rows[j] * scale + out[i] *
keep``, rounding the first product and the sum together (fma).
"""
