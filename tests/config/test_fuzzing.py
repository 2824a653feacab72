"""Tests that any value for any key quickly results in a configuration or a ConfigError, never in
another error.
"""

import random
import re
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sbpflow.config.load import config_facts, load_config
from sbpflow.config.yaml_text import MAX_CHARACTERS, load_yaml
from sbpflow.data.prepare.schema_file import read_schema
from sbpflow.errors import ConfigError
from sbpflow.models.registry import MODELS
from sbpflow.run.planning.build_plan import plan_run
from tests.config.keys import KEYS, Key
from tests.quick import quick
from tests.training.wdl_case import FIELDS

ROOT = Path(__file__).parents[2]
MAX_S = 5.0
MAX_MESSAGE = 2500  # characters
BOMB = "[&a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]" + "".join(
    f", &{b} [{', '.join([f'*{a}'] * 10)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
BOMB += "]"
VALUES = (
    *("2026-13-45", "2026-01-02", "!!int abc", "!!bool abc", "!!int ''", "!!float ''"),
    *("!!timestamp x", "!!binary '*'", "!!set {a, b}", "!!omap [a: 1]", "!!pairs [a: 1]"),
    *("!!python/name:os.system", "!x y", "9" * 5000, "-" + "9" * 5000, "0x" + "f" * 5000),
    *("1:" * 3000 + "1", "1e999", ".nan", ".inf", "-.inf", str(10**23), str(-(2**70)), "-1", "0"),
    *("[" * 5000, "[" * 900 + "]" * 900, "{a: " * 900 + "1" + "}" * 900, BOMB, "&a [*a]"),
    *(
        "&a {b: *a}",
        "{[1]: 2}",
        "{{a: 1}: 2}",
        "{1: 2}",
        "{null: 2}",
        "{2026-01-01: 1}",
        "[]",
        "{}",
    ),
    *("[[1], [2]]", "{name: [x]}", "{name: {x: y}}", "{name: 3}", "null", "''", "'\\0'", '"\\0"'),
    *(
        "a b",
        "S(" + "9" * 5000 + ")",
        "S(0)[" + "9" * 5000 + "]",
        "x" * 100_000,
        "true",
        "~",
        "{}x",
    ),
    *(f"[{', '.join(['16'] * 20_000)}]", f"[{', '.join(['16'] * 200)}]", "*nowhere", "- a\n- b"),
    *("{a: 1, a: 2}", "<<: 1", "{<<: [1]}", "\ud800", "\x07", "%YAML 9", "? [a]\n: b", "'", "2**3"),
)
json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.dates(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
texts = st.sampled_from(VALUES) | st.text(max_size=30) | json_like.map(yaml.safe_dump)


def refusal_of(overrides: list[str], *, plan: bool = False) -> str:
    """Return the message of a ConfigError, or "" for accepted values; any other exception is a
    failure.
    """
    began = time.process_time()
    try:
        config = load_config(ROOT / "configs" / "scheme1.yaml", overrides, models=MODELS)
        config_facts(config)
        if plan:
            plan_run(config, FIELDS, world_size=2, device_type="cpu")
        refusal: Exception | None = None
    except Exception as error:  # noqa: BLE001 (any other than ConfigError is a failure, below)
        refusal = error
    seconds = time.process_time() - began
    if seconds > MAX_S:
        pytest.fail(f"{overrides[-1][:99]}: took {seconds:.1f} s")
    message = "" if refusal is None else str(refusal)
    if len(message) > MAX_MESSAGE or not isinstance(refusal, ConfigError | None):
        pytest.fail(f"{overrides[-1][:99]}: {type(refusal).__name__} {message[:999]}")
    return message


def words(name: str, key: Key, value: str) -> list[str]:
    return [*key.needs, f"{name}={value}"]


@given(name=st.sampled_from(sorted(KEYS)), value=texts)
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_any_value_of_any_key_passes_or_is_refused(name, value):
    refusal_of(words(name, KEYS[name], value))


@pytest.mark.few(1)
@pytest.mark.parametrize("part", quick(range(8), lambda n: n < 3))
def test_every_key_with_difficult_values(part):
    """Test each key with three random values."""
    draw, refused = random.Random(part), 0
    for name in sorted(KEYS)[part::8]:
        for value in draw.sample(VALUES, 3):
            refused += bool(refusal_of(words(name, KEYS[name], value)))
    assert refused > 20, "no value was refused"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["data.batch_size", "model.hidden", "model.name", "parallel.tables.*"]
)
def test_keys_that_once_failed_reject_difficult_values(name):
    taken = {value for value in VALUES if not refusal_of([f"{name}={value}"])}
    assert len(taken) < 12
    assert not taken & {BOMB, "&a [*a]", "9" * 5000, "{[1]: 2}", "[" * 5000}


SIZES = sorted(name for name, key in KEYS.items() if key.kind == "number")


@pytest.mark.parametrize("value", [str(2**63 - 1), "1e308", str(2**31 - 1), "1"])
def test_the_largest_numbers_give_a_plan_or_are_refused(value):
    """Planning a large model from its shapes must not overflow."""
    for name in SIZES:
        if name.startswith(("model", "data", "parallel")):
            refusal_of(words(name, KEYS[name], value), plan=True)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model.hidden=" + VALUES[VALUES.index(BOMB)], "more than 100,000 values"),
        (
            f"model.hidden=[{', '.join(['16'] * 20_000)}]",
            r"model\.hidden: the list has 20,000 entries, but at",
        ),
        (
            f"model.hidden=[{', '.join(['16'] * 300)}]",
            r"model\.hidden: the list has 300 entries, but at most 256",
        ),
        ("model.hidden=" + "[" * 5000, "more than 32 levels of nesting"),
        ("run.seed=" + "9" * 5000, "a number has 5,000 characters, but at most 40"),
        (
            f"run.seed={10**23}",
            r"exceeds 64 bits; use a whole number up to 9223372036854775807",
        ),
        ("data.batch_size=3000000000", r"must be >= 1 and < 2147483648"),
        ("parallel.timeout_s=1e30", r"must be > 0 and <= 1e\+06"),
        ("model.hidden=&a [*a]", r"\*a is used inside its own definition"),
        ("model={[1]: 2}", "line 1: a key must be plain text"),
        ("model={<<: {dropout: 0.5}}", r"line 1: merge keys \(<<\) are not supported"),
        ("run.dir=2026-13-45", "line 1: '2026-13-45' is not a valid !!timestamp"),
        ("run.dir=!!timestamp abc", "line 1: 'abc' is not a valid !!timestamp"),
        ("run.seed=!!int ''", "line 1: '' is not a valid !!int"),
        ("run.dir=x" + " " * MAX_CHARACTERS, r"at most 1,048,576"),
        ("model.name=[wdl]", r"model\.name: .* is unknown; use one of wdl"),
        ("parallel.dense.*=" + "S(" + "9" * 5000 + ")", "numbers of at most 18 digits"),
    ],
)
def test_messages_name_the_limits(word, message):
    assert re.search(message, refusal_of([word], plan=True))


