"""Tests which configurations are accepted, and the message for each mistake."""

import dataclasses
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import yaml

from sbpflow.config.checks import check, data_path
from sbpflow.config.load import config_facts, config_of, dump_config, load_config, read_yaml
from sbpflow.config.schema import Config
from sbpflow.embedding.rules.lazy_adam import LazyAdam
from sbpflow.embedding.rules.sgd import Sgd
from sbpflow.errors import ConfigError
from sbpflow.models.registry import MODELS
from sbpflow.models.wdl import WdlConfig

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))


@pytest.fixture
def load(tmp_path):
    """Return a function that converts YAML text and overrides to a Config."""

    def load(text: str = "", *overrides: str) -> Config:
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return load_config(path, overrides, models=MODELS)

    return load


def refused(load, *overrides: str, text: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    return str(caught.value)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_survive_a_dump(path, tmp_path):
    config = load_config(path, models=MODELS)
    copy = tmp_path / "dump.yaml"
    copy.write_text(dump_config(config))
    assert load_config(copy, models=MODELS) == config


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_plan_on_the_command_line_replaces_the_scheme_in_the_file(path, caplog):
    parallel = load_config(path, ["parallel.plan=auto"], models=MODELS).parallel
    assert (parallel.plan, parallel.scheme) == ("auto", None)
    assert caplog.messages == ["parallel.plan replaces parallel.scheme from the configuration"]


@pytest.mark.parametrize(("word", "scheme"), [("column", "1"), ("row", "2"), ("row_dedup", "3")])
def test_a_scheme_has_a_name_and_a_number(load, word, scheme):
    assert load(f"parallel: {{scheme: {word}}}") == load(f"parallel: {{scheme: {scheme}}}")
    assert load(f"parallel: {{scheme: {word}}}").parallel.scheme == scheme


def test_a_scheme_on_the_command_line_replaces_the_plan_in_the_file(load, caplog):
    parallel = load("parallel: {plan: plan.yaml}", "parallel.scheme=3").parallel
    assert (parallel.plan, parallel.scheme) == (None, "3")
    assert caplog.messages == ["parallel.scheme replaces parallel.plan from the configuration"]


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("parallel: {plan: auto, scheme: 1}", []),
        ("", ["parallel.plan=auto", "parallel.scheme=1"]),
        ("parallel: {scheme: 2}", ["parallel.plan=auto", "parallel.scheme=1"]),
        ("", ["parallel={scheme: 1}", "parallel.plan=auto"]),
    ],
)
def test_a_plan_and_a_scheme_in_the_same_place_are_refused(load, caplog, text, overrides):
    message = refused(load, *overrides, text=text)
    assert message.startswith("parallel.plan: auto cannot be combined with parallel.scheme: 1")
    assert not caplog.messages


def test_null_on_the_command_line_replaces_nothing(load, caplog):
    parallel = load("parallel: {scheme: 2}", "parallel.plan=null").parallel
    assert (parallel.plan, parallel.scheme) == (None, "2")
    assert not caplog.messages


def test_shipped_configs_are_found():
    names = {path.stem for path in CONFIGS}
    assert {"dp", "scheme1", "scheme2", "scheme3", "demo", "dlperf"} <= names


@pytest.mark.parametrize("stem", ["scheme2", "scheme3", "dp"])
def test_schemes_differ_only_in_their_parallel_group(stem):
    folder = CONFIGS[0].parent
    scheme1, other = (
        load_config(folder / "scheme1.yaml", models=MODELS),
        load_config(folder / f"{stem}.yaml", models=MODELS),
    )
    assert dataclasses.replace(other, parallel=scheme1.parallel) == scheme1
    assert len(yaml.safe_load((folder / f"{stem}.yaml").read_text())["parallel"]) <= 3


def test_an_empty_file_gives_the_defaults(load):
    assert load("") == Config(model=WdlConfig())


def test_overrides_apply_in_order_and_are_yaml(load):
    config = load(
        "train: {epochs: 2}\noptimizer:\n",
        "train.epochs=3",
        "train.epochs=4",
        "model.hidden=[8, 4]",
        "optimizer.sparse={name: lazy_adam, lr: 1e-2}",
        "data.path=out/x",
    )
    assert config.train.epochs == 4
    assert config.model.hidden == (8, 4)
    assert config.optimizer.sparse == LazyAdam(lr=0.01)
    assert config.data.path == Path("out/x")


