"""Reshapes, flattens, and concatenates global tensors, keeping their splits where possible."""

import math
from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor

from sbpflow.errors import SbpError
from sbpflow.tensor.dispatch import (
    Out,
    apply,
    check_list,
    check_same_dtype,
    check_tensors,
    checked_dim,
    letters_for,
    whole_numbers,
)
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.tensor.signature import Choice, make_rule


def reshape(x: GlobalTensor, shape: int | Sequence[int], *, id: str | None = None) -> GlobalTensor:
    """Reshape to ``shape``. One entry may be -1; an int stands for a 1-D shape.

    ``S(i) -> S(j) where dim i begins dim j, B -> B, P -> P``

    A split is kept if its dim is the first of the dims that are merged or divided. For example, if
    [b, f, d] is reshaped to [b, f * d], a split along b stays, and a split along f becomes a split
    of the second dim in multiples of d. Other splits are converted first, including splits whose
    pieces would not have whole lengths, and splits of a dim along two axes that explicit sizes
    cannot express.
    """
    check_tensors("reshape", x)
    full = _resolve(x.shape, whole_numbers("reshape", "shape", shape))
    letters, output, scales = _reshape_groups(x.shape, full)
    signatures = "".join(f"{a}->{a};" for a in letters if a and a in output) + "P->P"
    op_rule = make_rule("reshape", (letters,), output, signatures, scales)

    def kernel(choice: Choice, parts: list[Tensor]) -> Tensor:
        return parts[0].reshape(choice.output.part_shape(full, x.boxing.world.rank) or ())

    return apply(op_rule, [x], full, kernel, id=id)


def flatten(x: GlobalTensor, start: int = 0, *, id: str | None = None) -> GlobalTensor:
    """Merge all dims from ``start`` on.

    ``S(i) -> S(i) up to start, B -> B, P -> P``
    """
    check_tensors("flatten", x)
    start = checked_dim(x, start, "flatten") if x.ndim else 0
    return reshape(x, (*x.shape[:start], math.prod(x.shape[start:])), id=id)


def _resolve(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
    count = math.prod(old)
    known = math.prod(size for size in new if size != -1)
    holes = new.count(-1)
    if holes == 1 and known > 0 and count % known == 0:
        return tuple(count // known if size == -1 else size for size in new)
    if holes or known != count or min(new, default=0) < 0:
        raise SbpError(f"reshape: {list(old)} has {count} elements and cannot become {list(new)}")
    return new


def _reshape_groups(
    old: tuple[int, ...], new: tuple[int, ...]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[str, int, int], ...]]:
    """Return the dim letters for both shapes and, for each group whose first dims differ in length,
    the ratio of these lengths.

    A group is a shortest run of dims with the same product in both shapes. The first dim of a group
    has the same letter in both shapes.
    """
    names = iter(letters_for(len(old) + len(new)))
    letters: list[str] = [next(names) for _ in old]
    output: list[str] = [next(names) for _ in new]
    scales: list[tuple[str, int, int]] = []
    # For an empty tensor, all products are 0, so only equal leading dims are matched.
    if not math.prod(old):
        for n, _ in takewhile(lambda pair: old[pair[0]] == pair[1], enumerate(new[: len(old)])):
            output[n] = letters[n]
        return tuple(letters), tuple(output), ()
    i = j = 0
    while i < len(old) and j < len(new):
        start_i, start_j = i, j
        left, right = old[i], new[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right and i < len(old):
                left, i = left * old[i], i + 1
            elif j < len(new):
                right, j = right * new[j], j + 1
            else:
                break
        output[start_j] = letters[start_i]
        if old[start_i] != new[start_j]:
            scales.append((letters[start_i], new[start_j], old[start_i]))
    return tuple(letters), tuple(output), tuple(scales)


def concat(
    tensors: Sequence[GlobalTensor], dim: int, *, out: Out = None, id: str | None = None
) -> GlobalTensor:
    """Concatenate along ``dim``. Operands that are split along ``dim`` are converted first; the
    result is P if all operands are P.

    ``S(i) x .. -> S(i) for i other than dim, B x .. -> B, P x .. -> P``
    """
    check_list("concat", tensors, "dim")
    first = tensors[0]
    dim = checked_dim(first, dim, "concat")
    check_same_dtype("concat", tensors)
    for n, x in enumerate(tensors):
        if x.ndim != first.ndim or _without(x.shape, dim) != _without(first.shape, dim):
            raise SbpError(
                f"concat: tensor {n} has shape {list(x.shape)}, but tensor 0 has shape "
                f"{list(first.shape)}; shapes may differ only along dim {dim}"
            )
    letters = letters_for(first.ndim)
    free = [letter for n, letter in enumerate(letters) if n != dim]
    signatures = "".join(",".join([a] * len(tensors)) + f"->{a};" for a in free)
    signatures += ",".join(["P"] * len(tensors)) + "->P"
    # Operands may have different lengths along ``dim``, so each operand has its own letter for this
    # dim.
    others = letters_for(len(tensors), "".join(letters))
    dims = tuple((*letters[:dim], others[n], *letters[dim + 1 :]) for n in range(len(tensors)))
    op_rule = make_rule("concat", dims, letters, signatures)
    shape = (*first.shape[:dim], sum(x.shape[dim] for x in tensors), *first.shape[dim + 1 :])
    return apply(op_rule, tensors, shape, lambda _, p: torch.cat(p, dim), out=out, id=id)


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])
