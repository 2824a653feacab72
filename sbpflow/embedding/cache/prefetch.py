"""Provides a prefetch instruction for numba loops; imported only if numba is installed."""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

DISTANCE = 48  # loops prefetch a row this many rows before they use it


def _prefetch(typing: Any, array: Any, row: Any) -> Any:  # noqa: ANN401 (types of numba)
    """Load the cache line of ``array[row, 0]`` without waiting for it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ANN401
        value = context.make_array(signature.args[0])(context, builder, args[0])
        indices = [args[1], context.get_constant(types.intp, 0)]
        pointer = cgutils.get_item_pointer(context, builder, signature.args[0], value, indices)
        number, address = ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [address, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        for_writing_often = [ir.Constant(number, flag) for flag in (1, 3, 1)]
        builder.call(function, [builder.bitcast(pointer, address), *for_writing_often])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


prefetch: Any = intrinsic(_prefetch)
