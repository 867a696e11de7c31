"""Tokenised sources on disk, so that a second start reads no text.

The cache is a folder: for each source config and tokenizer one folder, and in it the corpus of the input files as
they were (paths, sizes, modification times). An entry is written beside its place and renamed into it, so it is there
whole or not at all; while one process writes it, others that want it wait for its lock. Where file locks are not
supported, each writes its own and the first one counts.

What goes: the corpus of inputs that have changed since, as soon as the new one is there, and what no run has used for
``KEEP_DAYS`` days, whenever something is written. What a process has open (it holds a shared lock) stays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxpar.data.corpus import ENTRY, CannotWrite, Corpus, Damaged, Progress, open_corpus, write_corpus, writing
from jaxpar.data.files import look, refuse_change, what_changed
from jaxpar.data.mapped import TemporaryFolder
from jaxpar.data.sources import Source
from jaxpar.data.tokenizers import Tokenizer
from jaxpar.errors import RunError
from jaxpar.user_cache import user_cache
from jaxpar.words import Say

KEEP_DAYS = 30

_FORMAT = 1  # part of the key: raise it when the files, or what a source reads from the same input, change
_PLAIN_TEXT = {"", ".txt", ".text", ".md", ".py", ".json", ".jsonl"}  # suffixes of files about as large as their text
_NEW = "new-"
_OURS = re.compile(f"({_NEW})?[0-9a-f]{{24}}")  # names of folders: the cache may be in a folder that holds other things


def cache_folder(cache: str | None) -> Path | None:
    """Where ``data.cache`` is: ``"auto"`` is in the user's cache folder; None for none."""
    if cache is None:
        return None
    if cache == "auto":
        return user_cache("tokens")
    try:
        return Path(cache).expanduser()
    except RuntimeError:  # no home folder
        return None


def read_corpus(
    source: Source, field: str, tokenizer: Tokenizer, cache: Path | None, progress: Progress | None, say: Say
) -> Corpus:
    """The corpus of ``source``: from the folder ``cache`` if it is there, else read, tokenised and put there.

    Without a cache, or where it cannot be written, the corpus is in temporary files for as long as it is needed.
    Raise ``ConfigError`` as ``write_corpus`` does and for files that change meanwhile, and ``RunError`` when no disk
    takes it.
    """
    wanted = _Wanted(source, field, tokenizer)
    if cache is not None:
        try:
            return _from_cache(wanted, cache, progress, say)
        except CannotWrite as error:
            say(f"data.cache: {cache}: {error}; going on without a cache")
    folder = TemporaryFolder()
    try:
        origin = wanted.write(folder.path, progress)
        return open_corpus(folder.path, source.name, folder, origin)
    except (CannotWrite, Damaged) as error:
        rule = f"the tokens do not go into {folder.path.parent}: {error}"
        raise RunError(f"{field}: {rule}; set data.cache or TMPDIR to a folder on another disk") from error


class _Wanted:
    """A source, read by a tokenizer, and its input files as they are now."""

    def __init__(self, source: Source, field: str, tokenizer: Tokenizer):
        self.source, self.field, self.tokenizer = source, field, tokenizer
        files = source.inputs(field)
        base, self.inputs = look(files)
        plain = all(path.suffix.lower() in _PLAIN_TEXT for path in files)
        self.input_bytes = sum(size for _, size, _ in self.inputs) if plain else None
        config = dataclasses.asdict(source)
        del config["weight"]
        self.about = {
            "format": _FORMAT,
            "source": {"type": type(source).__name__, **json.loads(json.dumps(config, default=str))},
            "folder": base,
            "tokenizer": [tokenizer.identity, tokenizer.vocab_size, tokenizer.eos],
        }

    def place(self, cache: Path) -> Path:
        """The folder of this corpus."""
        return cache / _name(self.about) / _name(self.inputs)

    def write(self, folder: Path, progress: Progress | None) -> str:
        """Read and tokenise the source into ``folder``; return in words how long it took."""
        start = time.monotonic()
        about = {**self.about, "inputs": self.inputs}
        write_corpus(folder, self.source, self.field, self.tokenizer, about, self.input_bytes, progress)
        refuse_change(self.inputs, self.source.inputs(self.field), self.source.name, self.field)
        return f"read in {time.monotonic() - start:.1f} s"


