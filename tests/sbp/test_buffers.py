"""Tests the memory of conversions (lent, kept, and donated buffers) and the order of terms in
sums."""

import contextlib
import itertools

import pytest
import torch

from sbpflow.boxing import buffers as staging
from sbpflow.boxing import program as boxing_program
from sbpflow.boxing.buffers import Loan, Staging
from sbpflow.boxing.copies import combined
from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import plan_boxing
from sbpflow.boxing.program import compile_step
from sbpflow.sbp.sbp import Broadcast, Partial, Split
from tests import oracle
from tests.oracle import line_layout
from tests.sbp.conversions import check_parts

B, P, S0, S1 = Broadcast(), Partial(), Split(0), Split(1)


def _steps(world_size, a, b, shape=(6, 4), dtype=torch.float32):
    src, dst = line_layout("cpu", world_size, a), line_layout("cpu", world_size, b)
    return plan_boxing(src, dst, shape, dtype, id="x", backend="gloo")


def _donated(world):
    boxing = Boxing(world)
    part = torch.full((6, 4), world.rank + 1.0)
    steps = _steps(world.size, P, B)
    kept = boxing.run(steps, part)
    assert part.unique().tolist() == [world.rank + 1.0]
    given = boxing.run(steps, part, donate=True)
    assert torch.equal(kept, given)
    return given.data_ptr() == part.data_ptr()


def test_a_part_is_overwritten_only_if_donated(ranks):
    assert ranks(2, _donated) == [True, True]


def _results_kept(world):
    """Convert between all pairs twice, with different values; the first results must not change."""
    boxing = Boxing(world)
    usual, staging.MIN_BYTES = staging.MIN_BYTES, 1  # lend buffers of every size
    kept = []
    for factor in (1.0, 2.0):
        full = torch.arange(35.0).view(7, 5) * factor
        for a, b in itertools.product((S0, S1, B, P), repeat=2):
            src, dst = (line_layout("cpu", world.size, s) for s in (a, b))
            steps = plan_boxing(src, dst, (7, 5), torch.float32, id="x", backend="gloo")
            part = oracle.shares(full, src)[world.rank]
            kept.append((boxing.run(steps, part), dst, full))
    staging.MIN_BYTES = usual
    for part, dst, full in kept:
        check_parts(world, part, dst, full, f"kept {dst}")


def test_results_do_not_alias_buffers(ranks):
    ranks(3, _results_kept)


def test_staging_buffers_are_reused_and_released(monkeypatch):
    monkeypatch.setattr("sbpflow.boxing.buffers.MIN_BYTES", 1000)
    pool = Staging()
    loan = Loan(pool)
    first = loan.take((50, 100), torch.empty(0, dtype=torch.float64))
    assert (first.shape, first.dtype) == ((50, 100), torch.float64)
    second = loan.take((50, 100), torch.empty(0, dtype=torch.float64))
    assert second.data_ptr() != first.data_ptr()
    assert loan.take((10,), first).numel() == 10  # too small to be kept for reuse
    loan.give_back()
    assert pool.kept_bytes == 80_000
    again = Loan(pool).take((9000,), torch.empty(0, dtype=torch.int32))
    assert again.data_ptr() in (first.data_ptr(), second.data_ptr())
    assert pool.kept_bytes == 40_000
    monkeypatch.setattr("sbpflow.boxing.buffers.MAX_KEPT_BYTES", 50_000)
    loan = Loan(pool)
    loan.take((3000,), torch.empty(0)), loan.take((6000,), torch.empty(0))
    loan.give_back()
    assert pool.kept_bytes == 40_000


@contextlib.contextmanager
def _own_terms(apart):
    """Leave each rank's own terms out of the exchange if ``apart`` is true; otherwise, keep the
    usual threshold.
    """
    usual = boxing_program.APART_BYTES
    boxing_program.APART_BYTES = 0 if apart else usual
    try:
        yield
    finally:
        boxing_program.APART_BYTES = usual


def _sum_in_order(world, apart, dst):
    """Add terms whose float32 sum depends on the order; the receiver must add rank 0's term
    first."""
    terms = [1e8, 1.0, -1e8, 1.0]
    part = torch.full((8, 4), terms[world.rank])
    with _own_terms(apart):
        out = Boxing(world).run(_steps(4, P, dst, (8, 4)), part)
    expected = torch.tensor(0.0)
    for term in terms:
        expected = expected + torch.tensor(term)
    return out.unique().tolist(), expected.item()


@pytest.mark.parametrize("dst", [S0, S1], ids=str)
@pytest.mark.parametrize("apart", [False, True], ids=["through buffers", "apart"])
def test_sums_are_in_rank_order(ranks, apart, dst):
    for values, expected in ranks(4, _sum_in_order, apart, dst):
        assert values == [expected]


def test_no_rank_receives_its_own_term():
    (step,) = _steps(4, P, S0, (8, 4))
    with _own_terms(True):
        programs = [compile_step(step, rank, in_pairs=True) for rank in range(4)]
    assert [program.receive_shape for program in programs] == [(3, 2, 4)] * 4


def test_terms_can_be_combined_in_place():
    terms = [torch.full((3,), float(n)) for n in (1, 2, 4)]
    assert combined(terms, [1, 0, 2], "sum", out=terms[0]) is terms[0]
    assert terms[0].tolist() == [7.0] * 3


def _half_sum(world, dtype_name, apart):
    part = torch.full((4, 2), 256.0 if world.rank == 0 else 0.75).to(getattr(torch, dtype_name))
    src, dst = line_layout("cpu", 4, P), line_layout("cpu", 4, S0)
    steps = plan_boxing(src, dst, (4, 2), part.dtype, id="x", backend="gloo")
    with _own_terms(apart):
        return Boxing(world).run(steps, part).float().unique().tolist()


@pytest.mark.parametrize("apart", [False, True], ids=["through buffers", "apart"])
def test_half_types_add_up_in_float32(ranks, apart):
    """In float32, 256 + 3 x 0.75 = 258.25, which rounds to 258 in bfloat16. If terms were added one
    by one in bfloat16, the sum would stay 256.
    """
    assert ranks(4, _half_sum, "bfloat16", apart) == [[258.0]] * 4


def _conjugate(world):
    part = torch.full((1, 3), 1 + 2j * (1 + world.rank)).conj()
    return Boxing(world).run(_steps(2, S0, B, (2, 3), torch.complex64), part)


def test_conjugate_views_are_sent_as_their_values(ranks):
    expected = torch.tensor([[1 - 2j] * 3, [1 - 4j] * 3])
    assert all(torch.equal(out, expected) for out in ranks(2, _conjugate))
