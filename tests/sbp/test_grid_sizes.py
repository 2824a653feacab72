"""Tests ops on grids with explicit sizes and with one dim split by two axes.

Candidate layouts that do not fit the shape are ignored: for any legal operand layouts, an op finds
one that fits, and its value equals that of the plain op.
"""

import itertools
import math
import random
import re

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from sbpflow.boxing.dry_run import DryBoxing
from sbpflow.boxing.executor import Boxing
from sbpflow.errors import SbpError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Partial, Split, balanced_sizes, format_nd_sbp, parse_nd_sbp
from sbpflow.tensor import ops
from sbpflow.tensor.global_tensor import GlobalTensor, check_user
from tests import oracle
from tests.sbp import test_ops
from tests.sbp.conversions import check_parts, whole_numbers
from tests.sbp.test_properties import cuts

GRID = [[0, 1], [2, 3]]
SHAPES = [(2, 2), (2, 3), (3, 2), (1, 4), (4,), (2, 1, 2)]
PLACEMENTS = [Placement("cpu", tuple(range(math.prod(shape))), shape) for shape in SHAPES]


@st.composite
def layouts(draw, placement, shape, learns):
    """Sample any layout that a user may give, with explicit sizes on any axis, also in nested
    splits.
    """
    nd_sbp = []
    lengths = [{length} for length in shape]  # piece sizes after splitting along the previous axes
    for parts in placement.shape:
        choices = [Broadcast(), *([Partial()] if learns else []), *map(Split, range(len(shape)))]
        sbp = draw(st.sampled_from(choices))
        if isinstance(sbp, Split):
            here = lengths[sbp.dim]
            if len(here) == 1 and draw(st.booleans()):
                sbp = Split(sbp.dim, draw(cuts(min(here), parts)))
            if sbp.sizes is None and any(0 < length < parts for length in here):
                sbp = Broadcast()
            else:
                pieces = [sbp.sizes or balanced_sizes(length, parts) for length in here]
                lengths[sbp.dim] = {piece for each in pieces for piece in each}
        nd_sbp.append(sbp)
    return Layout(placement, tuple(nd_sbp))


def _check_dry(name, call, placement, fulls, chosen, learns):
    """Check that no rank raises an error, and that all ranks choose the same layout and return
    parts with its shapes.
    """
    note(f"{name} of {[f'{list(x.shape)} {at}' for x, at in zip(fulls, chosen, strict=True)]}")
    outputs = set()
    for rank in (0, placement.size - 1):
        boxing = DryBoxing(placement.size, rank)
        operands = []
        for full, layout, differentiable in zip(fulls, chosen, learns, strict=True):
            check_user(layout, tuple(full.shape))
            shape = layout.part_shape(tuple(full.shape), rank)
            part = torch.empty(shape, dtype=full.dtype, device="meta")
            operand = GlobalTensor(part, layout, tuple(full.shape), boxing)
            operands.append(operand.requires_grad_(differentiable))
        y = call(*operands)
        torch.autograd.backward([y.part], [torch.empty_like(y.part)])
        outputs.add((y.layout, y.shape))
    assert len(outputs) == 1


@pytest.mark.few(14)
@pytest.mark.parametrize("name", test_ops.OPS)
def test_no_legal_operands_are_refused(name):
    call, _, shapes = test_ops.OPS[name]
    fulls = test_ops._operands(name)
    learns = [shape not in ("ids", "labels") for shape in shapes]

    @settings(max_examples=3, deadline=None, derandomize=True)
    @given(data=st.data())
    def check(data):
        placement = data.draw(st.sampled_from(PLACEMENTS))
        chosen = [
            data.draw(layouts(placement, tuple(full.shape), differentiable))
            for full, differentiable in zip(fulls, learns, strict=True)
        ]
        _check_dry(name, call, placement, fulls, chosen, learns)

    check()


