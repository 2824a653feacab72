"""Tests user mistakes with ops and dtypes: every rank raises one message that says what to do.

All ranks see the same shapes, dims and dtypes, but only the ranks that store a value (such as an
out-of-range id) see it.
"""

import re
from pathlib import Path

import pytest
import torch

from sbpflow.boxing.dry_run import DryBoxing
from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import plan_boxing
from sbpflow.errors import SbpError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Partial, Split, parse_nd_sbp
from sbpflow.tensor import ops
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.tensor.gradient_sync import GradientSync
from sbpflow.tensor.infer_shape import infer_shape
from tests import oracle
from tests.oracle import line_layout
from tests.ranks import RanksFailed
from tests.sbp.conversions import check_parts, whole_numbers
from tests.torchrun import run_script

ROOT = Path(__file__).parents[2]


def dry(*shape, sbp="B", dtype=torch.float32):
    """Return a tensor for planning only, on two ranks."""
    layout = Layout(Placement.line("cpu", 2), parse_nd_sbp(sbp))
    part = torch.empty(layout.part_shape(shape, 0), dtype=dtype, device="meta")
    return GlobalTensor(part, layout, shape, DryBoxing(2))


def wrong(text, call):
    return pytest.param(call, text, id=text[:40])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        wrong(
            "linear: shapes [[5, 7], [5, 6]] do not fit", lambda: ops.linear(dry(5, 7), dry(5, 6))
        ),
        wrong("linear: weight has 1 dim,", lambda: ops.linear(dry(5, 7), dry(7))),
        wrong("linear: x has 0 dims", lambda: ops.linear(dry(), dry(5, 7))),
        wrong("matmul: the second operand has 1 dim,", lambda: ops.matmul(dry(5, 7), dry(7))),
        wrong("matmul: the first operand has 0 dims", lambda: ops.matmul(dry(), dry(7, 7))),
        wrong("bias_add: x has 0 dims", lambda: ops.bias_add(dry(), dry(7))),
        wrong("bias_add: shapes [[5, 7], [5]] do not fit", lambda: ops.bias_add(dry(5, 7), dry(5))),
        wrong(
            "add: [5, 7] and [5, 6] do not broadcast: dim -1 has lengths 7 and 6; ",
            lambda: ops.add(dry(5, 7), dry(5, 6)),
        ),
        wrong(
            "mul: [5] and [5, 7] do not broadcast: dim -1 has lengths 5 and 7",
            lambda: ops.mul(dry(5), dry(5, 7)),
        ),
        wrong("concat: the list of tensors is empty", lambda: ops.concat([], 0)),
        wrong(
            "tensor 1 has shape [4, 5], but tensor 0 has shape [4]; shapes may differ only along "
            "dim 0",
            lambda: ops.concat([dry(4), dry(4, 5)], 0),
        ),
        wrong(
            "tensor 2 has shape [4, 5], but tensor 0 has shape [3, 5]; shapes may differ only along"
            " dim 1",
            lambda: ops.concat([dry(3, 5), dry(3, 2), dry(4, 5)], 1),
        ),
        wrong("concat: dim 2 is out of range", lambda: ops.concat([dry(3, 5)], 2)),
        wrong(
            "reduce_sum: dims [1, -1] contain dim 1 twice; list each dim once",
            lambda: ops.reduce_sum(dry(5, 7), [1, -1]),
        ),
        wrong(
            "reduce_sum: dim 2 is out of range for GlobalTensor(float32[5, 7] B@[0, 1]); use 0..1",
            lambda: ops.reduce_sum(dry(5, 7), [2]),
        ),
        wrong(
            "reduce_mean: dims [0, 0] contain dim 0 twice", lambda: ops.reduce_mean(dry(5), [0, 0])
        ),
        wrong(
            "reduce_mean: dim 1 is out of range for GlobalTensor(float32[5] B@[0, 1]); use 0",
            lambda: ops.reduce_mean(dry(5), [1]),
        ),
        wrong(
            "reduce_max: dims [0, 1, 0] contain dim 0 twice",
            lambda: ops.reduce_max(dry(5, 7), [0, 1, 0]),
        ),
        wrong("reduce_max: dim -3 is out of range", lambda: ops.reduce_max(dry(5, 7), [-3])),
        wrong(
            "dim 0 is out of range for GlobalTensor(float32[] B@[0, 1]); it has no dims",
            lambda: ops.reduce_max(dry(), [0]),
        ),
        wrong(
            "reduce_max: GlobalTensor(float32[0, 7] B@[0, 1]) has no elements along [0]",
            lambda: ops.reduce_max(dry(0, 7), [0]),
        ),
        wrong(
            "reshape: [5, 7] has 35 elements and cannot become [4, -1]",
            lambda: ops.reshape(dry(5, 7), (4, -1)),
        ),
        wrong("cannot become [-5, -7]", lambda: ops.reshape(dry(5, 7), (-5, -7))),
        wrong("cannot become [0, -1]", lambda: ops.reshape(dry(0, 7), (0, -1))),
        wrong(
            "gather: the table has 1 dim,", lambda: ops.gather(dry(5), dry(3, dtype=torch.int64))
        ),
        wrong(
            "gather: ids must have an integer dtype, such as torch.int64, got GlobalTensor(float32",
            lambda: ops.gather(dry(5, 7), dry(3)),
        ),
        wrong(
            "bce_with_logits: reduction must be none, sum, or mean, got 'max'",
            lambda: ops.bce_with_logits(dry(5), dry(5), reduction="max"),
        ),
        wrong(
            "bce_with_logits: shapes [[5, 1], [5]] do not fit",
            lambda: ops.bce_with_logits(dry(5, 1), dry(5)),
        ),
        wrong(
            "dropout: p must be at least 0 and less than 1 (for example, 0.1), got 1.5",
            lambda: ops.dropout(dry(5), 1.5, 0),
        ),
    ],
)
def test_shapes_and_dims(call, text):
    with pytest.raises(SbpError, match=re.escape(text)):
        call()


