"""The columns of a prepared set as a model sees them."""

from data.format.manifest import Manifest
from data.format.schema import Field
from sbpflow.run.model import Fields, IdField


def fields_of(manifest: Manifest) -> Fields:
    """Dense columns, id columns and crosses, in the order of a batch."""
    return Fields(
        dense=manifest.dense,
        sparse=tuple(_id_field(column) for column in manifest.sparse),
        crosses=tuple(_id_field(column) for column in manifest.crosses),
    )


def _id_field(column: Field) -> IdField:
    return IdField(
        name=column.name,
        rows=column.rows,
        hotness=column.hot,
        ragged=column.ragged,
        weighted=column.weighted,
        vocabulary=column.vocabulary,
    )
