"""The endless training stream and the one-pass evaluation: any batch of either, by number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from jaxpar.data.mixture import Mixture, fold, permute
from jaxpar.data.packing import Batch, PackedRows, empty_batch
from jaxpar.errors import ConfigError, divisors


class Stream:
    """Sequences 0, 1, 2, ... of training: a pure function of ``seed`` and the sequence's number, and of nothing else.

    The mixture picks the source; a source goes through all of its rows once per epoch, in an order that is new in
    every epoch.
    """

    def __init__(self, sources: Sequence[PackedRows], weights: Sequence[float], seed: int):
        self.sources = tuple(sources)
        self.seq_len = self.sources[0].seq_len
        self.mixture = Mixture(weights)
        self.seed = seed
        self._rows_K = np.array([packed.rows for packed in self.sources])

    def order(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """For sequences ``first .. first + count - 1``: the source of each, and its row there."""
        source_B, index_B = self.mixture.assign(first, count)
        rows_B = self._rows_K[source_B]
        epoch_B, within_B = np.divmod(index_B, rows_B)
        return source_B, permute(within_B, rows_B, fold(fold(self.seed, source_B), epoch_B))

    def batch(self, first: int, count: int) -> Batch:
        """Sequences ``first .. first + count - 1``, arrays [count, seq_len]."""
        source_B, row_B = self.order(first, count)
        batch = empty_batch(count, self.seq_len)
        for k in np.unique(source_B).tolist():
            at = np.flatnonzero(source_B == k)
            self.sources[k].fill(batch, at, row_B[at])
        return batch


class Evaluation:
    """Every held-out row once, in a fixed order that mixes the sources: any first few batches are a fair sample.

    The order depends on neither seed nor batch size.
    """

    def __init__(self, sources: Sequence[PackedRows]):
        self.sources = tuple(sources)
        self.seq_len = self.sources[0].seq_len
        self.rows = sum(packed.rows for packed in self.sources)
        self._begins = np.cumsum([0, *(packed.rows for packed in self.sources)])

    def batch(self, first: int, count: int) -> Batch:
        """Rows ``first .. first + count - 1``, arrays [count, seq_len]; all padding past the last row."""
        batch = empty_batch(count, self.seq_len)
        row_B = permute(np.arange(first, min(first + count, self.rows)), self.rows, fold(0, 0))
        for packed, begin in zip(self.sources, self._begins, strict=False):
            at = np.flatnonzero((row_B >= begin) & (row_B < begin + packed.rows))
            packed.fill(batch, at, row_B[at] - begin)
        return batch

    def batches(
        self, global_batch: int, max_batches: int | None = None, host_index: int = 0, host_count: int = 1
    ) -> Iterator[Batch]:
        """Yield this host's share, arrays [global_batch / host_count, seq_len], of each global batch.

        The last batch is filled up with fully masked rows, so a sum over ``mask`` weighs every target once, and all
        hosts see the same number of batches. ``max_batches`` stops earlier.
        """
        begin, share = host_part(global_batch, host_index, host_count)
        starts = range(0, self.rows, global_batch)[:max_batches]
        return (self.batch(start + begin, share) for start in starts)


def host_part(global_batch: int, host_index: int, host_count: int) -> tuple[int, int]:
    """Where host ``host_index``'s part of a global batch begins, and how many sequences it is.

    Raise ``ConfigError`` when ``global_batch`` does not divide by ``host_count``.
    """
    if global_batch < 1 or global_batch % host_count:
        legal = f"a multiple of {host_count}; hosts: {divisors(global_batch)}" if global_batch > 0 else "1 or more"
        raise ConfigError("global_batch", global_batch, f"cannot be shared by {host_count} hosts", legal)
    if not 0 <= host_index < host_count:
        raise ConfigError("host_index", host_index, f"is none of {host_count} hosts", f"0 to {host_count - 1}")
    share = global_batch // host_count
    return host_index * share, share
