"""Tests that generated rows resemble measured rows and do not depend on chunks, and that the best
possible AUC is stated correctly.
"""

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch

from sbpflow.data.__main__ import main
from sbpflow.data.format.ids import assign_ids
from sbpflow.data.format.manifest import load_manifest
from sbpflow.data.format.schema import CRITEO
from sbpflow.data.format.shards import RowFiles
from sbpflow.data.format.verify import verify_set
from sbpflow.data.prepare.workspace import only_run
from sbpflow.data.read.fields import fields_of
from sbpflow.data.stats import load_stats
from sbpflow.data.synth.bayes import BayesTally
from sbpflow.data.synth.columns import CHAINS, FOLLOWS, MASKS, Columns, profile
from sbpflow.data.synth.generate import IdMaps, make_rows, synth
from sbpflow.data.synth.generator import Generator
from sbpflow.data.synth.options import MLPERF_HOT, SynthOptions
from sbpflow.data.synth.signal import CROSS_TERMS, ID_TERMS, PRODUCT_TERMS, SHARES
from tests.data.rows import all_words, floats, folder_bytes, ids, run_prepare

NUM_ROWS = 137_139
"""Number of real rows that were measured."""
# Number of distinct ids per 16384 consecutive rows, measured on six batches of real rows; a missing
# value counts as one id.
UNIQUE_16K = {"C3": 9164, "C4": 6189, "C7": 4182, "C10": 4460, "C11": 2520, "C12": 8562,
              "C13": 2060, "C15": 2619, "C16": 7574, "C18": 1450, "C19": 671, "C21": 8134,
              "C24": 3708, "C26": 2814, "C2": 427, "C1": 220}  # fmt: skip


@cache
def sample():
    """Generate NUM_ROWS rows with Criteo's own vocabulary; return their ranks, integers, and masks
    of missing values.
    """
    columns = Columns(7, 1.0, {}, 0.0)
    blocks = [columns.block(index) for index in range(3)]

    def joined(part):
        names = getattr(blocks[0], part)
        return {
            name: np.concatenate([getattr(b, part)[name] for b in blocks])[:NUM_ROWS]
            for name in names
        }

    return joined("ranks"), joined("integers"), joined("missing")


def share_bound(share):
    """Return four standard errors of a share that is estimated from NUM_ROWS rows."""
    return 4 * np.sqrt(share * (1 - share) / NUM_ROWS) + 1e-5


def test_missing_rates_and_shared_masks():
    ranks, _, missing = sample()
    for group in MASKS:
        kind = "int" if group[0][0] == "I" else "cat"
        expected = profile()[kind][group[0]]["missing"]
        for name in group:
            assert abs(missing[name].mean() - expected) < share_bound(expected), name
            assert np.array_equal(missing[name], missing[group[0]])
            if kind == "cat":
                assert np.array_equal(ranks[name] < 0, missing[name])


@pytest.mark.parametrize("name", CRITEO.sparse)
def test_masses_distinct_values_and_singletons(name):
    ranks, column = sample()[0][name], profile()["cat"][name]
    counts = np.sort(np.bincount(ranks[ranks >= 0]))[::-1]
    mass = np.cumsum(counts) / counts.sum()
    for top, bound in (("1", 0.005), ("10", 0.012), ("100", 0.02), ("1000", 0.03)):
        if top in column["measured"]["cum_mass"]:
            actual = mass[min(int(top), len(mass)) - 1]
            assert abs(actual - column["measured"]["cum_mass"][top]) < bound, top
    distinct, singles = column["measured"]["distinct"], column["measured"]["singletons"]
    assert abs((counts > 0).sum() - distinct) < 0.1 * distinct + 10
    assert abs((counts == 1).sum() - singles) < 0.15 * singles + 30


def test_unique_ids_per_batch():
    ranks = sample()[0]
    for name, expected in UNIQUE_16K.items():
        batches = ranks[name][: 8 * 16384].reshape(8, 16384)
        actual = np.mean([len(np.unique(batch)) for batch in batches])
        assert abs(actual - expected) < 0.12 * expected, (name, actual)


