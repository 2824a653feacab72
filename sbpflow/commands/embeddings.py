"""``sbpflow embeddings``: write a trained table's vectors along with the original values."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

from sbpflow.commands.saved_run import add_model, saved_run
from sbpflow.runtime.files.local_path import local_path
from sbpflow.runtime.processes.launch import ArgumentParser, unwritable

if TYPE_CHECKING:
    import numpy as np
    import polars as pl
    from numpy.typing import NDArray

    from sbpflow.checkpoint.read import Checkpoint
    from sbpflow.config.schema import Config
    from sbpflow.data import Manifest
    from sbpflow.run.model.spec import ModelConfig

VECTOR, _OTHER_VECTOR = "vector", "embedding"
"""The name of the column of vectors, and its name if the column of values is called ``vector``"""
_BLOCK_BYTES = 32 << 20
_SUFFIXES = (".parquet", ".arrow")


def embeddings(argv: Sequence[str]) -> int:
    """Write a table's values and vectors to a file, ready for a vector index."""
    parser = ArgumentParser(prog="sbpflow embeddings", description=embeddings.__doc__)
    add_model(parser, "checkpoint")
    add = parser.add_argument
    add("--table", required=True, help="name of a table, as `sbpflow explain` prints it")
    text = "a .parquet or .arrow file"
    add("--output", type=local_path, required=True, metavar="FILE", help=text)
    args = parser.parse_intermixed_args(argv)

    import polars as pl
    from polars.exceptions import ComputeError
    from polars.io.plugins import register_io_source

    from sbpflow.data.values import value_blocks

    output = args.output
    if output.suffix not in _SUFFIXES or output.exists():
        fault = f"must end in {' or '.join(_SUFFIXES)}"
        if output.exists():
            fault = "already exists; remove it first, or use another path"
        parser.error(f"--output {output}: {fault}")
    checkpoint, config = saved_run(args)
    manifest, feature, keys = source_of(checkpoint, config, args.table)
    name = f"tables/{args.table}"
    dim = checkpoint.saved(name).shape[1]
    block_rows = max(1, _BLOCK_BYTES // (4 * dim))
    blocks = value_blocks(manifest, feature, block_rows, keys)
    first = next(blocks, None)
    if first is None:
        parser.error(f"--table {args.table}: no value of {feature} has its own row")
    num_rows = 0

    def frames(*_query: object) -> Iterator[pl.DataFrame]:
        """Yield frames with all rows. The query from Polars can be ignored, because it requests all
        rows for both kinds of output files.
        """
        nonlocal num_rows
        for values, rows in chain([first], blocks):
            yield (frame := _frame(checkpoint, name, feature, values, rows))
            num_rows += len(frame)

    schema = _frame(checkpoint, name, feature, first[0][:0], first[1][:0]).schema
    table = register_io_source(frames, schema=schema)
    partial = output.with_name(output.name + ".partial")
    try:
        if output.suffix == ".parquet":
            table.sink_parquet(partial)
        else:
            table.sink_ipc(partial)
        partial.replace(output)
    except (OSError, ComputeError) as error:  # Polars raises either for a full disk
        parser.error(f"--output {output} {unwritable(error)}")
    finally:
        partial.unlink(missing_ok=True)
    print(f"{output}: {num_rows:,} values of {feature} with vectors of {dim} numbers")
    return 0


def source_of(
    checkpoint: "Checkpoint", config: "Config", table: str
) -> "tuple[Manifest, str, NDArray[np.int64] | None]":
    """Return the run's set, the table's column, and the keys if the table grows."""
    from sbpflow.checkpoint.folder import data_folder
    from sbpflow.data import fields_of, load_manifest
    from sbpflow.run.saved.saved_model import keys_of, table_of

    manifest = load_manifest(data_folder(checkpoint.path))
    table_config = table_of(cast("ModelConfig", config.model).spec(fields_of(manifest)), table)
    return manifest, table_config.features[0], keys_of(checkpoint, table_config)


def _frame(
    checkpoint: "Checkpoint",
    name: str,
    feature: str,
    values: "NDArray[Any]",
    rows: "NDArray[np.int32]",
) -> "pl.DataFrame":
    """Return a frame of values and their vectors. ``rows`` must be in ascending order."""
    import polars as pl
    import torch

    dim = checkpoint.saved(name).shape[1]
    start, stop = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
    block = checkpoint.tensor(name, slice(start, stop), dtype=torch.float32).numpy()
    kind = pl.Int64 if values.dtype.kind == "i" else pl.String
    vectors = pl.Series(block[rows - start], dtype=pl.Array(pl.Float32, dim))
    column = VECTOR if feature != VECTOR else _OTHER_VECTOR
    return pl.DataFrame({feature: pl.Series(values.tolist(), dtype=kind), column: vectors})
