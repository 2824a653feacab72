"""Runs the CPU tests' equality cases on rehearsed devices, by exchange."""

from dataclasses import replace

import pytest
import torch

import tests.embedding.test_equality as schemes
import tests.embedding.test_mixes as mixes
from tests.quick import diagonal, quick

RULES = {rule.name: rule for rule in mixes.RULES}
OF_SCHEMES = ["sgd", "adagrad", "rowwise_adagrad", "lazy_adam"]


def turns(each, others, count):
    """Pair each element of ``each`` with ``count`` elements of ``others``, which take turns."""
    others = list(others)
    return [
        (one, others[(place + 2 * n) % len(others)])
        for place, one in enumerate(each)
        for n in range(count)
    ]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("world_size", "scheme", "optimizer"),
    [
        *((1, *pair) for pair in turns(schemes.SCHEMES, OF_SCHEMES, 1)),
        *quick(
            ((3, *pair) for pair in turns(schemes.SCHEMES, OF_SCHEMES, 2)), lambda n: n % 2 == 0
        ),
    ],
)
def test_scheme_equals_the_reference(rehearsed_ranks, world_size, scheme, optimizer):
    case = schemes.make_case(*schemes.SCHEMES[scheme], optimizer)
    schemes.check(rehearsed_ranks, world_size, case)


def test_uneven_shards_on_some_ranks_equal_the_reference(rehearsed_ranks):
    schemes.test_uneven_row_shards_and_rank_subsets_equal_the_reference(
        rehearsed_ranks, "rowwise_adagrad"
    )


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("world_size", "exchange", "rule"),
    [
        *quick(((1, name, "lazy_adam") for name in mixes.EXCHANGES), lambda n: n == 0),
        *((2, exchange, "rowwise_adagrad") for exchange in mixes.EXCHANGES),
        *quick(((3, *pair) for pair in turns(mixes.EXCHANGES, RULES, 2)), lambda n: n % 5 == 0),
    ],
)
def test_lists_and_weights_equal_the_reference(rehearsed_ranks, world_size, exchange, rule):
    mix = mixes.mix_of(exchange, 6, RULES[rule], batch_sizes=(13, 8, 0, 5))
    mixes.check(rehearsed_ranks, replace(mix, world_size=world_size), 1e-10)


@pytest.mark.few(1)
@pytest.mark.parametrize("exchange", quick(mixes.EXCHANGES, lambda n: n % 2 == 0))
def test_accumulated_steps_without_overlap_equal_the_reference(rehearsed_ranks, exchange):
    mix = mixes.mix_of(
        exchange, 6, RULES["lazy_adam"], batch_sizes=(9, 4, 7, 3), accumulate=2, overlap=False
    )
    mixes.check(rehearsed_ranks, replace(mix, world_size=3), 1e-10)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("exchange", "dtype"), diagonal(list(mixes.EXCHANGES), [torch.bfloat16, torch.float16])
)
def test_rows_and_vectors_in_half_precision(rehearsed_ranks, exchange, dtype):
    # In each of the four steps, a value moves by at most 0.1 x 4; vectors, gradients, and rows have
    # at least 8 significant bits.
    mix = mixes.mix_of(
        exchange,
        8,
        mixes.sparse_optimizer("sgd", lr=0.1),
        comm_dtype=dtype,
        row_dtype=dtype,
        batch_sizes=(13, 8, 5, 9),
    )
    mixes.check(rehearsed_ranks, mix, 2e-2)
