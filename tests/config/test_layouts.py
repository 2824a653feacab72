"""Which layout each table gets: schemes, patterns, and combinations that cannot be."""

import pytest

from sbpflow.config import load_config
from sbpflow.config_layout import resolve_table_layouts
from sbpflow.errors import ConfigError
from sbpflow.sbp import Broadcast, Split

TABLES = {"wide.C1xC2": (100, 1), "deep.C1": (50, 16), "deep.C3": (7, 16)}


@pytest.fixture
def resolve(tmp_path):
    """A function from a ``parallel`` group in YAML and a world size to the layouts."""

    def resolve(text, world_size, tables=TABLES):
        path = tmp_path / "config.yaml"
        path.write_text(f"parallel: {text}")
        return resolve_table_layouts(load_config(path).parallel, tables, world_size)

    return resolve


SCHEMES = {
    "dp": [(Broadcast(), "local"), (Broadcast(), "local")],
    "1": [(Split(0), "reduce"), (Split(1), "columns")],
    "2": [(Split(0), "reduce"), (Split(0), "reduce")],
    "3": [(Split(0), "unique"), (Split(0), "unique")],
}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes(resolve, scheme, world_size):
    found = resolve(f"{{scheme: {scheme}}}", world_size)
    (wide, deep), ranks = SCHEMES[scheme], tuple(range(world_size))
    for name, (sbp, exchange) in zip(TABLES, [wide, deep, deep], strict=True):
        assert (found[name].nd_sbp, found[name].exchange) == ((sbp,), exchange)
        assert found[name].ranks == ranks


def test_the_last_matching_pattern_wins(resolve):
    text = "{scheme: 1, tables: {deep.*: {sbp: S(0)}, deep.C3: {sbp: B, ranks: [1]}}}"
    found = resolve(text, 2)
    assert str(found["deep.C1"]) == "S(0)@[0, 1] reduce"
    assert str(found["deep.C3"]) == "B@[1] columns"
    assert found["deep.C3"].key == "parallel.tables.deep.C3"
    swapped = "{scheme: 1, tables: {deep.C3: {sbp: B, ranks: [1]}, deep.*: {sbp: S(0)}}}"
    assert str(resolve(swapped, 2)["deep.C3"]) == "S(0)@[0, 1] reduce"


def test_an_override_of_a_pattern_comes_last(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("parallel: {tables: {deep.C3: {sbp: B}, '*': {sbp: S(0)}}}")
    config = load_config(path, ["parallel.tables.deep.C3={sbp: S(1)}"])
    assert resolve_table_layouts(config.parallel, TABLES, 2)["deep.C3"].exchange == "columns"
    config = load_config(path, ["parallel.tables.*.exchange=unique"])
    assert resolve_table_layouts(config.parallel, TABLES, 2)["deep.C3"].exchange == "unique"


def test_sizes_reach_the_layout(resolve):
    text = "{scheme: 1, tables: {deep.C1: {sbp: S(0), ranks: [2, 0], sizes: [50, 0]}}}"
    layout = resolve(text, 3)["deep.C1"].layout("cpu")
    assert layout.nd_sbp == (Split(0, (50, 0)),)
    assert layout.part_shape((50, 16), 2) == (50, 16)
    assert layout.part_shape((50, 16), 0) == (0, 16)
    assert layout.part_shape((50, 16), 1) is None


def test_one_column_per_rank_is_enough(resolve):
    assert resolve("{scheme: 1}", 16)["deep.C1"].exchange == "columns"


# parallel group, world size -> parts of the message
MISFITS = [
    ("{scheme: 1}", 17, ["parallel.scheme 1 (deep.C1)", "17 ranks", "deep.C1 has 16", "S(0)"]),
    ("{tables: {deep.*: {sbp: S(0)}}}", 2, ["no pattern", "matches wide.C1xC2", "dp, 1, 2 or 3"]),
    ("{scheme: 1, tables: {deep.C4: {sbp: B}}}", 2, ["deep.C4: matches no table", "deep.C1"]),
    ("{scheme: 1, tables: {Deep.*: {sbp: B}}}", 2, ["Deep.*: matches no table"]),
    (
        "{scheme: 1, tables: {deep.C1: {sbp: S(0), ranks: [0, 2]}}}",
        2,
        ["deep.C1.ranks: [2] not in a world of 2", "0..1"],
    ),
    (
        "{scheme: 1, tables: {deep.C1: {sbp: S(0), sizes: [30, 30]}}}",
        2,
        ["deep.C1.sizes: [30, 30] sum to 60", "50 rows", "[25, 25]"],
    ),
    (
        "{scheme: 1, tables: {deep.C1: {sbp: S(1), sizes: [8, 9]}}}",
        2,
        ["deep.C1.sizes", "16 columns", "[8, 8]"],
    ),
    (
        "{scheme: 1, tables: {deep.C1: {sbp: S(1), sizes: [16, 0]}}}",
        2,
        ["without columns", "[8, 8]"],
    ),
    (
        "{scheme: 1, tables: {deep.C1: {sbp: S(0), sizes: [25, 25]}}}",
        3,
        ["2 sizes [25, 25] for 3 ranks", "[17, 17, 16]"],
    ),
    (
        "{scheme: 1, tables: {deep.C1: {sbp: B, ranks: [0, 1]}}}",
        3,
        ["B on ranks [0, 1] of 3", "ranks: [0]"],
    ),
    (
        "{scheme: 1, tables: {deep.C1: {sbp: S(0), exchange: columns}}}",
        2,
        ["deep.C1.exchange: columns", "reduce or unique"],
    ),
    (
        "{scheme: 1, tables: {deep.C1: {sbp: S(1), exchange: unique}}}",
        2,
        ["deep.C1.exchange: unique", "use columns"],
    ),
    (
        "{scheme: 1, tables: {deep.C1: {sbp: B, exchange: columns}}}",
        2,
        ["deep.C1.exchange: columns", "use local"],
    ),
]


@pytest.mark.parametrize(("text", "world_size", "parts"), MISFITS)
def test_what_does_not_fit_says_what_would(resolve, text, world_size, parts):
    with pytest.raises(ConfigError) as caught:
        resolve(text, world_size)
    for part in parts:
        assert part in str(caught.value)
