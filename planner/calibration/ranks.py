"""Texts of any length between ranks, through the engine's own conversions."""

import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import plan_boxing
from sbpflow.runtime.compute.devices import backend_of_device
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Split


def gather_texts(boxing: Boxing, text: str) -> list[str]:
    """Every rank's text, in rank order, on every rank."""
    raw = text.encode()
    if boxing.world.size == 1:
        return [text]
    sizes = _on_all(boxing, torch.tensor([[len(raw)]]), "planner/lengths")
    most = max(1, int(sizes.max()))
    mine = torch.zeros(1, most, dtype=torch.uint8)
    mine[0, : len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
    everyone = _on_all(boxing, mine, "planner/texts")
    return [
        bytes(row[:size].tolist()).decode()
        for row, size in zip(everyone, sizes.flatten().tolist(), strict=True)
    ]


def _on_all(boxing: Boxing, mine: torch.Tensor, id: str) -> torch.Tensor:
    world = boxing.world
    line = Placement.line(world.device.type, world.size)
    shape = (world.size, mine.shape[1])
    src, dst = Layout(line, (Split(0),)), Layout(line, (Broadcast(),))
    backend = backend_of_device(world.device.type)
    steps = plan_boxing(src, dst, shape, mine.dtype, id=id, backend=backend)
    out = boxing.run(steps, mine.to(world.device), "control")
    if out is None:
        raise RuntimeError(f"{id}: nothing came")
    return out.cpu()
