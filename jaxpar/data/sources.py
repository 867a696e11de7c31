"""Where the text comes from: Python's standard library, text files, or records (JSON lines, Parquet, ...).

A source yields its documents in one fixed order that depends only on what is on disk: files by their paths, records as
they stand in the files. ``weight`` is the source's share of the training *sequences* relative to the other sources,
whatever their sizes. Nothing but the document at hand, and a stretch of its file, is in memory.

Every source has ``documents(field, dropped)``, the texts, and ``inputs(field)``, the files that they come from, found
without reading them; ``field`` is what errors call the source, such as ``data.sources.0``.
"""

from __future__ import annotations

import codecs
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpar.data.files import expand, find_files, open_file, reading, require
from jaxpar.data.records import Records, check_weight, parse_json
from jaxpar.data.tables import Parquet, SavedDataset
from jaxpar.errors import ConfigError

# Installed packages, tests and bundled tools, and what is generated for the machine at hand.
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip", "__pycache__"}
_STDLIB_GENERATED = ("_sysconfigdata", "config-")
_CHUNK = 1 << 20  # bytes of text decoded at a time
_RECORDS = 64  # of an array_record file read at a time


@dataclass(frozen=True)
class StandardLibrary:
    """The source text of Python's own standard library: some 10 MB that every machine already has.

    One document per ``*.py`` file, sorted by relative path. The text differs between Python versions.
    """

    weight: float = 1.0

    @property
    def name(self) -> str:
        """What summaries call this source."""
        return "standard library"

    def validate(self, field: str = "data.sources.0") -> None:
        """Raise ``ConfigError`` naming ``field`` (such as ``data.sources.0``) for an illegal value; reads no file."""
        check_weight(self.weight, field)

    def inputs(self, field: str = "data.sources.0") -> list[Path]:
        """The files that are read, in order."""
        root = Path(sysconfig.get_paths()["stdlib"])
        modules = []
        for folder, subfolders, files in os.walk(root):
            subfolders[:] = [name for name in subfolders if _is_library(name)]
            modules += [Path(folder, name) for name in files if name.endswith(".py") and _is_library(name)]
        return sorted(modules, key=lambda path: path.relative_to(root).as_posix())

    def documents(self, field: str = "data.sources.0", dropped: Counter[str] | None = None) -> Iterator[str]:
        """Yield the text of each module; bytes that are not UTF-8 become U+FFFD. None is ever ``dropped``."""
        for path in self.inputs(field):
            yield path.read_bytes().decode("utf-8", errors="replace")