def trained(*shape):
    return dry(*shape).requires_grad_()


SAME = trained(3)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (
            [trained(2), ops.relu(trained(4))],
            "gradients: parameter 1, GlobalTensor(float32[4] B@[0, 1]), is not a leaf",
        ),
        (
            [SAME, trained(2), SAME],
            "gradients: parameter 2, GlobalTensor(float32[3] B@[0, 1]), is the same as parameter 0",
        ),
        (
            [dry(4)],
            "gradients: parameter 0, GlobalTensor(float32[4] B@[0, 1]), does not require grad; ",
        ),
        (
            [trained(2), dry(4, dtype=torch.int64)],
            "gradients: parameter 1, GlobalTensor(int64[4] B@[0, 1]), does not require grad; ",
        ),
        (
            [trained(2), dry(4, sbp="S(0)")],
            "gradients: parameter 1, GlobalTensor(float32[4] S(0)@[0, 1]), does not require grad;",
        ),
    ],
    ids=["result", "twice", "frozen", "integer", "frozen split"],
)
def test_tensors_without_their_own_gradient_are_refused(parameters, text):
    for bucket_bytes in (8, 1 << 20):
        with pytest.raises(SbpError, match=re.escape(text)):
            GradientSync(parameters, bucket_bytes=bucket_bytes)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        wrong(
            "item() needs a tensor with one element, got GlobalTensor(float32[5, 2] B@[0, 1]);",
            lambda: dry(5, 2).item(),
        ),
        wrong(
            "item() needs a tensor with one element, got GlobalTensor(float32[0] B@[0, 1])",
            lambda: dry(0).item(),
        ),
        wrong(
            "backward(): the gradient must have the same shape as "
            "GlobalTensor(float32[3] B@[0, 1]), got "
            "GlobalTensor(float32[5] B@[0, 1])",
            lambda: trained(3).backward(dry(5)),
        ),
        wrong("must have the same shape as", lambda: trained(3).backward(dry(1))),
        wrong(
            "backward(): on rank 0, no input of GlobalTensor(float32[] B@[0, 1]) requires grad",
            lambda: dry().backward(),
        ),
        wrong(
            "rank 0 passed a part that does not require grad; omit requires_grad",
            lambda: GlobalTensor.from_local(
                torch.empty(2, device="meta"),
                line_layout("cpu", 2, Broadcast()),
                (2,),
                DryBoxing(2),
                requires_grad=True,
            ),
        ),
    ],
)
def test_one_element_and_shapes_of_gradients(call, text):
    with pytest.raises(SbpError, match=re.escape(text)):
        call()