@pytest.mark.parametrize("text", ["runs/#3", "'runs/a #3'", '"runs/a #3"'])
def test_a_path_may_contain_a_hash_sign(load, text):
    assert load("", f"run.dir={text}").run.dir == Path(text.strip("'\""))


@pytest.mark.parametrize("text", ["1e-3", "1.0e-3", "1E-3", "0.001", ".001"])
def test_common_ways_to_write_a_float_are_accepted(load, text):
    assert load(f"optimizer: {{dense: {{lr: {text}}}}}").optimizer.dense.lr == 1e-3


def test_an_optimizer_name_brings_its_own_settings(load):
    assert load("", "optimizer.sparse.name=sgd").optimizer.sparse == Sgd()
    message = refused(load, "optimizer.sparse={name: sgd, betas: [0.9, 0.99]}")
    assert "optimizer.sparse.betas is a setting of lazy_adam, not of sgd" in message


# overrides: parts of the expected message (the key, the value or a near match, and a valid value)
MISTAKES = {
    "train.epoch=3": ["train.epoch: unknown key", "did you mean train.epochs?"],
    "optimizer.tables=5": ["optimizer.tables: 5 (int) is not a group of keys", "name: ftrl"],
    "optimizer.tables.wide.*=5": ["optimizer.tables.wide.*: 5 (int) is not a group of keys"],
    "optimizer.tables.wide.*.name=adam": ["'adam' is unknown; use one of same, adagrad, ftrl"],
    "optimizer.sparse.name=adam": ["optimizer.sparse.name: 'adam'", "did you mean lazy_adam?"],
    "optimizer.tables.wide.*.beta=1.0": [
        "optimizer.tables.wide.*.beta is a setting of ftrl",
        "is a setting of ftrl, not of",
    ],
    "optimizer.tables.wide.*.lr=0": ["optimizer.tables.wide.*.lr must be > 0, got 0"],
    "optimizer.clip=5": ["optimizer.clip: 5 (int)", "clip: {norm: 10.0}"],
    "optimizer.clip.norm=-1": ["optimizer.clip.norm must be > 0, got -1", "norm: 10.0"],
    "optimizer.dense_schedule.decay_start=3": ["optimizer.dense_schedule.decay_start: 3", "decay_"],
    "train.stop.metric=f1": ["train.stop.metric: 'f1' is not one of auc", "metric: auc"],
    "train.plateau.factor=1.0": [
        "train.plateau.factor must be > 0 and < 1, got 1.0",
        "factor: 0.1",
    ],
    "train.plateau.min_factor=1": ["train.plateau.min_factor must be > 0 and < 1, got 1"],
    "train.profile=[5, 3]": ["train.profile: [5, 3] ends before", "[3, 5]"],
    "train.prometheus.host=''": ["train.prometheus.host is empty", "host: 127.0.0.1"],
    "train.slices=C1": ["train.slices: C1 (str) is not a list"],
    "train.loss.label_smoothing=1": ["train.loss.label_smoothing must be >= 0 and < 1, got 1"],
    "lr=0.1": ["lr: unknown key", "optimizer.sparse.lr or optimizer.dense.lr"],
    "snapshots.every=3": ["snapshots: unknown key", "the top level has the keys run, data"],
    "train.epochs=three": ["train.epochs: three (str)", "a whole number", "epochs: 1"],
    "train.epochs=0": ["train.epochs must be >= 1, got 0", ">= 1", "epochs: 1"],
    "train.max_steps=1.5": ["train.max_steps: 1.5 (float)", "max_steps: 100"],
    "run.seed=true": ["run.seed: true (bool)", "a whole number", "seed: 7"],
    "run.seed=-1": ["got -1", ">= 0"],
    "run.dir=7": ["run.dir: 7 (int)", "a path", "dir: runs/train"],
    "train.progress=1": ["train.progress: 1 (int)", "true or false", "progress: true"],
    "model.dropout=1": ["model.dropout must be >= 0 and < 1, got 1 ", "< 1", "dropout: 0.5"],
    "optimizer.dense.lr=fast": ["optimizer.dense.lr: fast (str)", "finite number", "lr: 0.001"],
    "optimizer.dense.lr=.nan": ["optimizer.dense.lr: .nan", "finite number"],
    "optimizer.dense.lr=0": ["optimizer.dense.lr must be > 0 and <= 1e+30, got 0", "> 0"],
    "optimizer.dense.lr=1e300": ["optimizer.dense.lr must be > 0 and <= 1e+30, got '1e300'"],
    "optimizer.dense.weight_decay=1e300": ["weight_decay must be >= 0 and <= 1e+30"],
    "optimizer.sparse={name: adagrad, initial_accumulator: 1e300}": ["_accumulator must be >= 0"],
    "optimizer.sparse={name: ftrl, l1: 1e300}": ["optimizer.sparse.l1 must be >= 0 and <= 1e+30"],
    "optimizer.dense.betas=[0.9]": ["optimizer.dense.betas: [0.9]", "betas: [0.9, 0.999]"],
    "optimizer.schedule={decay_start: 20, end_factor: 0.0}": [
        "optimizer.schedule.decay_start: 20",
        "decay_steps: 10000",
    ],
    "optimizer.schedule={decay_steps: 9, end_factor: 5}": [
        "schedule.end_factor must be >= 0 and <= 1, got 5",
        "<= 1",
    ],
    "optimizer.sparse.name=lazyadam": ["optimizer.sparse.name: 'lazyadam'", "lazy_adam"],
    "optimizer.sparse=[]": ["optimizer.sparse: []", "a group of keys"],
    "model.hidden=400": ["model.hidden: 400 (int)", "a list", "hidden: [1024, 1024]"],
    "model.hidden=[4, x]": ["model.hidden[1]: x (str)", "a whole number"],
    "model.hidden=[]": ["model.hidden: []", "[400, 400]"],
    "model.wide.crosses=[[C1]]": ["model.wide.crosses[0]: ['C1']", "[C1, C2]"],
    "model.wide.crosses=[[C1, C2], [C1, C2]]": ["crosses[1]", "listed twice"],
    "model={deep: false, wide: {crosses: []}}": ["model.deep: false", "nothing to train"],
    "data.loader=memmmap": [
        "data.loader: 'memmmap' is not one of auto, dali, memmap",
        "loader: memmap",
    ],
    "parallel.scheme=4": ["parallel.scheme: 4 is not one of dp, 1, 2, 3"],
    "data.path.x=3": ["data.path: {x: 3} (dict)", "a path"],
    "run.seed": ["'run.seed' is not a setting; write key=value", "run.seed=7"],
    "checkpoint.dir=": ["checkpoint.dir= has no value", "or null to unset an optional key"],
    "run.dir=runs/a #3": ["YAML reads the # in 'runs/a #3' and all", "'run.dir=\"name #3\"'"],
    "run.dir=#3": ["YAML reads the # in '#3' and all that follows as a comment"],
    "run.seed=[1": ["run.seed: '[1' is not accepted: not YAML"],
    "run.seed=010": ["run.seed: '010' is not accepted: line 1: YAML reads 010 as the number 8"],
    "parallel.tables.deep.C1={ranks: [0]}": ["parallel.tables.deep.C1.sbp is not given", "S(0)"],
    "parallel.tables.deep.C1.sbp=P": ["deep.C1.sbp: P", "B, S(0), or S(1)"],
    "parallel.tables.deep.C1.sbp=S(2)": ["deep.C1.sbp: S(2)", "B, S(0), or S(1)"],
    "parallel.tables.deep.C1.sbp=X": ["deep.C1.sbp: 'X'", "B, S(0), or S(1)"],
    "parallel.tables.deep.C1.sbp=(S(0), S(1))": ["deep.C1.ranks is not given", "[[0, 1], [2, 3]]"],
    "parallel.tables.deep.C1={sbp: S(0), ranks: [[0, 1]]}": ["deep.C1.ranks", "[0, 1]"],
    "parallel.tables.deep.C1={sbp: S(0), ranks: [0, 0]}": [
        "deep.C1.ranks: [0, 0]",
        "contain duplicates",
        "[0, 1]",
    ],
    "parallel.tables.deep.C1={sbp: S(0), ranks: []}": ["deep.C1.ranks: []", "[0, 1]"],
    "parallel.tables.deep.C1={sbp: S(0), ranks: 0}": [
        "deep.C1.ranks: 0 (int) is not a list in which each entry is a whole number or a list",
        "ranks: [0, 1]",
    ],
    "parallel.tables.deep.C1={sbp: B, sizes: [1]}": ["deep.C1.sizes", "remove sizes"],
    "parallel.tables.deep.C1={sbp: S(0), ranks: [0, 1], sizes: [9]}": [
        "[9] has 1 sizes, but axis 0"
    ],
    "parallel.tables.deep.C1={sbp: S(0), exchange: pull}": ["'pull'", "reduce, unique"],
}


