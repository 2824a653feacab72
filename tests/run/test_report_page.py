"""Tests the contents of a report page, and that the page is self-contained."""

import errno
import json
import re
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from sbpflow.api import Run
from sbpflow.errors import ConfigError, DataError
from sbpflow.run.planning.plan_file import plan_to_json
from sbpflow.run.report import data
from sbpflow.run.report.charts import Series, line_chart, ticks
from sbpflow.run.report.data import read_run, read_runs
from sbpflow.run.report.page import write_report
from tests.training.wdl_case import FIELDS, make_config

START = datetime(2026, 3, 1, tzinfo=UTC)


def events(scale: float = 1.0) -> list[dict[str, Any]]:
    moves = {"move_look_up_ms": 2.0, "move_forward_ms": 3.0, "step_ms": 7.0, "data_ms": 1.0}
    found: list[dict[str, Any]] = [
        {
            "event": "step",
            "step": step,
            "loss": scale / step,
            "samples_per_s": 1000.0,
            "lr_sparse": 0.05,
            "lr_dense": 0.001,
            "grad_norm": 2.5,
            **moves,
        }
        for step in (10, 20, 30)
    ]
    found.append({"event": "eval", "step": 30, "split": "val", "num_rows": 50, "auc": 0.7125})
    found.append(
        {
            "event": "calibration",
            "step": 30,
            "split": "test",
            "rows": [25, 25],
            "predicted": [0.1, 0.4],
            "observed": [0.2, 0.3],
        }
    )
    found.append(
        {
            "event": "slice",
            "step": 30,
            "split": "test",
            "column": "C<1>",
            "num_rows": 12,
            "auc": 0.65,
            "value": 7,
            "logloss": 0.5,
            "calibration_ratio": 1.25,
        }
    )
    final = {"auc": 0.75, "logloss": 0.4, "samples_per_s": 900.0, "steps": 30, "val_auc": 0.7125}
    sums = {"predicted": 310.25, "positives": 300, "calibration": 1.0342}
    found.append({"event": "final", **final, **sums, "peak_memory_bytes": [3 << 30, 1 << 30]})
    return [
        {**event, "time": (START + timedelta(seconds=40 * n)).isoformat()}
        for n, event in enumerate(found)
    ]


def write(folder: Path, lines: list[dict[str, Any]], *, plan: bool = True, dim: int = 16) -> Path:
    folder.mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text, encoding="ascii")
    (folder / "start.txt").write_text(
        f"config:\n  model:\n    embedding_dim: {dim}\n    name: wdl\nversions:\n  torch 2\n"
    )
    if plan:
        from sbpflow.run.planning.build_plan import plan_run

        _, planned = plan_run(make_config("1", "sgd"), FIELDS, world_size=2, device_type="cpu")
        (folder / "plan.json").write_text(plan_to_json(planned))
    return folder


