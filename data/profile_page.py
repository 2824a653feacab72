"""Show the profile of a set as text, as an HTML page, and as an SVG picture."""

from collections.abc import Callable, Sequence
from html import escape

from sbpflow.data.concerns import concerns
from sbpflow.data.format.manifest import Manifest
from sbpflow.data.numbers import epoch_unit, minute_text
from sbpflow.data.profile import FeatureProfile, Profile
from sbpflow.run.report.charts import WIDTH, Series, line_chart, picture, show_number, stacked_bars
from sbpflow.run.report.html import document, html_row, html_table

_MAX_BARS = 15
_DAY = 86_400.0
_WITHOUT_LABELS = "-"
_NO_CONCERNS = "No warnings."


def profile_text(manifest: Manifest, profile: Profile) -> str:
    """Return the tables and warnings of a profile as text."""
    tables = [_splits(manifest, profile), _times(manifest, profile), _fields(profile)]
    tables.append(_dense(profile))
    blocks = [_aligned(*table) for table in tables if table[1]]
    warnings = [f"warning: {text}" for text in concerns(profile)] or [_NO_CONCERNS]
    return "\n\n".join([*blocks, "\n".join(warnings)])


def profile_page(manifest: Manifest, profile: Profile) -> str:
    """Return a self-contained HTML page with charts, tables and warnings."""
    warnings = "".join(f"<li>{escape(text)}</li>" for text in concerns(profile))
    tables = {
        "Splits": _splits(manifest, profile),
        "Rows by time": _times(manifest, profile),
        "Fields": _fields(profile),
        "Dense columns": _dense(profile),
    }
    sections = [
        ("Warnings", f"<ul>{warnings}</ul>" if warnings else f"<p>{_NO_CONCERNS}</p>"),
        ("Charts", html_row(_charts(manifest, profile))),
        *((name, html_table(*table)) for name, table in tables.items() if table[1]),
    ]
    return document(str(manifest.path), sections)


def profile_picture(manifest: Manifest, profile: Profile) -> str:
    """Return the charts of ``profile_page`` as one SVG file."""
    return picture(str(manifest.path), _charts(manifest, profile))


Table = tuple[list[str], list[list[str]]]


