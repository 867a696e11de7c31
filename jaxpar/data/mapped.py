"""Arrays that are files: mapped, so that the kernel decides what of them is in memory, and pickled as a path."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.errors import RunError

_PREFIX = "jaxpar-data-"


class MappedArray(np.ndarray):
    """A whole file as a read-only array [its size]; made by ``map_file``.

    Pickled, it is the file's path, and the process that unpickles it maps the same pages: nothing is copied. What is
    computed or sliced from it is pickled by value. It holds on to its ``lease``, whatever keeps the file in place.
    """

    path: str | None = None
    lease: object = None
    pages: mmap.mmap | None = None

    def __reduce__(self) -> Any:
        return super().__reduce__() if self.path is None else (map_file, (self.path, self.dtype.str))


def map_file(path: str | os.PathLike[str], dtype: str, lease: object = None) -> MappedArray:
    """The file ``path``, which is not empty, as an array of ``dtype``; raise ``OSError`` or ``ValueError``."""
    mapped = np.memmap(path, np.dtype(dtype), mode="r")
    array = mapped.view(np.ndarray).view(MappedArray)
    array.path, array.lease, array.pages = os.path.abspath(path), lease, mapped._mmap  # type: ignore[attr-defined]
    return array


def release_pages(array: np.ndarray) -> None:
    """Count the pages of a mapped file that were read no more as this process's memory; they stay in the file cache."""
    if isinstance(array, MappedArray) and array.pages is not None:
        array.pages.madvise(mmap.MADV_DONTNEED)


class TemporaryFolder:
    """A folder for mapped files that is removed with this object, at the latest when the interpreter exits.

    It stays locked (flock) as long as its process lives: what a killed process leaves is removed by the next one that
    makes such a folder in the same place.
    """

    def __init__(self) -> None:
        place = Path(tempfile.gettempdir())
        with contextlib.suppress(OSError):
            for left in place.glob(f"{_PREFIX}*"):
                _remove_unlocked(left)
        try:
            new = Path(tempfile.mkdtemp(prefix="jaxpar-new-"))
            lock = os.open(new / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            self.path = new.rename(place / new.name.replace("jaxpar-new-", _PREFIX))  # locked before it can be found
        except OSError as error:
            raise RunError(f"{place} cannot hold the data: {error.strerror}; set TMPDIR to another folder") from error
        self._numbers = itertools.count()
        self._end = weakref.finalize(self, _remove_folder, self.path, lock)

    def store(self, array: np.ndarray) -> np.ndarray:
        """``array`` as a file of this folder (an empty one stays as it is); ``RunError`` on a full disk."""
        if not array.size:
            return array
        path = self.path / f"array-{next(self._numbers)}"
        try:
            path.write_bytes(np.ascontiguousarray(array).data)
        except OSError as error:
            raise RunError(f"{self.path} cannot hold the data: {error.strerror}; set TMPDIR to another disk") from error
        return map_file(path, array.dtype.str, self)


def _remove_folder(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def _remove_unlocked(path: Path) -> None:
    with contextlib.suppress(OSError):
        lock = os.open(path / "lock", os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)
