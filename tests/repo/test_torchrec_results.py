"""Tests that the comparison with TorchRec shows the recorded values."""

import re

import pytest

from tests.repo.results import PAGES, RECORDS, ROOT, read, rows

PAGE = PAGES["torchrec"]
# The end of a record's name, by the heading of its column.
CPUS = {"Intel Xeon": "", "Zen 3": "_zen3", "Zen 4": "_zen4", "Zen 5": "_zen5"}
ON_ONE_CPU = re.findall(r"^\| [^\n]* \| `(vs_torchrec_\w+)\.jsonl` \|$", PAGE, re.M)


def comparisons(record: str) -> dict[str, tuple[str, str]]:
    """Return the speedup and the step times of a record, by the dtype of transfers."""
    found, steps = {}, {}
    for line in read(f"{record}.jsonl"):
        if "system" in line:
            steps[line["system"]] = line["step_ms"]
            continue
        low, high = line["spread"]
        speedup = f"{line['times_faster']:.2f} ({low:.2f} to {high:.2f})"
        times = f"{steps[line['against']]:.1f} and {steps['sbpflow']:.1f}"
        found[line["wire"]] = speedup, times
    return found


@pytest.mark.parametrize(("title", "place"), [("Times faster", 0), ("Step times", 1)])
def test_the_tables_of_all_cpus_show_the_recorded_values(title, place):
    lines = PAGE.split(f"**{title}**")[1].split("\n\n")[1].splitlines()
    head, _, *shown = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    assert head == ["work", "transfers", *CPUS, "records"]
    for _, transfers, *cells, records in shown:
        expected = []
        for end in CPUS.values():
            record = records.strip("`") + end
            exists = (RECORDS / f"{record}.jsonl").is_file()
            expected.append(comparisons(record)[transfers][place] if exists else "")
        assert cells == expected
    assert len(shown) > 10


@pytest.mark.parametrize("record", ON_ONE_CPU)
def test_the_table_of_other_work_shows_the_recorded_values(record):
    shown = {transfers: (speedup, times) for _, transfers, _, speedup, times in
             rows("torchrec", f"{record}.jsonl")}  # fmt: skip
    assert shown == comparisons(record)


def test_the_readme_has_the_range_of_all_comparisons():
    found = (comparisons(path.stem) for path in RECORDS.glob("vs_torchrec_*.jsonl"))
    ratios = [float(speedup.split()[0]) for each in found for speedup, _ in each.values()]
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"are {min(ratios):.1f} to {max(ratios):.1f} times as fast as TorchRec's" in readme


def test_plain_torch_took_the_recorded_times():
    systems = ("plain torch, DDP", "plain torch, one process")
    lines = PAGE.split("\n| plain PyTorch")[1].split("\n\n")[0].splitlines()
    head, _, *shown = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    assert len(shown) == len(systems)
    for system, (_, *cells) in zip(systems, shown, strict=True):
        for cpu, cell in zip(head, cells, strict=True):
            lines = read(f"vs_torchrec_loopback{CPUS[cpu]}.jsonl")
            (found,) = (n["beside"][system] for n in lines if system in n.get("beside", ()))
            assert cell == "{:.2f} ({:.2f} to {:.2f})".format(*found)


def test_every_comparison_is_in_a_table():
    in_columns = re.findall(r"`(vs_torchrec_\w+)` \|$", PAGE, re.M)
    shown = {*ON_ONE_CPU, *(name + end for name in in_columns for end in CPUS.values())}
    assert {path.stem for path in RECORDS.glob("vs_torchrec_*.jsonl")} <= shown


@pytest.mark.parametrize("cpu", ["Zen 3", "Zen 4", "Zen 5"])
def test_the_limits_of_the_machines_are_the_recorded_ones(cpu):
    record = f"roofline{CPUS[cpu]}.jsonl"
    (line,) = (line for line in read(record) if line["benchmark"] == "roofline")
    names = ("limit_ms", "step_cpu_ms", "step_ms")
    ratios = (line["times_limit_by_cpu"], line["times_limit_by_clock"])
    limit, by_cpu, by_clock = (f"{line[name]:.1f}" for name in names)
    expected = [cpu, limit, by_cpu, f"{ratios[0]:.2f}", by_clock, f"{ratios[1]:.2f}"]
    assert rows("torchrec", record) == [expected]
