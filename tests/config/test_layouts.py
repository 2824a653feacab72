"""Tests the layout of each table: schemes, patterns, and combinations that are refused."""

import random
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest

from sbpflow.config.load import load_config
from sbpflow.config.model_tables import check_matches, last_matches
from sbpflow.config.table_layouts import resolve_dense_layouts, resolve_table_layouts
from sbpflow.config.table_rules import ParallelConfig, TableRule, rule_of
from sbpflow.embedding.plan.tables import OutputConfig, TableConfig
from sbpflow.errors import ConfigError, choices
from sbpflow.models.registry import MODELS
from sbpflow.run.model.spec import schemes_of
from sbpflow.sbp.sbp import Broadcast, Split

TABLES = {"wide.C1xC2": (100, 1), "deep.C1": (50, 16), "deep.C3": (7, 16)}


def layouts_of(config, world_size, tables=TABLES):
    configs = [
        TableConfig(name=name, features=(name,), num_rows=rows, dim=dim)
        for name, (rows, dim) in tables.items()
    ]
    schemes = schemes_of([OutputConfig(name="all", tables=tuple(configs))])
    return resolve_table_layouts(config.parallel, tables, schemes, world_size)


@pytest.fixture
def resolve(tmp_path):
    """Return a function that computes table layouts from a ``parallel`` group in YAML and a world
    size.
    """

    def resolve(text, world_size, tables=TABLES):
        path = tmp_path / "config.yaml"
        path.write_text(f"parallel: {text}")
        return layouts_of(load_config(path, models=MODELS), world_size, tables)

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
    layouts = resolve(f"{{scheme: {scheme}}}", world_size)
    (wide, deep), ranks = SCHEMES[scheme], tuple(range(world_size))
    for name, (sbp, exchange) in zip(TABLES, [wide, deep, deep], strict=True):
        layout = layouts[name].layout
        assert (layout.nd_sbp, layouts[name].exchange) == ((sbp,), exchange)
        assert layout.placement.ranks == ranks


def test_the_last_matching_pattern_wins(resolve):
    text = "{scheme: 1, tables: {deep.*: {sbp: S(0)}, deep.C3: {sbp: B, ranks: [1]}}}"
    layouts = resolve(text, 2)
    assert str(layouts["deep.C1"]) == "S(0)@[0, 1] reduce"
    assert str(layouts["deep.C3"]) == "B@[1] columns"
    assert layouts["deep.C3"].key == "parallel.tables.deep.C3"
    swapped = "{scheme: 1, tables: {deep.C3: {sbp: B, ranks: [1]}, deep.*: {sbp: S(0)}}}"
    assert str(resolve(swapped, 2)["deep.C3"]) == "S(0)@[0, 1] reduce"


def test_the_last_matches_equal_a_search_and_plain_names_are_not_compared(monkeypatch):
    names = [f"{output}.C{number}" for output in ("wide", "deep") for number in range(40)]
    others = ["deep.*", "wide.C1?", "*.C[27]", "[*].C1", "*"]
    for seed in range(20):
        patterns = random.Random(seed).sample([*names, "other.C1", *others], 30)
        expected = {
            name: max(at for at, pattern in enumerate(patterns) if fnmatchcase(name, pattern))
            for name in names
            if any(fnmatchcase(name, pattern) for pattern in patterns)
        }
        assert last_matches(patterns, names) == expected
    # A scheme has a pattern for each table; comparing each with each took a minute for 1,000.
    compared: list[str] = []
    monkeypatch.setattr("sbpflow.config.model_tables.fnmatchcase", lambda _, p: compared.append(p))
    assert last_matches(names, names) == {name: place for place, name in enumerate(names)}
    check_matches("parallel.tables", names, names, "table")
    assert not compared


