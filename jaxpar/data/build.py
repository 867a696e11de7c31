"""``DataConfig`` and the one entry point, ``build_data``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np

from jaxpar.data.cache import cache_folder, read_corpus
from jaxpar.data.corpus import Corpus, Progress
from jaxpar.data.loader import Loader
from jaxpar.data.mapped import TemporaryFolder
from jaxpar.data.mixture import fold
from jaxpar.data.packing import PACKINGS, PackedRows, Packing, pack
from jaxpar.data.sources import Source, StandardLibrary
from jaxpar.data.stream import Evaluation, Stream
from jaxpar.data.tokenizers import Tokenizer, load_tokenizer
from jaxpar.errors import ConfigError, did_you_mean
from jaxpar.words import Say

_ORDER_VERSION = 1  # part of the fingerprint: raise it whenever the same config gives other batches

HOW_LOADED = ("workers", "prefetch", "cache")  # fields of DataConfig that never change what is loaded


@dataclass(frozen=True)
class DataConfig:
    """What to train on.

    - ``sources``: mixed by their weights, sequence by sequence.
    - ``tokenizer``: ``"bytes"``, or the path of a Hugging Face ``tokenizer.json``, whose end-of-document token is found
      by its usual names or given as ``eos_token``.
    - ``packing``: ``"concat"`` or ``"best_fit"``, see ``packing.pack``.
    - ``eval_fraction``: the share of each source's documents held out for evaluation.
    - ``mask_documents``: whether documents in one row are kept apart (segments, positions, targets).
    - ``workers``, ``prefetch``: processes and batches ahead, see ``Loader``; they never change what is loaded.
    - ``cache``: the folder that keeps the tokens for the next start, see ``cache``; ``"auto"`` is ``jaxpar/tokens`` in
      the user's cache folder (``XDG_CACHE_HOME``), None keeps nothing. It never changes what is loaded either.
    """

    sources: tuple[Source, ...] = (StandardLibrary(),)
    tokenizer: str = "bytes"
    eos_token: str | None = None
    packing: Packing = "concat"
    eval_fraction: float = 0.05
    mask_documents: bool = True
    workers: int = 0
    prefetch: int = 2
    cache: str | None = "auto"

    def validate(self) -> None:
        """Raise ``ConfigError`` for the first field that cannot work; reads no text."""
        if not isinstance(self.sources, (tuple, list)) or not self.sources:
            raise ConfigError("data.sources", self.sources, "is no tuple of sources", "at least one source")
        for k, source in enumerate(self.sources):
            if not isinstance(source, Source):
                legal = ", ".join(kind.__name__ for kind in get_args(Source))
                raise ConfigError(f"data.sources.{k}", source, "is no source", legal)
            source.validate(f"data.sources.{k}")
        if self.packing not in PACKINGS:
            rule = f"is no way of packing.{did_you_mean(self.packing, PACKINGS)}"
            raise ConfigError("data.packing", self.packing, rule, ", ".join(PACKINGS))
        if not 0 <= self.eval_fraction < 1:
            raise ConfigError("data.eval_fraction", self.eval_fraction, "is out of range", "0 or more, below 1")
        for name in ("workers", "prefetch"):
            if getattr(self, name) < 0:
                raise ConfigError(f"data.{name}", getattr(self, name), "is negative", "0 or more")
        if self.cache is not None and (not self.cache or "://" in self.cache):
            rule = "is no folder of this machine's file systems"
            raise ConfigError("data.cache", self.cache, rule, "a path, auto, none")


@dataclass(frozen=True)
class Data:
    """Everything there is to know about the data of a run; made by ``build_data``.

    ``evaluation`` is None when ``eval_fraction`` is 0. ``fingerprint`` is a short hash of all that determines the
    batches: a resumed run compares it to notice that the data changed.
    """

    config: DataConfig
    tokenizer: Tokenizer
    train: Stream
    evaluation: Evaluation | None
    fingerprint: str
    corpora: tuple[Corpus, ...] = field(repr=False)

    def loader(self, global_batch: int, first: int = 0, rows: np.ndarray | None = None) -> Loader:
        """A training ``Loader`` with the config's ``workers`` and ``prefetch``."""
        return Loader(self.train, global_batch, first, rows, self.config.workers, self.config.prefetch)

    def summary(self) -> dict[str, Any]:
        """Counts for each source and split (``PackedRows.counts``) and the unigram entropy in nats, ready for JSON."""
        held_out = self.evaluation.sources if self.evaluation else (None,) * len(self.corpora)
        sources = [
            {
                "name": corpus.name,
                "share": float(share),
                "documents": len(corpus.lengths_D),
                "tokens": len(corpus.tokens_N),
                "origin": corpus.origin,
                "train": train.counts(),
                "eval": held.counts() if held else None,
            }
            for corpus, share, train, held in zip(
                self.corpora, self.train.mixture.shares, self.train.sources, held_out, strict=True
            )
        ]
        return {
            "tokenizer": self.config.tokenizer,
            "vocab_size": self.tokenizer.vocab_size,
            "seq_len": self.train.seq_len,
            "packing": self.config.packing,
            "fingerprint": self.fingerprint,
            "sources": sources,
            "unigram_entropy": self.unigram_entropy(),
        }

    def unigram_entropy(self) -> float | None:
        """Nats per evaluation target of a model that knows only how often each token occurs in the training split.

        The cross-entropy of the evaluation targets under the training tokens' frequencies with add-one smoothing,
        all sources together: a first bar for any model. None without an evaluation split.
        """
        if self.evaluation is None:
            return None
        smoothed_V = np.ones(self.tokenizer.vocab_size)
        targets_V = np.zeros(self.tokenizer.vocab_size)
        for corpus, held_out in zip(self.corpora, self.evaluation.sources, strict=True):
            held_inputs_V, held_targets_V = held_out.token_counts(self.tokenizer.vocab_size)
            smoothed_V += corpus.counts_V - held_inputs_V
            targets_V += held_targets_V
        return float(-targets_V @ np.log(smoothed_V / smoothed_V.sum()) / max(targets_V.sum(), 1))