@pytest.mark.few(22)
@pytest.mark.parametrize("value", VALUES)
def test_files_are_read_like_overrides(value, tmp_path):
    file = tmp_path / "file.yaml"
    file.write_text(value, encoding="utf-8", errors="surrogatepass")
    if value.strip() not in ("null", "{}", "~"):
        with pytest.raises(ConfigError):
            load_config(file, [], models=MODELS)
    with pytest.raises(ConfigError):
        read_schema(file)


@pytest.mark.parametrize(
    "text", ["010", "-010", "00", "0_7", "12:30", "12:30.5", "{010: 1}", "[1, 01]"]
)
def test_octal_and_base_60_numbers_are_refused(text):
    with pytest.raises(ConfigError, match=r"line 1: YAML reads .* as the number .* in quotes, as"):
        load_yaml(text)


def test_other_integers_are_read():
    assert load_yaml("[0, -0, 10, 1_000, 0x1f, '010']") == [0, 0, 10, 1000, 31, "010"]


def test_aliases_within_the_limits_work():
    assert load_yaml("{a: &x [1, 2], b: *x, c: [*x, *x]}")["c"] == [[1, 2], [1, 2]]


def test_an_override_of_one_alias_does_not_change_the_others(tmp_path):
    file = tmp_path / "file.yaml"
    file.write_text("model: {tables: {'deep.C1': &x {dim: 4}, 'deep.C2': *x}}\n")
    tables = load_config(file, ["model.tables.deep.C1.dim=8"], models=MODELS).model.tables
    assert (tables["deep.C1"].dim, tables["deep.C2"].dim) == (8, 4)


