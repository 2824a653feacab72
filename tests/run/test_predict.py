"""Tests that predictions equal evaluations, on one and several ranks, from raw rows and prepared
sets.
"""

import json
import os
import re
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.checkpoint.format import digest_of
from sbpflow.commands.export import export
from sbpflow.commands.predict import predict
from sbpflow.config.parse import plain
from sbpflow.config.schema import Config, DataConfig
from sbpflow.data import fields_of, load_manifest
from sbpflow.data.__main__ import main as data_main
from sbpflow.data.predictions import Scoring, check_ids
from sbpflow.data.read.loaders import open_loaders
from sbpflow.errors import CheckpointError, ConfigError, DataError
from sbpflow.models.wdl import WdlConfig, WideConfig
from sbpflow.run.execution import start
from sbpflow.run.execution.job import build_job
from sbpflow.run.execution.predict import on_rank_0, predictions, probabilities
from sbpflow.run.execution.start import join_ranks
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.planning.plan_file import plan_to_json
from sbpflow.run.saved.save import Saver
from sbpflow.run.saved.saved_model import find_checkpoint, load_values, saved_config, saved_plan
from sbpflow.runtime.ranks.world import World
from tests import deadlines
from tests.data.tables import INF, SCHEMA, SPLIT, table, write_csv
from tests.run.saved import save_job
from tests.torchrun import torchrun
from tests.training.wdl_case import make_config

ROOT = Path(__file__).resolve().parents[2]
MODELS = {"wdl": WdlConfig}
STEPS = 6


