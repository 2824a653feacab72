"""linear_of_parts equals concat and linear, forward and backward, under any dense layout."""

import pytest
import torch
import torch.nn.functional as F

from sbpflow.boxing import Boxing
from sbpflow.dist import World
from sbpflow.errors import SbpError
from sbpflow.global_tensor import GlobalTensor
from sbpflow.layout import Layout
from sbpflow.op_linear import linear_of_parts
from sbpflow.ops import reduce_sum
from sbpflow.placement import Placement
from sbpflow.sbp import parse_nd_sbp

WIDTHS = (3, 8, 1)


def values() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = [*((7, width) for width in WIDTHS), (5, sum(WIDTHS)), (5,)]
    return [torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes]


def run(world: World, weight: str, bias: str, x: str) -> list[torch.Tensor]:
    boxing, line = Boxing(world), Placement.line("cpu", world.size)
    layouts = [x] * len(WIDTHS) + [weight, bias]
    tensors = [
        GlobalTensor.from_full(v, Layout(line, parse_nd_sbp(text)), boxing).requires_grad_()
        for v, text in zip(values(), layouts, strict=True)
    ]
    *xs, w, b = tensors
    out = linear_of_parts(xs, w, b)
    reduce_sum(out).backward()
    full = [out.full()]
    for tensor in tensors:
        grad = tensor.part.grad
        given = torch.zeros_like(tensor.part) if grad is None else grad
        full.append(GlobalTensor(given, tensor.layout.dual(), tensor.shape, boxing).full())
    return [tensor.detach().numpy() for tensor in full]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("weight", "bias", "x"),
    [("B", "B", "S(0)"), ("S(0)", "S(0)", "B"), ("S(0)", "S(0)", "S(0)"), ("S(1)", "B", "S(0)")],
)
def test_the_parts_give_what_their_concatenation_gives(ranks, world_size, weight, bias, x):
    *xs, w, b = [value.requires_grad_() for value in values()]
    expected = F.linear(torch.cat(xs, 1), w, b)
    expected.sum().backward()
    wanted = [expected, *(t.grad for t in (*xs, w, b))]
    for result in ranks(world_size, run, weight, bias, x):
        for got, want in zip(result, wanted, strict=True):
            torch.testing.assert_close(torch.from_numpy(got), want, rtol=0, atol=1e-12)


def refused(world: World) -> str:
    boxing, line = Boxing(world), Layout(Placement.line("cpu", 1), parse_nd_sbp("B"))
    *xs, w, b = [GlobalTensor.from_full(value, line, boxing) for value in values()]
    with pytest.raises(SbpError) as error:
        linear_of_parts(xs[:2], w, b)
    return str(error.value)


def test_widths_that_do_not_add_up_are_refused(ranks):
    (message,) = ranks(1, refused)
    assert "inputs of widths [3, 8] need a weight of 11 columns" in message
