"""Runs ops on global tensors: chooses a signature, converts operands, and runs a kernel on the
parts.
"""

import string
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from operator import index
from typing import SupportsIndex, cast

import torch
from torch import Tensor

from sbpflow.errors import SbpError
from sbpflow.sbp.sbp import NdSbp, parse_nd_sbp
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.tensor.signature import Choice, Operand, Rule, deduce

Out = NdSbp | str | None


def apply(
    op_rule: Rule,
    operands: Sequence[GlobalTensor],
    shape: tuple[int, ...],
    kernel: Callable[[Choice, list[Tensor]], Tensor],
    *,
    out: Out = None,
    id: str | None = None,
    dtype: torch.dtype | None = None,
    refuses: Callable[[Choice, list[Tensor]], str] | None = None,
) -> GlobalTensor:
    """Convert the operands to the layouts of the cheapest signature, and run ``kernel`` on their
    parts.

    ``kernel(choice, parts)`` runs only on ranks of the placement. ``shape`` and ``dtype`` describe
    the full output; by default, ``dtype`` is that of the first operand. ``refuses(choice, parts)``
    returns a message if this rank has invalid values, and "" otherwise. The message is raised as
    SbpError on this rank and, in checked mode, on all ranks.
    """
    wanted = parse_nd_sbp(out) if isinstance(out, str) else out
    choice = choose(op_rule, operands, wanted, dtype)
    name = id or op_rule.op
    boxed = [
        operand if operand.layout is layout else operand.to(layout, id=f"{name}.{n}")
        for n, (operand, layout) in enumerate(zip(operands, choice.inputs, strict=True))
    ]
    boxing = operands[0].boxing
    parts = [operand.part for operand in boxed]
    inside = boxing.world.rank in choice.output.placement
    if refuses is not None:
        refused = refuses(choice, parts) if inside else ""
        boxing.world.check(name, op_rule.op, refused)
        if refused:
            raise SbpError(refused)
    expected = dtype or operands[0].part.dtype
    part = kernel(choice, parts) if inside else _absent(parts, expected)
    if part.dtype != expected:
        raise SbpError(
            f"{op_rule.op}: the function returned {part.dtype}, but an op must keep its operands' "
            f"dtype {expected}; use ops.cast to change the dtype"
        )
    return GlobalTensor(part, choice.output, shape, boxing)


def choose(
    op_rule: Rule,
    operands: Sequence[GlobalTensor],
    out: NdSbp | None = None,
    dtype: torch.dtype | None = None,
) -> Choice:
    """Return the signature that ``apply`` would choose."""
    facts = tuple([Operand(x.layout, x.shape, x.part.dtype) for x in operands])
    return deduce(op_rule, facts, out, dtype)


