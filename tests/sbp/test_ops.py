"""Tests that every op, for every combination of operand layouts, equals the plain torch op,
including gradients.

The signature tables are written by hand, so removing or adding a signature requires a change here.
Each signature is also checked to run without traffic.
"""

import inspect
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sbpflow.boxing.dry_run import DryBoxing
from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import plan_boxing
from sbpflow.errors import SbpError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Partial, Split, parse_nd_sbp
from sbpflow.tensor import dispatch, ops
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.tensor.signature import deduce, describe
from tests import oracle
from tests.quick import quick
from tests.sbp.conversions import check_parts, one_axis, whole_numbers

ROWS = 7  # number of rows of the gathered table


def normed(x, weight, bias, *, training=True, running=None):
    """Apply a batch norm; its running statistics start from 0 and 1 by default."""
    return ops.batch_norm(x, weight, bias, *(running or running_of(x)), training=training)


def running_of(x):
    everywhere = Layout(x.layout.placement, (Broadcast(),) * x.layout.placement.ndim)
    width = x.shape[1] if x.boxing.world.rank in everywhere.placement else 0
    return tuple(
        GlobalTensor(x.part.new_full((width,), value), everywhere, (x.shape[1],), x.boxing)
        for value in (0.0, 1.0)
    )


def _dots(x):
    """Compute dot products pair by pair, in row order of the lower triangle."""
    pairs = [(i, j) for i in range(x.shape[1]) for j in range(i)]
    return torch.stack([(x[:, i] * x[:, j]).sum(1) for i, j in pairs], 1)


def _cross(x, *weights):
    """Apply one cross layer with the tensors (w, b) or (v, w, b)."""
    *lower, upper, bias = weights
    entering = x @ lower[0].T if lower else x
    return x * (entering @ upper.T + bias) + x


def _sum_of_dots(x):
    return _dots(x).sum(1, keepdim=True)


# name: (op on global tensors, op on plain tensors, shapes); "ids" marks integer operands.
OPS = {
    "matmul": (ops.matmul, torch.matmul, [(5, 7), (7, 6)]),
    "linear": (ops.linear, F.linear, [(5, 7), (6, 7)]),
    "linear_bias": (ops.linear, F.linear, [(5, 7), (6, 7), (6,)]),
    "bias_add": (ops.bias_add, torch.add, [(5, 6), (6,)]),
    "relu": (ops.relu, torch.relu, [(5, 7)]),
    "tanh": (lambda x: ops.nonlinear("tanh", torch.tanh, x), torch.tanh, [(5, 7)]),
    "add": (ops.add, torch.add, [(5, 7), (5, 7)]),
    "add_broadcast": (ops.add, torch.add, [(5, 7), (5, 1)]),
    "mul": (ops.mul, torch.mul, [(5, 7), (5, 7)]),
    "mul_broadcast": (ops.mul, torch.mul, [(5, 7), (7,)]),
    "scale": (lambda x: ops.scale(x, 3.0), lambda x: x * 3.0, [(5, 7)]),
    "concat": (lambda *x: ops.concat(x, 1), lambda *x: torch.cat(x, 1), [(5, 4), (5, 3)]),
    "reduce_sum": (lambda x: ops.reduce_sum(x, [1]), lambda x: x.sum(1), [(5, 7)]),
    "reduce_sum_keep": (
        lambda x: ops.reduce_sum(x, [0], keepdim=True),
        lambda x: x.sum(0, keepdim=True),
        [(5, 7)],
    ),
    "reduce_sum_all": (ops.reduce_sum, torch.sum, [(5, 7)]),
    "reduce_mean": (lambda x: ops.reduce_mean(x, [0]), lambda x: x.mean(0), [(5, 7)]),
    "reshape_merge": (
        lambda x: ops.reshape(x, (5, 12)),
        lambda x: x.reshape(5, 12),
        [(5, 4, 3)],
    ),
    "reshape_cut": (
        lambda x: ops.reshape(x, (5, 4, -1)),
        lambda x: x.reshape(5, 4, 3),
        [(5, 12)],
    ),
    "flatten": (ops.flatten, torch.flatten, [(4, 3)]),
    "gather": (ops.gather, lambda t, i: F.embedding(i, t), [(ROWS, 5), "ids"]),
    "dot_interaction": (ops.dot_interaction, _dots, [(5, 4, 3)]),
    "fm_interaction": (ops.fm_interaction, _sum_of_dots, [(5, 4, 3)]),
    "cross_network": (
        lambda x, w, b: ops.cross_network(x, [(w, b)]),
        _cross,
        [(5, 7), (7, 7), (7,)],
    ),
    "cross_network_low": (
        lambda x, v, w, b: ops.cross_network(x, [(v, w, b)]),
        _cross,
        [(5, 4), (3, 4), (4, 3), (4,)],
    ),
    "layer_norm": (
        ops.layer_norm,
        lambda x, w, b: F.layer_norm(x, (7,), w, b),
        [(5, 7), (7,), (7,)],
    ),
    "batch_norm": (
        normed,
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        [(5, 7), (7,), (7,)],
    ),
    "bce_mean": (
        ops.bce_with_logits,
        F.binary_cross_entropy_with_logits,
        [(7, 1), "labels"],
    ),
    "bce_none": (
        lambda x, y: ops.bce_with_logits(x, y, reduction="none"),
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"),
        [(7, 1), "labels"],
    ),
}
INEXACT = {"tanh", "bce_mean", "bce_none", "reduce_mean", "layer_norm", "batch_norm"}


