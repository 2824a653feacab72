import pytest
import torch

from sbpflow.boxing import Boxing
from sbpflow.boxing_plan import plan_boxing
from sbpflow.layout import Layout
from sbpflow.placement import Placement
from sbpflow.sbp import Broadcast, Partial, Split
from tests import oracle


def _converts(world, shape, src_ranks, dst_ranks, src_sbp, dst_sbp, dtype):
    src = Layout(Placement.of("cpu", src_ranks), src_sbp)
    dst = Layout(Placement.of("cpu", dst_ranks), dst_sbp)
    full = torch.arange(float(torch.Size(shape).numel())).view(shape).to(dtype)
    parts = oracle.shares(full, src)
    steps = plan_boxing(src, dst, shape, dtype, id="t", backend="gloo")
    out = Boxing(world).run(steps, parts.get(world.rank))
    sent = sum(r.bytes_sent for r in world.log.records)
    assert sent == sum(s.bytes_sent(world.rank) for s in steps)
    return None if out is None else out.float().numpy()


S0, S1, B, P = Split(0), Split(1), Broadcast(), Partial()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_smoke(ranks, world_size):
    line = list(range(world_size))
    shape = (7, 5)
    full = torch.arange(35.0).view(shape)
    for src in (S0, S1, B, P):
        for dst in (S0, S1, B, P, Split(1, (0,) * (world_size - 1) + (5,))):
            out = ranks(world_size, _converts, shape, line, line, (src,), (dst,), torch.float32)
            layout = Layout(Placement.of("cpu", line), (dst,))
            parts = {r: torch.from_numpy(o) for r, o in enumerate(out) if o is not None}
            assert torch.equal(oracle.joined(parts, layout, shape, torch.float32), full), (src, dst)