@pytest.mark.parametrize("override", MISTAKES)
def test_mistakes_name_key_value_rule_and_remedy(load, override):
    message = refused(load, override)
    for part in MISTAKES[override]:
        assert part in message
    assert "\n" not in message


def test_a_near_match_is_suggested_once_even_if_several_models_have_the_key(load):
    message = refused(load, "train.dropou=0.5")
    assert message.count("model.dropout") == 1


def test_a_key_with_dots_in_a_file_is_shown_nested(load):
    message = refused(load, text="optimizer.dense.lr: 0.1\n")
    assert message == (
        "optimizer.dense.lr: a key must not contain dots; nest the groups (for example, "
        "{optimizer: {dense: {lr: 0.1}}})"
    )
    message = refused(load, text="train: {stop.patience: 3}\n")
    assert message.startswith("train.stop.patience: a key must not contain dots")
    assert message.endswith("{stop: {patience: 3}})")
    message = refused(load, text="parallel.tables.deep.C1.sbp: S(0)\n")
    assert message.endswith("{parallel: {tables: {deep.C1: {sbp: S(0)}}}})")
    message = refused(load, text="parallel: {tables.*.C1: {sbp: B}}\n")
    assert message.endswith("{tables: {'*.C1': {sbp: B}}})")
    message = refused(load, text="model: {fields: {a.b: {evict.max_rows: 70000}}}\n")
    assert message.endswith("{evict: {max_rows: 70000}})")
    with pytest.raises(
        ConfigError, match=r"must not contain dots; .* \{.train.: .*Fraction\(1, 2\)"
    ):
        config_of({"train.epochs": Fraction(1, 2)}, models=MODELS)
    message = refused(load, text="trian.epochs: 3\n")
    assert "trian.epochs: unknown key; did you mean train.epochs? the top level has" in message


