"""How every op on global tensors runs: choose a signature, box the operands, run a kernel."""

import string
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from sbpflow.errors import SbpError
from sbpflow.global_tensor import GlobalTensor
from sbpflow.sbp import NdSbp, parse_nd_sbp
from sbpflow.signature import Choice, Operand, Rule, deduce, make_rule

Out = NdSbp | str | None


def apply(
    op_rule: Rule,
    operands: Sequence[GlobalTensor],
    shape: tuple[int, ...],
    kernel: Callable[[Choice, list[Tensor]], Tensor],
    *,
    out: Out = None,
    id: str | None = None,
) -> GlobalTensor:
    """Run ``kernel`` on parts boxed to the chosen signature.

    ``kernel(choice, parts)`` runs only inside the placement. ``shape`` is that of the full output.
    """
    wanted = parse_nd_sbp(out) if isinstance(out, str) else out
    choice = choose(op_rule, operands, wanted)
    name = id or op_rule.op
    boxed = [
        operand.to(layout, id=f"{name}.{n}")
        for n, (operand, layout) in enumerate(zip(operands, choice.inputs, strict=True))
    ]
    boxing = operands[0].boxing
    parts = [operand.part for operand in boxed]
    inside = boxing.world.rank in choice.output.placement
    part = kernel(choice, parts) if inside else _absent(parts)
    return GlobalTensor(part, choice.output, shape, boxing)


def choose(op_rule: Rule, operands: Sequence[GlobalTensor], out: NdSbp | None = None) -> Choice:
    """The signature that ``apply`` would take."""
    described = tuple(Operand(x.layout, x.shape, x.dtype) for x in operands)
    backend = operands[0].boxing.world.backend_of(operands[0].layout)
    return deduce(op_rule, described, backend, out)


def _absent(parts: list[Tensor]) -> Tensor:
    """The empty part of a rank outside the placement, tied to its inputs for the backward."""
    floating = [part for part in parts if part.is_floating_point()] or parts
    return torch.cat(floating)


@lru_cache(maxsize=1024)
def letters_for(count: int, taken: str = "") -> tuple[str, ...]:
    """Names for ``count`` dims, none of them in ``taken`` or mistaken for B or P."""
    free = [letter for letter in string.ascii_letters if letter not in (*taken, "B", "P")]
    return tuple(free[:count])


@lru_cache(maxsize=4096)
def cached_rule(
    op: str, inputs: tuple[tuple[str, ...], ...], output: tuple[str, ...], signatures: str
) -> Rule:
    """``make_rule``, remembered: deduction is keyed by the rule."""
    return make_rule(op, inputs, output, signatures)


def checked_dim(x: GlobalTensor, dim: int, op: str) -> int:
    """``dim`` counted from the front; raises SbpError naming ``op`` if ``x`` has no such dim."""
    if not -x.ndim <= dim < x.ndim:
        raise SbpError(f"{op}: dim {dim} is out of range for {x!r}; use 0..{x.ndim - 1}")
    return dim % x.ndim