class Page(HTMLParser):
    """Collects the text, the section titles, and all addresses that a page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sections: list[str] = []
        self.addresses: list[str] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self._open and self._open[-1] == "h2":
            self.sections.append(data)
            self._open.pop()


def test_a_page_has_all_parts_and_loads_no_resources(tmp_path):
    one = write(tmp_path / "one", events())
    two = write(tmp_path / "two", events(2.0), dim=32)
    file = write_report([one, two])
    assert file == one / "report.html"
    text = file.read_text(encoding="utf-8")
    page = Page(text)
    assert page.addresses == []
    assert not re.search(r"https?:|url\(|@import|<script", text)
    assert page.sections == [
        "Results",
        "Loss",
        "AUC of val",
        "Learning rates and gradients",
        "Speed",
        "Calibration",
        "Slices",
        "Layouts",
        "Transfers",
        "Memory",
        "Settings that differ",
    ]
    for part in (
        "0.75000",  # test AUC
        "310.2 of 300",  # both sums
        "0:04:00",  # time from the first event to the last event
        "deep.C1",
        "S(1)@[0, 1]",
        "3.00 GiB",  # peak
        "model.embedding_dim",
        "32",
        "C<1>",  # must be escaped in the page
        "7.00 ms",
    ):
        assert part in page.texts, part
    assert text.count("<polyline") == 2 * (2 + 2 + 2 + 1 + 2 + 1)  # two runs


def test_an_incomplete_run_is_shown_with_notes(tmp_path):
    run = write(tmp_path / "run", events()[:2], plan=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "ti')
    output = tmp_path / "page.html"
    text = write_report([run], output).read_text(encoding="utf-8")
    for note in (
        "the last line of metrics.jsonl, line 3, is truncated",
        "the run has not finished",
        "there is no plan.json",
    ):
        assert note in text
    assert "Layouts" not in text
    assert "Loss" in text


def test_the_time_of_a_run_is_not_negative_if_the_clock_was_set_back(tmp_path):
    *earlier, last = events()
    last["time"] = (START - timedelta(hours=2)).isoformat()
    run = write(tmp_path / "run", [*earlier, last])
    page = Page(write_report([run]).read_text(encoding="utf-8"))
    assert page.texts[page.texts.index("time shown") + 1] == "0:03:20"


def test_the_result_of_a_run_is_read_from_the_end_of_its_file(tmp_path, monkeypatch):
    run = write(tmp_path / "run", events(), plan=False)
    file = run / "metrics.jsonl"
    lines = file.read_bytes()
    with file.open("r+b") as opened:  # the bytes before the lines take no space on the disk
        opened.seek(1 << 30)
        opened.write(b"\n" + lines)
    assert Run(run, None, None, ()).result.items() >= {"steps": 30}.items()
    for text in ("", '{"event": "final", "ti', json.dumps(events()[0] | {"time": str(START)})):
        file.write_text(text)
        assert Run(run, None, None, ()).result == {}
    file.write_text('{"event": "final"}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl: the last line is not a valid event \("):
        Run(run, None, None, ())

    def refuse(*_: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(data, "read_end", refuse)
    with pytest.raises(DataError, match=r"jsonl: the file cannot be read \(permission denied\)$"):
        Run(run, None, None, ())


def test_folders_that_are_not_runs_are_refused(tmp_path):
    run = write(tmp_path / "runs" / "one", events())
    with pytest.raises(ConfigError, match=r"runs has no metrics\.jsonl.*did you mean .*runs/one\?"):
        write_report([tmp_path / "runs"])
    with pytest.raises(ConfigError, match=r"runs/one is given twice"):
        write_report([run, run])
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([lines[0], "{}", *lines[1:]]))
    with pytest.raises(
        DataError,
        match=r"line 2 is not a valid event .*event must be one of step, ranks, eval",
    ):
        write_report([run])
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="has no events yet"):
        write_report([run])


def test_a_run_without_events_can_be_read(tmp_path):
    """`sbpflow.load` reads a run that was interrupted in its first step."""
    run = read_run(write(tmp_path / "run", [], plan=False), "run")
    assert run.final == {}
    assert "the run has not finished" in run.notes


def test_a_page_that_cannot_be_written_names_an_output_that_can(tmp_path):
    run = write(tmp_path / "run", events(), plan=False)
    (run / "report.html").mkdir()
    with pytest.raises(ConfigError, match=r"report\.html .*\(is a directory\).* --output ~/report"):
        write_report([run])


def test_a_plan_of_another_version_is_noted(tmp_path):
    run = write(tmp_path / "run", events(), plan=False)
    (run / "plan.json").write_text('{"format": 0, "sha256": "", "plan": {}}')
    text = write_report([run]).read_text(encoding="utf-8")
    assert "plan.json is not shown: the plan is not a valid plan.json" in text


def test_runs_with_equal_names_are_distinguished_by_their_folders(tmp_path):
    folders = [write(tmp_path / name / "run", events(), plan=False) for name in ("a", "b")]
    assert [run.name for run in read_runs(folders)] == ["a/run", "b/run"]


@pytest.mark.parametrize(
    ("low", "high", "want"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (3, 12, [4, 6, 8, 10, 12]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_ticks_are_round_numbers_within_the_range(low, high, want):
    assert ticks(low, high) == pytest.approx(want)


def test_a_chart_of_one_point_or_no_points():
    assert line_chart("t", "step", [Series("a", [], 0)]) == ""
    one = line_chart("t", "step", [Series("a", [(3.0, 0.5)], 0)])
    assert one.count("<circle") == 1
    assert "nan" not in one


def test_a_line_of_many_points_has_a_limited_number_of_dots():
    points = [(float(step), step % 7 / 7) for step in range(10_000)]
    chart = line_chart("t", "step", [Series("a", points, 0)])
    assert chart.count("<circle") == 400
    assert "<title>a: 9999, 0.428571</title>" in chart
    assert len(chart) < 200_000