def _items(world):
    values = [torch.tensor([[2**53 + 1]]), torch.tensor(2.5), torch.tensor([True])]
    layout = line_layout("cpu", world.size, Broadcast())
    return [GlobalTensor.from_full(value, layout, Boxing(world)).item() for value in values]


def test_item_has_the_type_of_its_tensor(ranks):
    for values in ranks(2, _items):
        assert values == [2**53 + 1, 2.5, True]
        assert [type(value) for value in values] == [int, float, bool]


F64, I64 = torch.float64, torch.int64


@pytest.mark.parametrize(
    ("call", "text"),
    [
        wrong(
            "add: operands have dtypes float32, float64, but must all have the same dtype",
            lambda: ops.add(dry(5), dry(5, dtype=F64)),
        ),
        wrong(
            "mul: operands have dtypes float32, int64, but must",
            lambda: ops.mul(dry(5), dry(5, dtype=I64)),
        ),
        wrong(
            "matmul: operands have dtypes float64, float32, but must",
            lambda: ops.matmul(dry(5, 7, dtype=F64), dry(7, 5)),
        ),
        wrong(
            "linear: operands have dtypes float32, float32, float64, but must",
            lambda: ops.linear(dry(5, 7), dry(6, 7), dry(6, dtype=F64)),
        ),
        wrong(
            "bias_add: operands have dtypes float32, float64, but must",
            lambda: ops.bias_add(dry(5, 7), dry(7, dtype=F64)),
        ),
        wrong(
            "concat: operands have dtypes float32, float64, float32, but must",
            lambda: ops.concat([dry(5), dry(5, dtype=F64), dry(5)], 0),
        ),
        wrong(
            "reduce_mean: GlobalTensor(int64[5] B@[0, 1]) does not have a floating dtype",
            lambda: ops.reduce_mean(dry(5, dtype=I64)),
        ),
        wrong("dropout: GlobalTensor(int64[5]", lambda: ops.dropout(dry(5, dtype=I64), 0.5, 0)),
        wrong("scale: GlobalTensor(int64[5]", lambda: ops.scale(dry(5, dtype=I64), 0.5)),
        wrong(
            "bce_with_logits: GlobalTensor(int64[5]",
            lambda: ops.bce_with_logits(dry(5, dtype=I64), dry(5)),
        ),
        wrong(
            "above: the function returned torch.bool, but an op must keep",
            lambda: ops.nonlinear("above", lambda x: x > 0, dry(5)),
        ),
    ],
)
def test_dtypes_are_not_mixed(call, text):
    """There is no implicit promotion, because a rank without a part could not know the dtype."""
    with pytest.raises(SbpError, match=re.escape(text)):
        call()


def test_integer_labels_and_class_weights():
    assert ops.bce_with_logits(dry(5), dry(5, dtype=I64)).dtype == torch.float32
    assert ops.scale(dry(5, dtype=I64), 3).dtype == I64
    many = ops.concat([dry(2) for _ in range(70)], 0)
    assert many.shape == (140,)


def _dtypes_off_the_placement(world):
    """Use operands on ranks 0 and 2; rank 1 has no part, but must know every dtype."""
    boxing = Boxing(world)
    there = Layout(Placement.of("cpu", [0, 2]), (Split(0),))
    on_one = Layout(Placement.of("cpu", [1]), (Broadcast(),))

    def lay(full):
        return GlobalTensor.from_full(full, there, boxing)

    x, labels = lay(torch.ones(4)), lay(torch.tensor([0, 1, 1, 0]))
    table, ids = lay(torch.arange(8.0).view(4, 2)), lay(torch.tensor([[0], [3], [1], [1]]))
    results = [
        (ops.bce_with_logits(x, labels.to("S(0)"), reduction="none"), torch.float32),
        (ops.reduce_sum(ops.cast(labels, torch.int32)), torch.int64),
        (ops.gather(table, ids), torch.float32),
        (ops.cast(x, torch.bfloat16), torch.bfloat16),
        (ops.cast(labels, torch.float64), torch.float64),
        (ops.relu(labels), torch.int64),
    ]
    for y, dtype in results:
        assert y.dtype == dtype
        assert y.to(on_one).dtype == dtype
        assert y.full().dtype == dtype
    return ops.reduce_sum(ops.cast(labels, torch.int32)).full().item()


