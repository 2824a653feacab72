"""Plot statistics of tables: the distribution of lookups over rows, and how often ids repeat."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sbpflow.data.stats import BATCH_SIZES, NUM_BINS, FieldStats
from sbpflow.errors import ConfigError


def write_png(stats: Sequence[FieldStats], path: Path) -> None:
    """Draw two heat maps with one row per table: the lookups by frequency bin, and the distinct ids
    per lookup by batch size.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--png needs matplotlib; run pip install 'sbpflow[plots]'") from error
    figure = Figure(figsize=(14, 2 + 0.28 * len(stats)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    names = [f"{s.name} ({s.rows:,})" for s in stats]
    shares = np.array([np.array(s.bins_lookups) / max(sum(s.bins_lookups), 1) for s in stats])
    sizes = [size for size in BATCH_SIZES if all(str(size) in s.unique_ratio for s in stats)]
    ratios = np.array([[s.unique_ratio[str(size)] for size in sizes] for s in stats])
    labels = ["1", *(f"to {2**k}" for k in range(1, NUM_BINS - 1)), "more"]
    for axes, values, ticks, title in (
        (left, shares, labels, "share of a batch's lookups, by number of lookups per row"),
        (right, ratios, [f"{size:,}" for size in sizes], "distinct ids per lookup, by batch size"),
    ):
        if not ticks:  # the set is smaller than the smallest batch
            axes.set_axis_off()
            continue
        image = axes.imshow(values, aspect="auto", vmin=0, vmax=1, cmap="viridis")
        axes.set_xticks(range(len(ticks)), ticks, rotation=45, ha="right", fontsize=8)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_title(title, fontsize=10)
        figure.colorbar(image, ax=axes)
    figure.savefig(path, dpi=120, format="png")
