"""Defines signatures (which layouts an op accepts and produces) and chooses the cheapest one.

As in einsum, a rule labels the dims of each operand with letters. The rule lists 1-D signatures,
which assign a letter (split along that dim), B, or P to each operand. On n-D placements, each axis
uses its own signature, so every combination of signatures is a candidate. This module works on
layouts and shapes, not on tensors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch

from sbpflow.boxing.plan import plan_boxing
from sbpflow.boxing.step import TERM_DTYPES
from sbpflow.errors import SbpError
from sbpflow.sbp.layout import Layout, split_sizes
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, NdSbp, Partial, Sbp, Split, balanced_sizes, format_nd_sbp

Dims = tuple[str, ...]  # one letter per dim; "" for a dim of size 1 that broadcasts


@dataclass(frozen=True, slots=True)
class Signature:
    """Assigns a letter, "B", or "P" to each operand on one placement axis, and one of these,
    "P(max)", or "P(min)" to the output.
    """

    inputs: tuple[str, ...]
    output: str


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity: ``make_rule`` is cached
class Rule:
    """The dims of an op's operands and output, and its legal signatures, including all-B.

    ``scales`` contains (letter, numerator, denominator) for each dim whose output length is
    numerator / denominator times its input length, as in a reshape.
    """

    op: str
    inputs: tuple[Dims, ...]
    output: Dims
    signatures: tuple[Signature, ...]
    scales: tuple[tuple[str, int, int], ...] = ()


class Operand(NamedTuple):  # a tuple, because every op makes and hashes its operands
    """The properties of an operand that the choice of a signature depends on."""

    layout: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Choice:
    """The layouts of the operands after conversion, the output layout, and the bytes that the
    conversions send.
    """

    inputs: tuple[Layout, ...]
    output: Layout
    total_bytes: int


@lru_cache(maxsize=4096)
def make_rule(
    op: str,
    inputs: tuple[Dims, ...],
    output: Dims,
    signatures: str,
    scales: tuple[tuple[str, int, int], ...] = (),
) -> Rule:
    """Parse signatures such as "m,B->m; B,n->n; k,k->P", and append the all-B signature."""
    listed = [_signature(text) for text in signatures.split(";") if text.strip()]
    everywhere_b = Signature(("B",) * len(inputs), "B")
    return Rule(op, inputs, output, (*listed, everywhere_b), scales)


def _signature(text: str) -> Signature:
    inputs, output = text.split("->")
    return Signature(tuple(token.strip() for token in inputs.split(",")), output.strip())


@lru_cache(maxsize=16384)
def deduce(
    op_rule: Rule,
    operands: tuple[Operand, ...],
    out: NdSbp | None = None,
    dtype: torch.dtype | None = None,
) -> Choice:
    """Choose the legal signature whose conversions send the fewest bytes.

    Among equally cheap signatures, choose the one that converts the fewest operands; if there are
    several, choose the first in the rule. Operands are never converted to P. ``out`` requests an
    output layout. ``dtype`` is the output dtype, by default that of the first operand; P is not
    legal for dtypes that do not support addition. Raise SbpError if operands have different
    placements or unsuitable shapes, if ``out`` does not have one entry per axis, if no legal
    signature produces ``out``, or if every such signature would send elements of more than 8 bytes.
    """
    placement = _common_placement(op_rule, operands)
    _check_shapes(op_rule, operands)
    if out is not None:
        Layout(placement, out)  # raises SbpError unless ``out`` has one entry per axis
    no_partial = (dtype or operands[0].dtype) not in TERM_DTYPES
    best: tuple[int, int, int] | None = None
    chosen: Choice | None = None
    fault: SbpError | None = None
    for index, (inputs, output) in enumerate(_candidates(op_rule, operands, placement)):
        if out is not None and not _matches(output.nd_sbp, out):
            continue
        if no_partial and any(isinstance(sbp, Partial) for sbp in output.nd_sbp):
            continue
        try:
            price = sum(
                _price(operand, layout) for operand, layout in zip(operands, inputs, strict=True)
            )
        except SbpError as error:  # this dtype cannot be sent
            fault = error
            continue
        matches = sum(o.layout == layout for o, layout in zip(operands, inputs, strict=True))
        if best is None or (price, -matches, index) < best:
            best, chosen = (price, -matches, index), Choice(inputs, output, price)
    if chosen is None:
        raise fault or SbpError(_no_signature(op_rule, operands, out))
    return chosen


def _matches(output: NdSbp, requested: NdSbp) -> bool:
    """Return True if ``output`` matches ``requested``. A requested split without sizes matches a
    split of any sizes.
    """
    return all(
        sbp == request or (isinstance(sbp, Split) and request == Split(sbp.dim))
        for sbp, request in zip(output, requested, strict=True)
    )


def _price(operand: Operand, layout: Layout) -> int:
    steps = plan_boxing(operand.layout, layout, operand.shape, operand.dtype, id="price")
    return sum(step.total_bytes for step in steps)


def _candidates(
    op_rule: Rule, operands: tuple[Operand, ...], placement: Placement
) -> Iterator[tuple[tuple[Layout, ...], Layout]]:
    """For every combination of one signature per axis that fits the operands' shapes, yield the
    operand layouts and the output layout.
    """
    per_axis = [list(_axis_options(op_rule, operands, axis)) for axis in range(placement.ndim)]
    known = {operand.layout: operand.layout for operand in operands}
    for combination in product(*per_axis):
        layouts: list[Layout] = []
        for n, operand in enumerate(operands):
            layout = Layout(placement, tuple(inputs[n] for inputs, _ in combination))
            # Keep the object of an equal layout, so that later comparisons are fast.
            layouts.append(operand.layout if operand.layout == layout else layout)
        if not all(
            operand.layout == layout or layout.accepts(operand.shape)
            for operand, layout in zip(operands, layouts, strict=True)
        ):
            continue
        output = tuple(out for _, out in combination)
        for scale in op_rule.scales:
            output = _scaled(output, op_rule, scale, layouts[0], operands[0].shape)
            if output is None:
                break
        else:
            result = Layout(placement, output)
            yield tuple(layouts), known.get(result, result)


def _axis_options(
    op_rule: Rule, operands: tuple[Operand, ...], axis: int
) -> Iterator[tuple[tuple[Sbp, ...], Sbp]]:
    """Yield the sbps of the operands and of the output for each legal signature on one axis. Splits
    take the explicit sizes of the operands.
    """
    for signature in op_rule.signatures:
        sizes = {
            letter: _sizes_of(letter, op_rule, operands, axis)
            for letter in {*signature.inputs, signature.output}
        }
        inputs: list[Sbp] = []
        for token, dims, operand in zip(signature.inputs, op_rule.inputs, operands, strict=True):
            if token == "P" and operand.layout.nd_sbp[axis] != Partial():
                break
            inputs.append(_sbp(token, dims, sizes[token]))
        else:
            yield tuple(inputs), _sbp(signature.output, op_rule.output, sizes[signature.output])


def _sbp(token: str, dims: Dims, sizes: tuple[int, ...] | None) -> Sbp:
    if token == "B":
        return Broadcast()
    if token.startswith("P"):
        return {"P": Partial(), "P(max)": Partial("max"), "P(min)": Partial("min")}[token]
    return Split(dims.index(token), sizes)


def _sizes_of(
    letter: str, op_rule: Rule, operands: tuple[Operand, ...], axis: int
) -> tuple[int, ...] | None:
    """Return the explicit sizes, if any, of the first operand that is split along ``letter`` on
    this axis.
    """
    for dims, operand in zip(op_rule.inputs, operands, strict=True):
        sbp = operand.layout.nd_sbp[axis]
        if isinstance(sbp, Split) and sbp.dim < len(dims) and dims[sbp.dim] == letter:
            return sbp.sizes
    return None


def _scaled(
    output: NdSbp, op_rule: Rule, scale: tuple[str, int, int], src: Layout, shape: tuple[int, ...]
) -> NdSbp | None:
    """Return ``output`` with the split sizes of the input, scaled by the ratio of the dim's output
    and input lengths.

    Return ``None`` if a piece does not scale to a whole number, or if several axes split the dim
    into pieces of different sizes, which a layout cannot express.
    """
    letter, num, den = scale
    if letter not in op_rule.output:
        return output
    src_dim, dst_dim = op_rule.inputs[0].index(letter), op_rule.output.index(letter)
    scaled = list(output)
    lengths = {shape[src_dim]}  # lengths of the pieces into which the previous axes split the dim
    for axis, (before, after) in enumerate(zip(src.nd_sbp, output, strict=True)):
        if not (isinstance(before, Split) and after == Split(dst_dim, before.sizes)):
            continue
        parts = src.placement.shape[axis]
        splits = [split_sizes(before, length, parts) for length in sorted(lengths)]
        lengths = {piece for pieces in splits for piece in pieces}
        if any(piece * num % den for piece in lengths):
            return None
        new_sizes = {tuple(piece * num // den for piece in pieces) for pieces in splits}
        if all(_is_balanced(sizes) for sizes in new_sizes):
            scaled[axis] = Split(dst_dim)
        elif len(new_sizes) == 1:
            scaled[axis] = Split(dst_dim, new_sizes.pop())
        else:
            return None
    return tuple(scaled)


def _is_balanced(sizes: tuple[int, ...]) -> bool:
    """Return True if the sizes form a balanced split without empty ranks."""
    return sizes == balanced_sizes(sum(sizes), len(sizes)) and (all(sizes) or not any(sizes))


def _common_placement(op_rule: Rule, operands: tuple[Operand, ...]) -> Placement:
    placements = {operand.layout.placement for operand in operands}
    if len(placements) > 1:
        raise SbpError(
            f"{op_rule.op}: operands have different placements: {_describe(operands)}; "
            "convert one operand with x.to(layout) first"
        )
    return operands[0].layout.placement


def _check_shapes(op_rule: Rule, operands: tuple[Operand, ...]) -> None:
    lengths: dict[str, int] = {}
    for dims, operand in zip(op_rule.inputs, operands, strict=True):
        fits = len(dims) == len(operand.shape) and all(
            lengths.setdefault(letter, length) == length
            for letter, length in zip(dims, operand.shape, strict=True)
            if letter
        )
        if not fits:
            wanted = ", ".join("[" + ", ".join(d or "1" for d in ds) + "]" for ds in op_rule.inputs)
            raise SbpError(
                f"{op_rule.op}: shapes {[list(o.shape) for o in operands]} do not fit {wanted}"
            )


def _describe(operands: Sequence[Operand]) -> str:
    return ", ".join(f"{list(operand.shape)} {operand.layout}" for operand in operands)


def _no_signature(op_rule: Rule, operands: tuple[Operand, ...], out: NdSbp | None) -> str:
    requested = "" if out is None else f" and output {format_nd_sbp(out)}"
    return (
        f"{op_rule.op} has no legal signature for operands "
        f"{_describe(operands)}{requested}; legal per axis: {describe(op_rule)}. Operands are "
        "never converted to P; convert one with x.to(layout)"
    )


def describe(op_rule: Rule) -> str:
    """Format the signatures in sbp notation, such as "S(0), B -> S(0); ..."."""
    return "; ".join(
        ", ".join(
            str(_sbp(token, dims, None))
            for token, dims in zip(signature.inputs, op_rule.inputs, strict=True)
        )
        + " -> "
        + str(_sbp(signature.output, op_rule.output, None))
        for signature in op_rule.signatures
    )