def _operands(name):
    shapes = OPS[name][2]
    made = []
    for number, shape in enumerate(shapes):
        if shape == "ids":
            made.append(torch.arange(5 * 3).view(5, 3) * 4 % ROWS)
        elif shape == "labels":
            made.append(torch.tensor([0.0, 1, 1, 0, 1, 0, 0], dtype=torch.float64).view(7, 1))
        else:
            made.append(whole_numbers(shape, torch.float64, step=7 + 2 * number) / 2)
    return made


def _learns(name, number):
    return OPS[name][2][number] not in ("ids", "labels")


def _values(name, number):
    shape = _operands(name)[number].shape
    dims = [dim for dim in range(len(shape)) if shape[dim] >= 3]
    return one_axis(dims, partial=_learns(name, number))


def _reference(name):
    plain = _operands(name)
    for number, operand in enumerate(plain):
        operand.requires_grad_(_learns(name, number))
    output = OPS[name][1](*plain)
    cotangent = whole_numbers(output.shape, torch.float64, step=5)
    output.backward(cotangent)
    return output.detach(), cotangent, [operand.grad for operand in plain]


def _lay_out(world, boxing, full, layout, seed):
    parts = oracle.shares(full, layout, seed)
    part = parts.get(world.rank, full.new_empty(0)).clone()
    return GlobalTensor.from_local(part, layout, tuple(full.shape), boxing)


def _run_combinations(world, name, ranks, combinations):
    """Run ``combinations``, each with one nd-sbp per operand; return how many there are."""
    boxing = Boxing(world)
    placement = Placement.of("cpu", ranks)
    expected, cotangent, gradients = _reference(name)
    tolerance = 1e-12 if name in INEXACT else 0.0
    for combination in combinations:
        what = f"{name} of {[str(s) for s in combination]}"
        layouts = [Layout(placement, nd_sbp) for nd_sbp in combination]
        operands = [
            _lay_out(world, boxing, full, layout, seed)
            for seed, (full, layout) in enumerate(zip(_operands(name), layouts, strict=True))
        ]
        for number, operand in enumerate(operands):
            operand.requires_grad_(_learns(name, number))
        y = OPS[name][0](*operands)
        assert y.shape == tuple(expected.shape), what
        check_parts(world, y.part.detach(), y.layout, expected, what, tolerance)
        seeds = oracle.shares(cotangent, y.layout.dual(), 9)
        torch.autograd.backward([y.part], [seeds.get(world.rank, cotangent.new_empty(0))])
        for operand, gradient in zip(operands, gradients, strict=True):
            if gradient is not None:
                got = operand.part.grad
                assert got is not None, f"{what}: an operand without gradient"
                dual = operand.layout.dual()
                # Halves of whole numbers add up exactly; results of functions such as tanh do not.
                check_parts(world, got, dual, gradient, f"gradient of {what}", tolerance)
    return len(combinations)


