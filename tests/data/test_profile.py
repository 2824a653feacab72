"""Tests the profile of a set and its warnings against counts computed from the rows."""

import json
from xml.etree import ElementTree

import numpy as np
import polars as pl
import pytest

from sbpflow.data import load_manifest
from sbpflow.data.__main__ import main
from sbpflow.data.concerns import concerns
from sbpflow.data.profile import profile_set
from sbpflow.data.profile_page import profile_page, profile_picture, profile_text

NUM_TRAIN, NUM_ROWS = 2400, 3000
SCHEMA = """
label: y
dense: {size: identity, same: identity, late: identity, leak_number: identity}
sparse:
  city: string
  user: integer
  fixed: string
  leak: string
  tags: {kind: string, max: 4}
  pair: {kind: string, width: 2}
time: {ts: integer}
group: {user: integer}
"""


def rows(**changes):
    """Return rows in time order; the users in val and test are new, and ``late`` drifts."""
    rng = np.random.default_rng(5)
    label = rng.random(NUM_ROWS) < 0.3
    old = np.arange(NUM_ROWS) < NUM_TRAIN
    city = rng.choice(["Lima", "Osaka", "Lagos"], NUM_ROWS, p=[0.5, 0.3, 0.2]).tolist()
    return pl.DataFrame({
        "y": label,
        "size": np.where(rng.random(NUM_ROWS) < 0.1, 0.0, rng.normal(10, 2, NUM_ROWS)),
        "same": np.full(NUM_ROWS, 3.0),
        "late": rng.normal(np.where(old, 0, 2), 1),
        "leak_number": np.where(label, 5.0, 1.0) + rng.random(NUM_ROWS),
        "city": [None if n % 20 == 0 else value for n, value in enumerate(city)],
        "user": np.where(old, rng.integers(0, 50, NUM_ROWS), 1000 + np.arange(NUM_ROWS)),
        "fixed": ["x"] * NUM_ROWS,
        "leak": [f"{'in' if y else 'out'}{n % 9}" for n, y in enumerate(label)],
        "tags": [["a", "b"][: n % 3] for n in range(NUM_ROWS)],
        "pair": [["p"] if n % 2 else ["p", "q"] for n in range(NUM_ROWS)],
        "ts": 1_700_000_000 + 3600 * np.arange(NUM_ROWS),
        **changes,
    })  # fmt: skip


def prepared(folder, frame, *more, schema=SCHEMA):
    folder.mkdir(exist_ok=True)
    frame.write_parquet(folder / "t.parquet")
    (folder / "schema.yaml").write_text(schema)
    words = ["--input", folder / "t.parquet", "--schema", folder / "schema.yaml"]
    assert main(["prepare", *map(str, [*words, "--output", folder / "set", *more])]) == 0
    return load_manifest(folder / "set")


@pytest.fixture(scope="module")
def frame():
    return rows()


@pytest.fixture(scope="module")
def manifest(tmp_path_factory, frame):
    return prepared(tmp_path_factory.mktemp("profile"), frame)


@pytest.fixture(scope="module")
def profile(manifest):
    return profile_set(manifest)


def of(profile, name):
    return next(f for f in (*profile.fields, *profile.dense) if f.name == name)


def parts(frame):
    return {"train": frame[:NUM_TRAIN], "val": frame[NUM_TRAIN:2700], "test": frame[2700:]}


def test_labels_and_times_are_those_of_the_rows(profile, frame):
    for name, part in parts(frame).items():
        split = profile.splits[name]
        assert split.rows == len(part)
        assert split.label_rate == part["y"].mean()
        assert split.times == (part["ts"].min(), part["ts"].max())
        assert sum(split.rows_by_time) == len(part)
        assert sum(split.positives_by_time) == part["y"].sum()
        edges = np.array(profile.time_edges)
        assert split.rows_by_time == np.histogram(part["ts"].to_numpy(), edges)[0].tolist()


def test_missing_and_unknown_shares_are_those_of_the_rows(profile, frame):
    for name, part in parts(frame).items():
        assert of(profile, "city").missing[name] == part["city"].is_null().mean()
        assert of(profile, "user").unknown[name] == (0.0 if name == "train" else 1.0)
        assert of(profile, "size").missing[name] == (part["size"] == 0).mean()
        assert of(profile, "tags").missing[name] == 0
        assert of(profile, "pair").missing[name] == pytest.approx(0.25)