def test_an_overridden_pattern_becomes_the_last(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("parallel: {tables: {deep.C3: {sbp: B}, '*': {sbp: S(0)}}}")
    config = load_config(path, ["parallel.tables.deep.C3={sbp: S(1)}"], models=MODELS)
    assert layouts_of(config, 2)["deep.C3"].exchange == "columns"
    config = load_config(path, ["parallel.tables.*.exchange=unique"], models=MODELS)
    assert layouts_of(config, 2)["deep.C3"].exchange == "unique"


def test_sizes_reach_the_layout(resolve):
    text = "{scheme: 1, tables: {deep.C1: {sbp: S(0), ranks: [2, 0], sizes: [50, 0]}}}"
    layout = resolve(text, 3)["deep.C1"].layout
    assert layout.nd_sbp == (Split(0, (50, 0)),)
    assert layout.part_shape((50, 16), 2) == (50, 16)
    assert layout.part_shape((50, 16), 0) == (0, 16)
    assert layout.part_shape((50, 16), 1) is None


def test_s1_needs_only_one_column_per_rank(resolve):
    assert resolve("{scheme: 1}", 16)["deep.C1"].exchange == "columns"


# (parallel group, world size, parts of the expected message)
MISFITS = [
    ("{scheme: 1}", 17, ["parallel.scheme 1 (deep.C1)", "17 ranks", "deep.C1 has 16", "S(0)"]),
    (
        "{tables: {deep.*: {sbp: S(0)}}}",
        2,
        ["no pattern", "matches wide.C1xC2", "dp, 1, 2, 3, auto"],
    ),
    ("{scheme: 1, tables: {deep.C4: {sbp: B}}}", 2, ["deep.C4 matches no table", "deep.C1"]),
    ("{scheme: 1, tables: {Deep.*: {sbp: B}}}", 2, ["Deep.* matches no table"]),
    (
        "{scheme: 1, tables: {deep.C1: {sbp: S(0), ranks: [0, 2]}}}",
        2,
        ["deep.C1.ranks: [2] are not in a world of 2", "0..1"],
    ),
    (
        "{scheme: 1, tables: {deep.C1: {sbp: S(0), sizes: [30, 30]}}}",
        2,
        ["deep.C1.sizes: [30, 30] adds up to 60", "50 rows", "[25, 25]"],
    ),
    (
        "{scheme: 1, tables: {deep.C1: {sbp: S(1), sizes: [8, 9]}}}",
        2,
        ["deep.C1.sizes", "16 columns", "[8, 8]"],
    ),
    (
        "{scheme: 1, tables: {wide.*: {sbp: S(1)}}}",
        2,
        ["wide.C1xC2 has 1 column; use S(0), 1 rank", "at least 2 columns"],
    ),
    (
        "{scheme: 1, tables: {deep.C1: {sbp: S(0), sizes: [25, 25]}}}",
        3,
        ["2 sizes [25, 25] for 3 ranks", "[17, 17, 16]"],
    ),
    (
        "{scheme: 1, tables: {deep.C1: {sbp: B, ranks: [0, 1]}}}",
        3,
        ["B needs either all 3 ranks or a single one, got [0, 1]", "ranks: [0]"],
    ),
    (
        "{scheme: 1, tables: {deep.C1: {sbp: S(0), exchange: columns}}}",
        2,
        ["deep.C1.exchange: columns", "reduce or unique"],
    ),
    (
        "{scheme: 1, tables: {deep.C1: {sbp: S(1), exchange: unique, ranks: [0, 1]}}}",
        3,
        ["deep.C1.exchange: unique", "use columns"],
    ),
    (
        "{scheme: 1, tables: {deep.C1: {sbp: B, exchange: columns}}}",
        2,
        ["deep.C1.exchange: columns", "use local"],
    ),
]


@pytest.mark.parametrize(("text", "world_size", "parts"), MISFITS)
def test_a_rule_that_does_not_fit_is_rejected_with_one_that_fits(resolve, text, world_size, parts):
    with pytest.raises(ConfigError) as caught:
        resolve(text, world_size)
    for part in parts:
        assert part in str(caught.value)


GRID = 'sbp: "(S(0), S(1))", ranks: [[0, 1], [3, 2]]'


def test_a_grid_splits_rows_and_columns(resolve):
    layout = resolve(f"{{scheme: 1, tables: {{deep.C1: {{{GRID}}}}}}}", 4)["deep.C1"]
    assert layout.exchange == "reduce"
    slices = {rank: layout.layout.part_slices((50, 16), rank) for rank in range(4)}
    assert slices[0] == (slice(0, 25), slice(0, 8))
    assert slices[3] == (slice(25, 50), slice(0, 8))
    assert slices[2] == (slice(25, 50), slice(8, 16))


@pytest.mark.parametrize(
    "rule",
    [
        "{sbp: B}",
        "{sbp: B, ranks: [2]}",
        "{sbp: S(1), exchange: unique, comm_dtype: bfloat16}",
        "{sbp: S(0), ranks: [3, 1], exchange: unique}",
        "{sbp: S(0), ranks: [0, 1, 3], sizes: [20, 30, 0]}",
        "{sbp: '(S(0), S(1))', ranks: [[0, 1], [2, 3]]}",
        "{sbp: '(S(0), S(1))', ranks: [[0, 1]], sizes: [[50], [10, 6]]}",
    ],
)
def test_the_rule_of_a_layout_gives_that_layout(resolve, rule):
    tables = {"deep.C1": (50, 16)}
    layout = resolve(f"{{tables: {{'*': {rule}}}}}", 4, tables)["deep.C1"]
    parallel = ParallelConfig(tables={"*": rule_of(layout)})
    again = resolve_table_layouts(parallel, tables, {}, 4)["deep.C1"]
    assert replace(again, key=layout.key) == layout


def test_a_grid_takes_row_sizes_and_column_sizes(resolve):
    text = f"{{scheme: 1, tables: {{deep.C1: {{{GRID}, sizes: [[1, 49], [12, 4]]}}}}}}"
    layout = resolve(text, 4)["deep.C1"].layout
    assert layout.part_shape((50, 16), 1) == (1, 4)
    assert layout.part_shape((50, 16), 3) == (49, 12)


def test_explicit_sizes_may_leave_a_rank_without_columns(resolve):
    rules = "deep.C1: {sbp: S(1), sizes: [16, 0]}, wide.*: {sbp: S(1), sizes: [0, 1]}"
    layouts = resolve(f"{{scheme: 1, tables: {{{rules}}}}}", 2)
    assert layouts["deep.C1"].layout.part_shape((50, 16), 1) == (50, 0)
    assert layouts["wide.C1xC2"].layout.part_shape((100, 1), 1) == (100, 1)
    text = f"{{scheme: 1, tables: {{deep.C1: {{{GRID}, sizes: [[25, 25], [16, 0]]}}}}}}"
    assert resolve(text, 4)["deep.C1"].layout.part_shape((50, 16), 1) == (25, 0)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ('{sbp: "(S(0), S(1))"}', "deep.C1.ranks is not given, but (S(0), S(1)) needs a grid"),
        ('{sbp: "(S(0), S(1))", ranks: [0, 1]}', "[0, 1] has 1 axes, but (S(0), S(1)) has 2"),
        ('{sbp: "(S(0), S(1))", ranks: [[0, 1], [2]]}', "for example, ranks: [[0, 1], [2, 3]]"),
        ('{sbp: "(S(1), S(0))", ranks: [[0, 1], [2, 3]]}', "deep.C1.sbp: (S(1), S(0)) is not a"),
        ("{sbp: S(0), ranks: [[0, 1], [2, 3]]}", "has 2 axes, but S(0) has 1"),
        (f"{{{GRID}, sizes: [25, 25]}}", "takes a list of row sizes and a list of column sizes"),
        (f"{{{GRID}, sizes: [[25, 25]]}}", "takes a list of row sizes and a list of column sizes"),
        (f"{{{GRID}, sizes: [[25, 25], [8, 8], [1]]}}", "for example, sizes: [[60, 40], [8, 8]]"),
        (f"{{{GRID}, sizes: []}}", "takes a list of row sizes and a list of column sizes"),
        (
            f"{{{GRID}, sizes: [[25, 26], [8, 8]]}}",
            "[25, 26] adds up to 51, but deep.C1 has 50 rows",
        ),
        (f"{{{GRID}, exchange: columns}}", "columns does not support (S(0), S(1))"),
        ("{sbp: S(0), sizes: [[25, 25], [8, 8]]}", "S(0) has one axis"),
    ],
)
def test_mistakes_in_a_grid_are_explained(resolve, rule, expected):
    with pytest.raises(ConfigError) as caught:
        resolve(f"{{scheme: 1, tables: {{deep.C1: {rule}}}}}", 4)
    assert expected in str(caught.value)


