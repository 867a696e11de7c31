"""``DataConfig`` and the one entry point, ``build_data``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from jaxpar.data.corpus import Corpus, Progress, tokenise
from jaxpar.data.loader import Loader
from jaxpar.data.mixture import fold
from jaxpar.data.packing import PACKINGS, PackedRows, pack
from jaxpar.data.sources import Source, StandardLibrary
from jaxpar.data.stream import Evaluation, Stream
from jaxpar.data.tokenizers import Tokenizer, load_tokenizer
from jaxpar.errors import ConfigError, did_you_mean

_ORDER_VERSION = 1  # part of the fingerprint: raise it whenever the same config gives other batches


@dataclass(frozen=True)
class DataConfig:
    """What to train on.

    - ``sources``: mixed by their weights, sequence by sequence.
    - ``tokenizer``: ``"bytes"``, or the path of a Hugging Face ``tokenizer.json``, whose end-of-document token is found
      by its usual names or given as ``eos_token``.
    - ``packing``: ``"concat"`` or ``"first_fit"``, see ``packing.pack``.
    - ``eval_fraction``: the share of each source's documents held out for evaluation.
    - ``mask_documents``: whether documents in one row are kept apart (segments, positions, targets).
    - ``workers``, ``prefetch``: processes and batches ahead, see ``Loader``; they never change what is loaded.
    """

    sources: tuple[Source, ...] = (StandardLibrary(),)
    tokenizer: str = "bytes"
    eos_token: str | None = None
    packing: Literal["concat", "first_fit"] = "concat"
    eval_fraction: float = 0.05
    mask_documents: bool = True
    workers: int = 0
    prefetch: int = 2

    def validate(self) -> None:
        """Raise ``ConfigError`` for the first field that cannot work; reads no text."""
        if not isinstance(self.sources, (tuple, list)) or not self.sources:
            raise ConfigError("data.sources", self.sources, "is no tuple of sources", "at least one source")
        for k, source in enumerate(self.sources):
            if not isinstance(source, Source):
                raise ConfigError(f"data.sources.{k}", source, "is no source", "StandardLibrary, TextFiles, JsonLines")
            source.validate(f"data.sources.{k}")
        if self.packing not in PACKINGS:
            rule = f"is no way of packing.{did_you_mean(self.packing, PACKINGS)}"
            raise ConfigError("data.packing", self.packing, rule, ", ".join(PACKINGS))
        if not 0 <= self.eval_fraction < 1:
            raise ConfigError("data.eval_fraction", self.eval_fraction, "is out of range", "0 or more, below 1")
        for name in ("workers", "prefetch"):
            if getattr(self, name) < 0:
                raise ConfigError(f"data.{name}", getattr(self, name), "is negative", "0 or more")


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
        """Counts for each source and split (see ``PackedRows.counts``) and the unigram entropy, ready for JSON."""
        held_out = self.evaluation.sources if self.evaluation else (None,) * len(self.corpora)
        sources = [
            {
                "name": corpus.name,
                "share": float(share),
                "documents": len(corpus.lengths_D),
                "tokens": len(corpus.tokens_N),
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
            "unigram_entropy_nats": self.unigram_entropy(),
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
        for train, held_out in zip(self.train.sources, self.evaluation.sources, strict=True):
            smoothed_V += train.token_counts(self.tokenizer.vocab_size)[0]
            targets_V += held_out.token_counts(self.tokenizer.vocab_size)[1]
        return float(-targets_V @ np.log(smoothed_V / smoothed_V.sum()) / max(targets_V.sum(), 1))


def build_data(config: DataConfig, seq_len: int, seed: int, progress: Progress | None = None) -> Data:
    """Read, tokenise, split and pack: all that happens before the first batch.

    ``progress(source, documents, tokens)`` is called as tokenisation goes on. Raise ``ConfigError`` naming the field
    for anything that cannot work.
    """
    if seq_len < 1:
        raise ConfigError("seq_len", seq_len, "is no length", "1 or more")
    config.validate()
    tokenizer = load_tokenizer(config.tokenizer, config.eos_token)
    corpora, train, held_out = [], [], []
    for k, source in enumerate(config.sources):
        name = f"data.sources.{k}"
        corpus = tokenise(source, name, tokenizer, progress)
        held_out_D = corpus.held_out_D(config.eval_fraction, name)
        corpora.append(corpus)
        train.append(_pack(corpus, _shuffled(np.flatnonzero(~held_out_D), fold(seed, k)), seq_len, config))
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
    return documents[np.argsort(fold(fold(key, -1), documents), kind="stable")]


def _pack(corpus: Corpus, documents: np.ndarray, seq_len: int, config: DataConfig) -> PackedRows:
    starts_D, lengths_D = corpus.starts_D[documents], corpus.lengths_D[documents]
    return pack(corpus.tokens_N, starts_D, lengths_D, seq_len, config.packing, config.mask_documents)


def _fingerprint(
    config: DataConfig, seq_len: int, seed: int, tokenizer: Tokenizer, corpora: Sequence[Corpus], stream: Stream
) -> str:
    parts = {
        "version": _ORDER_VERSION,
        "sources": [corpus.digest() for corpus in corpora],
        "shares": [str(share) for share in stream.mixture.shares],
        "tokenizer": [tokenizer.identity, tokenizer.eos],
        "packing": [config.packing, config.mask_documents, seq_len],
        "eval_fraction": config.eval_fraction,
        "seed": seed,
    }
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()