def prepared(folder: Path) -> Path:
    """Make a CSV table and its prepared set in ``folder``."""
    (folder / "schema.yaml").write_text(SCHEMA)
    source = write_csv(folder / "t.csv", table(900))
    words = ["--input", source, "--output", folder / "set", "--schema", folder / "schema.yaml"]
    words += ["--split", SPLIT, "--max-bad-fraction", "0.05"]
    assert data_main(["prepare", *map(str, words)]) == 0
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a CSV table and its prepared set."""
    return prepared(tmp_path_factory.mktemp("predict"))


def config_of(folder: Path, scheme: str = "1") -> Config:
    return replace(
        make_config(scheme, "adagrad", dtype="float32"),
        data=DataConfig(path=folder / "set", batch_size=64, loader="memmap"),
        model=WdlConfig(embedding_dim=4, hidden=(7, 6), dropout=0.0, wide=WideConfig(crosses=())),
    )


def _train(world: World, folder: Path, run: Path) -> tuple[np.ndarray, np.ndarray]:
    """Train and save to ``run``; return logits and labels of the test split, as in an
    evaluation."""
    config, manifest = config_of(folder), load_manifest(folder / "set")
    spec, plan = plan_run(config, fields_of(manifest), world_size=1, device_type="cpu")
    job = build_job(config, spec, plan, Boxing(world))
    loaders = open_loaders(manifest, config.data, 0, 1, seed=7, device=world.device)
    for _, batch in zip(range(STEPS), loaders["train"].epoch(0), strict=False):
        job.trainer.step(batch)
    save_job(run, job, config, STEPS)
    return scores_of(job.trainer, loaders["test"])


def scores_of(trainer, loader) -> tuple[np.ndarray, np.ndarray]:
    found = [(trainer.predict(batch), batch.labels) for batch in loader.epoch(0)]
    logits, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
    return probabilities(logits.numpy()), labels.numpy()


@pytest.fixture(scope="module")
def run(_cpu_ranks, folder) -> Path:
    """Return a run folder with one checkpoint, and its evaluation in scores.npy and labels.npy."""
    ((scores, labels),) = _cpu_ranks(1, _train, folder, folder / "run")
    np.save(folder / "run" / "scores.npy", scores)
    np.save(folder / "run" / "labels.npy", labels)
    return folder / "run"


def words(run: Path, source: object, output: Path, *more: str) -> list[str]:
    return ["--checkpoint", str(run), "--input", str(source), "--output", str(output), *more]


def test_ranks_compare_their_weights(run, folder, tmp_path, monkeypatch):
    """Machines can have different checkpoints of the same step at the same local path."""
    compared: list[str] = []

    def join(config, plan, *, data_set):
        compared.append(data_set)
        return join_ranks(config, plan, data_set=data_set)

    monkeypatch.setattr(start, "join_ranks", join)
    assert predict(words(run, folder / "set", tmp_path / "s.parquet")) == 0
    digest = digest_of(find_checkpoint(run).index)
    assert compared == [f"{folder / 'set'} (test) by step-{STEPS} {digest[:16]}"]


def test_a_prediction_equals_the_evaluation_bit_for_bit(run, folder, tmp_path):
    assert predict(words(run, folder / "set", tmp_path / "s.parquet")) == 0
    frame = pl.read_parquet(tmp_path / "s.parquet")
    assert frame.columns == ["id", "score", "label"]
    assert frame["score"].to_numpy().tolist() == np.load(run / "scores.npy").tolist()
    assert frame["label"].to_numpy().tolist() == np.load(run / "labels.npy").tolist()
    # The test split begins 24 days after the start of the table; rows with an infinite price are
    # bad.
    numbers = [int(key.removeprefix("row-")) for key in frame["id"]]
    assert numbers == sorted(numbers)
    assert numbers[0] >= 24 * 24
    assert [path.name for path in tmp_path.iterdir()] == ["s.parquet"]


def test_the_suffix_selects_the_format_of_the_scores(run, folder, tmp_path):
    """Text files contain the shortest digits that give the same float32."""
    readers = {"csv": {}, "tsv": {"separator": "\t"}}
    assert predict(words(run, folder / "set", tmp_path / "s.parquet")) == 0
    wanted = pl.read_parquet(tmp_path / "s.parquet")
    for suffix, options in readers.items():
        assert predict(words(run, folder / "set", tmp_path / f"s.{suffix}")) == 0
        found = pl.read_csv(tmp_path / f"s.{suffix}", schema=wanted.schema, **options)
        assert found.equals(wanted)
    for name in ("s.CSV", "s.csv.gz"):
        with pytest.raises(ConfigError, match=rf"--output must end in .*, got .*{name}"):
            predict(words(run, folder / "set", tmp_path / name))


def test_raw_rows_get_the_ids_and_scores_of_the_run(run, folder, tmp_path):
    rows = [row for row in table(900)[24 * 24 :] if row["price"] != INF]
    source = write_csv(tmp_path / "new.csv", rows)
    assert predict(words(run, source, tmp_path / "s.parquet")) == 0
    raw = pl.read_parquet(tmp_path / "s.parquet")
    assert predict(words(run, folder / "set", tmp_path / "t.parquet")) == 0
    assert raw.equals(pl.read_parquet(tmp_path / "t.parquet"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.csv", "s.parquet", "t.parquet"]


def test_bad_raw_rows_end_a_prediction_unless_they_are_allowed(run, tmp_path, capsys):
    source = write_csv(tmp_path / "new.csv", table(200))
    with source.open("a") as file:
        file.write("\n")  # a blank line is not a bad line
    with pytest.raises(
        DataError, match="5 of the 200 lines are bad, more than --max-bad-fraction 0"
    ):
        predict(words(run, source, tmp_path / "s.parquet"))
    assert not (tmp_path / "s.parquet").exists()
    more = ("--max-bad-fraction", "0.1")
    assert predict(words(run, source, tmp_path / "s.parquet", *more)) == 0
    good = [row["id"] for row in table(200) if row["price"] != INF]
    assert pl.read_parquet(tmp_path / "s.parquet")["id"].to_list() == good
    assert "which have no score and no row number: 5\n" in capsys.readouterr().err


def test_an_optimizer_of_a_module_is_imported_only_if_the_command_names_it(run, folder, tmp_path):
    own = "tests.embedding.own_rule:ScaledMomentum"
    changed = f"optimizer.sparse={{name: '{own}'}}"
    with pytest.raises(ConfigError, match=f"add --optimizer {own}"):
        predict(words(run, folder / "set", tmp_path / "s.parquet", changed))
    named = ("--optimizer", own, changed)
    assert predict(words(run, folder / "set", tmp_path / "s.parquet", *named)) == 0


def test_predictions_of_unlabelled_parquet_have_no_labels(run, tmp_path):
    rows = [row for row in table(60) if row["price"] != INF]
    frame = pl.DataFrame(rows, infer_schema_length=None).drop("click", "buy")
    frame.write_parquet(tmp_path / "new.parquet")
    assert predict(words(run, tmp_path / "new.parquet", tmp_path / "s.parquet")) == 0
    found = pl.read_parquet(tmp_path / "s.parquet")
    assert found.columns == ["id", "score"]
    assert found["score"].is_between(0, 1).all()


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_a_missing_column_is_named_with_its_file(run, tmp_path, suffix):
    frame = pl.DataFrame(table(60), infer_schema_length=None).drop("click", "buy", "price")
    source = tmp_path / f"new.{suffix}"
    if suffix == "parquet":
        frame.write_parquet(source)
    else:
        simple = [name for name in frame.columns if not frame[name].dtype.is_nested()]
        frame.select(simple).write_csv(source)
    with pytest.raises(DataError) as error:
        predict(words(run, source, tmp_path / "s.parquet"))
    assert str(error.value).startswith(f"{source} has no column")
    assert "'price'" in str(error.value)
    assert "new rows need all columns of the training set except the labels" in str(error.value)
    assert "--schema" not in str(error.value)
    assert ("separated by" in str(error.value)) == (suffix == "csv")


def test_a_renamed_column_and_a_missing_file_are_named(run, tmp_path):
    source = tmp_path / "new.parquet"
    rows = pl.DataFrame(table(60), infer_schema_length=None)
    rows.rename({"price": "prices"}).write_parquet(source)
    with pytest.raises(DataError, match="rename 'prices' to 'price'"):
        predict(words(run, source, tmp_path / "s.parquet"))
    with pytest.raises(ConfigError, match=r"--input .*gone\.csv: no such file"):
        predict(words(run, tmp_path / "gone.csv", tmp_path / "s.parquet"))


def _predict(world: World, folder: Path, run: Path, overrides: list[str]):
    """Return the scores on rank 0, and whether the run's plan was used."""
    checkpoint = find_checkpoint(run)
    config = saved_config(checkpoint, overrides, models=MODELS, own_model=None)
    manifest = load_manifest(folder / "set")
    spec, plan = plan_run(config, fields_of(manifest), world_size=world.size, device_type="cpu")
    kept = saved_plan(checkpoint, plan, config.parallel.kernel)
    job = build_job(config, spec, kept or plan, Boxing(world))
    load_values(job, checkpoint)
    loaders = open_loaders(
        manifest, config.data, world.rank, world.size, seed=7, device=world.device
    )
    scores = [score for score, _ in predictions(job.trainer, loaders["test"], job.boxing)]
    return (np.concatenate(scores) if scores else None), kept is not None


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("size", "overrides"),
    [(1, []), (2, []), (3, ["parallel.scheme=3"]), (2, ["parallel.scheme=2"]),
     (1, ["data.batch_size=37"]), (2, ["parallel.table_dtype=bfloat16"])],
)  # fmt: skip
def test_scores_with_other_layouts_differ_only_by_rounding(ranks, run, folder, size, overrides):
    results = ranks(size, _predict, folder, run, overrides)
    scores, as_the_run = results[0]
    assert as_the_run == (size == 1 and not overrides)
    assert all(other is None for other, _ in results[1:])
    wanted = np.load(run / "scores.npy")
    bound = {"parallel.table_dtype=bfloat16": 2e-3}.get("".join(overrides), 1e-6)
    np.testing.assert_allclose(scores, wanted, rtol=0, atol=bound)
    if as_the_run:
        assert scores.tolist() == wanted.tolist()