def test_dense_summaries_are_those_of_the_rows(profile, frame):
    for split, part in parts(frame).items():
        summary, values = of(profile, "size").summary[split], part["size"].cast(pl.Float32)
        assert (summary["min"], summary["max"]) == (values.min(), values.max())
        assert summary["mean"] == pytest.approx(values.mean(), rel=1e-6)
        assert summary["std"] == pytest.approx(values.std(ddof=0), rel=1e-5)
        for name, part_of in (("p25", 0.25), ("p50", 0.5), ("p99", 0.99)):
            # Bins have a relative width of 1/128, and a quantile is the lower edge of its bin.
            exact = values.quantile(part_of, "higher")
            assert exact * (1 - 1 / 64) <= summary[name] <= exact


def index(expected, actual):
    """Compute the population stability index of two lists of counts."""
    p, q = (np.maximum(np.array(c) / np.sum(c), 1e-4) for c in (expected, actual))
    return float(((q - p) * np.log(q / p)).sum())


def test_drift_is_the_population_stability_index(profile, frame):
    split = parts(frame)
    values = ["Lima", "Osaka", "Lagos", None]
    counts = [[split[n]["city"].eq_missing(v).sum() for v in values] for n in ("train", "test")]
    assert of(profile, "city").psi["test"] == pytest.approx(index(*counts))
    edges = np.quantile(split["train"]["late"], np.linspace(0, 1, 11)[1:-1])
    deciles = [np.bincount(np.searchsorted(edges, split[n]["late"]), minlength=10)
               for n in ("train", "val")]  # fmt: skip
    # the profile's deciles are edges of its bins
    assert of(profile, "late").psi["val"] == pytest.approx(index(*deciles), rel=0.1)
    assert of(profile, "size").psi["val"] < 0.1


def pairs_auc(scores, labels):
    positive, negative = scores[labels][:, None], scores[~labels][None]
    return ((positive > negative) + 0.5 * (positive == negative)).mean()


def test_the_auc_of_a_feature_comes_from_rates_of_train_on_other_rows(profile, frame):
    train, others = frame[:NUM_TRAIN], frame[NUM_TRAIN:]
    rates = {value: train.filter(pl.col("city").eq_missing(value))["y"].mean()
             for value in ("Lima", "Osaka", "Lagos", None)}  # fmt: skip
    scores = np.array([rates[value] for value in others["city"]])
    expected = pairs_auc(scores, others["y"].to_numpy())
    assert of(profile, "city").auc == pytest.approx(expected, abs=1e-9)
    assert of(profile, "fixed").auc == 0.5
    assert of(profile, "leak").auc == 1.0
    assert of(profile, "leak_number").auc == 1.0
    assert of(profile, "user").auc == 0.5  # all users in val and test are new


def test_each_problem_has_one_warning(profile):
    warnings = concerns(profile)
    assert [text for text in warnings if text.startswith("leakage")] == [
        "leakage: leak_number alone reaches an AUC of 1.0000 on val and test; remove it unless its "
        "value is known before the label",
        "leakage: leak alone reaches an AUC of 1.0000 on val and test; remove it unless its value "
        "is known before the label",
    ]
    assert [text for text in warnings if text.startswith("constant")] == [
        f"constant: {name} is the same in all rows of train; remove it"
        for name in ("same", "fixed")
    ]
    assert [text for text in warnings if text.startswith("unknown")] == [
        "unknown: user is rare or new in 100.0% of val, 100.0% of test; these rows share one "
        "vector (lower --min-count, or use --hash-size)"
    ]
    drifts = [text.split()[1] for text in warnings if text.startswith("drift")]
    assert drifts == ["late", "user"]
    assert len(warnings) == 7


def test_label_shift_and_times_out_of_order_are_reported(tmp_path):
    label = np.random.default_rng(1).random(NUM_ROWS) < np.where(np.arange(NUM_ROWS) < 2700, 0.2, 1)
    profile = profile_set(prepared(tmp_path / "a", rows(y=label, ts=np.arange(NUM_ROWS)[::-1])))
    warnings = concerns(profile)
    rate = label[:NUM_TRAIN].mean()
    assert warnings[0] == "label: all 300 rows of test have label 1"
    assert warnings[1] == f"label shift: the label rate is 100.00% in test and {rate:.2%} in train"
    assert [text for text in warnings if text.startswith("time")] == [
        f"time: {name} begins before train ends, so training sees the future; sort the rows, or "
        "split by time (--split time:COLUMN<...)"
        for name in ("val", "test")
    ]