def test_a_duplicate_key_is_refused_with_its_line(load):
    message = refused(load, text="run: {seed: 1}\ntrain: {}\nrun: {seed: 2}\n")
    assert "line 3: key 'run' appears twice" in message


@pytest.mark.parametrize("text", ["- 1\n", "just text", "a: [1"])
def test_a_file_that_is_not_a_config_is_refused(load, text):
    assert "config.yaml" in refused(load, text=text)


def test_a_missing_file_suggests_similar_names():
    with pytest.raises(ConfigError, match=r"scheme4\.yaml does not exist; did you mean .*scheme1"):
        load_config(CONFIGS[0].parent / "scheme4.yaml", models=MODELS)


@pytest.mark.parametrize("key", ["--config", "parallel.plan", "parallel.topology"])
def test_a_missing_file_without_neighbors_names_a_value_that_passes(tmp_path, key):
    with pytest.raises(ConfigError, match=rf"{key}: .*nothere\.yaml does not exist; use .*\.yaml"):
        read_yaml(tmp_path / "nothere.yaml", key)


def test_the_message_for_missing_data_shows_how_to_generate_data(load, tmp_path):
    with pytest.raises(ConfigError, match=r"data.path is not given.*sbpflow synth"):
        data_path(load(""))
    with pytest.raises(ConfigError, match=r"data.path: /no/such does not exist.*sbpflow synth"):
        data_path(load("data: {path: /no/such}"))
    assert data_path(load(f"data: {{path: {tmp_path}}}")) == tmp_path