def _from_cache(wanted: _Wanted, cache: Path, progress: Progress | None, say: Say) -> Corpus:
    """As ``read_corpus``; ``CannotWrite`` where the corpus has to be written and cannot."""
    place = wanted.place(cache)
    with contextlib.suppress(Damaged):  # or not there: looked into below, where nobody else writes it
        return _open(wanted, place)

    def waiting(who: str) -> None:
        say(f"{wanted.field}: {wanted.source.name} is being read by {who}; waiting for it")

    with writing():
        place.parent.mkdir(parents=True, exist_ok=True)
    with _lock(place.parent / "lock", waiting) as alone:
        with writing():
            before = sorted(place.parent.iterdir())
        try:
            return _open(wanted, place)  # another process has made it meanwhile
        except Damaged as error:
            damage = str(error)
        if (place / ENTRY).exists():
            say(f"{wanted.field}: the cache entry {place} is damaged ({damage}); reading {wanted.source.name} again")
        else:
            _say_what_changed(wanted, before, say)
        left = [folder for folder in before if folder.name.startswith(_NEW)]
        _remove(place, *(left if alone else ()))  # of processes that were killed
        corpus = _build(wanted, place, progress)
        _sweep(cache, place)
    return corpus


def _open(wanted: _Wanted, place: Path) -> Corpus:
    """The entry at ``place``, held; ``Damaged`` too if there is none."""
    lease = _Lease(place / ENTRY)
    try:
        corpus = open_corpus(place, wanted.source.name, lease, "from the cache")
    except Damaged:
        lease.end()
        raise
    with contextlib.suppress(OSError):  # somebody else's, or read-only
        os.utime(place / ENTRY)
    return corpus


def _build(wanted: _Wanted, place: Path, progress: Progress | None) -> Corpus:
    new = place.parent / f"{_NEW}{secrets.token_hex(12)}"
    with writing():
        new.mkdir()
    try:
        origin = wanted.write(new, progress)
        with contextlib.suppress(OSError):  # not empty: another process was first, with the same
            new.rename(place)
        return open_corpus(place, wanted.source.name, _Lease(place / ENTRY), origin)
    except Damaged as error:
        raise CannotWrite(f"{place} is damaged: {error}") from error
    finally:
        _remove(new)


class _Lease:
    """A shared lock on an entry until ``end``, or as long as this object lives; none where there is no entry."""

    def __init__(self, entry: Path):
        with contextlib.suppress(OSError):
            handle = os.open(entry, os.O_RDONLY)
            self._end = weakref.finalize(self, os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_SH)

    def end(self) -> None:
        """Release the lock."""
        if hasattr(self, "_end"):
            self._end()


@contextlib.contextmanager
def _lock(path: Path, waiting: Callable[[str], None]) -> Iterator[bool]:
    """Hold the lock file ``path``; False where locks are not supported. ``waiting`` is told who has it, once."""
    with writing():
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    told = False
    try:
        while True:
            try:
                held = _lock_now(handle)
                break
            except BlockingIOError:
                if not told:
                    waiting(os.pread(handle, 1000, 0).decode(errors="replace") or "another process")
                    told = True
                time.sleep(0.1)
        with contextlib.suppress(OSError):  # a full disk
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield held
    finally:
        os.close(handle)


def _say_what_changed(wanted: _Wanted, siblings: list[Path], say: Say) -> None:
    """A line for the user if an earlier state of the same source is there."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        entries = [folder / ENTRY for folder in siblings if (folder / ENTRY).exists()]
        newest = max(entries, key=lambda entry: entry.stat().st_mtime)
        changed = what_changed(json.loads(newest.read_bytes())["inputs"], wanted.inputs)
        say(f"{wanted.field}: {changed or 'the order of the files changed'}; reading {wanted.source.name} again")


def _sweep(cache: Path, written: Path) -> None:
    """Remove what ``written`` replaces and what has not been used for long."""
    oldest = time.time() - KEEP_DAYS * 24 * 3600
    with contextlib.suppress(OSError):
        for folder in cache.glob("*/*/"):
            if not (_OURS.fullmatch(folder.parent.name) and _OURS.fullmatch(folder.name)):
                continue
            entry = folder / ENTRY
            unused = (entry if entry.exists() else folder).stat().st_mtime < oldest
            replaced = folder.parent == written.parent and not folder.name.startswith(_NEW)
            if folder != written and (unused or replaced):
                _remove(folder)
        for lock in cache.glob("*/lock"):
            alone = _OURS.fullmatch(lock.parent.name) and len(os.listdir(lock.parent)) == 1
            if alone and lock.stat().st_mtime < oldest:
                shutil.rmtree(lock.parent)


def _remove(*folders: Path) -> None:
    """Remove entries and parts of entries, but for those that a process holds and what is somebody else's."""
    for folder in folders:
        with contextlib.suppress(OSError):
            if (folder / ENTRY).exists():
                handle = os.open(folder / ENTRY, os.O_RDWR)
                try:
                    _lock_now(handle)
                    (folder / ENTRY).unlink()  # from here on it is no entry for anyone
                finally:
                    os.close(handle)
            shutil.rmtree(folder)


def _lock_now(handle: int) -> bool:
    """Lock a file, or raise ``BlockingIOError`` where another process has; False where locks are not supported."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        raise
    except OSError:
        return False


def _name(what: object) -> str:
    return hashlib.blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=12).hexdigest()
