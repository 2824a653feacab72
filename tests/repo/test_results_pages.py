"""Tests that pages with results name the records behind their numbers and show the recorded
values.
"""

import re
import statistics
from statistics import median
from typing import Any

import pytest

from tests.repo.results import PAGES, RECORDS, ROOT, read, rows

# A row of the page's last table: a record, its CPU, and its commits.
NAMED = [
    (page, *row)
    for page, text in PAGES.items()
    for row in re.findall(r"^\| `(\w+\.jsonl)` \| ([^|]+) \| ([\da-f, ]+) \|$", text, re.M)
]


def test_records_have_the_cpu_and_commits_stated_on_their_pages():
    for _, record, cpu, commits in NAMED:
        lines = read(record)
        assert {line["commit"] for line in lines} == set(commits.split(", ")), record
        for device in {line["device"] for line in lines}:
            name, _, family = cpu.strip().removesuffix(")").partition(" (")
            assert name in device.replace("(R)", ""), record
            assert family in device or not family.startswith("family"), record


def test_every_record_is_on_one_page():
    named = [record for _, record, _, _ in NAMED]
    assert len(set(named)) == len(named) > 40
    readme = (ROOT / "README.md").read_text()
    records = [path.name for path in RECORDS.glob("*.jsonl")]
    assert [r for r in records if r not in named and f"results/{r}" not in readme] == []


STAGES = ("+ overlap", "+ layout per table", "+ unique rows", "every table whole", "scheme: auto")


@pytest.mark.parametrize("record", [r for _, r, _, _ in NAMED if r.startswith("stages_")])
def test_the_stages_are_the_recorded_ones(record):
    stages = {line["stage"]: line for line in read(record)}
    (cells,) = rows("engine", record)
    faster = [f"{stages[s]['times_faster']:.2f}" if s in stages else "" for s in STAGES]
    first, last = stages["serial, S(0) reduce"], stages["+ unique rows"]
    expected = [*faster, f"{first['step_ms']:.0f} to {last['step_ms']:.0f} ms"]
    assert cells[1:] == expected


def test_the_models_have_the_recorded_scores():
    means = {
        line["benchmark"].removeprefix("criteo_"): line["means"]
        for line in read("criteo_models.jsonl")
        if "means" in line
    }
    shown = re.findall(
        r"^\| `(\w+)` \| (0\.\d+) \| (0\.\d+) \| \S+ \| (0\.\d+) \|", PAGES["models"], re.M
    )
    assert len(shown) == len(means) == 4
    for model, *scores in shown:
        systems = ("sbpflow float32", "plain torch", "sbpflow bf16")
        assert scores == [f"{means[model][system]:.5f}" for system in systems]


def test_caches_fetched_the_recorded_rows():
    measured: dict[tuple[str, str], list[str]] = {}
    for line in read("cache_fetches.jsonl"):
        cells = measured.setdefault((line["trace"], f"{line['capacity']:,}"), [])
        if line["policy"] == "MIN":
            cells.append(f"{line['fetched_per_step']:,.0f}")
        elif line["policy"] != "ours" or (line["ahead"], line["known"]) in {(1, 4), (1, 16)}:
            cells.append(f"{line['times_min']:.2f}")
        elif (line["ahead"], line["known"]) == (1, 64):
            cells += [f"{line['times_min']:.3f}", f"{line['read_per_step']:,.0f}"]
    table = PAGES["cache"].split("**Rows fetched**")[1].split("\n\n**")[0]
    shown = re.findall(r"^\| (\w.+), (\d\d,000 .+|100,000 .+) \|$", table, re.M)
    assert [(name, *cells.split(" | ")) for name, cells in shown] == [
        (name, f"{capacity} slots", *cells) for (name, capacity), cells in measured.items()
    ]


def test_training_with_slow_storage_took_the_recorded_times():
    systems = {"uncached": "on demand, all rows", "LRU": "on demand, LRU", "lookahead": "lookahead"}
    expected: list[list[str]] = []
    for line in read("cache_store.jsonl"):
        if line["benchmark"] == "systems" and line["system"] in systems:
            name = systems[line["system"]]
            name += "" if line["full_duplex"] else ", half duplex"
            name += "" if line["writes_buffered"] else ", serial writes"
            values = [line[k] for k in ("step_ms", "exposed_wait_ms", "link_ms", "cpu_ms")]
            expected.append([name, *(f"{value:.1f}" for value in values)])
    table = PAGES["cache"].split("**Slow storage**")[1].split("\n\n**")[0]
    shown = re.findall(r"^\| ((?:on demand|lookahead).+) \|$", table, re.M)
    assert [row.split(" | ") for row in shown] == expected