@pytest.mark.few(14)
@pytest.mark.parametrize("name", quick(OPS, lambda n: n != list(OPS).index("cross_network_low")))
@pytest.mark.parametrize("line", [pytest.param([0, 1], marks=pytest.mark.slow), [0, 2, 1]], ids=str)
def test_every_combination_on_a_line(ranks, line, name):
    choices = [_values(name, number) for number in range(len(OPS[name][2]))]
    combinations = list(itertools.product(*choices))
    counts = ranks(max(line) + 1, _run_combinations, name, line, combinations)
    assert counts[0] == math.prod(len(c) for c in choices)


@pytest.mark.few(5)
@pytest.mark.parametrize("name", ["linear_bias", "matmul", "gather", "concat", "reduce_sum", "mul",
                                  "reshape_merge", "bce_mean", "batch_norm",
                                  "dot_interaction"])  # fmt: skip
@pytest.mark.parametrize("count", [4, pytest.param(25, marks=pytest.mark.slow)])
def test_combinations_on_a_grid(ranks, name, count):
    per_operand = []
    for number in range(len(OPS[name][2])):
        values = [s for (s,) in _values(name, number)]
        pairs = itertools.product(values, repeat=2)
        # Splitting one short dim by both axes would leave ranks without rows, which is not allowed
        # for user tensors.
        per_operand.append([p for p in pairs if not (p[0] == p[1] and isinstance(p[0], Split))])
    combinations = list(itertools.product(*per_operand))
    picked = combinations[:: max(1, len(combinations) // count)]
    ranks(4, _run_combinations, name, [[0, 1], [2, 3]], picked)


def test_operands_on_some_of_the_ranks(ranks):
    combinations = list(itertools.product(*(_values("linear_bias", n) for n in range(3))))
    ranks(4, _run_combinations, "linear_bias", [3, 1], combinations[::5])


SIGNATURES = {
    "matmul": "S(0), B -> S(0); B, S(1) -> S(1); S(1), S(0) -> P; P, B -> P; B, P -> P; B, B -> B",
    "linear": "S(0), B -> S(0); B, S(0) -> S(1); S(1), S(1) -> P; P, B -> P; B, P -> P; B, B -> B",
    "linear_bias": "S(0), B, B -> S(0); B, S(0), S(0) -> S(1); B, B, B -> B",
    "bias_add": "S(0), B -> S(0); S(1), S(0) -> S(1); B, B -> B",
    "relu": "S(0) -> S(0); S(1) -> S(1); B -> B",
    "add": "S(0), S(0) -> S(0); S(1), S(1) -> S(1); P, P -> P; B, B -> B",
    "add_broadcast": "S(0), S(0) -> S(0); S(1), B -> S(1); P, P -> P; B, B -> B",
    "mul": "S(0), S(0) -> S(0); S(1), S(1) -> S(1); P, B -> P; B, P -> P; B, B -> B",
    "scale": "S(0) -> S(0); S(1) -> S(1); P -> P; B -> B",
    "concat": "S(0), S(0) -> S(0); P, P -> P; B, B -> B",
    "reduce_sum": "S(0) -> S(0); S(1) -> P; P -> P; B -> B",
    "reshape_merge": "S(0) -> S(0); S(1) -> S(1); P -> P; B -> B",
    "gather": (
        "B, S(0) -> S(0); B, S(1) -> S(1); S(0), B -> P; S(1), B -> S(2); P, B -> P; B, B -> B"
    ),
    "dot_interaction": "S(0) -> S(0); S(2) -> P; B -> B",
    "fm_interaction": "S(0) -> S(0); S(2) -> P; B -> B",
    "layer_norm": "S(0), B, B -> S(0); B, B, B -> B",
    "bce_none": "S(0), S(0) -> S(0); S(1), S(1) -> S(1); B, B -> B",
}


def dry_operands(name, nd_sbps, boxing, placement):
    operands = []
    for full, nd_sbp in zip(_operands(name), nd_sbps, strict=True):
        layout = Layout(placement, nd_sbp)
        shape = layout.part_shape(tuple(full.shape), 0)
        part = torch.empty(shape, dtype=full.dtype, device="meta")
        operands.append(GlobalTensor(part, layout, tuple(full.shape), boxing))
    return operands


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_match_the_table(name, monkeypatch):
    """The table contains the op's signatures, and each signature runs without conversions."""
    seen = []
    deduce = dispatch.deduce
    monkeypatch.setattr(dispatch, "deduce", lambda r, *a: (seen.append(r), deduce(r, *a))[1])
    placement = Placement.line("cpu", 2)
    for text in SIGNATURES[name].split("; "):
        if "S(1)" in text and any(s == (7, 1) for s in OPS[name][2]):
            continue  # labels have a single column, which cannot be split
        given, output = text.split(" -> ")
        boxing = DryBoxing(2)
        operands = dry_operands(
            name, [parse_nd_sbp(t) for t in given.split(", ")], boxing, placement
        )
        y = OPS[name][0](*operands)
        assert [step.collective for step in boxing.trace] == [], f"{text} was not taken as it is"
        assert y.layout.nd_sbp == parse_nd_sbp(output), text
    assert SIGNATURES[name] in {describe(r) for r in seen}


@pytest.mark.parametrize(
    ("name", "given", "output", "moved"),
    [
        ("matmul", ["S(0)", "B"], "S(0)", []),
        ("matmul", ["B", "S(1)"], "S(1)", []),
        ("matmul", ["S(1)", "S(0)"], "P", []),
        ("matmul", ["P", "P"], "P", ["all_reduce"]),
        ("matmul", ["(B, S(0))", "(S(1), B)"], "(S(1), S(0))", []),
        ("add", ["S(0)", "S(1)"], "S(0)", ["all_to_all"]),
        ("add", ["S(0)", "B"], "S(0)", ["none"]),
        ("add", ["S(1)", "P"], "S(1)", ["all_to_all"]),
        ("gather", ["S(0)", "B"], "P", []),
        ("gather", ["S(1)", "B"], "S(2)", []),
        ("gather", ["B", "S(0)"], "S(0)", []),
        ("relu", ["P"], "S(0)", ["all_to_all"]),
        ("bias_add", ["P", "B"], "S(0)", ["all_to_all"]),
        ("reduce_sum_all", ["S(1)"], "P", []),
        ("linear_bias", ["S(1)", "S(1)", "B"], "S(0)", ["all_to_all"]),
    ],
)
def test_deduction_picks_the_cheapest_signature(name, given, output, moved):
    nd_sbps = [parse_nd_sbp(text) for text in given]
    placement = Placement.of("cpu", [[0, 1], [2, 3]] if len(nd_sbps[0]) == 2 else [0, 1])
    boxing = DryBoxing(placement.size)
    y = OPS[name][0](*dry_operands(name, nd_sbps, boxing, placement))
    assert y.layout.nd_sbp == parse_nd_sbp(output)
    assert [step.collective for step in boxing.trace] == moved


def legal_signatures(name):
    return [
        (tuple(parse_nd_sbp(t)[0] for t in given.split(", ")), parse_nd_sbp(output)[0])
        for given, output in (text.split(" -> ") for text in SIGNATURES[name].split("; "))
    ]


def _price(operand, target):
    """Return the bytes for converting an operand to a layout; None if the operand would become P or
    does not fit.
    """
    sbp = operand.layout.nd_sbp[0]
    if target == Partial() != sbp:
        return None
    layout = Layout(operand.layout.placement, (target,))
    try:
        layout.check_user(operand.shape)
    except SbpError:
        return None
    steps = plan_boxing(
        operand.layout, layout, operand.shape, operand.dtype, id="x", backend="gloo"
    )
    return sum(step.total_bytes for step in steps)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", SIGNATURES)
def test_no_legal_signature_is_cheaper(name, size):
    """Check that every combination of layouts uses the cheapest signature of the table; no operand
    may become P.
    """
    placement = Placement.line("cpu", size)
    for combination in itertools.product(*(_values(name, n) for n in range(len(OPS[name][2])))):
        boxing = DryBoxing(size)
        operands = dry_operands(name, combination, boxing, placement)
        prices = [
            [_price(x, target) for x, target in zip(operands, inputs, strict=True)]
            for inputs, _ in legal_signatures(name)
        ]
        best = min(sum(each) for each in prices if None not in each)
        OPS[name][0](*operands)
        spent = sum(step.total_bytes for step in boxing.trace)
        # A linear op may also return P and add its bias later, if that sends fewer bytes.
        assert spent <= best if name == "linear_bias" else spent == best, combination
        assert not any(
            oracle.has_partial(step.dst) and not oracle.has_partial(step.src)
            for step in boxing.trace
        ), combination


def test_every_op_is_compared_with_plain_torch():
    """Every op must be compared with torch in ``OPS`` or by a test named in ``elsewhere``."""
    public = {
        name
        for name, value in vars(ops).items()
        if inspect.isfunction(value) and value.__module__.startswith("sbpflow.tensor.ops")
        and not name.startswith("_") and value is not vars(dispatch).get(name)
    }  # fmt: skip
    elsewhere = {"dropout": "test_dropout_masks", "reduce_max": "test_reduce_max_over_a_split_dim",
                 "linear_of_parts": "test_linear_of_parts_equals_linear_of_the_concatenation",
                 **dict.fromkeys(("class_weights", "focal_weights", "smooth_labels"),
                                 "training: test_a_loss_equals_that_of_plain_torch"),
                 "cast": "test_cast_keeps_partial_only_if_terms_stay_exact"}  # fmt: skip
    called = {"nonlinear"} | {
        name for name in public if any(entry.startswith(name) for entry in OPS)
    }
    called |= {"bce_with_logits"} if "bce_mean" in OPS else set()
    assert called | set(elsewhere) == public


def test_deduction_is_repeatable():
    """With an empty cache, as in a fresh process, the choices must be the same."""
    placement = Placement.of("cpu", [[0, 1], [2, 3]])
    choices = []
    for _ in range(2):
        deduce.cache_clear()
        outputs = []
        for a, b in itertools.product(["(S(0), S(1))", "(P, B)", "(B, S(0))"], repeat=2):
            given = [parse_nd_sbp(a), parse_nd_sbp(b)]
            operands = dry_operands("matmul", given, DryBoxing(4), placement)
            outputs.append(ops.matmul(*operands).layout)
        choices.append(outputs)
    assert choices[0] == choices[1]


def test_nonlinear_functions_never_get_partial():
    for name in ("relu", "tanh", "bias_add", "bce_none", "linear_bias", "fm_interaction",
                 "dot_interaction", "layer_norm", "batch_norm"):  # fmt: skip
        boxing = DryBoxing(2)
        nd_sbps = [(Partial(),), *[parse_nd_sbp("B")] * (len(OPS[name][2]) - 1)]
        y = OPS[name][0](*dry_operands(name, nd_sbps, boxing, Placement.line("cpu", 2)))
        assert not oracle.has_partial(y.layout), name
        assert boxing.trace, name


def _max_of_split(world, dim):
    boxing = Boxing(world)
    layout = Layout(Placement.line("cpu", world.size), (Split(dim),))
    full = torch.tensor([[3.0, 9, 1, 9], [8.0, 2, 8, 0], [5.0, 5, 5, 5]], dtype=torch.float64)
    x = _lay_out(world, boxing, full, layout, 0).requires_grad_()
    y = ops.reduce_max(x, [1])
    value = ops.scale(y.to("B"), 2.0)
    everywhere = Layout(layout.placement, parse_nd_sbp("B"))
    cotangent = torch.tensor([1.0, 10, 100], dtype=torch.float64)
    value.backward(GlobalTensor.from_full(cotangent, everywhere, boxing))
    return str(y.layout.nd_sbp[0]), value.full().tolist(), x.part.grad.tolist()


def test_reduce_max_over_a_split_dim(ranks):
    """The output is P(max), never P; among equal maxima, the first part gets the gradient."""
    first, second = ranks(2, _max_of_split, 1)
    assert first[0] == second[0] == "P(max)"
    assert first[1] == second[1] == [18, 16, 10]
    # Rows 0 and 1 tie across parts, and row 2 ties everywhere; part 0 gets the gradient and divides
    # it evenly.
    assert first[2] == [[0, 2], [20, 0], [100, 100]]
    assert second[2] == [[0, 0], [0, 0], [0, 0]]


def _dropped(world, nd_sbp, seed):
    boxing = Boxing(world)
    layout = Layout(Placement.line("cpu", world.size), nd_sbp)
    x = GlobalTensor.from_full(torch.ones(64, 32), layout, boxing).requires_grad_()
    kept = ops.dropout(x, 0.25, seed)
    kept.part.sum().backward()
    assert torch.equal(x.part.grad, kept.part)  # gradients of 1 get the mask and factor of x
    again = ops.dropout(x, 0.25, seed)
    assert torch.equal(kept.part, again.part)
    assert ops.dropout(x, 0.25, seed, training=False) is x
    return kept.part.detach().numpy()


def test_dropout_masks(ranks):
    """The same elements are dropped for every layout and world size, and the mean does not
    change."""
    a, b = ranks(2, _dropped, parse_nd_sbp("B"), 5)
    assert (a == b).all()
    assert set(a.flatten()) == {0.0, a.max()}
    assert a.max() == pytest.approx(4 / 3)
    assert a.mean() == pytest.approx(1.0, abs=0.1)
    other = ranks(2, _dropped, parse_nd_sbp("B"), 6)[0]
    assert (a != other).any()
    for size, sbp, axis in ((2, "S(0)", 0), (2, "S(1)", 1), (3, "S(0)", 0)):
        parts = ranks(size, _dropped, parse_nd_sbp(sbp), 5)
        assert (np.concatenate(parts, axis) == a).all(), sbp


def _dropped_number(world, seed):
    layout = Layout(Placement.line("cpu", world.size), parse_nd_sbp("B"))
    x = GlobalTensor.from_full(torch.tensor(3.0), layout, Boxing(world))
    return ops.dropout(x, 0.25, seed).part.tolist()


def test_dropout_of_a_number(ranks):
    made = [ranks(2, _dropped_number, seed) for seed in range(20)]
    assert all(first == second for first, second in made)
    assert {first for first, _ in made} == {0.0, 4.0}


def test_impossible_signature_names_what_is_legal():
    boxing, placement = DryBoxing(2), Placement.line("cpu", 2)
    x, w = dry_operands("linear", [parse_nd_sbp("S(0)"), parse_nd_sbp("B")], boxing, placement)
    with pytest.raises(SbpError) as caught:
        ops.relu(x, out="P")
    text = str(caught.value)
    for part in ("relu", "[5, 7] S(0)@[0, 1]", "output P", "S(1) -> S(1)", "never converted to P"):
        assert part in text
    assert ops.linear(x, w, out="S(1)").layout.nd_sbp == parse_nd_sbp("S(1)")


def test_operands_on_different_placements():
    boxing = DryBoxing(3)
    layouts = [Layout(Placement.of("cpu", r), parse_nd_sbp("B")) for r in ([0, 1], [0, 2])]
    a, b = (GlobalTensor(torch.empty(2, 2, device="meta"), layout, (2, 2), boxing)
            for layout in layouts)  # fmt: skip
    with pytest.raises(SbpError, match=r"add: operands have different placements: .*@\[0, 1\]"):
        ops.add(a, b)
