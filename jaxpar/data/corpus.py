"""A tokenised source: one flat array of ids, where each document starts, and which documents are held out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from jaxpar.data.sources import Source
from jaxpar.data.tokenizers import Tokenizer
from jaxpar.errors import ConfigError

Progress = Callable[[str, int, int], None]
"""Called with (source name, documents so far, tokens so far) after every batch of documents."""

_ENCODE_BATCH = 256
_DIGEST_CHUNK = 1 << 20


@dataclass(frozen=True)
class Corpus:
    """The documents of one source, each ended by the tokenizer's end token.

    Document ``d`` is ``tokens_N[offsets[d]:offsets[d + 1]]``; ``hashes_D`` are 64-bit hashes of the texts.
    """

    name: str
    tokens_N: np.ndarray
    offsets: np.ndarray
    hashes_D: np.ndarray

    @property
    def starts_D(self) -> np.ndarray:
        """Where each document starts in ``tokens_N``."""
        return self.offsets[:-1]

    @property
    def lengths_D(self) -> np.ndarray:
        """Tokens in each document, the end token included; never 0."""
        return np.diff(self.offsets)

    def digest(self) -> str:
        """A hash of the tokens and the document borders."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(self.offsets.astype("<i8").tobytes())
        for begin in range(0, len(self.tokens_N), _DIGEST_CHUNK):
            digest.update(self.tokens_N[begin : begin + _DIGEST_CHUNK].astype("<u4").tobytes())
        return digest.hexdigest()

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
    distinct = np.unique(hashes_D)
    if len(distinct) < 2:
        rule = f"needs two different documents in every source; {field} ({name}) has {len(hashes_D)}"
        raise ConfigError("data.eval_fraction", fraction, rule, "0, more documents, or a separator in TextFiles")
    below = int(np.searchsorted(distinct, np.uint64(int(fraction * 2**64))))
    return hashes_D < distinct[min(max(below, 1), len(distinct) - 1)]


def tokenise(source: Source, field: str, tokenizer: Tokenizer, progress: Progress | None = None) -> Corpus:
    """Read and encode all documents of ``source``; documents of white space alone are skipped.

    Raise ``ConfigError`` naming ``field`` when no document is left.
    """
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    end = np.array([tokenizer.eos], dtype)
    documents = (text for text in source.documents(field) if text.strip())
    chunks: list[np.ndarray] = []
    lengths: list[int] = []
    hashes: list[int] = []
    total = 0
    for texts in _batches(documents, _ENCODE_BATCH):
        ids = tokenizer.encode(texts)
        chunks.append(np.concatenate([part for one in ids for part in (one.astype(dtype, copy=False), end)]))
        lengths += [len(one) + 1 for one in ids]
        hashes += [text_hash(text) for text in texts]
        total += len(chunks[-1])
        if progress is not None:
            progress(source.name, len(lengths), total)
    if not chunks:
        raise ConfigError(f"{field}.path" if hasattr(source, "path") else field, source.name, "holds no text")
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return Corpus(source.name, np.concatenate(chunks), offsets, np.array(hashes, np.uint64))


def _batches(texts: Iterator[str], size: int) -> Iterator[list[str]]:
    while batch := list(islice(texts, size)):
        yield batch


def text_hash(text: str) -> int:
    """64 bits that a text and its equals have in common."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")