def _train_on_all(world: World, folder: Path, run: Path, scheme: str) -> list[np.ndarray]:
    """Train and save on all ranks; return this rank's scores for each evaluated batch."""
    config, manifest = config_of(folder, scheme), load_manifest(folder / "set")
    fields = fields_of(manifest)
    spec, plan = plan_run(config, fields, world_size=world.size, device_type="cpu")
    job = build_job(config, spec, plan, Boxing(world))
    loaders = open_loaders(
        manifest, config.data, world.rank, world.size, seed=7, device=world.device
    )
    for _, batch in zip(range(STEPS), loaders["train"].epoch(0), strict=False):
        job.trainer.step(batch)
    documents = {"config": plain(config), "plan": json.loads(plan_to_json(plan))}
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    saver = Saver(run / "checkpoints", job.boxing, job.state, run="test", deadline_s=30)
    saver.save(STEPS, documents)
    logits = [job.trainer.predict(batch) for batch in loaders["test"].epoch(0)]
    return [probabilities(part.numpy()) for part in logits]


@pytest.mark.parametrize(("size", "scheme"), [(2, "3"), (3, "2")])
def test_predictions_of_several_ranks_equal_their_evaluation_bit_for_bit(
    ranks, folder, tmp_path, size, scheme
):
    seen = ranks(size, _train_on_all, folder, tmp_path, scheme)
    results = ranks(size, _predict, folder, tmp_path, [])
    scores, as_the_run = results[0]
    assert as_the_run
    wanted = [part for batch in zip(*seen, strict=True) for part in batch]
    assert scores.tolist() == np.concatenate(wanted).tolist()