@dataclass(frozen=True)
class TextFiles:
    """UTF-8 text: ``path`` is a file, a glob pattern, or a folder, which is searched to any depth.

    One document per file, or, with a ``separator``, one per stretch of text between separators. Files that end in
    ``.gz`` or ``.zst`` are decompressed. A byte order mark is no part of the text; line ends are kept as they are.
    """

    path: str
    separator: str | None = None
    weight: float = 1.0

    @property
    def name(self) -> str:
        """What summaries call this source."""
        return self.path

    def validate(self, field: str = "data.sources.0") -> None:
        """Raise ``ConfigError`` naming ``field`` (such as ``data.sources.0``) for an illegal value; reads no file."""
        check_weight(self.weight, field)
        if self.separator == "":
            raise ConfigError(f"{field}.separator", self.separator, "is empty", "None, or at least one character")

    def inputs(self, field: str = "data.sources.0") -> list[Path]:
        """The files that are read, in order."""
        return find_files(self.path, f"{field}.path")

    def documents(self, field: str = "data.sources.0", dropped: Counter[str] | None = None) -> Iterator[str]:
        """Yield the documents; raise ``ConfigError`` for text that is not UTF-8. None is ever ``dropped``."""
        for path in self.inputs(field):
            with reading(path, self.path, field):
                text = self._text(path, field)
                yield from _split(text, self.separator) if self.separator else ("".join(text),)

    def _text(self, path: Path, field: str) -> Iterator[str]:
        """Yield the text of a file, a chunk at a time."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        begin, chunk = 0, b"any"
        with open_file(path, field) as file:
            while chunk:
                chunk = file.read(_CHUNK)
                kept = len(decoder.getstate()[0])
                try:
                    text = decoder.decode(chunk, final=not chunk)
                except UnicodeDecodeError as error:
                    rule = f"holds a file that is not UTF-8 text: {path} (byte {begin - kept + error.start})"
                    raise ConfigError(f"{field}.path", self.path, rule) from None
                yield text if begin else text.removeprefix("\ufeff")
                begin += len(chunk)


@dataclass(frozen=True)
class JsonLines(Records):
    """One JSON object per line; blank lines are skipped.

    ``path`` is a file, a glob pattern, or a folder, which is searched to any depth for *.jsonl. Files that end in
    ``.gz`` or ``.zst`` are decompressed. Lines count from 1.
    """

    column: str = "text"

    def inputs(self, field: str = "data.sources.0") -> list[Path]:
        """The files that are read, in order."""
        return find_files(self.path, f"{field}.path", ("*.jsonl", "*.jsonl.gz", "*.jsonl.zst"))

    def _records(self, field: str) -> Iterator[tuple[str, Any]]:
        for path in self.inputs(field):
            with reading(path, self.path, field), open_file(path, field) as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        place = f"{path}:{number}"
                        yield place, parse_json(line, self.path, place, field)


@dataclass(frozen=True)
class ArrayRecord(Records):
    """array_record files, whose records are UTF-8 text, or, with a ``column``, JSON objects. No other kind is read.

    ``path`` is a file, a glob pattern, or a folder, which is searched to any depth for *.array_record, with or without
    the suffix of a shard. Records count from 0.
    """

    def validate(self, field: str = "data.sources.0") -> None:
        """Raise ``ConfigError`` naming ``field`` (such as ``data.sources.0``) for an illegal value; reads no file."""
        super().validate(field)
        if self.where and self.column is None:
            rule = "has no columns to look at: without a column the records are plain text"
            raise ConfigError(f"{field}.where", ", ".join(map(str, self.where)), rule, "a column as well, for JSON")

    def inputs(self, field: str = "data.sources.0") -> list[Path]:
        """The files that are read, in order."""
        return find_files(self.path, f"{field}.path", ("*.array_record*", "*.arrayrecord*"))

    def _records(self, field: str) -> Iterator[tuple[str, Any]]:
        module = require("array_record.python.array_record_module", f"{field}.path", self.path)
        for path in self.inputs(field):
            with reading(path, self.path, field, RuntimeError):
                reader = module.ArrayRecordReader(str(path), "readahead_buffer_size:1M,max_parallelism:1")
                if not reader.ok():  # it would only count no records
                    raise EOFError("it is no array_record file, or not a whole one")
                count = reader.num_records()
                for begin in range(0, count, _RECORDS):
                    for number, content in enumerate(reader.read(begin, min(begin + _RECORDS, count)), start=begin):
                        place = f"{path} record {number}"
                        yield place, self._record(content, place, field)
                reader.close()

    def _record(self, content: bytes, place: str, field: str) -> Any:
        if self.column is not None:
            return parse_json(content, self.path, place, field)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            rule = f"holds a record that is not UTF-8 text: {place} (byte {error.start})"
            raise ConfigError(f"{field}.path", self.path, rule) from None


Source = StandardLibrary | TextFiles | JsonLines | Parquet | SavedDataset | ArrayRecord


def source_of(path: str, field: str) -> Source:
    """The source for ``path``, by the names of its files; all that are of no other kind are text.

    Raise ``ConfigError`` naming ``field`` when there is no file, or files of more than one kind.
    """
    folder = expand(path, field)
    if any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return SavedDataset(path)
    kinds = sorted({_class_of(file) for file in find_files(path, field)}, key=lambda kind: kind.__name__)
    if len(kinds) > 1:
        rule = f"names files of different kinds: {', '.join(kind.__name__ for kind in kinds)}"
        raise ConfigError(field, path, rule, "files of one kind, such as a pattern picks")
    return kinds[0](path)


def _class_of(file: Path) -> type[TextFiles | JsonLines | Parquet | ArrayRecord]:
    name = file.name.lower()
    if name.removesuffix(".gz").removesuffix(".zst").endswith(".jsonl"):
        return JsonLines
    if name.endswith(".parquet"):
        return Parquet
    return ArrayRecord if ".array_record" in name or ".arrayrecord" in name else TextFiles


def _is_library(name: str) -> bool:
    return name not in _STDLIB_SKIPPED and not name.startswith(_STDLIB_GENERATED)


def _split(chunks: Iterator[str], separator: str) -> Iterator[str]:
    """``"".join(chunks).split(separator)``, a document at a time."""
    keep = len(separator) - 1  # characters that may be the begin of a separator
    held: list[str] = []  # of the document at hand
    rest = ""  # what follows, not looked through to its end
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(separator)
        if whole:
            yield "".join([*held, whole[0]])
            yield from whole[1:]
            held = []
        if len(rest) > keep:
            held.append(rest[: len(rest) - keep])
            rest = rest[len(rest) - keep :]
    yield "".join([*held, rest])