def test_a_rank_without_a_part_knows_the_dtype(ranks):
    assert ranks(3, _dtypes_off_the_placement) == [2, 2, 2]


def _cast(world, sbp, dtype_name):
    boxing = Boxing(world)
    layout = line_layout("cpu", world.size, parse_nd_sbp(sbp)[0])
    full = whole_numbers((5, 7), torch.float32)
    part = oracle.shares(full, layout, seed=1)[world.rank].clone()
    x = GlobalTensor.from_local(part, layout, (5, 7), boxing).requires_grad_()
    dtype = getattr(torch, dtype_name)
    y = ops.cast(x, dtype)
    check_parts(world, y.part.detach(), y.layout, full.to(dtype), f"{sbp} as {dtype_name}")
    cotangent = whole_numbers((5, 7), dtype, step=5)
    seed = oracle.shares(cotangent, y.layout.dual(), seed=2)[world.rank]
    torch.autograd.backward([y.part], [seed])
    check_parts(world, x.part.grad, x.layout.dual(), cotangent.float(), f"gradient of {sbp}")
    return str(y.layout.nd_sbp[0])


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_cast_keeps_partial_only_if_terms_stay_exact(ranks, dtype):
    for sbp in ("S(0)", "S(1)", "B"):
        assert ranks(2, _cast, sbp, dtype) == [sbp] * 2
    assert ranks(2, _cast, "P", dtype) == ["P" if dtype == "float64" else "S(0)"] * 2


@pytest.mark.parametrize(
    ("dtype", "instead"),
    [
        (torch.bool, "torch.int8"),
        (torch.uint16, "torch.int32"),
        (torch.uint32, "torch.int64"),
        (torch.float8_e4m3fn, "torch.float64"),
        (torch.complex64, "torch.float64"),
    ],
)
@pytest.mark.parametrize("sbp", ["P", "P(max)", "P(min)"])
def test_partial_needs_a_dtype_with_addition(sbp, dtype, instead):
    p, b = (line_layout("cpu", 2, parse_nd_sbp(text)[0]) for text in (sbp, "B"))
    text = re.escape(
        f"{p} cannot have dtype {dtype}, because P needs a dtype that supports addition"
    )
    with pytest.raises(SbpError, match=f"{text}.*convert to {instead} first, or use S or B"):
        GlobalTensor(torch.empty(4, dtype=dtype, device="meta"), p, (4,), DryBoxing(2))
    for pair in ((p, b), (b, p)):
        with pytest.raises(SbpError, match=text):
            plan_boxing(*pair, (4,), dtype, id="x", backend="gloo")
    with pytest.raises(SbpError, match=text):
        dry(4, 4, dtype=dtype).to(sbp)


def test_unsupported_dtypes_are_refused():
    layouts = [line_layout("cpu", 2, sbp) for sbp in (Split(0), Broadcast())]
    with pytest.raises(SbpError, match=r"cannot send torch\.complex128"):
        plan_boxing(*layouts, (4,), torch.complex128, id="x", backend="gloo")


BAD_IDS = {"too high": (3, 1, 7), "negative": (4, 0, -1), "first": (0, 0, 99)}


def _look_up(world, table_sbp, ids_sbp, ranks, bad):
    """Return this rank's error, if any; a rank without ids must raise it, too."""
    boxing = Boxing(world)
    placement = Placement.of("cpu", ranks)
    row, column, value = bad
    full = torch.arange(10).view(5, 2) % 7
    full[row, column] = value
    table = whole_numbers((7, 4), torch.float32)
    table_layout = Layout(placement, parse_nd_sbp(table_sbp))
    part = oracle.shares(table, table_layout, seed=2).get(world.rank, table.new_empty(0))
    rows = GlobalTensor.from_local(part.clone(), table_layout, (7, 4), boxing).requires_grad_()
    ids = GlobalTensor.from_full(full, Layout(placement, parse_nd_sbp(ids_sbp)), boxing)
    try:
        ops.gather(rows, ids, id="deep")
    except SbpError as error:
        return str(error)
    return "no error"