def test_the_profile_does_not_depend_on_blocks(manifest, profile, monkeypatch):
    monkeypatch.setattr("sbpflow.data.profile._BLOCK_ROWS", 97)
    again = profile_set(manifest)
    assert (again.fields, again.splits) == (profile.fields, profile.splits)
    for left, right in zip(again.dense, profile.dense, strict=True):
        assert (left.psi, left.auc, left.missing) == (right.psi, right.auc, right.missing)
        # the sums are computed in a different order
        assert left.summary["train"] == pytest.approx(right.summary["train"], rel=1e-12)


def test_ids_of_large_tables_share_bins(manifest, monkeypatch):
    monkeypatch.setattr("sbpflow.data.profile._MAX_ID_BINS", 8)
    profile = profile_set(manifest)
    assert of(profile, "user").unknown["test"] == 1.0
    assert of(profile, "city").missing["train"] == 0.05


def test_empty_and_unlabelled_splits_are_left_out_of_the_profile(tmp_path, manifest, frame):
    train = profile_set(prepared(tmp_path / "a", frame, "--split", "time:1,0,0"))
    assert of(train, "leak").auc is None
    assert not any(text.startswith("leakage") for text in concerns(train))
    frame.drop("y").write_parquet(tmp_path / "new.parquet")
    words = ["--like", manifest.path, "--input", tmp_path / "new.parquet"]
    assert main(["encode", *map(str, [*words, "--output", tmp_path / "new"])]) == 0
    new = load_manifest(tmp_path / "new")
    profile = profile_set(new)
    assert profile.splits["test"].label_rate is None
    text = profile_text(new, profile)
    assert "test   3,000        -" in text
    assert ElementTree.fromstring(profile_picture(new, profile)) is not None


def test_text_page_and_picture_show_the_profile(manifest, profile, tmp_path, capsys):
    page, drawn = tmp_path / "stats.html", tmp_path / "stats.svg"
    words = ["stats", manifest.path, "--html", page, "--picture", drawn]
    assert main([*map(str, words)]) == 0
    text = capsys.readouterr().out
    for shown in ("2023-11-14 22:13", "warning: leakage: leak alone", "100.00%", "uniq@1k"):
        assert shown in text
    assert page.read_text() == profile_page(manifest, profile)
    for shown in ("label rate by time", "days since 2023-11-14", "drift: late", "<svg"):
        assert shown in page.read_text()
    svg = ElementTree.fromstring(drawn.read_text())
    titles = [node.text for node in svg if node.get("class") == "title"]
    assert "AUC of a single feature on val and test" in titles
    assert len(titles) == 7
    assert main(["stats", str(manifest.path), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["splits"]["train"]["rows"] == NUM_TRAIN
    assert content["warnings"] == concerns(profile)
    assert [entry["name"] for entry in content["tables"]][:2] == ["city", "user"]


def test_a_clean_set_without_times_has_no_warnings(tmp_path):
    frame = rows().select("y", "size", "city")
    schema = "label: y\ndense: {size: identity}\nsparse: {city: string}\n"
    manifest = prepared(tmp_path / "a", frame, schema=schema)
    profile = profile_set(manifest)
    assert concerns(profile) == []
    assert profile_text(manifest, profile).endswith("No warnings.")
    assert "<p>No warnings.</p>" in profile_page(manifest, profile)


def test_the_mean_of_standardised_values_is_0_without_rounding_errors(tmp_path):
    schema = "label: y\ndense: {late: standardise}\nsparse: {city: string}\n"
    manifest = prepared(tmp_path, rows(), schema=schema)
    summary = of(profile_set(manifest), "late").summary["train"]
    assert summary["mean"] == 0.0
    assert summary["std"] == pytest.approx(1.0, rel=1e-6)


def test_times_of_any_year_are_shown(tmp_path, capsys):
    days = ["0000-01-01", "2024-05-01", "9999-12-31"] * 20
    lines = [f"{n % 2},v{n % 3},{day}" for n, day in enumerate(days)]
    (tmp_path / "t.csv").write_text("\n".join(["click,c,day", *lines]) + "\n")
    assert main(["schema", str(tmp_path / "t.csv")]) == 0
    assert "time: day  # guess: 0000-01-01 00:00 to 9999-12-31 00:00" in capsys.readouterr().out
    words = ["--input", tmp_path / "t.csv", "--output", tmp_path / "set", "--schema", "auto"]
    assert main(["prepare", *map(str, words)]) == 0
    assert main(["stats", str(tmp_path / "set"), "--html", str(tmp_path / "page.html")]) == 0
    assert "0000-01-01 00:00  9999-12-31 00:00" in capsys.readouterr().out