def test_rates_caches_and_known_batches_took_the_recorded_times():
    keys = {"rates": "mbit_per_s", "capacities": "capacity", "lookaheads": "lookahead"}
    heads = {"rates": "rate, Mbit/s", "capacities": "slots", "lookaheads": "known batches"}
    formats = {"step with lookahead, ms": ("step_ms", ".0f")}
    formats["CPU time of the mover, ms"] = ("mover_cpu_ms", ".1f")
    for part, key in keys.items():
        found = {
            line[key]: line
            for line in read("cache_store.jsonl")
            if line["system"] == "lookahead"
            and line["benchmark"] in ("systems", part)
            and line.get("full_duplex")
        }
        lines = [found[value] for value in sorted(found)]
        shown = " | ".join(f"{line[key]:,.0f}" for line in lines)
        table = PAGES["cache"].split(f"| {heads[part]} | {shown} |\n")[1].split("\n\n")[0]
        for name, (value, form) in formats.items():
            assert (
                f"| {name} | {' | '.join(format(line[value], form) for line in lines)} |" in table
            )


def test_cached_training_used_the_recorded_cpu_time():
    lines = [line for line in read("cache_store.jsonl") if line["benchmark"] == "cpu"]
    rows = {
        "device": "all rows in memory",
        "paused": "all rows in memory, with pauses",
        "lookahead": "lookahead",
    }
    table = PAGES["cache"].split("**CPU time**")[1].split("\n\n**")[0]
    text = " ".join(table.split())
    keys = ("step_ms", "cpu_ms", "training_cpu_ms", "mover_cpu_ms")
    added = {}
    for rate in (400, 100):
        runs = {
            name: [line for line in lines if line["system"] == name and line["mbit_per_s"] == rate]
            for name in rows
        }
        for name, shown in rows.items():
            cells = (f"{median(line[key] for line in runs[name]):.1f}" for key in keys)
            assert f"| {rate} | {shown} | {' | '.join(cells)} |" in table
        assert f"of {len(runs['device'])} alternating rounds" in text
        for name in ("device", "paused"):
            more = [
                one["cpu_ms"] - other["cpu_ms"]
                for one, other in zip(runs["lookahead"], runs[name], strict=True)
            ]
            added[rate, name] = median(more), min(more), max(more)
    said = {
        (400, "device"): "uses {:.1f} ms more CPU time per step than training with all rows in "
        "memory ({:.1f} to {:.1f} ms)",
        (100, "device"): "uses {:.1f} ms more ({:.1f} to {:.1f} ms)",
        (100, "paused"): "uses {:.1f} ms more than that ({:.1f} to {:.1f} ms)",
    }
    for case, words in said.items():
        assert words.format(*added[case]) in text
    assert max(added[400, "device"]) <= 4.0
    assert max(added[100, "paused"]) <= 4.0


def test_evaluations_with_slow_storage_took_the_recorded_times():
    lines = [line for line in read("cache_store.jsonl") if line["benchmark"] == "evaluation"]
    device, *cached = lines
    assert f"a batch takes {device['pipelined_ms']:.1f} ms" in PAGES["cache"]
    formats = {
        "rate, Mbit/s": ("mbit_per_s", ",.0f"),
        "reads, ms": ("read_ms", ".0f"),
        "batch, without reading ahead, ms": ("one_by_one_ms", ".0f"),
        "batch, with reading ahead, ms": ("pipelined_ms", ".0f"),
        "multiple of the ideal": ("times_ideal", ".2f"),
    }
    table = PAGES["cache"].split("**Evaluation**")[1].split("\n\n**")[0]
    for name, (key, form) in formats.items():
        assert f"| {name} | {' | '.join(format(line[key], form) for line in cached)} |" in table


