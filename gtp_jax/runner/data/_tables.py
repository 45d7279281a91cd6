"""Reads tables of records: Parquet files, and data sets that the `datasets` package has saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..._foreign import printable
from ._lines import as_document

# The number of rows that are read at a time when iterating.
_ROWS = 1024

# The files that `save_to_disk` writes into a folder for one data set, and for several splits.
_ONE, _SPLITS = ("dataset_info.json", "state.json"), "dataset_dict.json"


class Table(Sequence[bytes]):
    """The documents in a column of a table.

    Args:
        path: the path of the table, for messages.
        rows: a table of the `datasets` package.
        field: the name of the column that holds the text.

    Raises:
        ValueError: if there is no such column. Reading a document raises one, which names its row, if it is not text.
    """

    def __init__(self, path: Path, rows: Any, field: str) -> None:
        _check_column(path, rows.column_names, field)
        self._path, self._rows, self._field = path, rows.select_columns([field]).with_format(None), field

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        return self._document(number, self._rows[int(number)][self._field])

    def __iter__(self) -> Iterator[bytes]:
        number = 0
        for batch in self._rows.iter(batch_size=_ROWS):
            for text in batch[self._field]:
                yield self._document(number, text)
                number += 1

    def _document(self, number: int, text: Any) -> bytes:
        try:
            return as_document(text, self._field)
        except ValueError as error:
            raise ValueError(f"`data` {self._path}, row {number}: {error}") from error


def is_saved(directory: Path) -> bool:
    """Returns whether a directory was written by `save_to_disk` of the `datasets` package."""
    return (directory / _SPLITS).is_file() or all((directory / name).is_file() for name in _ONE)


def read_saved(directory: Path, field: str) -> Table:
    """Returns the documents of a saved data set.

    Raises:
        ModuleNotFoundError: if the `datasets` package is not installed.
        ValueError: if the data set has several splits, or cannot be read.
    """
    datasets = _package(directory)
    if (directory / _SPLITS).is_file():
        splits = sorted(path.name for path in directory.iterdir() if path.is_dir())
        raise ValueError(
            f"`data` {directory} has the splits {', '.join(splits)}. Give one of them, {directory / splits[0]}."
            if splits
            else f"`data` {directory} has no split. Save the data set again."
        )
    return Table(directory, _read(directory, lambda: datasets.load_from_disk(str(directory))), field)


def read_parquet(path: Path, field: str) -> Table:
    """Returns the documents of a Parquet file, whose text stays in memory.

    Raises:
        ModuleNotFoundError: if the `datasets` package is not installed.
        ValueError: if the file cannot be read.
    """
    datasets = _package(path)
    from pyarrow import parquet  # pyright: ignore[reportMissingImports]  # datasets depends on it

    _check_column(path, _read(path, lambda: parquet.ParquetFile(path).schema_arrow.names), field)
    table = _read(path, lambda: parquet.read_table(path, columns=[field]))
    return Table(path, datasets.Dataset(datasets.table.InMemoryTable(table)), field)


def _check_column(path: Path, columns: Sequence[str], field: str) -> None:
    if field not in columns:
        raise ValueError(
            f"`data` {path}: there is no column {field!r}; it has {', '.join(map(printable, columns))}. Name the "
            "column of the text with --text-field."
        )


def _package(path: Path) -> Any:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'`data` {path} needs the `datasets` package: `pip install "gtp_jax[data]"`. JSON Lines and plain text '
            "can be read without it."
        ) from error
    return datasets


def _read[T](path: Path, read: Callable[[], T]) -> T:
    """Returns the result of `read`, which calls another package.

    Raises:
        ValueError: for any exception that `read` raises.
    """
    try:
        return read()
    except Exception as error:
        raise ValueError(f"`data` {path} cannot be read: {str(error).removesuffix('.')}. Write it again.") from error
