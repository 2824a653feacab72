"""Accept tables in memory (pandas, Polars, and Arrow), and return results as the same kind of
table.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import polars as pl

from sbpflow.config.parse import plain
from sbpflow.data.__main__ import parser
from sbpflow.data.format.manifest import MANIFEST, SPLITS, Manifest
from sbpflow.data.prepare.propose import refuse_guess
from sbpflow.errors import ConfigError, DataError
from sbpflow.runtime.files.remote_path import input_path

_NEEDS_SCHEMA = (
    "data: this table needs a schema. Check the proposal below and pass it as schema (a mapping or "
    'the path of a YAML file), or accept it unchanged with schema="auto"'
)
_UNREADABLE = (ValueError, TypeError, NotImplementedError, pl.exceptions.PolarsError)
Frame = Any  # a pandas or Polars DataFrame, or an Arrow table; pandas and pyarrow are optional


def prepared_set(
    data: "Frame | str | Path | Mapping[str, Frame]",
    folder: Path,
    schema: str | Path | Mapping[str, Any] | None,
    options: Mapping[str, object],
) -> Path:
    """Return the path of the prepared set ``data``, or prepare the rows of ``data`` in
    ``folder``.
    """
    if isinstance(data, str | Path):
        path = input_path(str(data))
        if isinstance(path, Path) and (path / MANIFEST).is_file():
            if schema is not None or options:
                key = "prepare" if schema is None else "schema"
                raise ConfigError(f"{key}: {path} is already prepared; omit {key}")
            return path
    _check_schema(schema)
    _check_options(options, splits=isinstance(data, Mapping))
    words, split = ["prepare", "--output", str(folder / "set"), "--input"], list[str]()
    if isinstance(data, Mapping):
        parts = cast("Mapping[str, Frame]", data)
        if "train" not in parts or set(parts) - set(SPLITS):
            raise ConfigError(
                f"data contains rows for {', '.join(map(str, parts)) or 'nothing'}; pass rows for "
                "train and, optionally, val and test"
            )
        for part, rows in parts.items():
            words.append(input_of(rows, folder / f"{part}.arrow", f"data[{part!r}]"))
            split += [] if part == "train" else [f"{part}={Path(words[-1]).name}"]
    else:
        words.append(input_of(data, folder / "rows.arrow"))
    words += ["--split", f"file:{','.join(split)}"] if split else []
    for key, value in options.items():
        if value is None or value is False:  # the default
            continue
        text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        words += [f"--{key.replace('_', '-')}", *([] if value is True else [text])]
    if isinstance(schema, str | Path):
        words += ["--schema", str(schema)]
    args = parser().parse_args(words)
    if isinstance(schema, Mapping):
        args.schema = plain(schema)
    with named_rows(folder):
        if schema is None and args.like is None:
            refuse_guess(args.input, _NEEDS_SCHEMA)
        manifest: Manifest = args.run(args)
    return manifest.path


def _check_schema(schema: object) -> None:
    if not isinstance(schema, str | Path | Mapping | None):
        raise ConfigError(
            f"schema: a value of type {type(schema).__name__} is not a schema; give a YAML file, "
            'its content as a mapping, or "auto"'
        )


def _check_options(options: Mapping[str, object], *, splits: bool) -> None:
    """Raise ConfigError for an option that an argument replaces; ``splits`` is True if ``data``
    gives each split its own rows.
    """
    for name in ("input", "output", "schema", "help"):
        if name in options:
            raise ConfigError(
                f"prepare: {name} is not an option of fit, which prepares data with schema in a "
                'temporary folder; use options such as {"min_count": 1}'
            )
    if splits and options.get("split") is not None:
        raise ConfigError(
            f"prepare: split has no effect, because data gives each split its own rows, got "
            f"{options['split']!r}; remove split, or pass a single table as data"
        )


@contextmanager
def named_rows(folder: Path) -> Generator[None]:
    """In error messages, replace the paths of files in ``folder`` with the names that the caller
    uses for the rows. At the end, remove the files, which may be as large as the rows in memory.
    """
    try:
        yield
    except DataError as error:
        text = str(error).replace(str(folder / "rows.arrow"), "data")
        text = text.replace("--schema: ", "schema: ", 1) if text.startswith("--schema: ") else text
        for part in SPLITS:
            text = text.replace(str(folder / f"{part}.arrow"), f"data[{part!r}]")
        raise DataError(*text.split("\n  ")) from error
    finally:
        for part in ("rows", *SPLITS):
            (folder / f"{part}.arrow").unlink(missing_ok=True)


def input_of(data: "Frame | str | Path", file: Path, key: str = "data") -> str:
    """Return the path of the rows; rows in memory are first written to ``file``."""
    if isinstance(data, str | Path):
        return str(data)
    if isinstance(data, pl.DataFrame):
        frame = data
    elif hasattr(data, "__arrow_c_stream__"):
        try:
            frame = pl.DataFrame(data)
        except ImportError as error:
            raise ConfigError(
                f"{key}: {type(data).__name__} needs another package ({error}); run pip install "
                "'sbpflow[notebook]', or pass a Polars DataFrame or a file"
            ) from error
        except _UNREADABLE as error:
            raise DataError(
                f"{key} cannot be read as a table: {_unreadable_column(data)}{error}; every column "
                "must have a single type"
            ) from error
    else:
        raise ConfigError(
            f"{key}: a value of type {type(data).__name__} is not a table; give a pandas or Polars "
            "DataFrame, an Arrow table, or the path of a file or of a prepared set"
        )
    frame.write_ipc(file)
    return str(file)


def _unreadable_column(data: Frame) -> str:
    """Return text that names the first column that cannot be read, or "" if every column can."""
    is_arrow = hasattr(data, "column_names")
    names = list(data.column_names if is_arrow else getattr(data, "columns", ()))
    for name in names if len(set(names)) == len(names) else ():
        try:
            pl.DataFrame(data.select([name]) if is_arrow else data[[name]])
        except _UNREADABLE:
            return f"column {name!r}: "
    return ""


def like(frame: pl.DataFrame, data: "Frame | str | Path") -> Frame:
    """Return ``frame`` as a pandas or Arrow table if ``data`` is one, and otherwise unchanged. A
    pandas result has the index of ``data`` if the two have equal lengths.
    """
    package = type(data).__module__.partition(".")[0]
    if package == "pyarrow":
        return frame.to_arrow()
    if package != "pandas":
        return frame
    result = frame.to_pandas()
    return result.set_index(data.index) if len(result) == len(data) else result
