"""Sources of columns, read by pyarrow: Parquet files, and datasets that Hugging Face's library saved on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpar.data.files import expand, find_files, reading, require
from jaxpar.data.records import Records, missing
from jaxpar.errors import ConfigError
from jaxpar.serialize import suggest

_ROWS = 128  # turned into Python objects at a time
_BUFFER = 1 << 20  # bytes of a column read at a time
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # how an Arrow stream ends that was written to its end


@dataclass(frozen=True)
class _Table(Records):
    """Records that are rows of a table; only the columns that are asked for are read."""

    column: str = "text"

    def _columns(self, schema: Any, path: Path, field: str) -> list[str]:
        """The columns to read, all of them there and the text one of text, or ``ConfigError`` naming the file."""
        import pyarrow as pa

        asked = {f"{field}.column": self.column}
        asked |= {f"{field}.where.{k}.column": wanted.column for k, wanted in enumerate(self.where)}
        row = pa.struct(list(schema))
        for place, column in asked.items():
            found = _column_type(row, column)
            if found is None:
                raise missing(column, _column_names(row), str(path), place)
            if column == self.column and not _holds_text(found):
                raise ConfigError(place, column, f"is a column of {found}, not of text, in {path}")
        return list(dict.fromkeys(asked.values()))

    def _rows(self, batches: Iterator[Any], path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        number = 0
        for batch in batches:
            for row in batch.to_pylist():
                yield f"{path} row {number}", row
                number += 1


@dataclass(frozen=True)
class Parquet(_Table):
    """Parquet files: ``path`` is a file, a glob pattern, or a folder, which is searched to any depth for *.parquet.

    A stretch of a row group is in memory at a time, of the columns that are asked for. Rows count from 0.
    """

    def inputs(self, field: str = "data.sources.0") -> list[Path]:
        """The files that are read, in order."""
        return find_files(self.path, f"{field}.path", ("*.parquet",))

    def _records(self, field: str) -> Iterator[tuple[str, Any]]:
        pa, parquet = (require(name, f"{field}.path", self.path) for name in ("pyarrow", "pyarrow.parquet"))
        for path in self.inputs(field):
            with (
                reading(path, self.path, field, pa.ArrowException, UnicodeDecodeError),
                # pre_buffer would hold whole row groups
                parquet.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False) as file,
            ):
                columns = self._columns(file.schema_arrow, path, field)
                yield from self._rows(file.iter_batches(_ROWS, columns=columns, use_threads=False), path)


@dataclass(frozen=True)
class SavedDataset(_Table):
    """A dataset that ``datasets.Dataset.save_to_disk`` wrote to the folder ``path``, or one ``split`` of several.

    The library itself is not needed: the folder holds Arrow streams, read one of their batches at a time. Rows count
    from 0 in each file.
    """

    split: str | None = None

    @property
    def name(self) -> str:
        """What summaries call this source."""
        return self.path if self.split is None else f"{self.path} ({self.split})"

    def inputs(self, field: str = "data.sources.0") -> list[Path]:
        """The files that are read, in order."""
        folder = expand(self.path, f"{field}.path")
        if (index := folder / "dataset_dict.json").is_file():
            splits = self._listed(index, "splits", field)
            if self.split not in splits:
                rule = suggest("is not one of its splits", self.split or "", splits)
                raise ConfigError(f"{field}.split", self.split, rule, ", ".join(splits))
            folder /= self.split or ""
        elif self.split is not None:
            raise ConfigError(f"{field}.split", self.split, f"is not there: {self.path} has no splits", "none")
        if not (index := folder / "state.json").is_file():
            rule = f"holds no saved dataset: {index} is not there"
            raise ConfigError(f"{field}.path", self.path, rule, "a folder that datasets.save_to_disk wrote")
        files = [folder / name for name in self._listed(index, "_data_files", field)]
        for file in files:
            if not file.is_file():
                raise ConfigError(f"{field}.path", self.path, f"is not whole: {file} is not there")
        return files

    def _listed(self, index: Path, key: str, field: str) -> list[str]:
        """The names of the files or splits that ``key`` lists in a file that says what a folder holds."""
        with reading(index, self.path, field, ValueError, RecursionError):
            content = json.loads(index.read_bytes())
            listed = content.get(key) if isinstance(content, dict) else None
            listed = listed if isinstance(listed, list) else []
            names: list[Any] = [one.get("filename") if isinstance(one, dict) else one for one in listed]
            if not names or not all(isinstance(name, str) for name in names):
                raise ValueError(f"{key} is no list of names")
            return [str(name) for name in names]

    def _records(self, field: str) -> Iterator[tuple[str, Any]]:
        pa = require("pyarrow", f"{field}.path", self.path)
        for path in self.inputs(field):
            with reading(path, self.path, field, pa.ArrowException, UnicodeDecodeError), pa.OSFile(str(path)) as file:
                file.seek(max(file.size() - len(_END_OF_STREAM), 0))
                if file.read() != _END_OF_STREAM:  # between two batches pyarrow would not notice
                    raise EOFError("it ends inside an Arrow stream")
                file.seek(0)
                stream = pa.ipc.open_stream(file)
                columns = self._columns(stream.schema, path, field)
                known = stream.schema.names
                outer = list(dict.fromkeys(c if c in known else c.partition(".")[0] for c in columns))
                yield from self._rows(_slices(stream, outer), path)


def _slices(stream: Any, columns: list[str]) -> Iterator[Any]:
    for batch in stream:
        for begin in range(0, batch.num_rows, _ROWS):
            yield batch.select(columns).slice(begin, _ROWS)


def _column_type(row: Any, column: str) -> Any:
    """The Arrow type of a column, or of one inside structs by its dotted name; None if it is not there once."""
    if (index := row.get_field_index(column)) >= 0:
        return row.field(index).type
    for name in str(column).split("."):
        index = row.get_field_index(name) if hasattr(row, "get_field_index") else -1
        if index < 0:
            return None
        row = row.field(index).type
    return row


def _column_names(row: Any, prefix: str = "") -> list[str]:
    names = []
    for inner in row:
        nested = hasattr(inner.type, "get_field_index")
        names += _column_names(inner.type, f"{prefix}{inner.name}.") if nested else [f"{prefix}{inner.name}"]
    return names


def _holds_text(kind: Any) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    return any(
        is_text(kind) for is_text in (types.is_string, types.is_large_string, types.is_string_view, types.is_null)
    )