@st.composite
def reshapes(draw):
    """Sample two shapes with equal numbers of elements, including zero and one."""
    factors = draw(st.lists(st.sampled_from([0, 1, 2, 2, 3, 5, 7]), min_size=1, max_size=4))

    def grouped():
        other = draw(st.permutations(factors)) if 0 in factors else factors
        marks = draw(st.lists(st.booleans(), min_size=len(other) - 1, max_size=len(other) - 1))
        dims = [other[0]]
        for factor, merge in zip(other[1:], marks, strict=True):
            if merge:
                dims[-1] *= factor
            else:
                dims.append(factor)
        return tuple(dims)

    return grouped(), grouped()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_reshape_of_any_layout(data):
    """Every rank reshapes only its own part, so a reshape that keeps a split must keep each rank's
    rows.
    """
    old, new = data.draw(reshapes())
    placement = data.draw(st.sampled_from(PLACEMENTS))
    layout = data.draw(layouts(placement, old, True))
    note(f"reshape of {list(old)} {layout} to {list(new)}")
    count = math.prod(old)
    full = torch.arange(count).view(old)
    for rank in placement.ranks:
        boxing = DryBoxing(placement.size, rank)
        part = torch.empty(layout.part_shape(old, rank), device="meta")
        y = ops.reshape(GlobalTensor(part, layout, old, boxing), new)
        assert y.shape == new
        # The part was reshaped after converting the operand to this layout.
        before = boxing.trace[-1].dst if boxing.trace else layout
        values = oracle.cut(full, oracle.extent(before, old, rank)).reshape(-1)
        expected = oracle.cut(full.reshape(new), oracle.extent(y.layout, new, rank)).reshape(-1)
        assert torch.equal(values, expected)


def _reshape(world, cases):
    boxing, placement = Boxing(world), Placement.of("cpu", GRID)
    outputs = []
    for old, new, text in cases:
        full = whole_numbers(old, torch.float64)
        layout = Layout(placement, parse_nd_sbp(text))
        part = oracle.shares(full, layout)[world.rank].clone()
        x = GlobalTensor.from_local(part, layout, old, boxing).requires_grad_()
        y = ops.reshape(x, new)
        what = f"{list(old)} {text} to {new}"
        expected = full.reshape(new)
        check_parts(world, y.part.detach(), y.layout, expected, what)
        cotangent = whole_numbers(expected.shape, torch.float64, step=5)
        seed = oracle.shares(cotangent, y.layout.dual(), seed=2)[world.rank]
        torch.autograd.backward([y.part], [seed])
        gradient = cotangent.reshape(old)
        check_parts(world, x.part.grad, layout.dual(), gradient, f"gradient of {what}")
        assert torch.equal(y.full(), expected), what
        outputs.append(format_nd_sbp(y.layout.nd_sbp))
    return outputs


RESHAPES = [
    # Splitting 6 gives 3, 3 and then 2, 1; likewise, 12 gives 6, 6 and then 4, 2.
    ((6, 2), -1, "(S(0), S(0))", "(S(0), S(0)[4, 2])"),
    # Pieces 3, 2 become 21, 14. But 21 is then split as 14, 7 and 14 as 7, 7, so no sizes fit both.
    ((5, 7), -1, "(S(0), S(0))", None),
    ((8, 3), -1, "(S(0), S(0))", "(S(0), S(0))"),
    ((6, 2), 12, "(S(0)[4, 2], S(0))", "(S(0)[8, 4], S(0))"),
    ((6, 2), 12, "(S(0), S(0)[1, 2])", "(S(0), S(0)[2, 4])"),
    ((6, 2), 12, "(S(0)[6, 0], B)", "(S(0)[12, 0], B)"),
    ((24, 3), (4, 6, 3), "(S(0), S(0))", "(S(0), S(0))"),
    ((4, 3, 2), (4, 6), "(S(0), S(1))", "(S(0), S(1)[4, 2])"),
    ((4, 3, 2), (12, 2), "(S(1), S(0))", "(S(1), S(0))"),
    # Explicit sizes that leave a rank without rows must remain as requested.
    ((6,), (1, 6), "(S(0)[6, 0], B)", "(S(0)[1, 0], B)"),
    ((0, 3), (3, 0), "(S(0), S(1))", None),
    ((0, 3), (3, 0), "(P, S(0))", None),
    ((0, 12, 2), (1, 0, 12, 2), "(S(1), S(1))", None),
    ((4, 0, 3), (4, 3, 0), "(S(0), S(0))", "(S(0), S(0))"),
]


