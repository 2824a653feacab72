"""Draw the pictures of the documentation.

    PYTHONPATH=. python .ci/pictures.py [FOLDER]

The command writes NAME-light.svg and NAME-dark.svg into FOLDER (default: docs/pictures). All facts
in the pictures come from real layouts, plans and schedules: parts, collectives, bytes and overlap.
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import torch
from svg_canvas import THEMES, Canvas

from sbpflow import Fields, Layout, Placement, load_config, plan_boxing
from sbpflow.config.table_rules import Scheme
from sbpflow.models.registry import MODELS
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.planning.explain import describe
from sbpflow.run.planning.plan import RunPlan

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
LINE = Placement.of("cpu", [0, 1])
GRID = Placement.of("cpu", [[0, 1], [2, 3]])
SIZE = 4  # rows and columns of drawn tensors
Box = tuple[slice, ...]


def plan_of(parallel: str, world_size: int, rows: dict[str, int]) -> RunPlan:
    """Plan a small Wide & Deep run with the ``parallel`` group in YAML form."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        wide = f"wide: {{columns: [{next(iter(rows))}], crosses: []}}"
        model = f"model: {{embedding_dim: 16, hidden: [64], {wide}}}\n"
        path.write_text(
            "data: {batch_size: 1024}\noptimizer: {sparse: {name: sgd}}\n" + model + parallel
        )
        config = load_config(path, models=MODELS)
    fields = Fields.of([], rows)
    return plan_run(config, fields, world_size=world_size, device_type="cpu")[1]


def cells(box: Box) -> Iterator[tuple[int, ...]]:
    """Yield (row, column) of each element in a box."""
    rows, columns = box
    for row in range(rows.start, rows.stop):
        for column in range(columns.start, columns.stop):
            yield row, column


def draw_grid(
    canvas: Canvas,
    x: float,
    y: float,
    cell: float,
    colors: dict[tuple[int, ...], Sequence[str]],
    *,
    shape: tuple[int, int] = (SIZE, SIZE),
    values: dict[tuple[int, ...], int] | None = None,
) -> None:
    """Draw a matrix of cells. A cell can have several colors; a cell without colors is empty."""
    for row in range(shape[0]):
        for column in range(shape[1]):
            at = (row, column)
            left, top = x + column * cell, y + row * cell
            fills = colors.get(at, ())
            for number, fill in enumerate(fills):
                part = cell / len(fills)
                canvas.box(left + number * part, top, part, cell, fill=fill, line=None)
            canvas.box(left, top, cell, cell, dashed=not fills)
            if values and at in values:
                middle, size = left + cell / 2, cell * 0.5
                canvas.text(middle, top + cell * 0.68, str(values[at]), size=size, anchor="middle")


def held(layout: Layout, rank: int) -> dict[tuple[int, ...], Sequence[str]]:
    """Return the cells of a rank's part, in the color of the rank."""
    box = layout.part_slices((SIZE, SIZE), rank)
    return {} if box is None else dict.fromkeys(cells(box), (f"rank{rank}",))


