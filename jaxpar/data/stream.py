"""The endless training stream and the one-pass evaluation: any batch of either, by number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from jaxpar.data.mixture import Mixture, fold, permute
from jaxpar.data.packing import Batch, PackedRows, empty_batch


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

    def batch(self, first: int, count: int, rows: np.ndarray | None = None) -> Batch:
        """Sequences ``first .. first + count - 1``, arrays [count, seq_len]; of these only the ``rows``, if given."""
        source_B, row_B = self.order(first, count)
        if rows is not None:
            source_B, row_B = source_B[rows], row_B[rows]
        batch = empty_batch(len(row_B), self.seq_len)
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

    def batch(self, first: int, count: int, rows: np.ndarray | None = None) -> Batch:
        """Rows ``first .. first + count - 1``, arrays [count, seq_len]; all padding past the last row.

        Of these only the ``rows`` (0 is ``first``), if given.
        """
        number_B = first + (np.arange(count) if rows is None else rows)
        batch = empty_batch(len(number_B), self.seq_len)
        there = np.flatnonzero(number_B < self.rows)
        row_B = permute(number_B[there], self.rows, fold(0, 0))
        for packed, begin in zip(self.sources, self._begins, strict=False):
            mine = (row_B >= begin) & (row_B < begin + packed.rows)
            packed.fill(batch, there[mine], row_B[mine] - begin)
        return batch

    def batches(
        self, global_batch: int, max_batches: int | None = None, rows: np.ndarray | None = None
    ) -> Iterator[Batch]:
        """Yield each global batch, arrays [global_batch, seq_len], or the ``rows`` of it that a host needs.

        The last batch is filled up with fully masked rows, so a sum over ``mask`` weighs every target once, and all
        hosts see the same number of batches. ``max_batches`` stops earlier.
        """
        starts = range(0, self.rows, global_batch)[:max_batches]
        return (self.batch(start, global_batch, rows) for start in starts)