def test_reshape_of_splits_on_a_grid(ranks):
    outputs = ranks(4, _reshape, [case[:3] for case in RESHAPES])[0]
    for (old, new, text, expected), got in zip(RESHAPES, outputs, strict=True):
        assert expected in (None, got), f"{old} {text} to {new}"


SIZED = {
    "relu": ["(B, S(0)[4, 1])", "(S(0), S(1)[2, 5])", "(S(0)[1, 4], S(0))"],
    "reduce_sum": ["(B, S(1)[6, 1])", "(S(0), S(1)[2, 5])", "(P, S(0)[0, 5])"],
    "reduce_mean": ["(B, S(0)[4, 1])", "(S(0), S(1)[2, 5])"],
    "flatten": ["(B, S(0)[3, 1])", "(S(0), S(1)[2, 1])", "(S(0), S(0))"],
    "add": ["(B, S(0)[4, 1])", "(S(0), S(1)[2, 5])", "(P, S(0)[2, 3])"],
    "mul": ["(B, S(0)[4, 1])", "(S(0), S(1)[2, 5])"],
    "matmul": ["(B, S(0)[4, 1])", "(S(0), S(1)[2, 5])", "(S(1)[5, 2], B)"],
    "linear_bias": ["(B, S(0)[4, 1])", "(S(0)[2, 3], B)"],
    "gather": ["(B, S(0)[4, 1])", "(S(0), S(1)[1, 2])", "(S(1), S(0)[1, 4])"],
    "concat": ["(B, S(0)[4, 1])", "(S(0)[1, 4], S(1))"],
    "bce_mean": ["(B, S(0)[4, 3])", "(S(0)[3, 4], B)"],
}  # fmt: skip


@pytest.mark.few(5)
@pytest.mark.parametrize("name", SIZED)
def test_explicit_sizes_on_a_grid_give_the_plain_value(ranks, name):
    fulls = test_ops._operands(name)
    learns = [test_ops._learns(name, number) for number in range(len(fulls))]
    per_operand = []
    for full, differentiable in zip(fulls, learns, strict=True):
        texts = [*SIZED[name], "(B, B)", "(S(0), B)"]
        nd_sbps = [parse_nd_sbp(text) for text in texts]
        per_operand.append([s for s in nd_sbps if _fits(s, full, differentiable)])
    combinations = list(itertools.product(*per_operand))
    assert len(combinations) >= len(SIZED[name])
    drawn = random.Random(5).sample(combinations, min(20, len(combinations)))
    ranks(4, test_ops._run_combinations, name, GRID, drawn)


def _fits(nd_sbp, full, differentiable):
    if not differentiable and Partial() in nd_sbp:
        return False
    try:
        Layout(Placement.of("cpu", GRID), nd_sbp).check_user(tuple(full.shape))
    except SbpError:
        return False
    return True


def test_sizes_that_do_not_add_up_are_refused_on_every_rank():
    """Wrong sizes are refused even on a rank outside the placement, which has no part to
    compare.
    """
    layout = Layout(Placement.of("cpu", GRID), parse_nd_sbp("(S(0), S(0)[4, 2])"))
    text = re.escape("the sizes of S(0)[4, 2] add up to 6, but the length of the dim is 3")
    for rank in (0, 4):
        empty = torch.empty(0, device="meta")
        with pytest.raises(SbpError, match=text):
            GlobalTensor(empty, layout, (6,), DryBoxing(5, rank))


def test_out_has_one_entry_per_axis():
    layout = Layout(Placement.of("cpu", GRID), parse_nd_sbp("(S(0), S(1))"))
    boxing = DryBoxing(4)
    x = GlobalTensor(torch.empty(2, 2, device="meta"), layout, (4, 4), boxing)
    for out, count in (("B", 1), ("(B, B, B)", 3)):
        for call in (lambda out=out: ops.relu(x, out=out), lambda out=out: x.to(out)):
            with pytest.raises(SbpError, match=f"has {count} entr.*the placement has 2 axes"):
                call()
    assert format_nd_sbp(ops.relu(x, out="(B, S(1))").layout.nd_sbp) == "(B, S(1))"