def _slow(world: World, kind: str):
    """Make rank 0 work for longer than the interval at which ranks exchange messages."""

    def work():
        time.sleep(0.4)
        if kind == "mistake":
            raise ConfigError("--input: no such file")
        return "made"

    try:
        return on_rank_0(Boxing(world), work, ask_s=0.1)
    except ConfigError as error:
        return str(error)


def test_other_ranks_wait_for_rank_0_and_raise_its_mistake(ranks):
    assert ranks(2, _slow, "fine") == ["made", None]
    assert ranks(2, _slow, "mistake") == ["--input: no such file"] * 2


def test_unsuitable_sets_are_rejected_before_anything_is_scored(run, folder, tmp_path):
    like = load_manifest(folder / "set")
    (tmp_path / "there.parquet").touch()
    with pytest.raises(ConfigError, match=r"there\.parquet already exists; use --overwrite"):
        predict(words(run, folder / "set", tmp_path / "there.parquet"))
    with pytest.raises(ConfigError, match=r"no-folder cannot be used \(no such file or directory"):
        predict(words(run, folder / "set", tmp_path / "no-folder" / "s.parquet"))
    with pytest.raises(CheckpointError, match=r"--checkpoint .* contains no checkpoint"):
        predict(words(tmp_path, folder / "set", tmp_path / "s.parquet"))
    other = ["--input", folder / "t.csv", "--output", tmp_path / "other", "--seed", "9"]
    other += ["--schema", folder / "schema.yaml", "--split", SPLIT, "--max-bad-fraction", "0.1"]
    assert data_main(["prepare", *map(str, other)]) == 0
    with pytest.raises(ConfigError, match=r"the ids in .*other are not from .* encode"):
        check_ids(load_manifest(tmp_path / "other"), like)
    same = [*other[:3], tmp_path / "log1", "--dense", "log1", *other[6:]]
    assert data_main(["prepare", *map(str, same)]) == 0
    with pytest.raises(ConfigError, match=r"the dense values in .*log1 are not transformed as in"):
        check_ids(load_manifest(tmp_path / "log1"), like)
    scoring = Scoring([str(folder / "set")], tmp_path / "s.csv", "val", like, overwrite=False)
    assert scoring.manifest().splits["val"] > 0
    with pytest.raises(ConfigError, match=r"'validation' is not a split .* use train or val or"):
        Scoring(["set"], tmp_path / "s.csv", "validation", like, overwrite=False)


@pytest.mark.parametrize(
    ("input", "output"),
    [
        ("rows.csv", "rows.csv"),
        ("rows", "rows/b.csv"),
        ("set", "set"),
        ("scores/rows.csv", "scores"),
        ("scores.csv.partial", "scores.csv"),
    ],
)
def test_an_output_cannot_replace_an_input(run, folder, tmp_path, input, output):
    path = tmp_path / input
    path.parent.mkdir(exist_ok=True)
    if input == "set":
        shutil.copytree(folder / "set", path)
    elif path.suffix:
        shutil.copy(folder / "t.csv", path)
    else:
        path.mkdir()
        shutil.copy(folder / "t.csv", path / "b.csv")
    with pytest.raises(ConfigError, match=rf"{output} would replace the input .*{input}"):
        predict([*words(run, path, tmp_path / output), "--overwrite"])
    assert path.exists()


def test_two_predictions_do_not_write_one_file(run, tmp_path, monkeypatch):
    """Otherwise, the first one would write its scores with the row keys of the second one."""
    rows = [row for row in table(900)[24 * 24 :] if row["price"] != INF]
    first = write_csv(tmp_path / "first.csv", rows[:50])
    second = write_csv(tmp_path / "second.csv", rows[50:100])
    output, close = tmp_path / "scores.csv", Scoring.close

    def late(scoring):
        monkeypatch.undo()
        with pytest.raises(ConfigError, match=r"another run .* is writing .*scores\.csv"):
            predict([*words(run, second, output), "--overwrite"])
        close(scoring)

    monkeypatch.setattr(Scoring, "close", late)
    assert predict(words(run, first, output)) == 0
    assert predict(words(run, first, tmp_path / "alone.csv")) == 0
    assert output.read_bytes() == (tmp_path / "alone.csv").read_bytes()


@pytest.mark.parametrize("output", [".", "/"])
def test_an_output_without_a_name_is_refused(run, folder, output):
    with pytest.raises(ConfigError, match=rf"--output {output} is not the .* scores\.parquet"):
        predict(words(run, folder / "set", Path(output)))