def test_planning_took_at_most_the_stated_times():
    for line in read("cache_planning.jsonl"):
        assert line.get("plan_us_per_row", 0.0) <= 0.10
    assert "at most 0.10 us" in PAGES["cache"]


def test_no_cached_case_differed():
    lines = read("cache_matrix.jsonl")
    assert sum(line["differing"] for line in lines) == 0
    assert f"{sum(line['cases'] for line in lines)} cases" in PAGES["cache"]


def test_requests_took_the_recorded_cpu_times():
    lines = [line for line in read("serving_cost.jsonl") if line["benchmark"] == "cost"]
    keys = ("hidden", "rows", "connections", "format")
    costs = {str([line.get(key) for key in keys]): f"{line['cpu_ms']:.2f} ms" for line in lines}
    formats = ("text/tab-separated-values", "application/json")
    expected = [
        [
            f"{width}, {width}", f"{n:,}", str(connections),
            *(costs[str([[width, width], n, connections, kind])] for kind in formats),
        ]
        for width in (64, 400)
        for n in (1, 64, 1024)
        for connections in (1, 8)
    ]  # fmt: skip
    assert rows("serving", "serving_cost.jsonl") == expected
    empty = costs[str([None, None, 1, None])]
    assert f"The empty server takes {empty}." in PAGES["serving"]


def test_predictions_took_the_recorded_times_and_memory():
    lines = {line["benchmark"]: line for line in read("predict.jsonl")}
    whole, killed = lines["whole"], lines["killed"]
    (row,) = read("predict_row.jsonl")
    assert (killed["kills"], killed["different_files"]) == (2, 0)
    text = PAGES["serving"].replace("\n", " ")
    for value in (
        f"{whole['rows']:,} generated rows",
        f"{whole['files']} files",
        f"{whole['rows_per_cpu_s']:,} rows per second of CPU time",
        f"{whole['anonymous_mb_highest_of_first_half']:,.0f} MB in the first half",
        f"{whole['anonymous_mb_highest_of_second_half']:,.0f} MB in the second",
        f"{row['predict_cpu_s']:.2f} s of CPU time, of which importing torch takes "
        f"{row['import_torch_cpu_s']:.2f} s",
    ):
        assert value in text


def test_servers_had_the_recorded_latencies():
    times: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in read("serving_latency.jsonl"):
        times.setdefault((str(line["connections"]), line["server"]), []).append(line)
    expected = [
        [*key, *(f"{statistics.median(line[p] for line in lines):.2f} ms" for p in PERCENTILES)]
        for key, lines in times.items()
    ]
    assert rows("serving", "serving_latency.jsonl") == expected


PERCENTILES = ("p50_ms", "p99_ms")


def test_deltas_had_the_recorded_latencies():
    *lines, everything = read("serving_delta.jsonl")
    assert [line["deltas"] for line in (*lines, everything)] == [*[1] * 12, 12]
    assert everything["requests"] == sum(line["requests"] for line in lines)
    (changed,) = {line["changed_rows"] for line in (*lines, everything)}
    pairs = [[line["idle_p99_ms"], line["during_p99_ms"]] for line in lines]
    figures = {
        "all requests": [everything["idle_p99_ms"], everything["during_p99_ms"]],
        "median delta": map(statistics.median, zip(*pairs, strict=True)),
        "highest": map(max, zip(*pairs, strict=True)),
    }
    expected = [
        [f"{changed:,}", name, *(f"{value:.2f} ms" for value in values)]
        for name, values in figures.items()
    ]
    assert rows("serving", "serving_delta.jsonl") == expected
    requests = [line["requests"] for line in lines]
    assert f"{min(requests)} to {max(requests)} requests" in PAGES["serving"]


def test_no_answer_of_the_long_run_was_wrong():
    (line,) = read("serving_soak.jsonl")
    assert (line["wrong_answers"], line["restarts"]) == (0, 1.0)
    assert line["refused_deltas"] > 0


