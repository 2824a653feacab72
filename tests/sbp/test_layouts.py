"""Tests layout values without ranks: parsing, printing, splits, placements, parts."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sbpflow.boxing.dry_run import DryBoxing
from sbpflow.boxing.moves import find_moves
from sbpflow.errors import SbpError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import (
    Broadcast,
    Partial,
    Split,
    balanced_sizes,
    dual,
    format_nd_sbp,
    parse_nd_sbp,
    parse_sbp,
)
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.tensor.infer_shape import full_shape
from tests import oracle
from tests.oracle import line_layout

B, P, S0, S1 = Broadcast(), Partial(), Split(0), Split(1)
PRIMES = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_balanced_splits_are_those_of_tensor_split(parts):
    for size in [*range(4 * parts + 1), *PRIMES]:
        pieces = torch.arange(size).tensor_split(parts)
        assert balanced_sizes(size, parts) == tuple(len(piece) for piece in pieces)


def test_balanced_splits_differ_from_torch_chunk():
    assert balanced_sizes(5, 4) == (2, 1, 1, 1)
    assert balanced_sizes(20, 6) == (4, 4, 3, 3, 3, 3)


@pytest.mark.parametrize("text", ["S(0)", "S(12)", "B", "P", "P(max)", "P(min)"])
def test_parse_reads_what_is_printed(text):
    assert str(parse_sbp(text)) == text
    assert parse_nd_sbp(text) == (parse_sbp(text),)
    grid = f"({text}, B)"
    assert format_nd_sbp(parse_nd_sbp(grid)) == grid


@pytest.mark.parametrize(
    "text",
    [
        "",
        "S",
        "S()",
        "S(-1)",
        "s(0)",
        "R",
        "P(mean)",
        "S(0) B",
        "S(0)[",
        "S(0)[-1]",
        "B[1]",
        "(S(0))",
    ],
)
def test_parse_refuses_and_shows_the_forms(text):
    with pytest.raises(SbpError, match=r"write S\(0\), S\(1\), S\(0\)\[3, 5\] with sizes, B, P"):
        parse_sbp(text)


def test_a_dim_from_the_back_is_explained():
    with pytest.raises(SbpError, match=r"count dims from the front, so that S\(1\) is the last"):
        parse_sbp("S(-1)")
    for text in ("S(0)[1,]", "S(0)[1 2]"):
        with pytest.raises(SbpError, match="whole numbers separated by commas"):
            parse_sbp(text)
    for text in ("()", "(S(0), , B)"):
        with pytest.raises(SbpError, match=r"' ?' is not a layout"):
            parse_nd_sbp(text)


SBPS = st.one_of(
    st.builds(Split, st.integers(0, 20)),
    st.builds(Split, st.integers(0, 20), st.lists(st.integers(0, 1 << 40), max_size=4).map(tuple)),
    st.just(B),
    st.builds(Partial, st.sampled_from(["sum", "max", "min"])),
)


@settings(deadline=None, derandomize=True)
@given(nd_sbp=st.lists(SBPS, min_size=1, max_size=4).map(tuple), spaces=st.booleans())
def test_printed_layouts_parse_back(nd_sbp, spaces):
    """The strings include explicit sizes, any number of axes, and optional blanks."""
    text = format_nd_sbp(nd_sbp)
    assert parse_nd_sbp(text if spaces else text.replace(" ", "")) == nd_sbp
    assert all(parse_sbp(str(sbp)) == sbp for sbp in nd_sbp)


def test_p_and_p_sum_are_equal():
    assert parse_sbp("P(sum)") == Partial() == P
    assert len({S0, Split(0), Split(0, (1, 2)), Split(0, (1, 2)), B, Broadcast(), P}) == 4


def test_values_are_equal_and_hash_by_content():
    a, b = (Layout(Placement.of("cpu", [[0, 1], [2, 3]]), (S0, B)) for _ in range(2))
    assert a == b
    assert a is not b
    assert hash(a) == hash(b)
    assert a != Layout(Placement.of("cpu", [[0, 1], [2, 3]]), (S0, P))
    assert a.placement != Placement.of("cuda", [[0, 1], [2, 3]])
    assert {a: 1}[b] == 1


def test_different_layouts_print_differently():
    grid = Placement.of("cpu", [[0, 1], [3, 2]])
    assert str(Layout(grid, (S0, B))) == "(S(0), B)@[[0, 1], [3, 2]]"
    assert str(line_layout("cpu", 2, Split(1, (3, 5)))) == "S(1)[3, 5]@[0, 1]"


@pytest.mark.parametrize(
    ("written", "nd_sbp"),
    [
        ("B", (B,)),
        ("P", (P,)),
        ("P(max)", (Partial("max"),)),
        ("S(0)[3, 2]", (Split(0, (3, 2)),)),
        (S0, (S0,)),
        ([B], (B,)),
        (("S(1)",), (S1,)),
    ],
    ids=repr,
)
def test_a_layout_may_be_given_as_text(written, nd_sbp):
    """A layout given as a string, an sbp or a list equals the one given as a tuple, and has the
    same hash.
    """
    line = Placement.line("cpu", 2)
    layout = Layout(line, written)
    assert layout == Layout(line, nd_sbp)
    assert hash(layout) == hash(Layout(line, nd_sbp))
    assert layout.nd_sbp == nd_sbp
    whole = Layout(line, (B,))
    x = GlobalTensor(torch.empty(5, 4, device="meta"), whole, (5, 4), DryBoxing(2))
    assert x.to(written).layout == layout


def test_text_has_an_entry_per_axis():
    grid = Placement.of("cpu", [[0, 1], [2, 3]])
    assert Layout(grid, "(S(0)[1, 2], B)") == Layout(grid, (Split(0, (1, 2)), B))
    assert replace(Layout(grid, "(S(0), B)"), nd_sbp="(B, P)") == Layout(grid, (B, P))


def test_numbers_may_come_from_arrays():
    assert Split(np.int64(1), [np.int64(3), 2]) == Split(1, (3, 2))
    assert hash(Split(0, [3, 2])) == hash(Split(0, (3, 2)))
    for ranks in (np.arange(4).reshape(2, 2), torch.arange(4).view(2, 2), [np.arange(2), [2, 3]]):
        assert Placement.of("cpu", ranks) == Placement.of("cpu", [[0, 1], [2, 3]])
    assert Placement.of("cpu", [np.int64(2)]).ranks == (2,)
    assert Placement.of("cpu", np.int64(2)) == Placement.of("cpu", 2)
    assert Placement.of("cpu", torch.ones(1, 1).int()).shape == (1, 1)
    assert json.dumps(Placement.of("cpu", [np.int64(2)]).nested()) == "[2]"


def test_duals_of_layouts():
    assert [dual(s) for s in (S0, B, P)] == [S0, P, B]
    assert Layout(Placement.of("cpu", [[0, 1]]), (B, S1)).dual().nd_sbp == (P, S1)
    with pytest.raises(SbpError, match=r"P\(max\) is not linear and has no dual"):
        dual(Partial("max"))


def test_nested_splits_apply_one_after_the_other():
    layout = Layout(Placement.of("cpu", [[0, 1], [2, 3]]), (S0, S0))
    assert [layout.part_shape((6,), rank) for rank in range(4)] == [(2,), (1,), (2,), (1,)]
    flat = line_layout("cpu", 4, S0)
    assert [flat.part_shape((6,), rank) for rank in range(4)] == [(2,), (2,), (1,), (1,)]


@pytest.mark.parametrize("grid", [[0, 2, 1], [[0, 1], [2, 3]], [[[1, 0]], [[3, 2]]]], ids=str)
def test_parts_cover_and_do_not_overlap(grid):
    placement = Placement.of("cpu", grid)
    for nd_sbp in itertools.product([S0, S1, B, P], repeat=placement.ndim):
        layout = Layout(placement, nd_sbp)
        counts = torch.zeros(13, 9)
        for rank in placement.ranks:
            counts[layout.part_slices((13, 9), rank)] += 1
            extent = [(s.start, s.stop) for s in layout.part_slices((13, 9), rank)]
            assert extent == oracle.extent(layout, (13, 9), rank)
        copies = placement.size
        for sbp, size in zip(nd_sbp, placement.shape, strict=True):
            copies //= size if isinstance(sbp, Split) else 1
        assert (counts == copies).all(), layout
        assert layout.part_slices((13, 9), 7) is None


def test_moves_deliver_each_element_once():
    """The boxes that a destination rank receives cover its part exactly once per source term."""
    placements = [Placement.of("cpu", r) for r in ([0, 1], [1, 2, 0], [[0, 1], [2, 3]])]
    for src_at, dst_at in itertools.product(placements, repeat=2):
        for a in itertools.product([S0, S1, B, P], repeat=src_at.ndim):
            for b in itertools.product([S0, S1, B], repeat=dst_at.ndim):
                terms = 1
                for sbp, size in zip(a, src_at.shape, strict=True):
                    terms *= size if isinstance(sbp, Partial) else 1
                src, dst = Layout(src_at, a), Layout(dst_at, b)
                counts = {rank: torch.zeros(5, 4) for rank in dst_at.ranks}
                for move in find_moves(src, dst, (5, 4)):
                    counts[move.dst][move.box] += 1
                for rank, count in counts.items():
                    wanted = torch.zeros(5, 4)
                    wanted[dst.part_slices((5, 4), rank)] = terms
                    assert torch.equal(count, wanted), f"{src} -> {dst} on {rank}"


def test_placement_groups():
    grid = Placement.of("cpu", [[0, 1, 2], [5, 4, 3]])
    assert grid.axis_groups(0) == ((0, 5), (1, 4), (2, 3))
    assert grid.axis_groups(1) == ((0, 1, 2), (5, 4, 3))
    assert grid.plane_groups({0, 1}) == ((0, 1, 2, 5, 4, 3),)
    assert [grid.coord(rank) for rank in (0, 4, 7)] == [(0, 0), (1, 1), None]
    assert str(grid) == "[[0, 1, 2], [5, 4, 3]]"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Placement.of("cpu", []), "at least one rank"),
        (lambda: Placement.of("cpu", [0, 0]), "contain duplicates"),
        (lambda: Placement.of("cpu", [[0, 1], [2]]), "rows of different lengths; every row"),
        (lambda: Placement.of("cpu", [0, [1]]), "are nested to different depths"),
        (lambda: Placement.of("cpu", [[0], 1]), "are nested to different depths"),
        (lambda: Placement.of("cpu", [-1]), "must be 0 or more"),
        (lambda: Placement("cpu", (0, 1, 2), (2, 2)), "needs .* ranks, got"),
        (lambda: Split(-1), "count dims from the front"),
        (lambda: Split(0, (2, -1)), r"sizes must be non-negative integers, .* got \(2, -1\)"),
        (lambda: Split(0, [2.0, 1]), r"sizes must be non-negative integers, .* got \[2.0, 1\]"),
        (lambda: Split(0, 3), r"sizes must be non-negative integers, .* such as \(3, 5\), got 3"),
        (lambda: Split("0"), "the dim must be a whole number of 0 or more"),
        (lambda: Partial("mean"), r"P\(mean\): .* one of sum, max, min"),
        (lambda: Placement("gpu", (0,), (1,)), "device type 'gpu' is unknown; use cpu or cuda"),
        (
            lambda: Placement.of("cpu", "01"),
            r"ranks must be whole numbers, as in \[0, 1\] .*got '01'",
        ),
        (lambda: Placement.of("cpu", [0, 1.5]), "ranks must be whole numbers, .* got 1.5"),
        (lambda: Placement.of("cpu", np.ones(2)), "ranks must be whole numbers, .* got 1.0"),
        (lambda: Layout(Placement.line("cpu", 2), "SP"), "'SP' is not a layout; write"),
        (
            lambda: Layout(Placement.line("cpu", 2), "(B, B)"),
            "2 entries, but the placement has 1 axes",
        ),
        (lambda: Layout(Placement.line("cpu", 2), (0,)), r"\(0,\) is not a layout; write S\(0\)"),
        (lambda: Layout(Placement.line("cpu", 2), None), "None is not a layout; write"),
        (lambda: line_layout("cpu", 3, Split(0, (1, 2))), "needs 3 sizes"),
        (
            lambda: Layout(Placement.line("cpu", 2), (S0, B)),
            "2 entries, but the placement has 1 axes",
        ),
        (
            lambda: Layout(Placement.of("cpu", [[0, 1]]), (P, Partial("max"))),
            "mixes different reductions",
        ),
        (
            lambda: line_layout("cpu", 2, Split(0, (1, 2))).part_shape((4,), 0),
            "add up to 3, but the length of the dim is 4",
        ),
        (lambda: line_layout("cpu", 2, Split(2)).part_shape((4, 4), 0), "at least 3 dims"),
    ],
)
def test_impossible_values_are_explained(make, message):
    with pytest.raises(SbpError, match=message):
        make()


@pytest.mark.parametrize(
    ("nd_sbp", "shape", "message"),
    [
        (
            (S0,),
            (3, 5),
            r"splits dim 0 of \[3, 5\] into 4 parts, .* only 3.*explicit",
        ),
        ((Split(2),), (4, 4), r"splits dim 2, but the shape \[4, 4\] has only 2 dims; use S\(0\)"),
        ((S1,), (8,), r"has only 1 dim; use S\(0\), B, or P"),
        ((S0,), (), "splits a tensor without dims; use B or P"),
        (
            (Split(0, (1, 2, 0, 1)),),
            (5,),
            r"the sizes of S\(0\)\[1, 2, 0, 1\] add up to 4, .* is 5",
        ),
    ],
)
def test_a_user_tensor_must_fill_its_ranks(nd_sbp, shape, message):
    with pytest.raises(SbpError, match=message):
        Layout(Placement.line("cpu", 4), nd_sbp).check_user(shape)


def test_explicit_empty_parts():
    line_layout("cpu", 4, S0).check_user((0, 5))
    line_layout("cpu", 4, Split(0, (1, 0, 2, 0))).check_user((3, 5))
    nested = Layout(Placement.of("cpu", [[0, 1], [2, 3]]), (S0, S0))
    nested.check_user((4,))
    with pytest.raises(SbpError, match="into 2 parts, but the length is only 1"):
        nested.check_user((3,))


def test_full_shape_from_parts():
    layout = Layout(Placement.of("cpu", [[0, 1], [2, 3]]), (S0, S1))
    parts = {0: (3, 2), 1: (3, 1), 2: (2, 2), 3: (2, 1)}
    assert full_shape(parts, layout) == (5, 3)
    for wrong in (
        {0: (3, 2), 1: (3, 1), 2: (1, 2), 3: (2, 1)},
        parts | {3: (2,)},
        parts | {0: (4, 2)},
    ):
        with pytest.raises(SbpError, match=r"parts of shapes .* would have .*sizes=\(\.\.\)"):
            full_shape(parts | wrong, layout)
    for wrong, split in (({0: (3,), 1: (3,)}, S1), ({0: (2,), 1: (2,)}, Split(0, (2, 1)))):
        with pytest.raises(SbpError, match=r"the layout cannot split \[\d\]\. A split"):
            full_shape(wrong, line_layout("cpu", 2, split))
