"""How every op on global tensors runs: choose a signature, box the operands, run a kernel."""

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
from sbpflow.tensor.signature import Choice, Operand, Rule, deduce, make_rule

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
    """Run ``kernel`` on parts boxed to the chosen signature.

    ``kernel(choice, parts)`` runs only inside the placement. ``shape`` is that of the full output,
    ``dtype`` its dtype, that of the first operand by default. ``refuses(choice, parts)`` says what
    is wrong with the values on this rank, "" if nothing; then SbpError is raised: here, and in the
    checked mode on all ranks.
    """
    wanted = parse_nd_sbp(out) if isinstance(out, str) else out
    choice = choose(op_rule, operands, wanted, dtype)
    name = id or op_rule.op
    boxed = [
        operand.to(layout, id=f"{name}.{n}")
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
    expected = dtype or operands[0].dtype
    part = kernel(choice, parts) if inside else _absent(parts, expected)
    if part.dtype != expected:
        raise SbpError(
            f"{op_rule.op}: the function turned {expected} into {part.dtype}; an op keeps the "
            "dtype of its operands, ops.cast changes it"
        )
    return GlobalTensor(part, choice.output, shape, boxing)


def choose(
    op_rule: Rule,
    operands: Sequence[GlobalTensor],
    out: NdSbp | None = None,
    dtype: torch.dtype | None = None,
) -> Choice:
    """The signature that ``apply`` would take."""
    described = tuple(Operand(x.layout, x.shape, x.dtype) for x in operands)
    backend = operands[0].boxing.world.backend_of(operands[0].layout)
    return deduce(op_rule, described, backend, out, dtype)


def _absent(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The empty part of a rank outside the placement, tied to its inputs for the backward."""
    floating = [part for part in parts if part.is_floating_point()] or parts
    return torch.cat(floating).to(dtype)


@lru_cache(maxsize=1024)
def letters_for(count: int, taken: str = "") -> tuple[str, ...]:
    """Names for ``count`` dims, none of them in ``taken`` or mistaken for B or P."""
    free = [letter for letter in string.ascii_letters if letter not in (*taken, "B", "P")]
    free += [f"d{number}" for number in range(len(free), count)]  # a concat of many
    return tuple(free[:count])


@lru_cache(maxsize=4096)
def cached_rule(
    op: str,
    inputs: tuple[tuple[str, ...], ...],
    output: tuple[str, ...],
    signatures: str,
    scales: tuple[tuple[str, int, int], ...] = (),
) -> Rule:
    """``make_rule``, remembered: deduction is keyed by the rule."""
    return make_rule(op, inputs, output, signatures, scales)


def check_tensors(op: str, *operands: object) -> None:
    """Raise SbpError that says what to write unless all operands are global tensors."""
    for number, x in enumerate(operands):
        check_tensor(op, f"operand {number}", x)


def check_tensor(op: str, what: str, x: object) -> None:
    """Raise SbpError that says what to write unless ``x`` is a global tensor."""
    if isinstance(x, GlobalTensor):
        return
    instead = "give one made by GlobalTensor.from_full, GlobalTensor.from_local or an op"
    given = "None" if x is None else f"a {type(x).__name__}"
    if isinstance(x, Tensor):
        given = f"a plain tensor of shape {list(x.shape)}"
        instead = "lay it out first: GlobalTensor.from_full(x, layout, boxing)"
    elif isinstance(x, int | float):
        given = f"the number {x}"
        instead = (
            f"ops.scale(x, {x}) multiplies by it; else make it a tensor: "
            f"GlobalTensor.from_full(torch.tensor({x}), layout, boxing)"
        )
    raise SbpError(f"{op}: {what} is {given}, not a GlobalTensor; {instead}")


def check_list(op: str, tensors: object, rest: str) -> None:
    """Raise SbpError unless ``tensors`` is a list or tuple of one or more global tensors."""
    if not isinstance(tensors, list | tuple):
        given = (
            repr(tensors) if isinstance(tensors, GlobalTensor) else f"a {type(tensors).__name__}"
        )
        raise SbpError(f"{op}: it takes a list of tensors, not {given}: {op}([a, b], {rest})")
    if not tensors:
        raise SbpError(f"{op}: no tensors were given; it joins one or more")
    check_tensors(op, *cast("Sequence[object]", tensors))


def checked_dim(x: GlobalTensor, dim: int, op: str) -> int:
    """``dim`` counted from the front; raises SbpError naming ``op`` if ``x`` has no such dim."""
    check_tensors(op, x)
    try:
        dim = index(dim)
    except TypeError as error:
        raise SbpError(f"{op}: dim {dim!r} must be a whole number, such as 0 or -1") from error
    if not -x.ndim <= dim < x.ndim:
        legal = f"use 0..{x.ndim - 1}" if x.ndim > 1 else "use 0" if x.ndim else "it has no dims"
        raise SbpError(f"{op}: dim {dim} is out of range for {x!r}; {legal}")
    return dim % x.ndim


def checked_dims(x: GlobalTensor, dims: int | Sequence[int] | None, op: str) -> list[int]:
    """``dims`` from the front and sorted, all if None; SbpError if one is not there or twice."""
    check_tensors(op, x)
    given = range(x.ndim) if dims is None else whole_numbers(op, "dims", dims)
    chosen = sorted(checked_dim(x, dim, op) for dim in given)
    if twice := [a for a, b in pairwise(chosen) if a == b]:
        raise SbpError(f"{op}: dims {list(given)} name dim {twice[0]} twice; name each once")
    return chosen


def whole_numbers(op: str, what: str, given: object) -> tuple[int, ...]:
    """One whole number or several as a tuple; raises SbpError for anything else."""
    try:
        several = [given] if isinstance(given, int) else cast("Iterable[SupportsIndex]", given)
        return tuple(map(index, several))
    except TypeError as error:
        raise SbpError(
            f"{op}: {what} {given!r} must be a whole number or several, such as 0 or (0, 1)"
        ) from error


def check_ndim(op: str, what: str, x: GlobalTensor, wanted: int, at_least: bool = False) -> None:
    """Raise SbpError unless ``x`` has as many dims as ``op`` takes there."""
    check_tensor(op, what, x)
    if x.ndim != wanted and not (at_least and x.ndim > wanted):
        dims = "1 dim" if x.ndim == 1 else f"{x.ndim} dims"
        more = " or more" if at_least else ""
        raise SbpError(f"{op}: {what} has {dims}, {x!r}; it takes {wanted}{more}: use ops.reshape")


def check_same_dtype(op: str, operands: Sequence[GlobalTensor]) -> None:
    """Raise SbpError unless all operands have one dtype: nothing is promoted on the side."""
    check_tensors(op, *operands)
    first = operands[0].dtype
    if other := next((x.dtype for x in operands if x.dtype != first), None):
        given = ", ".join(str(x.dtype).removeprefix("torch.") for x in operands)
        raise SbpError(
            f"{op}: operands are {given}; they must be of one dtype, for it decides what a "
            f"conversion sends: ops.cast(x, {torch.promote_types(first, other)})"
        )


def check_floating(op: str, x: GlobalTensor) -> None:
    """Raise SbpError unless ``x`` has a floating dtype."""
    check_tensors(op, x)
    if not x.dtype.is_floating_point:
        raise SbpError(
            f"{op}: {x!r} is not of a floating dtype; ops.cast(x, torch.float32) makes it one"
        )
