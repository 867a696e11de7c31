"""Where the text comes from: the Python standard library, text files, or JSON lines.

A source yields its documents in one fixed order that depends only on what is on disk. ``weight`` is the source's
share of the training *sequences* relative to the other sources, whatever their sizes.
"""

from __future__ import annotations

import glob
import json
import math
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxpar.errors import ConfigError

# Installed packages, tests and bundled tools, and what is generated for the machine at hand.
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip", "__pycache__"}
_STDLIB_GENERATED = ("_sysconfigdata", "config-")


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
        _check_weight(self.weight, field)

    def inputs(self, field: str = "data.sources.0") -> list[Path]:
        """The files that ``documents`` reads, in order."""
        root = Path(sysconfig.get_paths()["stdlib"])
        modules = []
        for folder, subfolders, files in os.walk(root):
            subfolders[:] = [name for name in subfolders if _is_library(name)]
            modules += [Path(folder, name) for name in files if name.endswith(".py") and _is_library(name)]
        return sorted(modules, key=lambda path: path.relative_to(root).as_posix())

    def documents(self, field: str = "data.sources.0") -> Iterator[str]:
        """Yield the text of each module; bytes that are not UTF-8 become U+FFFD."""
        for path in self.inputs(field):
            yield path.read_bytes().decode("utf-8", errors="replace")


@dataclass(frozen=True)
class TextFiles:
    """UTF-8 text: ``path`` is a file, a glob pattern, or a folder, which is searched to any depth.

    One document per file, or, with a ``separator``, one per stretch of text between separators.
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
        _check_weight(self.weight, field)
        if self.separator == "":
            raise ConfigError(f"{field}.separator", self.separator, "is empty", "None, or at least one character")

    def inputs(self, field: str = "data.sources.0") -> list[Path]:
        """The files that ``documents`` reads, in order; raise ``ConfigError`` when there are none."""
        return _files(self.path, f"{field}.path", folders=True)

    def documents(self, field: str = "data.sources.0") -> Iterator[str]:
        """Yield the documents, in the order of their paths; raise ``ConfigError`` for text that is not UTF-8."""
        for path in self.inputs(field):
            try:
                text = path.read_bytes().decode("utf-8")
            except UnicodeDecodeError as error:
                rule = f"holds a file that is not UTF-8 text: {path} (byte {error.start})"
                raise ConfigError(f"{field}.path", self.path, rule) from None
            yield from text.split(self.separator) if self.separator else (text,)


@dataclass(frozen=True)
class JsonLines:
    """One JSON object per line, its text under the key ``field``; ``path`` is a file or a glob pattern."""

    path: str
    field: str = "text"
    weight: float = 1.0

    @property
    def name(self) -> str:
        """What summaries call this source."""
        return self.path

    def validate(self, field: str = "data.sources.0") -> None:
        """Raise ``ConfigError`` naming ``field`` (such as ``data.sources.0``) for an illegal value; reads no file."""
        _check_weight(self.weight, field)

    def inputs(self, field: str = "data.sources.0") -> list[Path]:
        """The files that ``documents`` reads, in order; raise ``ConfigError`` when there are none."""
        return _files(self.path, f"{field}.path", folders=False)

    def documents(self, field: str = "data.sources.0") -> Iterator[str]:
        """Yield one document per line, reading line by line; blank lines are skipped.

        Raise ``ConfigError`` naming file and line for bad JSON, a missing key, or a value that is not text.
        """
        for path in self.inputs(field):
            with path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield self._text(line, f"{path}:{number}", field)

    def _text(self, line: bytes, place: str, field: str) -> str:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # bad JSON and bad UTF-8 alike
            raise ConfigError(f"{field}.path", self.path, f"holds a line that is not JSON: {place}: {error}") from None
        if not isinstance(record, dict) or not isinstance(text := record.get(self.field), str):
            keys = ", ".join(map(repr, record)) if isinstance(record, dict) else f"none, a {type(record).__name__}"
            raise ConfigError(f"{field}.field", self.field, f"is not a text in {place}", f"its keys: {keys}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            rule = f"holds half a surrogate pair, which is not text: {place}"
            raise ConfigError(f"{field}.path", self.path, rule) from None
        return text


Source = StandardLibrary | TextFiles | JsonLines


def _is_library(name: str) -> bool:
    return name not in _STDLIB_SKIPPED and not name.startswith(_STDLIB_GENERATED)


def _check_weight(weight: float, field: str) -> None:
    if not (isinstance(weight, (int, float)) and math.isfinite(weight) and weight > 0):
        raise ConfigError(f"{field}.weight", weight, "cannot be a share of the mixture", "a finite number above 0")


def _files(pattern: str, field: str, folders: bool) -> list[Path]:
    """The files that ``pattern`` names, sorted by path; never empty."""
    path = Path(os.path.expanduser(pattern))
    if path.is_file():
        return [path]
    if path.is_dir():
        if not folders:
            raise ConfigError(field, pattern, "is a folder", f"a file or a pattern such as {path / '*.jsonl'}")
        inside = ((file.relative_to(path), file) for file in path.rglob("*") if file.is_file())
        found = [(rel.as_posix(), file) for rel, file in inside if not any(part.startswith(".") for part in rel.parts)]
    else:
        found = [(file, Path(file)) for file in glob.glob(str(path), recursive=True) if os.path.isfile(file)]
    if not found:
        raise ConfigError(field, pattern, "names no file" if path.is_dir() else "does not exist and matches no file")
    return [file for _, file in sorted(found)]