MANY = 10_000
PAIRS = [f"[a{n}, b]" for n in range(MANY)]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "text",
    quick(
        [
            f"model: {{wide: {{crosses: [{', '.join(PAIRS)}]}}}}",
            f"model: {{wide: {{hash_size: 9, crosses: [{', '.join(PAIRS)}]}}}}",
            f"model: {{wide: {{columns: [{', '.join(f'a{n}' for n in range(MANY))}]}}}}",
            f"train: {{slices: [{', '.join(f'a{n}' for n in range(MANY))}]}}",
            f"parallel: {{tables: {{{', '.join(f'a{n}: {{sbp: B}}' for n in range(MANY))}}}}}",
            f"parallel: {{tables: {{{', '.join(f'a{n}: {{sbp: B}}' for n in range(20_000))}}}}}",
            f"model: {{tables: {{{', '.join(f'a{n}: {{dim: 4}}' for n in range(MANY))}}}}}",
            f"model: {{fields: {{{', '.join(f'a{n}: {{table: b}}' for n in range(MANY))}}}}}",
            "model: {name: dcnv2, cross_layers: 256}",
        ],
        lambda n: n in (0, 4, 8),
    ),
    ids=lambda text: text[:40],
)
def test_the_longest_lists_are_read_quickly(text, tmp_path):
    """Process time is measured, because other programs on the machine do not affect it much."""
    file = tmp_path / "file.yaml"
    file.write_text(text + "\n")
    began, message = time.process_time(), ""
    try:
        config = load_config(file, ["parallel.scheme=1"], models=MODELS)
        plan_run(config, FIELDS, world_size=2, device_type="cpu")
    except ConfigError as error:
        message = str(error)
    assert len(message) < MAX_MESSAGE
    assert bool(message) is ("cross_layers" not in text)
    assert time.process_time() - began < MAX_S


@pytest.mark.parametrize(
    "word",
    [
        *(
            '"a\\nb"=1',
            "a\nb=1",
            'model={"a\\nb": 1}',
            'parallel.plan="a\\nb"',
            'run.dir={"a\\nb": 1}',
        ),
        *('train.slices.0="a\\nb"', 'model.wide.columns=["a\\nb"]', 'model.fields.*.table="a\\nb"'),
        *(f'{group}={{"a\\nb": {{}}}}' for group in ("parallel.tables", "parallel.dense")),
        *(f'{group}={{"a\\u2028b": {{}}}}' for group in ("parallel.kernels", "optimizer.tables")),
        *(f'{group}={{"a\\x1bb": {{}}}}' for group in ("model.tables", "model.fields")),
        *("run.dir=!!binary AAAA", 'model.name="a\\nb"', "run.dir=\n- a", "run.seed=a\x1b[2J"),
    ],
)
def test_a_message_is_one_line_regardless_of_its_quotations(word):
    message = refusal_of(["parallel.scheme=null", word], plan=True)
    assert message
    assert message.isprintable()


PATHS = sorted(name for name, key in KEYS.items() if key.kind == "path")


@pytest.mark.parametrize("name", [*PATHS, "parallel.plan", "checkpoint.resume"])
@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("x" * 5000, "5,000 bytes"),
        ("x" * 241, "name of 241 bytes"),
        ("a/" * 2000, "4,000 bytes, but a path can have at most 3,800"),
        ('"\\ud800"', "half of a surrogate pair"),
    ],
)
def test_an_impossible_path_is_refused(name, path, rule):
    message = refusal_of([*KEYS[name].needs, f"{name}={path}"])
    assert message.startswith(f"{name}: ")
    assert rule in message
    assert "use a local path such as out/criteo" in message