def _aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a text table with the first column left-aligned and the others right-aligned."""
    widths = [max(len(row[k]) for row in (header, *rows)) for k in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if k == 0 else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    )


def _percent(value: float | None) -> str:
    return _WITHOUT_LABELS if value is None else f"{100 * value:.2f}%"


def _present(profile: Profile) -> list[str]:
    return [name for name, split in profile.splits.items() if split.rows]


def _splits(manifest: Manifest, profile: Profile) -> Table:
    header = ["split", "rows", "label 1"]
    if profile.time_edges:
        header += ["first time", "last time"]
    rows: list[list[str]] = []
    for name in _present(profile):
        split = profile.splits[name]
        row = [name, f"{split.rows:,}", _percent(split.label_rate)]
        if profile.time_edges:
            row += [_moment(manifest, profile, time) for time in split.times or (0, 0)]
        rows.append(row)
    return header, rows


def _times(manifest: Manifest, profile: Profile) -> Table:
    """Return a table of row counts and label rates, with one row for every four time buckets."""
    names, edges, size = _present(profile), profile.time_edges, 4
    header = ["rows from", *names, "label 1"]
    rows: list[list[str]] = []
    for start in range(0, len(edges) - 1, size):
        parts = [sum(profile.splits[n].rows_by_time[start : start + size]) for n in names]
        positives = sum(
            sum(profile.splits[n].positives_by_time[start : start + size]) for n in names
        )
        rate = positives / sum(parts) if sum(parts) and manifest.labelled else None
        moment = _moment(manifest, profile, edges[start])
        rows.append([moment, *(f"{part:,}" for part in parts), _percent(rate)])
    return header, rows


def _fields(profile: Profile) -> Table:
    names = _present(profile)
    header = ["field", *(f"missing {n}" for n in names), *(f"unknown {n}" for n in names)]
    return _with_comparison(
        header,
        profile,
        profile.fields,
        lambda f: [
            *(_percent(f.missing[n]) for n in names),
            *(_percent(f.unknown[n]) for n in names),
        ],
    )


def _dense(profile: Profile) -> Table:
    names = _present(profile)
    keys = list(profile.dense[0].summary[names[0]]) if profile.dense and names else []
    header = ["dense column, as stored", *keys, *(f"zero {n}" for n in names)]
    return _with_comparison(
        header,
        profile,
        profile.dense,
        lambda f: [
            *(show_number(f.summary[names[0]][key]) for key in keys),
            *(_percent(f.missing[n]) for n in names),
        ],
    )


def _with_comparison(
    header: list[str],
    profile: Profile,
    features: Sequence[FeatureProfile],
    cells: Callable[[FeatureProfile], list[str]],
) -> Table:
    """Return a table with the given columns of each feature, followed by drift and single-feature
    AUC.
    """
    compared = [name for name in _present(profile) if name != "train"]
    header = [*header, *(f"PSI {name}" for name in compared), "AUC alone"]
    rows = [
        [
            f.name,
            *cells(f),
            *(f"{f.psi[n]:.3f}" if n in f.psi else "-" for n in compared),
            "-" if f.auc is None else f"{f.auc:.4f}",
        ]
        for f in features
    ]
    return header, rows


def _charts(manifest: Manifest, profile: Profile) -> list[str]:
    names, features = _present(profile), [*profile.fields, *profile.dense]
    rates = [(n, [(n, profile.splits[n].label_rate or 0.0)]) for n in names]
    charts = [stacked_bars("label rate", rates, _percent, WIDTH), *_time_charts(manifest, profile)]
    last = names[-1] if names else "train"
    shares = [(f.name, [("missing", f.missing[last]), ("unknown", f.unknown[last])])
              for f in profile.fields]  # fmt: skip
    drift = [(f.name, [("PSI", max(f.psi.values(), default=0.0))]) for f in features]
    alone = [(f.name, [("AUC", f.auc or 0.0)]) for f in features]
    charts += [
        _ranked(f"share of missing and unknown values in {last}", shares, _percent),
        _ranked(
            "drift from train to val or test: the larger population stability index",
            drift,
            "{:.3f}".format,
        ),
        _ranked("AUC of a single feature on val and test", alone, "{:.4f}".format),
    ]
    return [chart for chart in charts if chart]


Bars = Sequence[tuple[str, Sequence[tuple[str, float]]]]


def _ranked(title: str, bars: Bars, show: Callable[[float], str]) -> str:
    """Draw a bar chart of the largest values, with one bar per feature."""
    worst = sorted(bars, key=lambda bar: -sum(value for _, value in bar[1]))[:_MAX_BARS]
    more = f" (top {_MAX_BARS} of {len(bars)})" if len(bars) > _MAX_BARS else ""
    return stacked_bars(title + more, [(_short(name), parts) for name, parts in worst], show, WIDTH)


def _short(name: str) -> str:
    return name if len(name) <= 18 else name[:16] + ".."


def _time_charts(manifest: Manifest, profile: Profile) -> list[str]:
    edges, unit = profile.time_edges, _unit(manifest, profile)
    if not edges:
        return []
    step = (edges[1] - edges[0]) / (_DAY * unit if unit else 1.0)
    label = f"{'days' if unit else 'time'} since {_moment(manifest, profile, edges[0])}"
    rows: list[Series] = []
    rates: list[Series] = []
    for number, name in enumerate(_present(profile)):
        split = profile.splits[name]
        counted = list(zip(split.rows_by_time, split.positives_by_time, strict=True))
        places = [(place * step, *pair) for place, pair in enumerate(counted) if pair[0]]
        rows.append(Series(name, [(x, float(count)) for x, count, _ in places], number))
        if split.label_rate is not None:
            points = [(x, positives / count) for x, count, positives in places]
            rates.append(Series(name, points, number))
    return [
        line_chart("rows by time", label, rows, zero=True),
        line_chart("label rate by time", label, rates, zero=True),
    ]


def _unit(manifest: Manifest, profile: Profile) -> float | None:
    """Return the number of time units per second, or None if the numbers are not times since
    1970.
    """
    if not profile.time_edges:
        return None
    if manifest.content["schema"]["time"][1] != "integer":
        return 1e6
    return epoch_unit(profile.time_edges[0], profile.time_edges[-1])


def _moment(manifest: Manifest, profile: Profile, time: int) -> str:
    unit = _unit(manifest, profile)
    return f"{time:,}" if unit is None else minute_text(time / unit)