def test_the_message_for_a_missing_rank_says_what_to_remove(resolve):
    rule = "{scheme: dp, tables: {deep.C1: {sbp: S(0), ranks: [0, 1], sizes: [30, 20]}}}"
    assert resolve(rule, 2)["deep.C1"].layout.placement.ranks == (0, 1)
    with pytest.raises(ConfigError) as caught:
        resolve(rule, 1)
    message = str(caught.value)
    assert "deep.C1.ranks: [1]" in message
    assert "are not in a world of 1; use ranks 0..0, or remove ranks and sizes" in message
    removed = "{scheme: dp, tables: {deep.C1: {sbp: S(0)}}}"
    for size in (1, 2, 3):
        assert resolve(removed, size)["deep.C1"].layout.placement.size == size


def test_a_scheme_that_the_spec_of_a_model_does_not_have_is_refused():
    schemes = {"1": {"*": TableRule(sbp="S(0)")}}
    with pytest.raises(ConfigError, match=r"no rules for scheme dp; use one of 1, auto$"):
        resolve_table_layouts(ParallelConfig(scheme="dp"), TABLES, schemes, 2)


@pytest.mark.parametrize("text", ["S(1)", "P", "P(max)", "S(2)"])
def test_a_layout_that_no_parameter_of_this_shape_has_is_refused_with_those_it_can_have(text):
    config = ParallelConfig(dense={"mlp.*": text})
    message = r"cannot be the layout of parameter mlp\.0\.bias \[8\], which supports B or S\(0\)$"
    with pytest.raises(ConfigError, match=message):
        resolve_dense_layouts(config, {"mlp.0.bias": (8,)}, "cpu", 2)


def test_a_message_lists_all_names_or_the_most_similar_of_many():
    assert choices("x", {"a": 1, "b": 2}) == "a, b"
    assert choices("", []) == ""
    text = choices("C12x", [f"C{number}" for number in range(2000)])
    assert text.startswith("C12, ")
    assert text.endswith(", and 1,995 others")
    assert len(text) < 60
