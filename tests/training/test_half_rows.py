"""Tests that rounding of half-precision rows depends on the step and the position, not on the
layout.
"""

from dataclasses import replace
from itertools import product

import pytest

from sbpflow.config.table_rules import TableRule
from tests.quick import quick
from tests.training.wdl_case import make_config, train

STEPS = 12
MIXED = {
    "deep.C1": TableRule(sbp="S(1)"),
    "deep.C2": TableRule(sbp="B", ranks=(1,)),
    "deep.C3": TableRule(sbp="S(0)", exchange="unique"),
    "deep.C4": TableRule(sbp="B"),
    "wide.*": TableRule(sbp="S(0)", exchange="reduce"),
}


def half(scheme, dtype, tables=None, row_dtype="bfloat16"):
    config = make_config(scheme, "adagrad", dtype=dtype, kernel="torch", dim=6, tables=tables)
    return replace(config, parallel=replace(config.parallel, table_dtype=row_dtype))


PLACES = [*product(["dp", "1", "2", "3"], [2, 3]), ("mixed", 3)]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("scheme", "size", "row_dtype"),
    quick(
        ((*place, dtype) for dtype in ("bfloat16", "float16") for place in PLACES),
        lambda n: n % 4 == 0,
    ),
)
def test_losses_are_those_of_one_rank(ranks, scheme, size, row_dtype):
    """The order of float64 sums hardly ever changes a rounding of a row."""
    one = ranks(1, train, half("dp", "float64", row_dtype=row_dtype), STEPS)[0]["losses"]
    tables = MIXED if scheme == "mixed" else None
    config = half("dp" if tables else scheme, "float64", tables, row_dtype)
    for result in ranks(size, train, config, STEPS):
        assert result["losses"] == pytest.approx(one, rel=1e-12)
    kept = ranks(1, train, half("dp", "float64", row_dtype="float64"), STEPS)[0]["losses"]
    assert one != pytest.approx(kept, rel=1e-7), "rows are not stored narrow at all"


@pytest.mark.parametrize(
    ("scheme", "size"), quick([("1", 2), ("2", 3), ("3", 3), ("dp", 2)], lambda n: n == 2)
)
def test_float32_losses_stay_within_rounding(ranks, scheme, size):
    """Sums in a different order differ by a relative 1e-7, which changes one rounding in 30,000, by
    a relative 4e-3.
    """
    one = ranks(1, train, half("dp", "float32"), STEPS)[0]["losses"]
    for result in ranks(size, train, half(scheme, "float32"), STEPS):
        assert result["losses"] == pytest.approx(one, rel=2e-5)