def test_each_column_of_a_chain_determines_the_next():
    ranks = sample()[0]
    for fine, coarse in [*(p for chain in CHAINS for p in pairwise(chain)), ("C7", "C13")]:
        pairs = np.unique(np.stack([ranks[fine], ranks[coarse]]), axis=1)
        assert len(np.unique(pairs[0])) == pairs.shape[1], (fine, coarse)
    pairs = np.unique(np.stack([ranks["C7"], ranks["C11"]]), axis=1)
    assert pairs.shape[1] > 1.2 * len(np.unique(pairs[0]))


@pytest.mark.parametrize("name", CRITEO.dense)
def test_integers_follow_the_measured_quantiles(name):
    values, column = sample()[1][name], profile()["int"][name]
    zero = column["zero"]
    # The share of zeros refers to all rows, and the quantiles only to rows in which the value is
    # present.
    assert abs((values == 0).mean() - zero) < share_bound(zero) + 0.01
    for percent, expected in zip(column["quantile_pct"], column["quantile"], strict=True):
        if 1 <= percent <= 99:
            low, high = np.percentile(values, [max(percent - 1, 0), min(percent + 0.5, 100)])
            assert low - 1 <= expected <= high + 1, percent


def test_correlated_integers():
    integers = sample()[1]

    def ranked(name):
        return np.argsort(np.argsort(integers[name] + 1e-3 * np.arange(NUM_ROWS) / NUM_ROWS))

    for name, (other, share) in FOLLOWS.items():
        actual = np.corrcoef(ranked(name), ranked(other))[0, 1]
        assert abs(actual - share) < 0.15, name
    # In the real data, I4 equals I13 in 71 % of the rows. In that share of the generated rows, the
    # two columns have the same quantile instead of the same value, so that both marginal
    # distributions are preserved.
    assert (integers["I4"] == integers["I13"]).mean() > 0.5


SMALL = {"vocab_scale": 0.01, "rows": 150_000}


@pytest.fixture(scope="module")
def generator(tmp_path_factory):
    return Generator(SynthOptions(output=tmp_path_factory.mktemp("none"), **SMALL))


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    return synth(SynthOptions(output=tmp_path_factory.mktemp("synth") / "set", **SMALL))


@pytest.mark.slow
def test_any_range_gives_the_same_rows(generator, generated):
    maps = IdMaps(SynthOptions(output=generated.path, **SMALL), generator.columns)
    whole = np.concatenate([all_words(generated, split) for split in ("train", "val", "test")])
    for start, stop in ((0, 10), (65_530, 65_540), (120_001, 150_000)):
        words, parts, _ = make_rows(generator, maps, start, stop)
        assert np.array_equal(words, whole[start:stop])
        assert parts == {}


@pytest.mark.slow
def test_the_set_is_reproducible_and_depends_on_the_seed(generated, tmp_path):
    again = SynthOptions(output=tmp_path / "again", workers=1, **SMALL)
    synth(again)
    assert folder_bytes(generated.path) == folder_bytes(tmp_path / "again")
    other = synth(SynthOptions(output=tmp_path / "other", seed=8, **SMALL))
    assert not np.array_equal(all_words(other, "test"), all_words(generated, "test"))


def test_the_generated_text_prepares_to_the_same_rows(generated, tmp_path):
    synth(SynthOptions(output=tmp_path / "rows.tsv", format="tsv", **SMALL))
    text = run_prepare(tmp_path / "set", tmp_path / "rows.tsv", min_count=1, piece_bytes=16 << 20)
    assert text.splits == generated.splits
    for split in ("train", "val", "test"):
        assert np.array_equal(floats(text, split), floats(generated, split))
    ours, theirs = ids(generated, "train"), ids(text, "train")
    for name in ("C1", "C3", "C13", "C26"):
        pairs = np.unique(np.stack([ours[name], theirs[name]]), axis=1)
        assert pairs.shape[1] == len(np.unique(pairs[0])) == len(np.unique(pairs[1]))