def layouts(theme: str) -> Canvas:
    """Draw one tensor on two ranks in each of the four layouts."""
    canvas = Canvas(theme, 560, 452, "The layouts S(0), S(1), B and P of one tensor on two ranks")
    cell = 24
    full = {at: 1 + at[0] * SIZE + at[1] for at in cells((slice(0, SIZE), slice(0, SIZE)))}
    whole = {at: ("panel",) for at in full}
    draw_grid(canvas, 20, 30, cell, whole, values=full)
    canvas.text(20, 18, "the full tensor", size=15, bold=True)
    for number, line in enumerate(("All four layouts on two ranks", "represent the same value.")):
        canvas.text(150, 62 + 22 * number, line, size=15)
    panels = {
        "S(0)": "split: part of the rows",
        "S(1)": "split: part of the columns",
        "B": "broadcast: full copies",
        "P": "partial: terms of a sum",
    }
    for number, (sbp, says) in enumerate(panels.items()):
        left, top = 20 + 280 * (number % 2), 176 + 148 * (number // 2)
        canvas.text(left, top, sbp, size=15, bold=True, mono=True)
        canvas.text(left + 48, top, says, size=13, color="faint")
        layout = Layout(LINE, sbp)
        for rank in LINE.ranks:
            colors = held(layout, rank)
            values = {at: full[at] for at in colors}
            if sbp == "P":  # any values with the right sum
                first = {at: (5 * at[0] + 3 * at[1] + 2) % full[at] for at in full}
                values = first if rank == 0 else {at: full[at] - first[at] for at in full}
            x = left + rank * (SIZE * cell + 30)
            draw_grid(canvas, x, top + 10, cell, colors, values=values)
            canvas.text(x + 2 * cell, top + 124, f"rank {rank}", size=12, anchor="middle")
        if sbp == "P":
            canvas.text(left + SIZE * cell + 15, top + 65, "+", size=22, anchor="middle")
    return canvas


def grids(theme: str) -> Canvas:
    """Draw two layouts over a 2 x 2 grid of ranks."""
    canvas = Canvas(theme, 560, 236, "Layouts of one tensor over a 2 x 2 grid of ranks")
    for number, sbp in enumerate(("(S(0), B)", "(S(0), S(1))")):
        left, cell = 20 + 280 * number, 18
        layout = Layout(GRID, sbp)
        canvas.text(left, 18, f"{sbp} on {GRID}", size=12.5, mono=True)
        for rank in GRID.ranks:
            row, column = divmod(rank, 2)
            x, y = left + column * 110, 30 + row * 104
            draw_grid(canvas, x, y, cell, held(layout, rank))
            canvas.text(x + 2 * cell, y + 89, f"rank {rank}", size=12, anchor="middle")
    return canvas


CONVERSIONS = (
    ("S(0)", "B", "Each rank sends its rows to the other."),
    ("S(0)", "S(1)", "Each rank sends columns to the other."),
    ("P", "S(0)", "Terms are sent to the rank that keeps the sum."),
    ("P", "B", "Every rank gets the sum."),
    ("B", "S(0)", "Each rank keeps a slice."),
    ("S(0)", "P", "Each rank fills the rest with zeros."),
    ("B", "P", "Rank 0 keeps its copy, and rank 1 has zeros."),
)


def conversions(theme: str) -> Canvas:
    """Draw the moves of each conversion between two layouts on two ranks."""
    tall, cell = 92, 15
    canvas = Canvas(
        theme, 560, 40 + tall * len(CONVERSIONS), "Conversions between layouts on two ranks"
    )
    heads = ((180, "before"), (405, "after: colors show the source rank"))
    canvas.text(heads[0][0], 18, heads[0][1], size=13, color="faint")
    canvas.text(556, 18, heads[1][1], size=13, color="faint", anchor="end")
    shape, starts = (SIZE, SIZE), (180, 405)
    for number, (src, dst, says) in enumerate(CONVERSIONS):
        top = 34 + tall * number
        before, after = Layout(LINE, src), Layout(LINE, dst)
        (step,) = plan_boxing(before, after, shape, torch.float32, id="x", backend="gloo")
        sent = Fraction(step.total_bytes, SIZE * SIZE * torch.float32.itemsize)
        canvas.text(4, top + 14, f"{src} -> {dst}", size=15, bold=True, mono=True)
        canvas.text(4, top + 34, step.collective.replace("none", "no transfer"), size=13, mono=True)
        canvas.text(4, top + 53, f"{sent} T sent" if sent else "nothing is sent", size=13)
        arriving: dict[int, dict[tuple[int, ...], list[str]]] = {rank: {} for rank in LINE.ranks}
        for move in step.moves:
            for at in cells(move.box):
                arriving[move.dst].setdefault(at, []).append(f"rank{move.src}")
        for rank in LINE.ranks:
            apart = rank * (SIZE * cell + 14)
            draw_grid(canvas, starts[0] + apart, top, cell, held(before, rank))
            zeros = {} if dst != "P" else {at: 0 for at in held(after, rank)}
            zeros = {at: 0 for at in zeros if at not in arriving[rank]}
            came = {at: sorted(colors) for at, colors in arriving[rank].items()}
            draw_grid(canvas, starts[1] + apart, top, cell, came, values=zeros)
        for layout, start in ((before, starts[0]), (after, starts[1])):
            if layout == Layout(LINE, "P"):
                canvas.text(start + 67, top + 36, "+", size=16, anchor="middle")
        canvas.arrow(332, top + 30, 390, top + 30)
        canvas.text(180, top + 76, says, size=12, color="faint")
    return canvas


SCHEMES = tuple(scheme for scheme in get_args(Scheme) if scheme != "auto")


def schemes(theme: str) -> Canvas:
    """Draw the layouts of IDs and tables in each scheme, and the transfers of a step."""
    tall, cell = 114, 15
    canvas = Canvas(theme, 600, 54 + tall * len(SCHEMES), "The schemes of a Wide & Deep model")
    for x, words in ((50, "ids"), (146, "wide"), (226, "deep"), (392, "transfers of a step")):
        canvas.text(x, 16, words, size=13, color="faint")
    for number, scheme in enumerate(SCHEMES):
        top = 30 + tall * number
        plan = plan_of(f"parallel: {{scheme: {scheme}, device: cpu}}\n", 2, {"C1": 1000})
        canvas.text(4, top + 14, scheme, size=17, bold=True, mono=True)
        for x, columns, layout in (
            (50, 2, ids_layout(plan)),
            (146, 1, plan.layouts["wide.C1"].layout),
            (226, SIZE, plan.layouts["deep.C1"].layout),
        ):
            for rank in LINE.ranks:
                box = layout.part_slices((SIZE, columns), rank)
                colors = dict.fromkeys(cells(box or (slice(0, 0), slice(0, 0))), (f"rank{rank}",))
                left = x + rank * (columns * cell + 14)
                draw_grid(canvas, left, top, cell, colors, shape=(SIZE, columns))
            canvas.text(x, top + 78, str(layout).partition("@")[0], size=13, mono=True)
        for line, words in enumerate(transfers(plan)):
            canvas.text(392, top + 11 + 17 * line, words, size=12, mono=True)
    y = 30 + tall * len(SCHEMES)
    canvas.box(4, y, 14, 14, fill="rank0")
    canvas.text(24, y + 12, "on rank 0", size=13)
    canvas.box(104, y, 14, 14, fill="rank1")
    canvas.text(124, y + 12, "on rank 1", size=13)
    canvas.text(596, y + 12, "dashed: not on that rank", size=13, anchor="end", color="faint")
    return canvas


def ids_layout(plan: RunPlan) -> Layout:
    """Return the layout of the IDs at the lookup: S(0), as loaded, unless a transfer changes it."""
    for step in describe(plan)["steps"]:
        if step["id"] == "ids/fwd":
            return Layout(LINE, step["what"].partition(" -> ")[2].partition("@")[0])
    return Layout(LINE, "S(0)")


def transfers(plan: RunPlan) -> list[str]:
    """List the table transfers in a step with their collectives, without duplicates."""
    shown = []
    for step in describe(plan)["steps"]:
        owner, *_, what = step["id"].split("/")
        if owner in ("ids", "wide", "deep") and step["collective"] != "none":
            name = "ids" if owner == "ids" else what
            name = "gradients" if "/bwd/" in step["id"] else name
            shown.append(f"{name:<10} {step['collective']}")
    return list(dict.fromkeys(shown))


def schedule(theme: str) -> Canvas:
    """Draw which transfers are in flight during each part of a training step."""
    plan = plan_of("parallel: {scheme: 3, device: cpu}\n", 2, {"C1": 1000})
    moves: list[dict[str, Any]] = describe(plan)["schedule"]
    names = list(dict.fromkeys(name for move in moves for name in move["under_way"]))
    tall, top, left, apart = 36, 72, 254, 62
    canvas = Canvas(theme, 560, top + tall * len(moves) + 12, "The schedule of a training step")
    canvas.text(4, 16, "a step, from top to bottom", size=13, color="faint")
    canvas.text(left, 16, "transfers in flight meanwhile", size=13, color="faint")
    for column, name in enumerate(names):
        lines = name.split()
        for line, word in enumerate(lines):
            y = 63 - 13 * (len(lines) - 1 - line)
            canvas.text(left + apart * column + 23, y, word, size=11, anchor="middle")
    for row, move in enumerate(moves):
        y = top + tall * row
        this = move["batch"] == "this"
        canvas.box(4, y + 2, 230, tall - 4, fill="panel" if this else "rank3", line=None, radius=4)
        canvas.text(12, y + 16, move["move"], size=13, bold=True, mono=True)
        canvas.text(12, y + 29, move["what"], size=11.5, color="faint" if this else "text")
        if not this:
            canvas.text(226, y + 16, "next batch", size=11.5, anchor="end")
    for column, name in enumerate(names):
        for first, last in runs([name in move["under_way"] for move in moves]):
            x, y = left + apart * column, top + tall * first
            fill = "rank3" if name.startswith("next ") else "rank0"
            canvas.box(x, y + 2, 46, tall * (last - first) - 4, fill=fill, line=None, radius=4)
    return canvas


def runs(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each run of consecutive true values."""
    start = None
    for place, flag in enumerate([*flags, False]):
        if flag and start is None:
            start = place
        elif not flag and start is not None:
            yield start, place
            start = None


YAML = """\
parallel:
  scheme: 2
  tables:
    "deep.C3": {sbp: "S(1)"}
    "deep.C4": {sbp: B, ranks: [1]}
"""


def table(theme: str) -> Canvas:
    """Draw the steps from the YAML rules to the shards on each rank."""
    plan = plan_of(YAML + "  device: cpu\n", 2, {"C1": 600, "C2": 1000, "C3": 800, "C4": 300})
    facts = describe(plan)
    canvas = Canvas(theme, 560, 652, "From the configuration to the rows of each table")
    y = 4.0

    def head(number: int, words: str) -> None:
        canvas.text(12, y + 16, f"{number}. {words}", size=14, bold=True)

    head(1, "The configuration")
    for line in YAML.splitlines():
        y += 18
        canvas.text(28, y + 18, line, size=13, mono=True)
    y += 30
    canvas.arrow(20, y, 20, y + 20)
    y += 26
    head(2, "The layout of each table, and the key that sets it")
    for name, layout in plan.layouts.items():
        y += 18
        canvas.text(28, y + 18, name, size=13, mono=True)
        canvas.text(110, y + 18, str(layout.layout), size=13, mono=True)
        canvas.text(242, y + 18, layout.exchange, size=13, mono=True)
        canvas.text(322, y + 18, layout.key, size=12, color="faint", mono=True)
    y += 30
    canvas.arrow(20, y, 20, y + 20)
    y += 26
    head(3, "Groups: tables that exchange vectors together")
    for group in plan.embeddings.groups:
        y += 18
        canvas.text(28, y + 18, group.name, size=13, mono=True)
        canvas.text(170, y + 18, ", ".join(t.name for t in group.tables), size=13, mono=True)
    y += 30
    canvas.arrow(20, y, 20, y + 20)
    y += 26
    head(4, "The shards that each rank stores and updates")
    y += 28
    tops = dict.fromkeys(LINE.ranks, y + 20)
    for rank in LINE.ranks:
        canvas.text(28 + 268 * rank, y + 12, f"rank {rank}", size=13, color="faint")
    for entry in facts["tables"]:
        for shard in entry["shards"]:
            (r0, r1), (c0, c1) = shard["rows"], shard["columns"]
            x, top = 28 + 268 * shard["rank"], tops[shard["rank"]]
            height, width = 20 + (r1 - r0) / 40, 5.5 * (c1 - c0) + 4
            canvas.box(x, top, width, height, fill=f"rank{shard['rank']}")
            canvas.text(x + 104, top + 12, entry["name"], size=12, mono=True)
            canvas.text(x + 104, top + 26, f"[{r0}:{r1}, {c0}:{c1}]", size=12, mono=True)
            tops[shard["rank"]] += max(height, 30) + 6
    return canvas


PICTURES = {
    "layouts": layouts,
    "grids": grids,
    "conversions": conversions,
    "schemes": schemes,
    "schedule": schedule,
    "table": table,
}


def main(folder: Path) -> None:
    """Draw every picture in both themes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        for theme in THEMES:
            draw(theme).save(folder / f"{name}-{theme}.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
