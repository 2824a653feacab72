"""Tests that the page with the planner's results shows the recorded values."""

import re

from tests.repo.results import PAGES, read


def test_the_cost_models_have_the_recorded_errors():
    lines = {line["link"]: line for line in read("planner_ablation_rounds.jsonl")}
    links = [lines[link] for link in ("loopback", "1gbit", "100mbit")]
    section = PAGES["planner"].split("## Cost models")[1].split("\n## ")[0]
    shown = [
        [cell.strip() for cell in row]
        for row in re.findall(
            r"^\| (\D[^|]*) \| ([^|]+%) \| ([^|]+) \| ([^|]+) \| ([^|]*) \|$", section, re.M
        )
    ]
    expected: list[list[str]] = []
    for name, pooled in lines["all"]["models"].items():
        each = [line["models"][name] for line in links]
        over, width = 100 * pooled["over"], 100 * pooled["over interval"]
        expected.append(
            [
                " / ".join(f"{100 * m['step relative']:.0f}" for m in each) + "%",
                " / ".join(f"{m['rank correlation']:.2f}" for m in each),
                f"{100 * pooled['regret']:.1f}% +- {100 * pooled['regret interval']:.1f}",
                f"{over:+.1f}% +- {width:.1f}" if width else "",
            ]
        )
    assert [cells for _, *cells in shown] == expected
    text = " ".join(section.split())
    for link in ("all", "loopback", "1gbit"):
        unfitted = lines[link]["models"]["constants"]
        points = f"{100 * unfitted['over']:.1f} points (+- {100 * unfitted['over interval']:.1f})"
        assert points in text
    for link, before in (("all", "The "), ("loopback", "4 ranks: "), ("1gbit", "loopback, ")):
        assert f"{before}{lines[link]['tasks']} " in text
    noise = " / ".join(f"{line['correlation_of_rounds']:.2f}" for line in links)
    one = lines["all"]["models"]["constants"]
    assert f"| random plan | | | {100 * one['regret of a random plan']:.0f}% | |" in section
    first = (
        f"| fastest plan of the first round | | {noise} | {100 * one['regret of one round']:.1f}%"
    )
    assert first in section


def test_calibrations_of_two_rounds_had_the_recorded_errors():
    lines = {line["link"]: line for line in read("planner_ablation_zen4.jsonl")}
    words, fit = " ".join(PAGES["planner"].split()), "fit, shrunk toward the constants"
    ours, unfitted = lines["all"]["models"][fit], lines["all"]["models"]["constants"]
    mean, width = 100 * ours["regret"], 100 * ours["regret interval"]
    over, half = 100 * unfitted["over"], 100 * unfitted["over interval"]
    correlations = " / ".join(
        f"{lines[link]['models'][fit]['rank correlation']:.2f}"
        for link in ("loopback", "1gbit", "100mbit")
    )
    assert f"in {lines['all']['tasks']} tasks of two such calibrations" in words
    assert f"the regret of the fit is {mean:.1f}% (+- {width:.1f})" in words
    assert f"is larger by {over:.1f} points (+- {half:.1f})" in words
    assert f"of the fit are {correlations}." in words


def test_the_cost_models_were_compared_on_earlier_days():
    links = ("loopback", "1gbit", "100mbit", "all")
    days = [
        {line["link"]: line for line in read(record)}
        for record in ("planner_ablation.jsonl", "planner_ablation_zen3.jsonl")
    ]
    words = " ".join(PAGES["planner"].split())
    *each, both = [days[1][link] for link in links]
    unfitted = both["models"]["constants"]
    first = days[0]["all"]["models"]["constants"]
    points = f"{100 * first['over']:.1f} points (+- {100 * first['over interval']:.1f})"
    assert f"{points} in {days[0]['all']['tasks']} tasks (`planner_ablation.jsonl`)" in words
    assert f"{both['tasks']} tasks)" in words
    over, width = 100 * unfitted["over"], 100 * unfitted["over interval"]
    fits = [line["models"]["fit, shrunk toward the constants"] for line in each]
    assert f"larger by {over:.1f} points (+- {width:.1f})" in words
    assert " / ".join(f"{100 * m['step relative']:.0f}" for m in fits) + "%, and its" in words
    assert " / ".join(f"{m['rank correlation']:.2f}" for m in fits) in words
    # Pool the tasks of both days; with so many, an interval is 1.96 standard errors.
    counts = [day["all"]["tasks"] for day in days]
    means = [day["all"]["models"]["constants"]["over"] for day in days]
    halves = [day["all"]["models"]["constants"]["over interval"] for day in days]
    total = sum(counts)
    mean = sum(n * m for n, m in zip(counts, means, strict=True)) / total
    squares = sum(
        (n - 1) * n * (half / 1.96) ** 2 + n * (m - mean) ** 2
        for n, m, half in zip(counts, means, halves, strict=True)
    )
    half = 1.96 * (squares / (total - 1) / total) ** 0.5
    assert f"of both days, by {100 * mean:.1f} points (+- {100 * half:.1f})" in words


