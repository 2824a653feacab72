"""What all ranks learn of one another on the control channel: facts, text, and refusals."""

import json
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

import torch
from torch import Tensor

from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import plan_boxing
from sbpflow.errors import ConfigError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Sbp, Split

Result = TypeVar("Result")
CHANNEL = "control"
_TEXT_BYTES = 120


def gather_facts(boxing: Boxing, facts: Mapping[str, str]) -> list[dict[str, str]]:
    """The facts of every rank, in rank order."""
    device = boxing.world.device
    raw = json.dumps(dict(facts)).encode()  # ASCII, so that blanks can fill it up
    length = torch.tensor([len(raw)], device=device)
    most = int(on_all_ranks(boxing, length, Split(0), "health/lengths").max())
    mine = torch.tensor(list(raw.ljust(most)), dtype=torch.uint8, device=device)
    everyone = on_all_ranks(boxing, mine.unsqueeze(0), Split(0), "health/facts")
    return [json.loads(bytes(row)) for row in everyone.tolist()]


def run_on_all_ranks(boxing: Boxing, attempt: Callable[[], Result]) -> Result:
    """What ``attempt`` returns; if it raises ConfigError on any rank, that is raised on every one.

    Every rank calls it. A rank that left alone would leave the others in a collective.
    """
    result, refused = None, ""
    try:
        result = attempt()
    except ConfigError as error:
        if boxing.world.size == 1:
            raise
        refused = str(error)
    everyone = gather_facts(boxing, {"refused": refused}) if boxing.world.size > 1 else []
    if reasons := [facts["refused"] for facts in everyone if facts["refused"]]:
        raise ConfigError(reasons[0])
    return cast("Result", result)


def gather_text(boxing: Boxing, text: str) -> list[str]:
    """One line of every rank, in rank order; cut at 120 bytes."""
    raw = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES)
    mine = torch.tensor(list(raw), dtype=torch.uint8, device=boxing.world.device)
    everyone = on_all_ranks(boxing, mine.unsqueeze(0), Split(0), "health/text")
    return [bytes(row).decode(errors="replace").rstrip() for row in everyone.tolist()]


def on_all_ranks(boxing: Boxing, part: Tensor, src: Sbp, id: str) -> Tensor:
    """Gather (Split) or add up (Partial) the ranks' parts of equal shape, on every rank."""
    world = boxing.world
    placement = Placement.line(world.device.type, world.size)
    shape = tuple(part.shape)
    if isinstance(src, Split):
        shape = (shape[0] * world.size, *shape[1:])
    steps = plan_boxing(
        Layout(placement, (src,)),
        Layout(placement, (Broadcast(),)),
        shape,
        part.dtype,
        id=id,
        backend=world.backend,
    )
    out = boxing.run(steps, part, CHANNEL)
    if out is None:
        raise RuntimeError(f"{id}: no result on rank {world.rank}")
    return out
