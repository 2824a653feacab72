"""Compares runs on one self-contained HTML page (``sbpflow report``)."""

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from sbpflow.config.metrics import METRICS
from sbpflow.errors import ConfigError
from sbpflow.run.planning.text import format_size
from sbpflow.run.report.charts import (
    Series,
    calibration_chart,
    line_chart,
    show_number,
    stacked_bars,
)
from sbpflow.run.report.data import Run, read_runs
from sbpflow.run.report.html import document, html_row, html_table
from sbpflow.runtime.files.run_folder import REPORT_FILE
from sbpflow.runtime.processes.launch import unwritable

Figure = float | int | None


def write_report(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Write the page to ``output``, or to the folder of the first run; return its path. Raises
    ConfigError if the file cannot be written.
    """
    text = page(read_runs(list(folders)))
    file = folders[0] / REPORT_FILE if output is None else output
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        text = f"report: {file} {unwritable(error)}, for example, --output ~/report.html"
        raise ConfigError(text) from error
    return file


def page(runs: Sequence[Run]) -> str:
    """Return the HTML of the page."""
    names = ", ".join(run.name for run in runs)
    sections = [
        ("Results", _results(runs)),
        ("Loss", _pair(runs, "loss of the step", "loss")),
        ("AUC of val", _pair(runs, "AUC", "auc", split="val")),
        ("Logloss of val", _pair(runs, "logloss", "logloss", split="val")),
        ("Learning rates and gradients", _rates(runs)),
        ("Growing tables", _each(runs, _growth)),
        ("Speed", _speed(runs)),
        ("Calibration", _calibration(runs)),
        ("Slices", _each(runs, _slices)),
        ("Layouts", _each(runs, _layouts)),
        ("Transfers", _each(runs, _transfers)),
        ("Memory", _each(runs, _memory)),
        ("Settings that differ", _differences(runs) if len(runs) > 1 else ""),
    ]
    return document(names, sections)


def _results(runs: Sequence[Run]) -> str:
    def of(key: str, show: Callable[[Any], str] = show_number) -> list[str]:
        return [_value(run.final.get(key), show) for run in runs]

    def five(value: float) -> str:
        return f"{value:.5f}"

    def both_sums(run: Run) -> str:
        final = run.final
        if final.get("predicted") is None:
            return "-"
        return f"{final['predicted']:,.1f} of {final['positives']:,}"

    rows: list[tuple[str, list[str]]] = [
        *((f"test {kind.label}", of(name, five)) for name, kind in METRICS.items()),
        ("error bound of the test AUC", of("auc_error", lambda v: f"{v:.1e}")),
        ("best possible AUC", of("best_auc", five)),
        ("val AUC", of("val_auc", five)),
        ("step of these weights (best on val)", of("best_step", lambda v: f"{v:,}")),
        ("test AUC of the last step", of("last_auc", five)),
        ("val AUC of the last step", of("last_val_auc", five)),
        ("test calibration", of("calibration", lambda v: f"{v:.4f}")),
        ("predicted of actual positives", [both_sums(run) for run in runs]),
        ("steps", of("steps", lambda v: f"{v:,}")),
        ("samples per second", of("samples_per_s", lambda v: f"{v:,.0f}")),
        # The last event is not the latest one if the system clock was set back during the run.
        ("time shown", [_clock(max(map(run.minutes, run.events))) for run in runs]),
    ]
    shown = [[name, *cells] for name, cells in rows if any(cell != "-" for cell in cells)]
    table = html_table(["", *(run.name for run in runs)], shown)
    notes = "".join(
        f'<p class="note">{escape(run.name)}: {escape(note)}</p>'
        for run in runs
        for note in run.notes
    )
    return table + notes


def _pair(runs: Sequence[Run], title: str, key: str, *, split: str | None = None) -> str:
    """Draw the same curves twice: over steps and over time."""
    charts = [
        line_chart(
            f"{title}, {text}",
            label,
            [Series(run.name, run.curve(key, split=split, by=by), n) for n, run in enumerate(runs)],
        )
        for by, label, text in (("step", "step", "by step"), ("time", "minutes", "by time"))
    ]
    return html_row(charts)


def _rates(runs: Sequence[Run]) -> str:
    rates = [
        Series(f"{run.name}, {part}", run.curve(f"lr_{part}"), n, dashed=part == "dense")
        for n, run in enumerate(runs)
        for part in ("sparse", "dense")
    ]
    norms = [Series(run.name, run.curve("grad_norm"), n) for n, run in enumerate(runs)]
    return html_row(
        [
            line_chart("learning rates", "step", rates, zero=True),
            line_chart("gradient norm before clipping", "step", norms, zero=True),
        ]
    )


def _speed(runs: Sequence[Run]) -> str:
    def curves(key: str) -> list[Series]:
        return [Series(run.name, run.curve(key), n) for n, run in enumerate(runs)]

    charts = [
        line_chart("samples per second, all ranks", "step", curves("samples_per_s"), zero=True),
        line_chart("ms per step", "step", curves("step_ms"), zero=True),
    ]
    bars = stacked_bars(
        "moves of a step on rank 0, in the interval with the median step time",
        [(run.name, _moves(run)) for run in runs if _moves(run)],
    )
    return html_row(charts) + bars


def _moves(run: Run) -> list[tuple[str, float]]:
    """Return (move, ms) in schedule order, including waits for data and the loop's own time. All
    values come from the same interval, so they add up to the step time.
    """
    steps = [event for event in run.of("step") if event.get("move_forward_ms") is not None]
    if not steps:
        return []
    median = sorted(steps, key=lambda event: event["step_ms"])[len(steps) // 2]
    order = [f"move_{move['move']}_ms" for move in run.plan.get("schedule", ())]
    keys = [key for key in median if key.startswith("move_")]
    keys.sort(key=lambda key: order.index(key) if key in order else len(order))
    names = [key.removeprefix("move_").removesuffix("_ms") for key in keys]
    parts = [("wait for data", float(median["data_ms"]))]
    parts += [(name, float(median[key])) for name, key in zip(names, keys, strict=True)]
    rest = median["step_ms"] - sum(value for _, value in parts)
    return [*parts, ("loop", max(rest, 0.0))]


def _calibration(runs: Sequence[Run]) -> str:
    charts = [
        calibration_chart(
            f"{split}, last evaluation",
            [
                Series(run.name, list(zip(event["predicted"], event["observed"], strict=True)), n)
                for n, run in enumerate(runs)
                for event in run.last("calibration", split)[-1:]
            ],
        )
        for split in ("test", "val")
    ]
    return html_row(charts)


def _slices(run: Run) -> str:
    split = "test" if run.last("slice", "test") else "val"
    rows = [
        [
            f"{event['column']}, mean over values" if event["value"] is None else event["column"],
            "" if event["value"] is None else str(event["value"]),
            f"{event['num_rows']:,}",
            _value(event["auc"], lambda v: f"{v:.5f}"),
            _value(event["logloss"], lambda v: f"{v:.5f}"),
            _value(event["calibration_ratio"], lambda v: f"{v:.4f}"),
        ]
        for event in run.last("slice", split)
    ]
    header = [f"{split}: column", "id", "rows", "AUC", "logloss", "calibration"]
    return html_table(header, rows)


def _growth(run: Run) -> str:
    """Draw each field's number of keys with a row and its share of rows in use; list the latest
    values.
    """
    last = next((e for e in reversed(run.of("step")) if e.get("growth_live") is not None), {})
    names = [key.removeprefix("growth.") for key in last if key.startswith("growth.")]
    fields = [name.removesuffix(".live") for name in names if name.endswith(".live")]
    if not fields:
        return ""
    charts = [
        line_chart(
            title,
            "step",
            [Series(f, run.curve(f"growth.{f}.{key}"), n) for n, f in enumerate(fields)],
            zero=True,
        )
        for title, key in (("keys with a row", "live"), ("share of rows in use", "load_factor"))
    ]
    figures = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    rows = [
        [field, *(_value(last.get(f"growth.{field}.{key}"), show_number) for key in figures)]
        for field in fields
    ]
    return html_row(charts) + html_table(["field", *figures], rows)


def _layouts(run: Run) -> str:
    rows = [
        [
            table["name"],
            f"{table['rows']:,}",
            str(table["dim"]),
            f"{table['sbp']}@{table['ranks']}",
            table["exchange"],
            f"{table['kernel']}: {table['kernel_reason']}",
        ]
        for table in run.plan.get("tables", ())
    ]
    return html_table(["table", "rows", "dim", "layout", "exchange", "kernel"], rows)


def _transfers(run: Run) -> str:
    steps = run.plan.get("steps", ())
    rows = [
        [
            step["id"],
            step["phase"],
            step["collective"],
            ("" if step["exact"] else "at most ") + format_size(step["total_bytes"]),
        ]
        for step in steps
    ]
    if not rows:
        return ""
    total = format_size(run.plan["bytes_per_iteration"])
    table = html_table(["step", "phase", "collective", "bytes, all ranks"], rows)
    return f"<details><summary>{total} per iteration at most</summary>{table}</details>"


def _memory(run: Run) -> str:
    ranks = run.plan.get("ranks", ())
    peaks = run.final.get("peak_memory_bytes") or [None] * len(ranks)
    rows = [
        [
            str(rank["rank"]),
            format_size(rank["table_bytes"]),
            format_size(rank["table_state_bytes"]),
            format_size(sum(value for key, value in rank.items() if key.startswith("dense"))),
            _value(peak, format_size),
        ]
        for rank, peak in zip(ranks, peaks, strict=False)
    ]
    header = ["rank", "tables, planned", "their state", "dense part", "peak of the process"]
    return html_table(header, rows)


def _differences(runs: Sequence[Run]) -> str:
    keys = list(dict.fromkeys(key for run in runs for key in run.settings))
    rows = [
        [key, *(run.settings.get(key, "-") for run in runs)]
        for key in keys
        if len({run.settings.get(key, "-") for run in runs}) > 1
    ]
    return html_table(["key", *(run.name for run in runs)], rows)


def _each(runs: Sequence[Run], section: Callable[[Run], str]) -> str:
    """Return the non-empty sections of all runs.

    With several runs, headings include the run's name.
    """
    parts = [(run.name, section(run)) for run in runs]
    title = len(runs) > 1
    return "".join(
        (f"<h3>{escape(name)}</h3>" if title else "") + text for name, text in parts if text
    )


def _value(value: Figure, show: Callable[[Any], str]) -> str:
    return "-" if value is None else show(value)


def _clock(minutes: float) -> str:
    seconds = round(60 * minutes)
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
