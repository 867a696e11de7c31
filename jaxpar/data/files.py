"""The files of a source: which there are, and their bytes, decompressed while they are read."""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import gzip
import importlib
import io
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from jaxpar.errors import ConfigError

_BUFFER = 1 << 20
_CHUNK = 1 << 12  # bytes of a zstd file, which come back at once: 128 KiB for every few bytes at worst


def find_files(pattern: str, field: str, names: tuple[str, ...] = ("*",)) -> list[Path]:
    """The files that ``pattern`` names, sorted by path; never empty, and none is opened.

    ``pattern`` is a file, a glob pattern (``**`` for folders of any depth), or a folder, which is searched to any depth
    for files that match one of ``names``; hidden ones are left out. Links are followed. What is there and cannot be
    looked at, such as a link to nothing or a closed folder, is an error: it would be missing without a word.
    """
    path = expand(pattern, field)
    try:
        if path.is_file():
            return [path]
        if path.is_dir():
            found = [
                (file.relative_to(path).as_posix(), file)
                for file in _walk(path)
                if any(fnmatch.fnmatch(file.name.lower(), name) for name in names) and _is_regular(file)
            ]
        else:
            found = [(file, Path(file)) for file in glob.glob(str(path), recursive=True) if _is_regular(file)]
    except OSError as error:
        rule = f"cannot be looked into: {error.filename or path}: {error.strerror}"
        raise ConfigError(field, pattern, rule) from None
    if not found:
        legal = None if names == ("*",) else f"a file, a pattern, or a folder that holds {' or '.join(names)}"
        rule = "names no file" if path.exists() else "does not exist and matches no file"
        raise ConfigError(field, pattern, rule, legal)
    return [file for _, file in sorted(found)]


def expand(pattern: str, field: str) -> Path:
    """``pattern`` with ``~`` as the home folder; ``ConfigError`` if it is empty, which would be the folder at hand."""
    if not pattern:
        raise ConfigError(field, pattern, "is empty", "a file, a pattern, or a folder; . is this one")
    return Path(os.path.expanduser(pattern))


def _walk(top: Path) -> Iterator[Path]:
    """Yield what is in a folder, at any depth, but folders and what is hidden; ``OSError`` for a closed folder."""

    def refuse(error: OSError) -> None:
        raise error

    above = {str(top): {os.path.realpath(top)}}  # the folders that each one is in: where a link goes round in circles
    for folder, inner, files in os.walk(top, onerror=refuse, followlinks=True):
        inner[:] = [name for name in inner if not name.startswith(".")]
        real = {name: os.path.realpath(os.path.join(folder, name)) for name in inner}
        inner[:] = [name for name in inner if real[name] not in above[folder]]
        above |= {os.path.join(folder, name): above[folder] | {real[name]} for name in inner}
        yield from (Path(folder, name) for name in files if not name.startswith("."))


def _is_regular(path: str | Path) -> bool:
    """Whether it is a file with content, not a folder or a pipe; ``OSError`` for a link to nothing."""
    return stat.S_ISREG(os.stat(path).st_mode)


def look(files: Sequence[Path]) -> tuple[str, list[list[Any]]]:
    """The folder that holds all of the files, and of each file its path inside it, its size and when it changed."""
    paths = [Path(os.path.abspath(path)) for path in files]
    base = os.path.commonpath([path.parent for path in paths])
    found = [(path, path.stat()) for path in paths]
    return base, [[os.path.relpath(path, base), state.st_size, state.st_mtime_ns] for path, state in found]


def what_changed(before: list[list[Any]], after: list[list[Any]]) -> str | None:
    """Which files, as ``look`` found them, are not as they were, in words; None if all are."""
    old, new = ({str(name): rest for name, *rest in files} for files in (before, after))
    changed = [name for name in new if name in old and new[name] != old[name]]
    added, gone = [name for name in new if name not in old], [name for name in old if name not in new]
    parts = [(changed, "changed"), (added, "is new"), (gone, "is gone")]
    said = [f"{names[0]}{_and_more(names)} {what}" for names, what in parts if names]
    return ", ".join(said) or None


def refuse_change(before: list[list[Any]], files: Sequence[Path], name: str, field: str) -> None:
    """Raise ``ConfigError`` unless the files of the source ``name`` are as they were ``before`` they were read."""
    if changed := what_changed(before, look(files)[1]):
        raise ConfigError(f"{field}.path", name, f"changed while it was read: {changed}", "files that stay as they are")


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1:,} more" if len(names) > 1 else ""


def open_file(path: Path, field: str) -> BinaryIO:
    """``path`` opened to read bytes; what ends in ``.gz`` or ``.zst`` is decompressed, all its members or frames."""
    if path.suffix.lower() in (".gz", ".zst") and not path.stat().st_size:
        raise EOFError("it is empty, where even no text would be some bytes compressed")
    match path.suffix.lower():
        case ".gz":
            return io.BufferedReader(gzip.open(path), _BUFFER)
        case ".zst":
            return io.BufferedReader(_Zstandard(path, field), _BUFFER)
    return path.open("rb", buffering=_BUFFER)


@contextlib.contextmanager
def reading(path: Path, pattern: str, field: str, *errors: type[Exception]) -> Iterator[None]:
    """Raise ``ConfigError`` naming ``path`` when it cannot be read, or is cut off or damaged.

    ``errors`` are those of a file format's library. Nothing that the body's caller does between two values is caught.
    """
    damage: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, *errors)
    try:
        path.open("rb").close()  # says why a file cannot be opened, which not every library does
        yield
    except damage as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{field}.path", pattern, f"holds a file that cannot be read: {path}: {reason}") from None


def require(module: str, field: str, value: object) -> Any:
    """Import ``module``, of the extra ``data``; where it is not installed, ``ConfigError`` says what installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        legal = 'after pip install -e ".[data]"'
        raise ConfigError(field, value, f"needs {package}, which cannot be imported: {error}", legal) from None


class _Zstandard(io.RawIOBase):
    """The content of a zstd file, frame after frame.

    ``zstandard.ZstdDecompressor.stream_reader`` takes a file that is cut off for a shorter one; this raises EOFError.
    """

    def __init__(self, path: Path, field: str):
        self._zstandard = require("zstandard", f"{field}.path", str(path))
        # the largest window there is, which files of `zstd --long=31` need
        self._decompressor = self._zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._frame: Any = None  # the frame being read, if any
        self._compressed = b""
        self._ready = memoryview(b"")
        self._file = path.open("rb", buffering=_BUFFER)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._compressed = self._compressed or self._file.read(_CHUNK)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("it ends inside a zstd frame")
                return 0
            self._ready = memoryview(self._decompress())
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _decompress(self) -> bytes:
        """What ``_compressed`` holds of one frame; the rest, of the next, stays there."""
        self._frame = self._frame or self._decompressor.decompressobj()
        try:
            content = self._frame.decompress(self._compressed)
        except self._zstandard.ZstdError as error:
            raise OSError(str(error)) from None
        self._compressed = self._frame.unused_data
        if self._frame.eof:
            self._frame = None
        return content

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