def test_halves_of_large_tables_have_equal_load(generated):
    train = ids(generated, "train")
    large = [field for field in generated.fields if field.rows >= 1000]
    assert len(large) > 15
    for field in large:
        share = float((train[field.name] < (field.rows + 1) // 2).mean())
        assert 0.4 <= share <= 0.6, (field, share)


def test_the_reported_best_scores_match_the_options_and_the_labels(generated):
    options = SynthOptions(output=generated.path, **SMALL)
    for auc, logloss in generated.bayes.by_split.values():
        # The generator calibrates the AUC on other rows; the AUC differs by up to 0.004 between
        # splits of 15,000 rows.
        assert abs(auc - options.auc) < 0.005
        assert abs(logloss - 0.4497) < 0.01
    labels = np.concatenate([floats(generated, split)[:, 0] for split in generated.splits])
    assert abs(labels.mean() - options.ctr) < 0.006


def fitted_auc(features, labels, probabilities, columns):
    """Return the AUC, without label noise, of a logistic regression fitted to the first half of the
    rows.
    """
    half = len(labels) // 2
    x = torch.from_numpy(np.vstack([features[columns], np.ones(len(labels))])).T
    y = torch.from_numpy(labels.astype(np.float64))
    weights = torch.zeros(x.shape[1], dtype=torch.float64)
    for _ in range(8):
        p = torch.sigmoid(x[:half] @ weights)
        hessian = (x[:half] * (p * (1 - p))[:, None]).T @ x[:half]
        weights += torch.linalg.lstsq(hessian, x[:half].T @ (y[:half] - p)).solution
    score = torch.sigmoid(x[half:] @ weights).numpy()
    order, chance = np.argsort(score), probabilities[half:]
    chance = chance[order]
    below = np.cumsum(1 - chance) - (1 - chance) / 2
    return float((chance * below).sum() / (chance.sum() * (1 - chance).sum()))


def test_a_regression_on_the_true_terms_reaches_the_best_auc_only_with_the_cross(generator):
    blocks = [generator.block(index) for index in range(4)]
    features = np.concatenate([generator.signal.features(rows) for rows, _, _ in blocks], axis=1)
    probabilities = np.concatenate([probability for _, probability, _ in blocks])
    labels = np.concatenate([label for _, _, label in blocks])
    tally = BayesTally()
    tally.add(probabilities[len(probabilities) // 2 :])
    every = list(range(len(features)))
    assert abs(fitted_auc(features, labels, probabilities, every) - tally.auc()) < 0.002
    additive = [k for k in every if not len(ID_TERMS) <= k < len(ID_TERMS) + len(CROSS_TERMS)]
    short = tally.auc() - fitted_auc(features, labels, probabilities, additive)
    assert 0.02 < short < 0.06


def test_each_kind_of_term_has_its_share_of_the_variance(generator):
    terms = generator.signal.features(generator.block(0)[0])
    variance = terms.var(axis=1)
    share = variance[: len(ID_TERMS)].sum() / variance.sum()
    assert abs(share - SHARES["ids"]) < 0.03


def test_products_have_their_share_and_are_not_explained_by_single_columns(tmp_path):
    generator = Generator(SynthOptions(output=tmp_path / "none", **SMALL, products=0.6))
    blocks = [generator.block(index)[0] for index in range(4)]
    terms = np.concatenate([generator.signal.features(rows) for rows in blocks], axis=1)
    products = terms[-len(PRODUCT_TERMS) :]
    share = products.var(axis=1).sum() / terms.var(axis=1).sum()
    assert abs(share - 0.6) < 0.05
    for (a, b), term in zip(PRODUCT_TERMS, products, strict=True):
        for name in (a, b):  # most of the variance remains after subtracting the mean per value
            ranks = np.concatenate([rows.ranks[name] for rows in blocks])
            _, place = np.unique(ranks, return_inverse=True)
            mean = np.bincount(place, term) / np.bincount(place)
            assert (term - mean[place]).var() > 0.3 * term.var(), name


def test_only_frequent_ids_have_weights(generator):
    rows = generator.block(5)[0]
    for name, table in generator.signal._tables.items():
        counts = np.bincount(rows.ranks[name][rows.ranks[name] >= 0], minlength=len(table))
        carrying = np.flatnonzero(table)
        assert counts[carrying].min() > 5, name
        assert table[-1] == 0


def test_skew_makes_the_first_rank_more_frequent_and_zero_makes_all_equal():
    tails = [Columns(7, 0.01, {"C3": skew}, 0.0).tails["C3"] for skew in (0.0, 1.0, 1.5)]
    assert tails[0].head[0] < tails[1].head[0] < tails[2].head[0]
    assert abs(tails[0].head[0] * tails[0].size - 1) < 0.05
    for tail in tails:
        assert abs(tail.bounds[-1] - 1) < 1e-6


def test_drifting_values_rise_and_fall_in_frequency_and_never_return():
    columns = Columns(7, 0.05, {}, 1.0)
    size, blocks = columns.tails["C3"].size, [columns.block(index) for index in range(0, 48, 4)]
    ranks = blocks[0].ranks["C3"]
    top = int(np.bincount(ranks[ranks >= 0]).argmax())
    shares = []
    for rows in blocks:
        values, ranks = rows.values["C3"], rows.ranks["C3"]
        assert np.array_equal(np.where(values < 0, -1, values % size), ranks)
        own = values[ranks == top] // size
        shares.append([float((own == generation).mean()) for generation in range(5)])
    shares = np.array(shares)
    assert np.allclose(shares.sum(axis=1), 1)
    # A value has at most two successors within a block.
    assert ((shares > 0).sum(axis=1) <= 3).all()
    # With a drift of 1.0 per million rows, a value gains or loses 26 % of its rank's rows within
    # four blocks (0.262 million rows).
    second = shares[:, 1][shares[:, 1] > 0]
    assert np.allclose(np.abs(np.diff(second)).max(), 0.262, atol=0.06)
    assert (np.diff(np.sign(np.diff(second))) <= 0).all(), "it rises once, and then falls"
    assert shares[0, 0] > 0 == shares[-1, 0]
    small = blocks[-1].values["C9"]
    assert np.array_equal(small, blocks[-1].ranks["C9"])
    again = Columns(7, 0.05, {}, 1.0).block(44)
    assert all(np.array_equal(again.values[n], blocks[-1].values[n]) for n in again.values)


def test_keys_equal_those_of_prepare_from_the_text(tmp_path):
    words = ["--rows", "3000", "--vocab-scale", "0.01", "--drift", "900", "--seed", "3"]
    assert main(["synth", *words, "--keys", "--output", str(tmp_path / "keys")]) == 0
    text = str(tmp_path / "rows.tsv")
    assert main(["synth", *words, "--format", "tsv", "--output", text]) == 0
    prepared = ["prepare", "--input", text, "--keys", "--output", str(tmp_path / "prepared")]
    assert main(prepared) == 0
    generated, prepared = (load_manifest(tmp_path / name) for name in ("keys", "prepared"))
    for split, rows in generated.splits.items():
        keys = [RowFiles(each, split).keys(0, rows) for each in (generated, prepared)]
        assert np.array_equal(*keys)
        words = [all_words(each, split) for each in (generated, prepared)]
        assert np.array_equal(*words)
    assert [f.keyed for f in generated.fields] == [True] * 28
    assert generated.bayes is not None
    assert main(["synth", "--rows", "9", "--keys", "--format", "tsv", "--output", text + "2"]) == 2


def test_lists_can_have_keys(tmp_path):
    words = ["--rows", "500", "--vocab-scale", "0.001", "--hot", "C1=2,C2=0-3", "--keys"]
    assert main(["synth", *words, "--output", str(tmp_path / "set")]) == 0
    manifest = load_manifest(tmp_path / "set")
    verify_set(manifest, 1)
    rows = RowFiles(manifest, "train")
    assert rows.keys(0, 400).shape == (400, 2 + 24 + 2)
    assert rows.lists(0, 400)[1].dtype == np.int64


@pytest.mark.slow
def test_list_lengths_are_within_their_bounds_and_independent_of_chunking(tmp_path):
    arguments = ["synth", "--rows", "70000", "--vocab-scale", "0.001", "--hot", "C1=0-3,C19=2-300"]
    for workers in ("1", "3"):
        output = tmp_path / workers
        assert main([*arguments, "--workers", workers, "--output", str(output)]) == 0
    assert folder_bytes(tmp_path / "1") == folder_bytes(tmp_path / "3")
    manifest = load_manifest(tmp_path / "1")
    verify_set(manifest, 1)
    assert [(f.name, f.hot) for f in manifest.lists] == [("C1", 3), ("C19", 300)]
    assert all_words(manifest, "train").shape[1] == 14 + 24 + 2
    lengths, values = RowFiles(manifest, "train").lists(0, 56_000)
    assert lengths.dtype == np.uint16
    assert np.allclose(np.bincount(lengths[:, 0]) / 56_000, 0.25, atol=0.01)  # C1 is never missing
    present = lengths[:, 1][lengths[:, 1] > 0]
    assert (present.min(), present.max()) == (2, 300)
    assert abs((lengths[:, 1] == 0).mean() - 0.44) < 0.02  # the share of rows without C19
    assert (values > 0).all()
    owner = np.repeat(np.tile([0, 1], len(lengths)), lengths.reshape(-1))
    stats = {entry["name"]: entry for entry in manifest.content["stats"]}
    assert stats["C19"]["lookups"] == (owner == 1).sum() == lengths[:, 1].sum(dtype=np.int64)


def test_multi_hot_sizes(tmp_path):
    arguments = ["synth", "--rows", "3000", "--vocab-scale", "0.001", "--hot", "mlperf"]
    assert main([*arguments, "--output", str(tmp_path / "set")]) == 0
    manifest = load_manifest(tmp_path / "set")
    assert tuple(field.hot for field in manifest.sparse) == MLPERF_HOT
    words = all_words(manifest, "train")
    assert words.shape[1] == 14 + sum(MLPERF_HOT) + 2
    rows = np.repeat([field.rows for field in manifest.fields], [f.hot for f in manifest.fields])
    assert (words[:, 14:] >= 0).all()
    assert (words[:, 14:] < rows).all()
    multi_hot = words[:, 14:17]
    same = multi_hot[:, 0] == multi_hot[0, 0]
    assert (multi_hot[same] == multi_hot[0]).all()
    assert len(np.unique(multi_hot[0])) == 3


def test_generated_ids_follow_the_rule_of_prepare(generator, generated):
    maps = IdMaps(SynthOptions(output=generated.path, **SMALL), generator.columns)
    sample_rows = generator.columns.block(0, stream=3)
    ranks = sample_rows.ranks["C7"]
    size = generator.columns.tails["C7"].size
    expected = assign_ids(np.bincount(ranks, minlength=size), (0, 0), 7, "C7")
    assert np.array_equal(maps.ids(sample_rows, "C7")[0], expected[ranks])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "0"], "between 1 and"),
        (["--rows", "10", "--auc", "1.5"], "--auc"),
        (["--rows", "10", "--split", "ratio:0.8,0.1,0.1"], "such as time:0.8,0.1,0.1"),
        (["--rows", "10", "--hot", "C99=3"], "C99"),
        (["--rows", "10", "--hot", "C1"], "such as C1=3"),
        (["--rows", "10", "--skew", "C1=x"], "such as C1=3"),
        (["--rows", "10", "--vocab-scale", "2"], "between 1e-06 and 1"),
        (["--rows", "10", "--format", "tsv", "--hot", "C1=2"], "--format prepared"),
        (["--rows", "10", "--format", "tsv", "--hot", "C1=0-1"], "--format prepared"),
    ],
)
def test_a_user_mistake_gives_one_readable_message(tmp_path, capsys, arguments, message):
    assert main(["synth", "--output", str(tmp_path / "set"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("--skew", "nan"), ("--skew", "inf"), ("--skew", "1e9"), ("--skew", "-1"),
        ("--skew", "C1=nan"), ("--skew", "C1=1,C1=2"), ("--skew", ""), ("--hot", ""),
        ("--drift", "nan"), ("--drift", "inf"), ("--drift", "1e30"),
        ("--vocab-scale", "nan"), ("--vocab-scale", "inf"), ("--vocab-scale", "0"),
        ("--auc", "nan"), ("--auc", "0.5"), ("--ctr", "nan"), ("--ctr", "0"), ("--ctr", "1"),
        ("--hot", "C1=3,C1=4"), ("--hot", "C1=0"), ("--hot", "C1=100000"),
        ("--rows", str(10**18)), ("--workers", "0"), ("--seed", "-1"),
        ("--split", "time:0.000001,0.5,0.499999"),
    ],
)  # fmt: skip
def test_a_number_out_of_range_gives_key_value_and_rule(tmp_path, capsys, key, value):
    arguments = {"--rows": "1000", "--vocab-scale": "0.001", key: value}
    words = [f"{name}={given}" for name, given in arguments.items()]
    assert main(["synth", "--output", str(tmp_path / "set"), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {key}")
    assert len(error.splitlines()) == 1
    assert any(rule in error for rule in ("must be between", "twice", "for example", "such as"))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "options",
    [
        {"skew": (("C3", 10.0), ("C1", 0.0))},
        {"drift": 1000.0},
        {"vocab_scale": 1e-6},
        {"ctr": 0.001, "auc": 0.98},
        {"ctr": 0.999, "auc": 0.51},
    ],
)
def test_the_limits_of_the_ranges_work(tmp_path, options):
    settings = {"vocab_scale": 0.001, "rows": 3000, **options}
    manifest = synth(SynthOptions(output=tmp_path / "set", **settings))
    words = all_words(manifest, "train")
    assert np.isfinite(words[:, :14].view(np.float32)).all()
    rows = np.array([field.rows for field in manifest.fields])
    assert (words[:, 14:] >= 0).all()
    assert (words[:, 14:] < rows).all()
    assert all(np.isfinite(pair).all() for pair in manifest.bayes.by_split.values())
    if "auc" in options:
        assert abs(manifest.bayes.by_split["train"][0] - options["auc"]) < 0.02


def test_a_generated_set_cannot_encode_new_rows(tmp_path, capsys):
    """The message explains how to get vocabularies: write the rows as text and prepare the text."""
    words = ["synth", "--rows", "600", "--vocab-scale", "0.001"]
    assert main([*words, "--output", str(tmp_path / "ids")]) == 0
    assert main([*words, "--format", "tsv", "--output", str(tmp_path / "rows.tsv")]) == 0
    text = ["--input", str(tmp_path / "rows.tsv"), "--output", str(tmp_path / "new")]
    for command in (["encode"], ["prepare"], ["prepare", "--grow"]):
        assert main([*command, "--like", str(tmp_path / "ids"), *text]) == 2
        message = capsys.readouterr().err
        assert f"--like: the set {tmp_path / 'ids'} does not store the values" in message
        assert "synth --format tsv" in message
    nowhere = ["--input", str(tmp_path / "nowhere.tsv"), *text[2:]]
    assert main(["encode", "--like", str(tmp_path / "ids"), *nowhere]) == 2
    message = capsys.readouterr().err
    assert f"--input {tmp_path / 'nowhere.tsv'}: no such file or folder" in message
    assert "--like" not in message
    arguments = ["--input", str(tmp_path / "rows.tsv"), "--output", str(tmp_path / "set")]
    assert main(["prepare", *arguments]) == 0
    assert main(["encode", "--like", str(tmp_path / "set"), *text]) == 0


def test_fields_have_the_id_statistics_of_the_set(tmp_path):
    assert main(["synth", "--rows", "6000", "--vocab-scale", "0.001", "--hot", "C4=0-5",
                 "--output", str(tmp_path / "set")]) == 0  # fmt: skip
    manifest = load_manifest(tmp_path / "set")
    stats = {field.name: field for field in load_stats(manifest)}
    for field in fields_of(manifest).ids:
        frequencies = field.frequencies
        per_sample = frequencies.per_sample
        assert per_sample == stats[field.name].lookups / manifest.splits["train"]
        distinct = stats[field.name].unique_ratio["1024"] * 1024 * per_sample
        assert frequencies.curve.touched(1024 * per_sample) == pytest.approx(distinct, rel=0.25)
    assert 0 < fields_of(manifest).ids[3].frequencies.per_sample < 5


@pytest.mark.parametrize("form", ["prepared", "tsv"])
def test_a_second_run_with_the_same_output_is_refused(tmp_path, capsys, form):
    output = tmp_path / "set"
    with only_run(output):
        assert main(["synth", "--rows", "10", "--output", str(output), "--format", form]) == 2
    assert "another run (process" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
