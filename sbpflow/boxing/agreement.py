"""Exchanges values and errors among all ranks on the control channel."""

import json
from collections.abc import Callable
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
Value = TypeVar("Value")
CHANNEL = "control"


def gather_values(boxing: Boxing, value: Value) -> list[Value]:
    """Return the values of all ranks, in rank order. Values consist of what JSON has: numbers,
    strings, booleans, None, lists, and dicts with strings as keys. Tuples are returned as lists.
    Every rank must call this function.
    """
    raw = json.dumps(value).encode()
    if boxing.world.size == 1:
        return [json.loads(raw)]
    device = boxing.world.device
    length = torch.tensor([len(raw)], device=device)
    lengths = combine_parts(boxing, length, Split(0), "agreement/lengths").tolist()
    mine = torch.tensor(list(raw.ljust(max(lengths))), dtype=torch.uint8, device=device)
    everyone = combine_parts(boxing, mine.unsqueeze(0), Split(0), "agreement/values").tolist()
    return [json.loads(bytes(row[:size])) for row, size in zip(everyone, lengths, strict=True)]


def run_on_all_ranks(boxing: Boxing, attempt: Callable[[], Result]) -> Result:
    """Return the result of ``attempt``; if ``attempt`` raises ConfigError on some ranks, raise the
    error of the first of these ranks on all ranks.

    Every rank must call this function. If an error were raised on a single rank only, the others
    would wait for that rank in their next collective.
    """
    result, refused = None, ""
    try:
        result = attempt()
    except ConfigError as error:
        if boxing.world.size == 1:
            raise
        refused = str(error)
    if reasons := [reason for reason in gather_values(boxing, refused) if reason]:
        raise ConfigError(reasons[0])
    return cast("Result", result)


def combine_parts(boxing: Boxing, part: Tensor, src: Sbp, id: str) -> Tensor:
    """Return the equally shaped parts of all ranks, concatenated if ``src`` is Split, and reduced
    if it is Partial; every rank gets the result.
    """
    world = boxing.world
    placement = Placement.line(world.device.type, world.size)
    shape = tuple(part.shape)
    if isinstance(src, Split):
        shape = (shape[0] * world.size, *shape[1:])
    whole = Layout(placement, (Broadcast(),))
    steps = plan_boxing(Layout(placement, (src,)), whole, shape, part.dtype, id=id)
    out = boxing.run(steps, part, CHANNEL)
    if out is None:
        raise RuntimeError(
            f"{id}: rank {world.rank} did not receive a result from a collective of all ranks"
        )
    return out