@pytest.mark.parametrize(
    ("source", "more", "message"),
    [
        ("set", ("--block-rows", "5"), r"--block-rows needs a folder .*--output .*/s$"),
        ("t.csv", ("--split", "test"), "^--split: test needs a prepared set, .* remove --split"),
        ("set", ("--max-bad-fraction", "0"), "^--max-bad-fraction: 0 needs .*; remove --max-bad-"),
    ],
)
def test_an_option_without_effect_is_refused(run, folder, tmp_path, source, more, message):
    with pytest.raises(ConfigError, match=message):
        predict(words(run, folder / source, tmp_path / "s.parquet", *more))


def test_a_model_of_a_module_is_imported_only_if_the_command_names_it(run, folder, tmp_path):
    checkpoint = find_checkpoint(run)
    tree = {**checkpoint.documents["config"], "model": {"name": "os_evil:Model"}}
    checkpoint.documents = {"config": tree}
    with pytest.raises(ConfigError, match="use --model os_evil:Model"):
        saved_config(checkpoint, [], models=MODELS, own_model=None)
    with pytest.raises(ConfigError, match="module os_evil does not exist"):
        saved_config(checkpoint, [], models=MODELS, own_model="os_evil:Model")
    with pytest.raises(ConfigError, match="--model is a:B, but the saved model is"):
        saved_config(find_checkpoint(run), [], models=MODELS, own_model="a:B")


def test_the_export_command_scores_like_the_run(run, folder, tmp_path, capsys, monkeypatch):
    more = ["--split", "test"]
    base = ["--checkpoint", str(run)]
    assert export([*base, "--output", str(tmp_path / "a"), *more]) == 0
    assert export([*base, "--output", str(tmp_path / "b"), "--rows", "float16", *more]) == 0
    text = capsys.readouterr().out
    assert "rows as_trained: AUC 0." in text
    assert "rows float16: AUC 0." in text
    with pytest.raises(
        ConfigError, match=r"--rows must be as_trained or float16 or int8, got 'int4'"
    ):
        export([*base, "--output", str(tmp_path / "c"), "--rows", "int4"])
    with pytest.raises(ConfigError, match="--score: int8 rows"):
        export([*base, "--output", str(tmp_path / "c"), "--rows", "int8", "data.path=nowhere"])
    monkeypatch.setattr("sbpflow.data.load_manifest", None)
    with pytest.raises(ConfigError, match="a already exists; use a new folder"):
        export([*base, "--output", str(tmp_path / "a")])  # refused before the set is read


def test_a_few_rows_are_scored_without_compilers(run, tmp_path):
    """Importing ``torch._dynamo``, DALI, or FBGEMM would take longer than scoring; numba's loops
    are needed only for lists of ids.
    """
    source = write_csv(tmp_path / "one.csv", [row for row in table(9) if row["price"] != INF][:1])
    code = (
        "import sys\nfrom sbpflow.commands.predict import predict\npredict(sys.argv[1:])\n"
        "names = ('torch._dynamo', 'nvidia.dali', 'fbgemm_gpu')\n"
        "print('loaded:', *[name for name in names if name in sys.modules])"
    )
    more = ("parallel.kernel=auto", "data.loader=auto")
    done = deadlines.run(
        [sys.executable, "-c", code, *words(run, source, tmp_path / "s.parquet", *more)],
        60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"
    assert len(pl.read_parquet(tmp_path / "s.parquet")) == 1


@pytest.mark.slow
def test_two_ranks_predict_raw_rows_from_the_command_line(run, folder, tmp_path):
    rows = [row for row in table(900)[24 * 24 :] if row["price"] != INF]
    source = write_csv(tmp_path / "new.csv", rows)
    command = [*torchrun(tmp_path), "-m", "sbpflow", "predict"]
    done = deadlines.run(
        [*command, *words(run, source, tmp_path / "s.parquet")],
        60,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    frame = pl.read_parquet(tmp_path / "s.parquet")
    np.testing.assert_allclose(frame["score"], np.load(run / "scores.npy"), rtol=0, atol=1e-6)
    assert done.stderr.count("scores, ") == 1, "only rank 0 reports"


def test_predictions_need_no_optimizer_state(run, folder, tmp_path):
    """docs/serving.md recommends this override."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text()
    (override,) = re.findall(r"`'(optimizer\.sparse[^']*)'`", page)
    assert predict(words(run, folder / "set", tmp_path / "s.parquet", override)) == 0
    frame = pl.read_parquet(tmp_path / "s.parquet")
    assert frame["score"].to_numpy().tolist() == np.load(run / "scores.npy").tolist()
