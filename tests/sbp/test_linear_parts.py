"""Tests that ``linear_of_parts`` equals a concat followed by a linear op, forward and backward,
under any dense layout.
"""

import re

import pytest
import torch
import torch.nn.functional as F

from sbpflow.boxing.dry_run import DryBoxing
from sbpflow.boxing.executor import Boxing
from sbpflow.errors import SbpError
from sbpflow.runtime.ranks.world import World
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import parse_nd_sbp
from sbpflow.tensor import ops
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.tensor.ops.matmul import linear_of_parts
from sbpflow.tensor.ops.reductions import reduce_sum

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
def test_linear_of_parts_equals_linear_of_the_concatenation(ranks, world_size, weight, bias, x):
    *xs, w, b = [value.requires_grad_() for value in values()]
    expected = F.linear(torch.cat(xs, 1), w, b)
    expected.sum().backward()
    wanted = [expected, *(t.grad for t in (*xs, w, b))]
    for result in ranks(world_size, run, weight, bias, x):
        for got, want in zip(result, wanted, strict=True):
            torch.testing.assert_close(torch.from_numpy(got), want, rtol=0, atol=1e-12)


def without_bias(world: World, weight: str) -> torch.Tensor:
    boxing, line = Boxing(world), Placement.line("cpu", world.size)
    *xs, w, _ = [
        GlobalTensor.from_full(value, Layout(line, parse_nd_sbp(text)), boxing)
        for value, text in zip(values(), ["S(0)"] * 3 + [weight, "B"], strict=True)
    ]
    return linear_of_parts(xs, w).full().numpy()


@pytest.mark.parametrize("weight", ["B", "S(0)", "S(1)"])
def test_a_bias_is_optional(ranks, weight):
    *xs, w, _ = values()
    for got in ranks(2, without_bias, weight):
        want = F.linear(torch.cat(xs, 1), w)
        torch.testing.assert_close(torch.from_numpy(got), want, rtol=0, atol=1e-12)


def dry(*values: torch.Tensor) -> list[GlobalTensor]:
    line, boxing = Layout(Placement.line("cpu", 1), parse_nd_sbp("B")), DryBoxing(1)
    return [GlobalTensor(v.to("meta"), line, tuple(v.shape), boxing) for v in values]


REFUSED = {
    "inputs of widths [3, 8] need a weight with 11 columns": lambda xs, w, b: (xs[:2], w, b),
    "the list of tensors is empty": lambda xs, w, b: ([], w, b),
    "needs a list of tensors, got GlobalTensor(float64[7, 3]": lambda xs, w, b: (xs[0], w, b),
    "input 1 has 1 dim, but needs 2: GlobalTensor(float64[5]": lambda xs, w, b: ([xs[0], b], w, b),
    "operand 1 is a plain tensor of shape [7]": lambda xs, w, b: ([xs[0], torch.ones(7)], w, b),
    "weight has 1 dim": lambda xs, w, b: (xs, b, b),
    "weight is None, not a GlobalTensor": lambda xs, w, b: (xs, None, b),
    "operand 4 is a plain tensor of shape [5]": lambda xs, w, b: (xs, w, torch.ones(5)),
    "shapes [[7, 3], [7, 8], [7, 1], [5, 12], [5, 12]] do not fit": lambda xs, w, b: (xs, w, w),
    "operands have dtypes float32, float64, float64, float64, float64, but must all have": (
        lambda xs, w, b: ([ops.cast(xs[0], torch.float32), *xs[1:]], w, b)
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_operands_that_do_not_fit_are_refused(text):
    *xs, w, b = dry(*values())
    with pytest.raises(SbpError, match=f"^linear_of_parts:? {re.escape(text)}"):
        linear_of_parts(*REFUSED[text](xs, w, b))
