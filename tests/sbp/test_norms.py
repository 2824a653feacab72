"""Tests norms and interactions beyond their values: running statistics, traffic, dtypes,
refusals.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sbpflow.boxing.dry_run import DryBoxing
from sbpflow.boxing.executor import Boxing
from sbpflow.errors import SbpError
from sbpflow.models.plain import PlainFunctions
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Split, parse_nd_sbp
from sbpflow.tensor import ops
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.tensor.gradient_sync import sync_gradients
from tests.meter import Meter
from tests.sbp.test_ops import normed, running_of

ROWS, WIDTH, STEPS = 11, 6, 4


def batches():
    generator = torch.Generator().manual_seed(4)
    return [
        torch.randn(ROWS - step, WIDTH, generator=generator, dtype=torch.float64) * 3
        for step in range(STEPS)
    ]


def plain():
    """Return the outputs of torch's norm in one process, in training and then in evaluation, and
    its running mean and variance."""
    norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
    outputs = [norm(x) for x in batches()]
    return outputs, norm.eval()(batches()[0]), norm.running_mean, norm.running_var


def norm_in_steps(world, nd_sbp):
    boxing, line = Boxing(world), Placement.line("cpu", world.size)
    everywhere = Layout(line, parse_nd_sbp("B"))
    weight, bias = (
        GlobalTensor.from_full(torch.full((WIDTH,), v, dtype=torch.float64), everywhere, boxing)
        for v in (1.0, 0.0)
    )
    running = None
    outputs = []
    for full in batches():
        x = GlobalTensor.from_full(full, Layout(line, parse_nd_sbp(nd_sbp)), boxing)
        running = running or running_of(x)
        outputs.append(normed(x, weight, bias, running=running).full())
    x = GlobalTensor.from_full(batches()[0], Layout(line, parse_nd_sbp(nd_sbp)), boxing)
    with Meter() as meter:
        last = normed(x, weight, bias, running=running, training=False)
    assert meter.names == []
    return outputs, last.full(), *(buffer.part for buffer in running)


@pytest.mark.parametrize("nd_sbp", ["S(0)", "S(1)", "B"])
def test_running_statistics_are_those_of_one_process(ranks, nd_sbp):
    wanted = plain()
    for result in ranks(3, norm_in_steps, nd_sbp):
        for mine, theirs in zip(result[0], wanted[0], strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=1e-12)
        for mine, theirs in zip(result[1:], wanted[1:], strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=1e-12)


def norm_without_rows(world):
    boxing, line = Boxing(world), Placement.line("cpu", world.size)
    everywhere = Layout(line, parse_nd_sbp("B"))
    full = batches()[0][:2]
    x = GlobalTensor.from_full(full, Layout(line, (Split(0, (1, 0, 1)),)), boxing)
    leaves = [
        GlobalTensor.from_full(torch.full((WIDTH,), v).double(), everywhere, boxing)
        for v in (2.0, 1.0)
    ]
    x.requires_grad_()
    y = normed(x, *leaves)
    with Meter() as meter:
        ops.reduce_sum(ops.mul(y, y)).backward()
    gradient = GlobalTensor(x.part.grad, x.layout, x.shape, boxing).full()
    return y.full(), gradient, meter.names


def test_a_rank_without_rows_and_one_all_reduce_each_way(ranks):
    x = batches()[0][:2].requires_grad_()
    y = F.batch_norm(x, None, None, torch.full((WIDTH,), 2.0).double(), torch.ones(WIDTH).double(),
                     training=True)  # fmt: skip
    y.square().sum().backward()
    for found, gradient, names in ranks(3, norm_without_rows):
        torch.testing.assert_close(found, y.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(gradient, x.grad, rtol=0, atol=1e-10)
        assert names == ["all_reduce"]


FAR = torch.tensor(
    [[1.6e9, 1e5], [2015.0, 5.0], [1e5, 3.0]], dtype=torch.float64
)  # mean, deviation


def far_columns():
    """Return float32 columns far from 0, such as timestamps and years."""
    generator = torch.Generator().manual_seed(4)
    mean, deviation = FAR.T
    return (torch.randn(64, 3, generator=generator) * deviation + mean).float()


def norm_of_far_columns(world):
    """Return the output, the gradients and the running statistics of the first step."""
    boxing, line = Boxing(world), Placement.line("cpu", world.size)
    everywhere = Layout(line, parse_nd_sbp("B"))
    x = GlobalTensor.from_full(far_columns(), Layout(line, parse_nd_sbp("S(0)")), boxing)
    weight, bias = (
        GlobalTensor.from_full(torch.full((3,), v), everywhere, boxing) for v in (2.0, 1.0)
    )
    leaves, running = [x, weight, bias], running_of(x)
    for leaf in leaves:
        leaf.requires_grad_()
    y = normed(*leaves, running=running)
    ops.reduce_sum(ops.mul(y, ops.mul(y, y))).backward()
    sync_gradients(leaves)
    gradients = [GlobalTensor(a.part.grad, a.layout, a.shape, boxing).full() for a in leaves]
    return y.full(), *gradients, *(buffer.part for buffer in running)


@pytest.mark.parametrize("size", [1, 2])
def test_columns_far_from_0_are_normalized_precisely_from_the_first_step(ranks, size):
    """The running mean is still 0, so sums in float32 would lose all digits of the variance."""
    norm = nn.BatchNorm1d(3, dtype=torch.float64)
    nn.init.constant_(norm.weight, 2.0)
    nn.init.constant_(norm.bias, 1.0)
    x = far_columns().double().requires_grad_()
    y = norm(x)
    y.pow(3).sum().backward()
    gradients = [x.grad, norm.weight.grad, norm.bias.grad]
    wanted = [y.detach(), *gradients, norm.running_mean, norm.running_var]
    for found in ranks(size, norm_of_far_columns):
        for mine, theirs in zip(found, wanted, strict=True):
            # float32 rounds each value by 6e-8; sums of 64 values add up such errors.
            bound = 2e-6 * theirs.abs().amax(0)
            assert ((mine.double() - theirs).abs() <= bound).all()


def dry(nd_sbp, shape, dtype=torch.float32):
    boxing, layout = DryBoxing(2), Layout(Placement.line("cpu", 2), parse_nd_sbp(nd_sbp))
    part = torch.empty(layout.part_shape(shape, 0), dtype=dtype, device="meta")
    return GlobalTensor(part, layout, shape, boxing)


def test_the_sum_of_interactions_of_a_half_type_is_float32():
    x = dry("S(0)", (4, 3, 8), torch.bfloat16)
    assert ops.fm_interaction(x).dtype == torch.float32
    assert ops.dot_interaction(x).dtype == torch.bfloat16
    values = torch.full((1, 2, 4), 300.0, dtype=torch.float16)
    alone = Layout(Placement.line("cpu", 1), parse_nd_sbp("B"))
    boxing = DryBoxing(1)
    output = ops.fm_interaction(GlobalTensor(values, alone, (1, 2, 4), boxing))
    assert output.part.item() == 4 * 300.0**2  # values above the range of float16


@pytest.mark.parametrize("low", [False, True], ids=["full rank", "low rank"])
@pytest.mark.parametrize("half", [None, torch.bfloat16], ids=str)
def test_cross_layers_by_blocks_of_rows(low, half):
    """Compare three layers computed in several blocks of rows with autograd over whole tensors."""
    shapes = [(5, 9), (9, 5), (9,)] if low else [(9, 9), (9,)]
    values = torch.Generator().manual_seed(3)
    dtype = torch.float64 if half is None else torch.float32
    full = [torch.randn(700, 9, generator=values, dtype=dtype)]
    full += [torch.randn(s, generator=values, dtype=dtype) / 3 for _ in range(3) for s in shapes]
    plain = [tensor.clone().requires_grad_() for tensor in full]
    weights = [plain[1:][n : n + len(shapes)] for n in range(0, 3 * len(shapes), len(shapes))]
    wanted = PlainFunctions().cross_network(plain[0], weights, half=half)
    boxing, alone = DryBoxing(1), Layout(Placement.line("cpu", 1), parse_nd_sbp("B"))
    x, *own = (
        GlobalTensor(tensor.clone(), alone, tuple(tensor.shape), boxing).requires_grad_()
        for tensor in full
    )
    layers = [own[n : n + len(shapes)] for n in range(0, len(own), len(shapes))]
    output = ops.cross_network(x, layers, half=half)
    bound = 1e-12 if half is None else 2e-2
    torch.testing.assert_close(output.part, wanted, rtol=bound, atol=bound)
    cotangent = torch.randn(wanted.shape, generator=values, dtype=dtype)
    wanted.backward(cotangent)
    output.part.backward(cotangent)
    for mine, theirs in zip([x, *own], plain, strict=True):
        difference = (mine.part.grad - theirs.grad).abs().max() / theirs.grad.abs().max()
        assert difference < bound


def test_cross_network_refusals():
    x, square, bias = dry("S(0)", (4, 3)), dry("B", (3, 3)), dry("B", (3,))
    assert ops.cross_network(x, []) is x
    with pytest.raises(SbpError, match=r"layer 1 have .* \[\[3\], \[3, 3\]\], but x has 3"):
        ops.cross_network(x, [(square, bias), (bias, square)])
    with pytest.raises(SbpError, match="operands have dtypes float32, float32, bfloat16"):
        ops.cross_network(x, [(square, dry("B", (3,), torch.bfloat16))])


def test_norm_refusals():
    x = dry("S(0)", (4, 3))
    weight = bias = dry("B", (3,))
    mean, var = running_of(x)
    with pytest.raises(SbpError, match=r"a batch of one row has no variance; .* data\.tail: drop"):
        ops.batch_norm(dry("B", (1, 3)), weight, bias, mean, var, training=True)
    half = [dry("S(0)", (4, 3), torch.float16), *(dry("B", (3,), torch.float16),) * 4]
    with pytest.raises(SbpError, match=r"precision of torch\.float16; convert .* ops\.cast"):
        ops.batch_norm(*half, training=True)
    split = GlobalTensor(torch.empty(2, device="meta"), Layout(mean.layout.placement, (Split(0),)),
                         (3,), mean.boxing)  # fmt: skip
    with pytest.raises(SbpError, match=r"running_mean .*must have layout B"):
        ops.batch_norm(x, weight, bias, split, var, training=True)
    with pytest.raises(SbpError, match="operands have dtypes bfloat16, float32"):
        ops.layer_norm(dry("S(0)", (4, 3), torch.bfloat16), weight, bias)
    with pytest.raises(SbpError, match=r"x \[batch, vectors, width\] has 2 dims"):
        ops.dot_interaction(x)
