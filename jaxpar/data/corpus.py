"""A tokenised source, a folder of four files: ids, where each document starts, hashes of the texts, token counts.

Tokenising writes the files as it reads, so memory holds one batch of documents whatever the size of the source. A
document costs 16 bytes of disk beside its tokens.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxpar.data.mapped import map_file
from jaxpar.data.sources import Source
from jaxpar.data.tokenizers import Tokenizer
from jaxpar.errors import ConfigError

Progress = Callable[[str, int, int, float | None], None]
"""Called after every batch of documents with (source name, documents so far, tokens so far, share of the input read).

The share is None where the input's size says little about its text: compressed files and tables.
"""

ENTRY = "corpus.json"
BLANK = "white space alone"

_ENCODE_DOCUMENTS = 256
_ENCODE_CHARACTERS = 1 << 20
_CHUNK = 1 << 20
_ENDS_CHECKED = 64


class CannotWrite(Exception):
    """A corpus cannot be written where it should be; its text says why."""


class Damaged(Exception):
    """The files of a corpus are not what was written; its text says which."""


@dataclass(frozen=True)
class Corpus:
    """The documents of one source, each ended by the tokenizer's end token.

    Document ``d`` is ``tokens_N[offsets[d]:offsets[d + 1]]``; ``hashes_D`` are 64-bit hashes of the texts, ``counts_V``
    how often each id occurs. ``digest`` is a hash of the tokens and the document borders. ``text_bytes`` is the size
    of the documents' UTF-8 text; ``dropped`` counts the documents that were left out, by why: ``BLANK`` or a filter.
    ``origin`` says in words whether it was read or found.
    """

    name: str
    tokens_N: np.ndarray
    offsets: np.ndarray
    hashes_D: np.ndarray
    counts_V: np.ndarray
    digest: str
    text_bytes: int
    dropped: dict[str, int]
    origin: str

    @property
    def starts_D(self) -> np.ndarray:
        """Where each document starts in ``tokens_N``."""
        return self.offsets[:-1]

    @property
    def lengths_D(self) -> np.ndarray:
        """Tokens in each document, the end token included; never 0."""
        return np.diff(self.offsets)

    def held_out_D(self, fraction: float, field: str) -> np.ndarray:
        """A boolean per document: whether it belongs to the evaluation split, see ``held_out``."""
        return held_out(self.hashes_D, fraction, field, self.name)


def held_out(hashes_D: np.ndarray, fraction: float, field: str, name: str) -> np.ndarray:
    """A boolean per document of the source ``field``: whether it belongs to the evaluation split.

    A document is held out when the hash of its text, as a number in [0, 1), is below ``fraction``: equal texts fall on
    the same side, and neither seed nor the other documents matter. The border moves only where that would leave a side
    empty: then one text (the lowest or the highest hash) is put there.

    Raise ``ConfigError`` when ``fraction`` is above 0 and all documents are one text.
    """
    if fraction == 0:
        return np.zeros(len(hashes_D), bool)
    held_out_D = hashes_D < np.uint64(int(fraction * 2**64))
    if held_out_D.any() and not held_out_D.all():
        return held_out_D
    distinct = np.unique(hashes_D)
    if len(distinct) < 2:
        rule = f"needs two different documents in every source; {field} ({name}) has {len(hashes_D)}"
        raise ConfigError("data.eval_fraction", fraction, rule, "0, more documents, or a separator in TextFiles")
    return hashes_D < distinct[-1 if held_out_D.all() else 1]


def write_corpus(
    folder: Path,
    source: Source,
    field: str,
    tokenizer: Tokenizer,
    about: dict[str, Any],
    input_bytes: int | None,
    progress: Progress | None = None,
) -> None:
    """Read and encode all documents of ``source`` into ``folder``; documents of white space alone are skipped.

    ``about`` is kept with the corpus; ``input_bytes`` is the size of the input if that is about the size of its text.
    Raise ``ConfigError`` naming ``field`` when no document is left, and ``CannotWrite`` when the disk does not take it.
    """
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1).newbyteorder("<")
    end = np.array([tokenizer.eos], dtype)
    counts_V = np.zeros(tokenizer.vocab_size, np.int64)
    seen = {"documents": 0, "tokens": 0, "text_bytes": 0}
    dropped: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        tokens, offsets, hashes = (
            stack.enter_context(_Output(folder / name)) for name in ("tokens", "offsets", "hashes")
        )
        offsets.write(np.zeros(1, "<i8"))
        for texts in _batches(source.documents(field, dropped), dropped):
            ids = tokenizer.encode(texts)
            flat = np.concatenate([part for one in ids for part in (one.astype(dtype, copy=False), end)])
            ends = seen["tokens"] + np.cumsum([len(one) + 1 for one in ids], dtype="<i8")
            tokens.write(flat)
            offsets.write(ends)
            hashes.write(np.array([text_hash(text) for text in texts], "<u8"))
            counts_V += np.bincount(flat, minlength=len(counts_V))
            seen["documents"] += len(texts)
            seen["tokens"] = int(ends[-1])
            seen["text_bytes"] += sum(len(text.encode("utf-8")) for text in texts)
            if progress is not None:
                share = min(seen["text_bytes"] / input_bytes, 1.0) if input_bytes else None
                progress(source.name, seen["documents"], seen["tokens"], share)
    if not seen["documents"]:
        why = ", ".join(f"{reason}: {count:,}" for reason, count in dropped.items())
        rule = f"holds no text that is not left out ({why})" if dropped.keys() - {BLANK} else "holds no text"
        raise ConfigError(f"{field}.path" if hasattr(source, "path") else field, source.name, rule)
    _write(folder / "counts", counts_V.astype("<i8").data)
    arrays = [map_file(folder / "offsets", "<i8"), map_file(folder / "hashes", "<u8"), counts_V]
    digest = _digest(arrays[0], folder / "tokens", dtype)
    entry = {**about, **seen, "dropped": dropped, "dtype": dtype.str, "eos": tokenizer.eos, "digest": digest}
    entry["checksum"] = _checksum(entry, arrays)
    _write(folder / ENTRY, json.dumps(entry, indent=1).encode())


def open_corpus(folder: Path, name: str, lease: object, origin: str) -> Corpus:
    """The corpus in ``folder``, mapped; ``lease`` keeps the folder in place, ``origin`` goes into the corpus.

    Raise ``Damaged`` unless the sizes, a checksum of all but the tokens, and the last tokens of some documents are
    what was written.
    """
    try:
        entry = json.loads((folder / ENTRY).read_bytes())
        tokens_N = map_file(folder / "tokens", entry["dtype"], lease)
        offsets = map_file(folder / "offsets", "<i8", lease)
        hashes_D = map_file(folder / "hashes", "<u8", lease)
        counts_V = map_file(folder / "counts", "<i8", lease)
        checksum = entry.pop("checksum")
        if checksum != _checksum(entry, [offsets, hashes_D, counts_V]):
            raise Damaged("a checksum differs")
        if len(tokens_N) != entry["tokens"]:
            raise Damaged(f"{len(tokens_N):,} tokens, not {entry['tokens']:,}")
        checked = np.linspace(1, entry["documents"], _ENDS_CHECKED).astype(np.int64)
        if (tokens_N[offsets[checked] - 1] != entry["eos"]).any():
            raise Damaged("a document does not end where it should")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # not there, no JSON, another JSON
        raise Damaged(getattr(error, "strerror", None) or str(error) or "unreadable") from error
    kept = {key: entry[key] for key in ("digest", "text_bytes", "dropped")}
    return Corpus(name, tokens_N, offsets, hashes_D, counts_V, **kept, origin=origin)


class _Output:
    """A file that arrays are appended to, on the disk when it is closed without an error."""

    def __init__(self, path: Path):
        self._path = path

    def __enter__(self) -> _Output:
        with writing():
            self._file: BinaryIO = open(self._path, "wb", buffering=_CHUNK)
        return self

    def write(self, array: np.ndarray) -> None:
        with writing():
            self._file.write(array.data)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            return
        with writing():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """An ``OSError`` in the block as ``CannotWrite``."""
    try:
        yield
    except OSError as error:
        raise CannotWrite(error.strerror or str(error)) from error


def _write(path: Path, content: bytes | memoryview) -> None:
    with writing(), open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _batches(documents: Iterator[str], dropped: Counter[str]) -> Iterator[list[str]]:
    """Documents that are not blank, as many at a time as are worth one call of the tokenizer."""
    batch: list[str] = []
    characters = 0
    for text in documents:
        if not text.strip():
            dropped[BLANK] += 1
            continue
        batch.append(text)
        characters += len(text)
        if len(batch) == _ENCODE_DOCUMENTS or characters >= _ENCODE_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def text_hash(text: str) -> int:
    """64 bits that a text and its equals have in common."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def _digest(offsets: np.ndarray, tokens: Path, dtype: np.dtype) -> str:
    """Of the document borders and the ids, whatever the width they are kept in."""
    digest = hashlib.blake2b(offsets.data, digest_size=16)
    with open(tokens, "rb") as file:
        while chunk := file.read(_CHUNK * dtype.itemsize):
            digest.update(np.frombuffer(chunk, dtype).astype("<u4").data)
    return digest.hexdigest()


def _checksum(entry: dict[str, Any], arrays: Sequence[np.ndarray]) -> str:
    checksum = hashlib.blake2b(json.dumps(entry, sort_keys=True).encode(), digest_size=16)
    for array in arrays:
        checksum.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data)
    return checksum.hexdigest()