def test_unequal_rates_were_measured_again():
    last = read("planner_regimes_1gbit_250mbit_zen3.jsonl")[-1]
    words = " ".join(PAGES["planner"].split())
    for name in ("greedies, best of 4", "embark"):
        found = last["planners"][name]["all"]
        low, high = found["interval"]
        assert low < 0 < high
        mean = 100 * found["slower_than_auto"]
        assert f"at {mean:+.1f}% ({100 * low:+.1f} to {100 * high:+.1f})" in words
    assert f"is {100 * last['auto_over_fastest']:.1f}% above that of the fastest" in words


def test_the_job_of_the_planner_took_the_recorded_times():
    table = PAGES["planner"].split("## Measured job time")[1].split("\n## ")[0]
    names = {"`auto`": "auto", "EMBark": "embark", "NeuroShard": "neuroshard"}
    names |= {"DreamShard": "dreamshard", "AutoShard": "autoshard"}
    plans = [
        next(line["plans"] for line in read(f"planner_job_{link}.jsonl") if "plans" in line)
        for link in ("loopback", "1gbit")
    ]
    shown = dict(re.findall(r"^\| ([^|]+) \| (.+) \|$", table, re.M))
    for row, plan in names.items():
        expected = [
            f"{found[plan]['ms']:.1f} ms"
            if plan == "auto"
            else f"{100 * found[plan]['slower_than_auto']:+.1f}% "
            f"+- {100 * found[plan]['plus_minus']:.1f}"
            for found in plans
        ]
        assert shown[row] == " | ".join(expected), row


def test_planners_on_each_link_took_the_recorded_times():
    table = PAGES["planner"].split("## Links and memory limits")[1].split("\n## ")[0]
    names = {f"greedy, by `{name}`": name for name in ("size", "dim", "lookup", "size-lookup")}
    names |= {name: name.lower() for name in ("EMBark", "NeuroShard", "DreamShard", "AutoShard")}
    names |= {"TorchRec": "torchrec", "best greedy planner": "greedies, best of 4"}
    names |= {"`scheme: auto`": "scheme: auto", "`auto`, best of four": "auto, best of 4"}
    names |= {"`auto`, built-in costs": "auto, built-in constants"}
    names |= {"`auto`, unsplit tables": "auto, whole or copied"}
    wires = ("100mbit", "1gbit", "1gbit_250mbit", "loopback")
    links = [list(read(f"planner_regimes_{link}.jsonl"))[-1] for link in wires]
    expected: dict[str, str] = {}
    for row, name in names.items():
        cells: list[str] = []
        for link in links:
            found = link["planners"][name]["all"]
            low, high = found["interval"]
            mean = 100 * found["slower_than_auto"]
            cells += [str(found["tasks"]), f"{mean:+.1f}% ({100 * low:+.1f} to {100 * high:+.1f})"]
        expected[row] = " | ".join(cells)
    assert dict(re.findall(r"^\| ([^|\s][^|]*) \| (\d.+) \|$", table, re.M)) == expected
    assert all(link["do_not_fit"]["auto"] == 0 for link in links)
    fastest = [f"{100 * link['auto_over_fastest']:.1f}%" for link in links]
    errors = [f"{100 * link['step_error']:.0f}%" for link in links]
    words = " ".join(table.split())
    ranks = [f"{link['spearman_predicted']:.2f}" for link in links]
    for numbers in (fastest, errors, ranks):
        assert "{}, {}, {}, and {}".format(*numbers) in words


def test_planners_on_unequal_ranks_took_the_recorded_times():
    table = PAGES["planner"].split("## Ranks of different speeds")[1].split("\n## ")[0]
    names = {f"greedy, by `{name}`": name for name in ("size", "dim", "lookup", "size-lookup")}
    names |= {"best greedy planner": "greedies, best of 4", "EMBark": "embark"}
    names |= {"NeuroShard": "neuroshard", "DreamShard": "dreamshard", "AutoShard": "autoshard"}
    names |= {"TorchRec": "torchrec", "`scheme: auto`": "scheme: auto"}
    names |= {"`auto` without the speeds": "auto, equal speeds"}
    names |= {"`auto`, best of four": "auto, best of 4"}
    summary = list(read("planner_unequal_ranks.jsonl"))[-1]
    expected: dict[str, str] = {}
    for row, name in names.items():
        found = summary["planners"][name]
        low, high = found["interval"]
        mean = 100 * found["slower_than_auto"]
        expected[row] = f"{mean:+.1f}% ({100 * low:+.1f} to {100 * high:+.1f})"
        assert found["tasks"] == summary["tasks"]
    assert dict(re.findall(r"^\| ([^|\s][^|]*) \| ([+-]\d.+) \|$", table, re.M)) == expected
    words = " ".join(table.split())
    assert f"error of predicted step times is {100 * summary['step_error']:.0f}%" in words
    assert f"rank correlation is {summary['spearman_predicted']:.2f}" in words
