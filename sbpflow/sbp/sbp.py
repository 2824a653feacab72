"""Defines Split, Broadcast, and Partial, the ways to distribute a tensor along a placement axis.

This module knows nothing about ranks, devices, or communication. The terms and the rule for
balanced splits follow OneFlow (oneflow/core/job/sbp_parallel.proto,
oneflow/core/common/balanced_splitter.h at 25c8978).
"""

import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast, get_args

from sbpflow.errors import SbpError

Reduction = Literal["sum", "max", "min"]


@dataclass(frozen=True, slots=True)
class Split:
    """Each coordinate stores a consecutive piece of ``dim``.

    ``sizes`` (a tuple or list) gives the length of each coordinate's piece, 0 or more. ``None``
    means a balanced split: in a dim of length n, each of the first ``n % parts`` pieces has one
    more element than the others.
    """

    dim: int
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        dim = whole(self.dim)
        if dim is None or dim < 0:
            raise SbpError(
                f"S({self.dim}): the dim must be a whole number of 0 or more, as in S(0); count "
                "dims from the front"
            )
        object.__setattr__(self, "dim", dim)
        if self.sizes is None:
            return
        value: Any = self.sizes
        sizes = [whole(s) for s in value] if isinstance(value, Iterable) else [None]
        if any(size is None or size < 0 for size in sizes):
            raise SbpError(
                f"S({dim}): the sizes must be non-negative integers, one per coordinate, such as "
                f"(3, 5), got {value}"
            )
        object.__setattr__(self, "sizes", tuple(sizes))

    def __str__(self) -> str:
        """Format as ``S(0)``, or as ``S(0)[3, 5]`` with explicit sizes."""
        return f"S({self.dim})" if self.sizes is None else f"S({self.dim}){list(self.sizes)}"


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Every coordinate stores the whole tensor."""

    def __str__(self) -> str:
        return "B"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every coordinate stores a term of full shape; the tensor is the sum, max, or min of the
    terms.
    """

    op: Reduction = "sum"

    def __post_init__(self) -> None:
        if self.op not in get_args(Reduction):
            raise SbpError(
                f"P({self.op}): the reduction must be one of {', '.join(get_args(Reduction))}"
            )

    def __str__(self) -> str:
        return "P" if self.op == "sum" else f"P({self.op})"


Sbp = Split | Broadcast | Partial
NdSbp = tuple[Sbp, ...]

_SBP = re.compile(
    r"S\((?P<dim>\d+)\)(?P<sizes>\[[\d, ]*\])?|(?P<broadcast>B)|P(?:\((?P<op>sum|max|min)\))?",
    re.ASCII,
)
MAX_CHARACTERS = 100_000
_FORMS = "write S(0), S(1), S(0)[3, 5] with sizes, B, P, P(max), or P(min)"


def parse_sbp(text: str) -> Sbp:
    """Parse ``S(0)``, ``S(0)[3, 5]``, ``B``, ``P``, ``P(max)`` or ``P(min)``; raise SbpError for
    other text.
    """
    if len(text) > MAX_CHARACTERS or re.search(r"\d{19}", text):
        raise SbpError(
            f"{text[:40]!r}.. of {len(text):,} characters is not a layout; {_FORMS}, with at most "
            f"{MAX_CHARACTERS:,} characters and with numbers of at most 18 digits"
        )
    match = _SBP.fullmatch(text.strip())
    if match is None:
        is_negative = re.search(r"S\(\s*-", text)
        hint = "count dims from the front, so that S(1) is the last of two; " if is_negative else ""
        raise SbpError(f"{text!r} is not a layout; {hint}{_FORMS}")
    if match["dim"] is not None:
        return Split(int(match["dim"]), _parse_sizes(text, match["sizes"]))
    if match["broadcast"] is not None:
        return Broadcast()
    return Partial(cast("Reduction", match["op"] or "sum"))


def _parse_sizes(text: str, listed: str | None) -> tuple[int, ...] | None:
    if listed is None:
        return None
    sizes = listed[1:-1].split(",") if listed[1:-1].strip() else []
    if not all(size.strip().isdigit() for size in sizes):
        raise SbpError(f"{text!r}: sizes must be whole numbers separated by commas; {_FORMS}")
    return tuple(int(size) for size in sizes)


@lru_cache(maxsize=1024)
def parse_nd_sbp(text: str) -> NdSbp:
    """Parse ``S(0)`` (one sbp) or ``(S(0), B)`` (one per axis). Raise SbpError for other text."""
    stripped = text.strip()
    if not (stripped.startswith("(") and stripped.endswith(")")):
        return (parse_sbp(stripped),)
    # Split at commas, but not at commas between explicit sizes.
    entries = re.split(r",(?![^\[]*\])", stripped[1:-1])
    if len(entries) > 1 and not entries[-1].strip():
        entries.pop()  # Python formats a tuple with one entry as "(S(0),)"
    return tuple(parse_sbp(entry) for entry in entries)


def as_nd_sbp(value: NdSbp | Sbp | str) -> NdSbp:
    """Convert a string, an sbp, or a sequence of sbps or strings to one sbp per placement axis."""
    if isinstance(value, str):
        return parse_nd_sbp(value)
    if isinstance(value, Split | Broadcast | Partial):
        return (value,)
    entries: Any = value
    if isinstance(entries, Iterable):
        sbps: list[Any] = [parse_sbp(e) if isinstance(e, str) else e for e in entries]
        if all(isinstance(sbp, Split | Broadcast | Partial) for sbp in sbps):
            return tuple(sbps)
    raise SbpError(f"{entries!r} is not a layout; {_FORMS}, one per axis, as in (S(0), B)")


def whole(value: object) -> int | None:
    """Convert a value of any integer type, including numpy's, to int; return None for other
    values."""
    try:
        return operator.index(value)  # pyright: ignore[reportArgumentType] -- this is the check
    except TypeError:
        return None


def format_nd_sbp(nd_sbp: NdSbp) -> str:
    """Format an nd-sbp as a string that ``parse_nd_sbp`` accepts."""
    if len(nd_sbp) == 1:
        return str(nd_sbp[0])
    return "(" + ", ".join(str(sbp) for sbp in nd_sbp) + ")"


def balanced_sizes(size: int, parts: int) -> tuple[int, ...]:
    """Return the lengths of the pieces of a balanced split; the first ``size % parts`` pieces get
    one more element.
    """
    quotient, remainder = divmod(size, parts)
    return tuple(quotient + (part < remainder) for part in range(parts))


def dual(sbp: Sbp) -> Sbp:
    """Return the sbp of a gradient, given its tensor's ``sbp``: S for S, P for B, and B for P."""
    if isinstance(sbp, Broadcast):
        return Partial()
    if isinstance(sbp, Partial):
        if sbp.op != "sum":
            raise SbpError(f"{sbp} is not linear and has no dual; convert it to B or S first")
        return Broadcast()
    return sbp