def test_keys_took_the_recorded_times():
    lines = {(line["benchmark"], line.get("keys")): line for line in read("growth.jsonl")}
    text = PAGES["engine"].replace("\n", " ")
    decisions = lines["decisions", None]
    made, large, steps = lines["map", 10**7], lines["map", 10**8], lines["steps", None]
    for value in (
        f"inserts {made['inserts_m_per_s']:.1f} million keys/s",
        f"finds {made['hits_m_per_s']:.1f} million keys/s",
        f"{made['bytes_per_key']:.1f} bytes per key",
        f"{large['bytes_per_key'] * 100e6 / 1e9:.2f} GB with 100 million keys",
        f"{decisions['ns_per_lookup']:.1f} ns per lookup",
        f"takes {decisions['ns_per_lookup_in_full_tables']:.1f} ns per lookup",
        f"including {decisions['transposing_ns_per_lookup']:.1f} ns to transpose",
        f"takes {steps['ratio']:.2f} times as long with growing tables as with fitted IDs",
        f"the longest step takes {steps['longest_over_median']:.2f} times the median",
    ):
        assert value in text


def test_evictions_took_the_recorded_times():
    lines = read("growth_evictions.jsonl")
    text = PAGES["engine"].replace("\n", " ")
    old, new = sorted({line["commit"] for line in lines}, reverse=True)
    least, most = 2**18, 2**24
    ns = {
        (line["commit"], line["policy"], line["rows"]): line["ns_per_key"]
        for line in lines
        if line["benchmark"] == "evictions"
    }
    full = {
        commit: [
            line["ns_per_lookup_in_full_tables"]
            for line in lines
            if line["benchmark"] == "decisions" and line["commit"] == commit
        ]
        for commit in (old, new)
    }
    gains = [ns[old, "lru", rows] / ns[new, "lru", rows] for rows in (least, most)]
    for value in (
        f"takes {ns[new, 'lru', least]} ns with 262,144 rows",
        f"{ns[new, 'lru', most]} ns with 16.8 million rows",
        f"{ns[new, 'lfu', least]} ns and {ns[new, 'lfu', most] / 1000:.0f} us with LFU",
        f"{gains[0]:.1f} and {gains[1]:.1f} times as fast as before {new}",
        f"{min(full[new]):.1f} to {max(full[new]):.1f} ns per lookup",
        f"(before, {min(full[old]):.1f} to {max(full[old]):.1f} ns)",
    ):
        assert value in text


def test_growing_tables_cost_the_recorded_auc_on_criteo_rows():
    words = " ".join(PAGES["engine"].split())
    for line in read("growth_criteo.jsonl"):
        lost, plus_minus = -line["difference"], line["plus_minus"]
        assert f"{lost:.4f} +- {plus_minus:.4f} lower than with" in words
        assert f"on {line['rows']:,} rows" in words
        assert f"{len(line['differences'])} seeds" in words


def test_a_limited_table_follows_drifting_rows():
    limited, unlimited = read("growth_drift.jsonl")
    text = PAGES["engine"].replace("\n", " ")
    memory, other = limited["memory_mb_at_tenths"], unlimited["memory_mb_at_tenths"]
    for value in (
        f"{limited['rows'] / 1e6:.0f} million generated rows",
        f"took {limited['training_s'] / 3600:.1f} hours",
        f"{limited['evicted'] / 1e6:.1f} million keys were evicted",
        f"{unlimited['live'] / 1e6:.1f} million keys had rows at the end",
        f"the test AUC was {limited['auc']:.4f}. ",
        f"the test AUC was {unlimited['auc']:.4f}, too",
        f"(difference {abs(limited['auc'] - unlimited['auc']):.5f})",
        f"grew from {memory[2] / 1024:.2f} to {max(memory) / 1024:.2f} GiB",
        f"grew from {other[2] / 1024:.1f} to {max(other) / 1024:.1f} GiB",
    ):
        assert value in text


def test_the_page_shows_the_cpu_times_and_memory_of_the_engines():
    for line in read("prepare_engines.jsonl"):
        least, most = line["least_work_over_threads"], line["most_work_over_threads"]
        ratio = f"{line['work_over_threads']:.2f} ({least:.2f} to {most:.2f})"
        times = f"{line['small_input_cpu_s']:.1f} | {line['large_input_cpu_s']:.1f}"
        memory = " | ".join(
            f"{line[f'{size}_input_memory_gb']:.2f} GB" for size in ("small", "large")
        )
        assert f"| `{line['engine']}` | {times} | {memory} | {ratio} |" in PAGES["data"]
