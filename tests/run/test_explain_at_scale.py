"""Tests that plans for many ranks are made in seconds on one core, and that long lists are printed
as ranges.
"""

import cProfile

import pytest

from sbpflow.config.table_rules import TableRule
from sbpflow.run.model.spec import Fields
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.planning.explain import describe, format_plan
from sbpflow.run.planning.text import short_lists
from tests.quick import quick
from tests.training.wdl_case import make_config

FIELDS = Fields.of(
    ("I1", "I2", "I3"),
    {"C1": 4037, "C2": 11, "C3": 5003, "C4": 3},
    {"C1xC2": 7001, "C3xC4": 2903},
)
# the numbers of fields and crosses of a prepared Criteo set
CRITEO = Fields.of(
    tuple(f"I{number}" for number in range(1, 14)),
    {f"C{n}": 3 + 10 ** (1 + n % 5) for n in range(1, 27)},
    {"C1xC2": 50_000, "C3xC4": 100_000},
)

GRID = {
    "deep.C3": TableRule(
        sbp="(S(0), S(1))", ranks=tuple(tuple(range(n, n + 16)) for n in range(0, 128, 16))
    )
}


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """Make one plan first, so that imports are not counted."""
    plan_run(make_config("1", "adagrad"), FIELDS, world_size=2, device_type="cpu")


@pytest.mark.parametrize(
    ("scheme", "size", "most", "fields", "tables"),
    quick(
        [
            ("1", 256, 1_000_000, FIELDS, None),
            ("2", 128, 8_000_000, FIELDS, GRID),
            ("3", 256, 1_500_000, CRITEO, None),
            ("auto", 256, 15_000_000, CRITEO, None),
            ("2", 1024, 2_000_000, FIELDS, None),
        ],
        lambda n: n == 3,
    ),
)
def test_planning_for_many_ranks_needs_few_calls_and_lines(scheme, size, most, fields, tables):
    """Function calls are counted (about two million per second), because times depend on the load.

    ``scheme: auto`` plans and prices up to 16 layouts of all tables.
    """
    config = make_config(scheme, "adagrad", batch_size=64 * size, dim=size, tables=tables)
    with cProfile.Profile() as calls:
        _, plan = plan_run(config, fields, world_size=size, device_type="cpu")
        text = format_plan(plan)
    assert sum(entry.callcount for entry in calls.getstats()) < most
    assert len(text.splitlines()) < 300
    assert max(map(len, text.splitlines())) < 400, "a grid has a range for each of its 8 rows"
    facts = describe(plan)
    assert len(facts["ranks"]) == size
    shards = sum(len(table["shards"]) for table in facts["tables"])
    assert shards > size, "every shard is in the JSON"


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("S(0)@[0, 1, 2, 3, 4, 5, 6, 7]", "S(0)@[0, 1, 2, 3, 4, 5, 6, 7]"),
        ("S(0)@[0, 1, 2, 3, 4, 5, 6, 7, 8]", "S(0)@[0..8]"),
        ("S(1)[1, 1, 1, 1, 1, 1, 1, 1, 0]@[0, 1]", "S(1)[8 x 1, 0]@[0, 1]"),
        ("[4, 5, 9, 9, 9, 1, 2, 3, 4, 4]", "[4, 5, 3 x 9, 1..4, 4]"),
    ],
)
def test_long_lists_become_ranges_and_repeats(text, short):
    assert short_lists(text) == short