def build_data(
    config: DataConfig, seq_len: int, seed: int, progress: Progress | None = None, say: Say | None = None
) -> Data:
    """Read and tokenise, or find in the cache, then split and pack: all that happens before the first batch.

    ``progress`` is called as tokenisation goes on, ``say`` with a line for the user about what the cache does not have
    or cannot do. Raise ``ConfigError`` naming the field for anything that cannot work.
    """
    if seq_len < 1:
        raise ConfigError("seq_len", seq_len, "is no length", "1 or more")
    config.validate()
    tokenizer = load_tokenizer(config.tokenizer, config.eos_token)
    cache = cache_folder(config.cache)
    files = TemporaryFolder() if config.workers else None
    corpora, train, held_out = [], [], []
    said: set[str] = set()

    def say_once(line: str) -> None:
        if say is not None and line not in said:
            say(line)
        said.add(line)

    if cache is None and config.cache is not None:
        say_once(f"data.cache: {config.cache}: there is no home folder; going on without a cache")
    for k, source in enumerate(config.sources):
        name = f"data.sources.{k}"
        corpus = read_corpus(source, name, tokenizer, cache, progress, say_once)
        held_out_D = corpus.held_out_D(config.eval_fraction, name)
        rows = _pack(corpus, _shuffled(np.flatnonzero(~held_out_D), fold(seed, k)), seq_len, config)
        if files is not None:  # for the workers to map, where each would get a copy
            rows = rows.in_files(files.store)
        corpora.append(corpus)
        train.append(rows)
        held_out.append(_pack(corpus, np.flatnonzero(held_out_D), seq_len, config))
    stream = Stream(train, [source.weight for source in config.sources], seed)
    return Data(
        config=config,
        tokenizer=tokenizer,
        train=stream,
        evaluation=Evaluation(held_out) if config.eval_fraction else None,
        fingerprint=_fingerprint(config, seq_len, seed, tokenizer, corpora, stream),
        corpora=tuple(corpora),
    )


def _shuffled(documents: np.ndarray, key: np.ndarray) -> np.ndarray:
    """``documents`` in a random order named by ``key``."""
    return documents[np.argsort(fold(fold(key, -1), documents))]  # no two are equal: fold maps them one to one


def _pack(corpus: Corpus, documents: np.ndarray, seq_len: int, config: DataConfig) -> PackedRows:
    starts_D, lengths_D = corpus.starts_D[documents], corpus.lengths_D[documents]
    return pack(corpus.tokens_N, starts_D, lengths_D, seq_len, config.packing, config.mask_documents)


def _fingerprint(
    config: DataConfig, seq_len: int, seed: int, tokenizer: Tokenizer, corpora: Sequence[Corpus], stream: Stream
) -> str:
    parts = {
        "version": _ORDER_VERSION,
        "sources": [corpus.digest for corpus in corpora],
        "shares": [str(share) for share in stream.mixture.shares],
        "tokenizer": [tokenizer.identity, tokenizer.eos],
        "packing": [config.packing, config.mask_documents, seq_len],
        "eval_fraction": config.eval_fraction,
        "seed": seed,
    }
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()