@pytest.mark.checked
@pytest.mark.parametrize("bad", BAD_IDS.values(), ids=BAD_IDS)
@pytest.mark.parametrize("ids_sbp", ["B", "S(0)"])
@pytest.mark.parametrize("table_sbp", ["B", "S(0)", "S(1)", "P"])
def test_ids_out_of_range_give_the_same_error_on_every_rank(ranks, table_sbp, ids_sbp, bad):
    """Every layout gives the same error on every rank, even outside the placement."""
    row, column, value = bad
    text = f"gather: ids[{row}, {column}] is {value}, but the table has 7 rows; ids must be 0..6"
    for line in ([0, 1], [0, 1, 2], [2, 0]):
        size = max(line) + 1
        messages = ranks(size, _look_up, table_sbp, ids_sbp, line, bad)
        assert len(set(messages)) == 1
        assert text in messages[0]


@pytest.mark.checked
def test_ids_out_of_range_on_a_grid(ranks):
    for nd_sbps in (
        ("(S(0), S(1))", "(B, B)"),
        ("(B, S(0))", "(S(0), B)"),
        ("(S(0), B)", "(B, B)"),
    ):
        messages = ranks(4, _look_up, *nd_sbps, [[0, 1], [2, 3]], (3, 1, 7))
        assert len(set(messages)) == 1
        assert "gather: ids[3, 1] is 7, but the table has 7 rows" in messages[0]


JOB = """
    import sys, time
    from sbpflow.runtime.processes.launch import run_main

    def main():
        import torch
        from sbpflow import ops
        from sbpflow.boxing.executor import Boxing
        from sbpflow.runtime.ranks.world import World
        from sbpflow.tensor.global_tensor import GlobalTensor
        from tests.oracle import line_layout
        from sbpflow.sbp.sbp import Broadcast, Split

        world = World.start("cpu", timeout_s=1200)
        boxing = Boxing(world)
        table = GlobalTensor.from_full(torch.ones(7, 4), line_layout("cpu", 2, Broadcast()), boxing)
        ids = torch.tensor([0, 1, 2, 7])
        ids = GlobalTensor.from_full(ids, line_layout("cpu", 2, Split(0)), boxing)
        table.full(), world.barrier()
        print("ready", flush=True)
        ops.reduce_sum(ops.gather(table, ids)).item()

    run_main(main)
"""


@pytest.mark.slow
def test_one_rank_ends_all_without_checked_mode(tmp_path):
    """Only rank 1 has the bad id, and rank 0 waits for rank 1's sum; one message is printed, and
    both ranks exit.
    """
    done = run_script(tmp_path, JOB, seconds=60)  # a collective would wait 20 minutes
    assert done.returncode != 0
    assert done.stdout.count("ready") == 2
    message = "SbpError: gather: ids[3] is 7, but the table has 7 rows; ids must be 0..6\n[rank 1]"
    assert done.stderr.count(message) == 1
    assert done.stderr.split(message)[0].count("Traceback") == 1, "of the rank that was wrong"


def _no_such_rank(world):
    infer_shape(torch.zeros(2), Layout(Placement.of("cpu", [0, 7]), (Split(0),)), Boxing(world))


def _sizes_do_not_add_up(world):
    layout = Layout(Placement.of("cpu", [0, 1]), "S(0)[3, 3]")
    part = torch.ones(3) if world.rank in layout.placement else None
    GlobalTensor.from_local(part, layout, (5,), Boxing(world))


def test_sizes_are_checked_on_every_rank(ranks):
    """Rank 2 has no part, but must check the sizes, too, or it would wait in the next
    collective.
    """
    with pytest.raises(RanksFailed) as caught:
        ranks(3, _sizes_do_not_add_up)
    assert len(caught.value.errors) == 3
    text = "the sizes of S(0)[3, 3] add up to 6, but the length of the dim is 5"
    assert all(text in error for error in caught.value.errors.values())


def test_shapes_that_cannot_be_inferred(ranks):
    text = "S(0)@[0, 7] names ranks outside this world of 2; use 0..1"
    with pytest.raises(RanksFailed) as caught:
        ranks(2, _no_such_rank)
    assert len(caught.value.errors) == 2
    assert all(text in error for error in caught.value.errors.values())


def test_partials_of_different_reductions_are_not_mixed():
    with pytest.raises(SbpError, match=r"add has no legal signature .* output P\(max\)"):
        ops.add(dry(4, sbp="P(max)"), dry(4, sbp="P(max)"), out=(Partial("max"),))