def test_a_batch_smaller_than_the_ranks_is_refused(load):
    config = load("data: {batch_size: 3}\nparallel: {scheme: dp}")
    check(config, 3, "cpu")
    with pytest.raises(ConfigError, match=r"data.batch_size: 3 .*ranks, 4.*data.batch_size: 4"):
        check(config, 4, "cpu")


def test_the_facts_that_ranks_compare_depend_on_all_values_and_on_pattern_order(load):
    base = "parallel: {scheme: 1, tables: {a: {sbp: B}, b: {sbp: B}}}"
    swapped = "parallel: {scheme: 1, tables: {b: {sbp: B}, a: {sbp: B}}}"
    configs = [load(base), load(swapped), load(base, "run.seed=8"), load(base, "train.log_every=9")]
    assert len({str(config_facts(config)) for config in configs}) == 4
    assert config_facts(load(base)) == config_facts(load(base))


def test_a_config_is_immutable(load):
    with pytest.raises(dataclasses.FrozenInstanceError):
        load("").run.seed = 8


def test_the_facts_name_every_key(load):
    base = config_facts(load(""))
    assert base["optimizer.sparse.lr"] == "0.05"
    assert base["model.hidden"] == "[1024, 1024]"
    assert "data.path" not in base  # a key with the value None counts as missing
    for override in (
        "run.seed=8",
        "optimizer.tables.*.name=ftrl",
        "parallel.tables.deep.*.sbp=S(1)",
    ):
        assert config_facts(load("", override)) != base
    rules = ["parallel.tables.deep.*.sbp=B", "parallel.tables.deep.C1.sbp=S(0)"]
    first, second = (config_facts(load("", *order)) for order in (rules, rules[::-1]))
    assert first["parallel.tables.deep.C1.sbp"] == second["parallel.tables.deep.C1.sbp"] == "S(0)"
    changed = {key for key in first if first[key] != second[key]}
    assert changed == {"parallel.tables (order)"}


def test_model_tables_are_set_by_pattern(load):
    config = load("", "model.tables.deep.C1.dim=8", "model.tables.deep.C*={pooling: mean}")
    assert list(config.model.tables) == ["deep.C1", "deep.C*"]
    assert (config.model.tables["deep.C1"].dim, config.model.tables["deep.C*"].pooling) == (
        8,
        "mean",
    )
    facts = config_facts(load("", "model.fields.*_shop.table=shop"))
    assert facts["model.fields.*_shop.table"] == "shop"
    assert facts["model.fields (order)"] == "['*_shop']"
    assert "model.tables.x.dim must be >= 1 and" in refused(load, "model.tables.x.dim=0")
    assert "model.tables.x.initial_range" in refused(load, "model.tables.x.initial_range=-1")


def test_keys_of_a_group_within_a_pattern_are_set_one_by_one(load):
    text = "model: {fields: {'a.*': {vocabulary: dynamic, evict: {max_rows: 70000}}}}"
    overrides = ["max_rows=90000", "policy=lfu"]
    config = load(text, *(f"model.fields.a.*.evict.{each}" for each in overrides))
    assert list(config.model.fields) == ["a.*"]
    evict = config.model.fields["a.*"].evict
    assert (evict.max_rows, evict.policy) == (90000, "lfu")
    message = refused(load, "model.fields.C1.evict.max_row=90000")
    assert "model.fields.C1.evict.max_row: unknown key; did you mean" in message


def test_numbers_of_numpy_are_read_and_other_objects_refused():
    train = {"epochs": np.int64(3), "progress": np.bool_(False)}
    tree = {"train": train, "model": {"hidden": np.array([8, 4]), "dropout": np.float32(0.25)}}
    config = config_of(tree, models=MODELS)
    assert (config.train.epochs, config.train.progress) == (3, False)
    assert (config.model.hidden, config.model.dropout) == ((8, 4), 0.25)
    with pytest.raises(ConfigError, match=r"train.epochs: Fraction\(1, 2\) \(Fraction\) is not a"):
        config_of({"train": {"epochs": Fraction(1, 2)}}, models=MODELS)


def test_hidden_files_are_not_suggested(tmp_path):
    (tmp_path / ".hooks.yaml").touch()
    with pytest.raises(ConfigError, match="does not exist; use a configuration file") as error:
        load_config(tmp_path / "hook.yaml", models=MODELS)
    assert ".hooks" not in str(error.value)
