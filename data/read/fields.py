"""Describe the columns of a prepared set for a model."""

from sbpflow.data.format.manifest import Manifest
from sbpflow.data.format.schema import Field
from sbpflow.data.stats import FieldStats, load_stats
from sbpflow.embedding.plan.id_statistics import IdFrequencies
from sbpflow.run.model.spec import Fields, IdField


def fields_of(manifest: Manifest) -> Fields:
    """Return dense columns, id columns, and crosses in the order of a batch. If the set has
    statistics, which encoded rows do not have, the result includes the frequencies of ids.
    """
    recorded = load_stats(manifest) if manifest.content.get("stats") else []
    stats = {field.name: field for field in recorded}
    rows = manifest.splits["train"]
    return Fields(
        dense=manifest.dense,
        sparse=tuple(_id_field(c, stats.get(c.name), rows) for c in manifest.sparse),
        crosses=tuple(_id_field(c, stats.get(c.name), rows) for c in manifest.crosses),
        grouped=any(column.role == "group" for column in manifest.side),
        timed=any(column.role == "time" for column in manifest.side),
    )


def _id_field(column: Field, stats: FieldStats | None, num_rows: int) -> IdField:
    frequencies = None
    if stats is not None and num_rows:
        bins = tuple(zip(stats.bins_rows, stats.bins_lookups, strict=True))
        frequencies = IdFrequencies(bins, stats.lookups / num_rows)
    return IdField(
        name=column.name,
        rows=column.rows,
        hotness=column.hot,
        ragged=column.ragged,
        weighted=column.weighted,
        vocabulary=column.vocabulary,
        keyed=column.keyed,
        frequencies=frequencies,
    )
