"""Reports on a plan: the load of each rank, alternatives for each table, and the lower bound."""

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.planners import Planned
from sbpflow.planner.search.bounds import Bound, bound
from sbpflow.planner.search.insertion import Inserter
from sbpflow.planner.search.problem import BYTES, TIMES, Floats, State
from sbpflow.planner.shapes import choice_of_move
from sbpflow.planner.task import Choice

COLORS = ("#4477aa", "#ccbb44", "#ee6677", "#aa3377")
SEEDS_SHOWN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """A table's second-best choice, which makes a step ``more_ms`` longer if all other tables keep
    their choices. If the plan fits in memory, it also fits with this choice; otherwise this choice
    does not increase the excess.
    """

    choice: Choice
    more_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A plan with its bound and alternatives, as input for the report writers."""

    planned: Planned
    cost: TaskCost
    bound: Bound
    runners_up: Mapping[str, RunnerUp]

    @property
    def kinds(self) -> Floats:
        """Return the ms of work and of each phase of transfers, [ranks, times]."""
        return self.planned.priced.loads[:, :BYTES]


def report_of(planned: Planned, cost: TaskCost) -> Report:
    """Compute the bound and the alternatives, which takes a while for many tables."""
    return Report(
        planned=planned,
        cost=cost,
        bound=bound(planned.problem, planned.priced.ms),
        runners_up=_runners_up(planned),
    )


def _runners_up(planned: Planned) -> dict[str, RunnerUp]:
    problem, price = planned.problem, planned.priced
    state, inserter = State(problem, planned.assignment), Inserter(problem)
    runners_up: dict[str, RunnerUp] = {}
    for table, name in enumerate(problem.names):
        current = state.remove(table)
        for other in inserter.ranked(state, table):
            if other.move == current:
                continue
            state.add(table, other.move)
            changed = state.price()
            state.remove(table)
            if changed.excess_bytes <= price.excess_bytes:
                choice = choice_of_move(problem, table, other.move)
                runners_up[name] = RunnerUp(choice=choice, more_ms=changed.ms - price.ms)
                break
        state.add(table, current)
    return runners_up


def as_tree(report: Report) -> dict[str, Any]:
    """Return the report as a tree that ``json.dumps`` accepts."""
    planned, kinds = report.planned, report.kinds
    prediction = report.cost.predict(planned.plan)
    seeds = planned.found.seeds if planned.found else {}
    return {
        "planner": planned.planner,
        "predicted_ms": planned.priced.ms,
        "error": prediction.error if math.isfinite(prediction.error) else None,
        "feasible": planned.priced.feasible,
        "plan_seconds": planned.seconds,
        "sources": dict(report.cost.profile.sources),
        "bound": {"ms": report.bound.ms, "gap": report.bound.gap if report.bound.ms > 0 else None},
        "ranks": [
            {
                "rank": rank,
                "ms": dict(zip(TIMES, map(float, kinds[rank]), strict=True)),
                "memory_bytes": prediction.memory_bytes[rank],
                "sent_bytes": prediction.sent_bytes[rank],
                "tables": [name for name, choice in planned.plan.items() if rank in choice.ranks],
            }
            for rank in range(planned.problem.num_ranks)
        ],
        "tables": [
            {
                "name": name,
                **_layout(choice),
                "runner_up": None
                if (other := report.runners_up.get(name)) is None
                else {**_layout(other.choice), "more_ms": other.more_ms},
            }
            for name, choice in planned.plan.items()
        ],
        "seeds": {n: seed.ms if seed.feasible else None for n, seed in seeds.items()},
    }


def _layout(choice: Choice) -> dict[str, Any]:
    return {"layout": str(choice.shape), "ranks": list(choice.ranks)}


def as_json(report: Report) -> str:
    return json.dumps(as_tree(report), indent=1)


def as_text(report: Report) -> str:
    """Format the prediction, the bound, the ranks, the tables, and the best seeds as text."""
    tree = as_tree(report)
    lines = [
        f"{tree['planner']}: {prediction_text(tree['predicted_ms'], tree['error'], report.cost)}, "
        f"planned in {tree['plan_seconds']:.1f} s" + ("" if tree["feasible"] else "; DOES NOT FIT"),
        f"lower bound for any plan {report.bound.ms:.3f} ms, gap {100 * report.bound.gap:.1f} %; "
        "the bound applies to predicted step times, not to measured ones",
        "",
    ]
    rows: list[tuple[str, ...]] = [("rank", *TIMES, "memory MB", "sent MB", "tables")]
    for rank in tree["ranks"]:
        times = [f"{rank['ms'][kind]:.3f}" for kind in TIMES]
        size, sent = rank["memory_bytes"] / 1e6, rank["sent_bytes"] / 1e6
        rows.append(
            (str(rank["rank"]), *times, f"{size:.1f}", f"{sent:.2f}", str(len(rank["tables"])))
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += ["  ".join(map(str.rjust, row, widths)) for row in rows]
    lines += [
        "",
        "table: layout on ranks; best alternative: ms that it would add to a step",
    ]
    for table in tree["tables"]:
        text = f"{table['name']}: {table['layout']} on {_ranks(table['ranks'])}"
        if other := table["runner_up"]:
            where = f"{other['layout']} on {_ranks(other['ranks'])}"
            text += f"; {where}: {other['more_ms']:+.4f} ms"
        lines.append(text)
    seeds = {name: ms for name, ms in tree["seeds"].items() if ms is not None}
    if seeds:
        best = sorted(seeds.items(), key=lambda seed: seed[1])[:SEEDS_SHOWN]
        texts = ", ".join(f"{name} {ms:.3f} ms" for name, ms in best)
        lines.append(f"best of the search's {len(seeds)} starting plans: {texts}")
    return "\n".join(lines)


def prediction_text(ms: float, error: float | None, cost: TaskCost) -> str:
    """Format the predicted step time with the expected error."""
    if error is None:
        measured = cost.profile.sources.get("work") == "measured"
        reason = (
            "the error is unknown" if measured else "based on data sheets; nothing was measured"
        )
        return f"predicted step {ms:.3f} ms ({reason})"
    return f"predicted step {ms:.3f} ms (9 of 10 held-out steps were within {100 * error:.0f} %)"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 8 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}..{ranks[-1]}"
    return ",".join(map(str, ranks))


def as_html(report: Report) -> str:
    """Return an HTML page with bars for each rank's work and transfers, and ``as_text``."""
    kinds = report.kinds
    starts = np.concatenate([[0.0], np.cumsum(kinds.max(axis=0))])
    scale, height = 900.0 / max(float(starts[-1]), 1e-9), 22
    bars: list[str] = []
    for rank, row in enumerate(kinds):
        y = 10 + rank * height
        bars.append(f'<text x="0" y="{y + 15}" font-size="12">{rank}</text>')
        for place, ms in enumerate(row):
            title = html.escape(f"rank {rank}, {TIMES[place]}: {ms:.3f} ms")
            bars.append(
                f'<rect x="{40 + scale * starts[place]:.1f}" y="{y}" height="{height - 4}" '
                f'width="{max(scale * ms, 0.5):.1f}" fill="{COLORS[place]}">'
                f"<title>{title}</title></rect>"
            )
    title = html.escape(
        f"{report.planned.planner}: predicted step {report.planned.priced.ms:.3f} ms"
    )
    return (
        f'<!doctype html><meta charset="utf-8"><title>{title}</title><h1>{title}</h1>'
        f'<svg width="960" height="{20 + height * len(kinds)}" font-family="sans-serif">'
        f"{''.join(bars)}</svg><pre>{html.escape(as_text(report))}</pre>\n"
    )