def _absent(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return an empty tensor that is connected to the inputs' autograd graph, for a rank outside
    the placement.
    """
    floating = [part for part in parts if part.is_floating_point()] or parts
    return torch.cat(floating).to(dtype)


@lru_cache(maxsize=1024)
def letters_for(count: int, taken: str = "") -> tuple[str, ...]:
    """Return ``count`` dim names other than B, P and the letters in ``taken``."""
    free = [letter for letter in string.ascii_letters if letter not in (*taken, "B", "P")]
    # A concatenation of many tensors may need more names than there are letters.
    free += [f"d{number}" for number in range(len(free), count)]
    return tuple(free[:count])


def check_tensors(op: str, *operands: object) -> None:
    """Raise SbpError, with advice, unless all operands are global tensors."""
    for number, x in enumerate(operands):
        if not isinstance(x, GlobalTensor):
            check_tensor(op, f"operand {number}", x)


def check_tensor(op: str, name: str, x: object) -> None:
    """Raise SbpError, with advice, unless ``x`` is a global tensor."""
    if isinstance(x, GlobalTensor):
        return
    fix = "pass a tensor from GlobalTensor.from_full, GlobalTensor.from_local, or an op"
    kind = "None" if x is None else f"a {type(x).__name__}"
    if isinstance(x, Tensor):
        kind = f"a plain tensor of shape {list(x.shape)}"
        fix = "make a global tensor first: GlobalTensor.from_full(x, layout, boxing)"
    elif isinstance(x, int | float):
        kind = f"the number {x}"
        fix = (
            f"to multiply, use ops.scale(x, {x}); otherwise pass "
            f"GlobalTensor.from_full(torch.tensor({x}), layout, boxing)"
        )
    raise SbpError(f"{op}: {name} is {kind}, not a GlobalTensor; {fix}")


def check_list(op: str, tensors: object, rest: str) -> None:
    """Raise SbpError unless ``tensors`` is a list or tuple of one or more global tensors."""
    if not isinstance(tensors, list | tuple):
        kind = repr(tensors) if isinstance(tensors, GlobalTensor) else f"a {type(tensors).__name__}"
        raise SbpError(f"{op} needs a list of tensors, got {kind}; write {op}([a, b], {rest})")
    if not tensors:
        raise SbpError(f"{op}: the list of tensors is empty; pass one tensor or more")
    check_tensors(op, *cast("Sequence[object]", tensors))


def checked_dim(x: GlobalTensor, dim: int, op: str) -> int:
    """Return ``dim``, counted from the front. Raise SbpError, naming ``op``, if ``dim`` is
    invalid.
    """
    check_tensors(op, x)
    try:
        dim = index(dim)
    except TypeError as error:
        raise SbpError(f"{op}: dim must be an integer, such as 0 or -1, got {dim!r}") from error
    if not -x.ndim <= dim < x.ndim:
        legal = f"use 0..{x.ndim - 1}" if x.ndim > 1 else "use 0" if x.ndim else "it has no dims"
        raise SbpError(f"{op}: dim {dim} is out of range for {x!r}; {legal}")
    return dim % x.ndim


def checked_dims(x: GlobalTensor, dims: int | Sequence[int] | None, op: str) -> list[int]:
    """Return ``dims``, counted from the front and sorted, or all dims if ``dims`` is None.

    Raise SbpError for a dim that does not exist or is repeated.
    """
    check_tensors(op, x)
    listed = range(x.ndim) if dims is None else whole_numbers(op, "dims", dims)
    chosen = sorted(checked_dim(x, dim, op) for dim in listed)
    if repeated := [a for a, b in pairwise(chosen) if a == b]:
        raise SbpError(
            f"{op}: dims {list(listed)} contain dim {repeated[0]} twice; list each dim once"
        )
    return chosen


def whole_numbers(op: str, name: str, value: object) -> tuple[int, ...]:
    """Return an integer, or a sequence of integers, as a tuple. Raise SbpError for other values."""
    try:
        numbers = [value] if isinstance(value, int) else cast("Iterable[SupportsIndex]", value)
        return tuple(map(index, numbers))
    except TypeError as error:
        raise SbpError(
            f"{op}: {name} must be an integer or a sequence of integers, such as 0 or (0, 1), got "
            f"{value!r}"
        ) from error


def check_ndim(op: str, name: str, x: GlobalTensor, ndim: int, at_least: bool = False) -> None:
    """Raise SbpError unless ``x`` has ``ndim`` dims or, with ``at_least``, at least ``ndim``
    dims.
    """
    if not isinstance(x, GlobalTensor):  # pyright: ignore[reportUnnecessaryIsInstance] -- users
        check_tensor(op, name, x)
    actual = len(x.shape)
    if actual != ndim and not (at_least and actual > ndim):
        dims = "1 dim" if actual == 1 else f"{actual} dims"
        more = " or more" if at_least else ""
        raise SbpError(f"{op}: {name} has {dims}, but needs {ndim}{more}: {x!r}; use ops.reshape")


def check_same_dtype(op: str, operands: Sequence[GlobalTensor]) -> None:
    """Raise SbpError unless all operands have the same dtype; dtypes are not promoted
    implicitly.
    """
    check_tensors(op, *operands)
    first, *rest = [x.part.dtype for x in operands]
    if other := next((dtype for dtype in rest if dtype != first), None):
        dtypes = ", ".join(str(x.dtype).removeprefix("torch.") for x in operands)
        raise SbpError(
            f"{op}: operands have dtypes {dtypes}, but must all have the same dtype; use "
            f"ops.cast(x, {torch.promote_types(first, other)})"
        )


def check_floating(op: str, x: GlobalTensor) -> None:
    """Raise SbpError unless ``x`` has a floating dtype."""
    check_tensors(op, x)
    if not x.dtype.is_floating_point:
        raise SbpError(
            f"{op}: {x!r} does not have a floating dtype; use ops.cast(x, torch.float32)"
        )


def check_numbers(op: str, x: GlobalTensor) -> None:
    """Raise SbpError if ``x`` is bool, for which torch has no products."""
    if x.dtype == torch.bool:
        raise SbpError(f"{op}: {x!r} is not numeric; use ops.cast(x, torch.float32)")
