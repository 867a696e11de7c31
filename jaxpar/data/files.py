"""The files of a source: which there are, and their bytes, decompressed while they are read."""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import gzip
import importlib
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from jaxpar.errors import ConfigError

_BUFFER = 1 << 20
_CHUNK = 1 << 12  # bytes of a zstd file, which come back at once: 128 KiB for every few bytes at worst


def find_files(pattern: str, field: str, names: tuple[str, ...] = ("*",)) -> list[Path]:
    """The files that ``pattern`` names, sorted by path; never empty, and none is opened.

    ``pattern`` is a file, a glob pattern (``**`` for folders of any depth), or a folder, which is searched to any depth
    for files that match one of ``names``; hidden ones are left out.
    """
    path = Path(os.path.expanduser(pattern))
    if path.is_file():
        return [path]
    if path.is_dir():
        inside = ((file.relative_to(path), file) for file in path.rglob("*") if file.is_file())
        found = [
            (place.as_posix(), file)
            for place, file in inside
            if not any(part.startswith(".") for part in place.parts)
            and any(fnmatch.fnmatch(place.name.lower(), name) for name in names)
        ]
    else:
        found = [(file, Path(file)) for file in glob.glob(str(path), recursive=True) if os.path.isfile(file)]
    if not found:
        legal = None if names == ("*",) else f"a file, a pattern, or a folder that holds {' or '.join(names)}"
        rule = "names no file" if path.is_dir() else "does not exist and matches no file"
        raise ConfigError(field, pattern, rule, legal)
    return [file for _, file in sorted(found)]


def open_file(path: Path, field: str) -> BinaryIO:
    """``path`` opened to read bytes; what ends in ``.gz`` or ``.zst`` is decompressed, all its members or frames."""
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
