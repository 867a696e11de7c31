"""Documents into rows of ``seq_len`` tokens, and rows into batches.

A row is made of *pieces*, runs of consecutive tokens of one document, and packing copies no token; ``fill`` gathers any
rows, in any order, straight into a batch. Nothing is dropped: every token of every document is an input in
exactly one row, and ``tokens + padding == rows * seq_len``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from jaxpar.data.mapped import release_pages

Packing = Literal["concat", "best_fit"]
PACKINGS: tuple[Packing, ...] = get_args(Packing)

_COUNT_TOKENS = 1 << 21  # tokens counted at a time, at some 10 bytes each

Batch = dict[str, np.ndarray]
"""The five arrays [B, S] of a batch:

- ``tokens`` int32: the inputs; 0 where there is padding.
- ``targets`` int32: the token that follows each input; 0 where there is none.
- ``segments`` int32: 1, 2, ... by document piece within the row; 0 is padding.
- ``positions`` int32: 0, 1, ... within the piece; 0 where there is padding.
- ``mask`` bool: whether the target counts.
"""


class Pieces(NamedTuple):
    """The pieces of some rows, by row and column; ``counts_R`` is how many each row has.

    Piece ``p`` is ``tokens_N[starts_P[p]:starts_P[p] + lengths_P[p]]`` at column ``columns_P[p]``, and the target of
    its last token is ``tokens_N[nexts_P[p]]``, or masked where ``nexts_P[p]`` is -1. The target of any other token is
    the token after it.
    """

    counts_R: np.ndarray
    starts_P: np.ndarray
    lengths_P: np.ndarray
    columns_P: np.ndarray
    nexts_P: np.ndarray


@dataclass(frozen=True)
class PackedRows:
    """The rows of one split of one source; made by ``pack``.

    With ``mask_documents`` a piece is its own segment with its own positions, and the last token of a document has
    no target. Without, a row is one plain stretch of text: segment 1, positions 0..S-1, and the last token of a
    document predicts the first of the next.
    """

    tokens_N: np.ndarray
    seq_len: int
    mask_documents: bool

    @property
    def rows(self) -> int:
        """Rows in one epoch."""
        raise NotImplementedError

    @property
    def totals(self) -> tuple[int, int, int]:
        """Pieces, tokens (inputs) and targets that count, of all rows."""
        raise NotImplementedError

    def pieces(self, rows_R: np.ndarray) -> Pieces:
        """The pieces of rows ``rows_R``."""
        raise NotImplementedError

    def in_files(self, store: Callable[[np.ndarray], np.ndarray]) -> PackedRows:
        """The same rows, with what ``store`` returns for each array but the tokens."""
        stored: dict[str, Any] = {
            name: store(value)
            for name, value in vars(self).items()
            if isinstance(value, np.ndarray) and name != "tokens_N"
        }
        return replace(self, **stored)

    def counts(self) -> dict[str, int | float]:
        """Rows, pieces, tokens (inputs), targets that count, padding, and the filled share of the rows."""
        pieces, tokens, targets = self.totals
        places = self.rows * self.seq_len
        return {
            "rows": self.rows,
            "pieces": pieces,
            "tokens": tokens,
            "targets": targets,
            "padding": places - tokens,
            "packing_efficiency": tokens / places if places else 1.0,
        }

    def token_counts(self, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
        """How often each token is an input, and how often a target that counts; two int64 arrays [vocab_size]."""
        inputs_V, targets_V = np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.int64)
        tokens_N = np.asarray(self.tokens_N)
        at_once = max(_COUNT_TOKENS // self.seq_len, 1)
        for row in range(0, self.rows, at_once):
            _, starts_P, lengths_P, _, nexts_P = self.pieces(np.arange(row, min(row + at_once, self.rows)))
            spans = zip(starts_P.tolist(), (starts_P + lengths_P).tolist(), strict=True)
            within = np.bincount(np.concatenate([tokens_N[begin:end] for begin, end in spans]), minlength=vocab_size)
            first_V = np.bincount(tokens_N[starts_P], minlength=vocab_size)
            next_V = np.bincount(tokens_N[nexts_P[nexts_P >= 0]], minlength=vocab_size)
            inputs_V += within
            targets_V += within - first_V + next_V  # within a piece, all inputs but the first are targets
            release_pages(self.tokens_N)
        return inputs_V, targets_V

    def fill(self, batch: Batch, at_R: np.ndarray, rows_R: np.ndarray) -> None:
        """Write rows ``rows_R`` of this packing into rows ``at_R`` of ``batch``, which hold nothing yet.

        One gather for all of them: the work is a few array operations over tokens and pieces, with no loop.
        """
        count_R, start_P, length_P, column_P, next_P = self.pieces(rows_R)
        order_P = _ranges(count_R)  # 0, 1, ... within each row
        place_P = np.repeat(at_R * self.seq_len, count_R) + column_P

        within_T = _ranges(length_P)  # 0, 1, ... within each piece
        source_T = np.repeat(start_P, length_P) + within_T
        place_T = np.repeat(place_P, length_P) + within_T
        last_P = place_P + length_P - 1

        flat = {key: array.reshape(-1) for key, array in batch.items()}
        flat["tokens"][place_T] = self.tokens_N[source_T]
        flat["targets"][place_T] = self.tokens_N.take(source_T + 1, mode="clip")
        flat["targets"][last_P] = np.where(next_P < 0, 0, self.tokens_N[next_P])
        flat["mask"][place_T] = True
        flat["mask"][last_P] = next_P >= 0
        if self.mask_documents:
            flat["segments"][place_T] = np.repeat(order_P + 1, length_P)
            flat["positions"][place_T] = within_T
        else:
            flat["segments"][place_T] = 1
            flat["positions"][place_T] = np.repeat(column_P, length_P) + within_T
        release_pages(self.tokens_N)


@dataclass(frozen=True)
class ConcatRows(PackedRows):
    """Documents end to end, cut every ``seq_len`` tokens; a row's pieces are found when it is read.

    Document ``d`` starts at ``starts_D[d]`` in the tokens and is ``bounds[d]:bounds[d + 1]`` of the whole: 16 bytes per
    document.
    """

    starts_D: np.ndarray
    bounds: np.ndarray

    @property
    def rows(self) -> int:
        return -(-int(self.bounds[-1]) // self.seq_len)

    @property
    def totals(self) -> tuple[int, int, int]:
        documents, tokens = len(self.starts_D), int(self.bounds[-1])
        if not documents:
            return 0, 0, 0
        both = int(np.count_nonzero(self.bounds[1:-1] % self.seq_len == 0))  # documents that end where a row does
        return self.rows + documents - 1 - both, tokens, tokens - (documents if self.mask_documents else 1)

    def pieces(self, rows_R: np.ndarray) -> Pieces:
        begin_R = rows_R * self.seq_len
        end_R = np.minimum(begin_R + self.seq_len, self.bounds[-1])
        first_R = np.searchsorted(self.bounds, begin_R, side="right") - 1  # the document of a row's first token
        counts_R = np.searchsorted(self.bounds, end_R, side="left") - first_R
        document_P = _spread(first_R, counts_R)
        begin_P = np.maximum(self.bounds[document_P], np.repeat(begin_R, counts_R))
        ends_P = self.bounds[document_P + 1]
        end_P = np.minimum(ends_P, np.repeat(end_R, counts_R))
        starts_P = self.starts_D[document_P] + begin_P - self.bounds[document_P]
        following_P = -1 if self.mask_documents else self._start_after(document_P)
        nexts_P = np.where(end_P == ends_P, following_P, starts_P + end_P - begin_P)
        return Pieces(counts_R, starts_P, end_P - begin_P, begin_P - np.repeat(begin_R, counts_R), nexts_P)

    def _start_after(self, document_P: np.ndarray) -> np.ndarray:
        """Where the next document starts, -1 after the last."""
        last = len(self.starts_D) - 1
        return np.where(document_P < last, self.starts_D[np.minimum(document_P + 1, last)], -1)


@dataclass(frozen=True)
class BestFitRows(PackedRows):
    """A table of pieces, row ``r`` being ``row_offsets[r]:row_offsets[r + 1]`` of it: 32 bytes per piece, 8 per row."""

    row_offsets: np.ndarray
    starts_P: np.ndarray
    lengths_P: np.ndarray
    columns_P: np.ndarray
    nexts_P: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.row_offsets) - 1

    @property
    def totals(self) -> tuple[int, int, int]:
        tokens = int(self.lengths_P.sum())
        return len(self.starts_P), tokens, tokens - int(np.count_nonzero(self.nexts_P < 0))

    def pieces(self, rows_R: np.ndarray) -> Pieces:
        first_R = self.row_offsets[rows_R]
        counts_R = self.row_offsets[rows_R + 1] - first_R
        at = _spread(first_R, counts_R)
        return Pieces(counts_R, self.starts_P[at], self.lengths_P[at], self.columns_P[at], self.nexts_P[at])


def empty_batch(rows: int, seq_len: int) -> Batch:
    """A batch of nothing but padding."""
    batch: Batch = {key: np.zeros((rows, seq_len), np.int32) for key in ("tokens", "targets", "segments", "positions")}
    return batch | {"mask": np.zeros((rows, seq_len), bool)}


def pack(
    tokens_N: np.ndarray,
    starts_D: np.ndarray,
    lengths_D: np.ndarray,
    seq_len: int,
    packing: Packing = "concat",
    mask_documents: bool = True,
) -> PackedRows:
    """Pack documents ``tokens_N[starts_D[d]:starts_D[d] + lengths_D[d]]``, all of length 1 or more.

    ``"concat"`` lays them end to end in the given order and cuts every ``seq_len`` tokens; only the last row has
    padding. A document cut by a row's end goes on in the next row, and the target at the cut is the token that goes on.

    ``"best_fit"`` cuts documents longer than ``seq_len`` into pieces of ``seq_len`` and packs the rest without
    cutting, the longest first, each into the fullest row with room for it (best-fit decreasing: at most 11/9 of the
    fewest rows possible, Johnson et al. 1974, SIAM J. Comput. 3(4)).
    """
    if packing == "concat":
        return ConcatRows(tokens_N, seq_len, mask_documents, starts_D, np.append(0, np.cumsum(lengths_D)))
    starts_P, lengths_P, row_P, ends_P = _best_fit(starts_D, lengths_D, seq_len)
    nexts_P = starts_P + lengths_P
    if mask_documents:
        following_P: np.ndarray | int = -1
    else:
        following_P = np.append(np.where(row_P[1:] == row_P[:-1], starts_P[1:], -1), -1)
    nexts_P = np.where(ends_P, following_P, nexts_P)
    rows = int(row_P[-1]) + 1 if len(row_P) else 0
    row_offsets = np.searchsorted(row_P, np.arange(rows + 1))
    begin_P = np.cumsum(lengths_P) - lengths_P
    columns_P = begin_P - begin_P[row_offsets[row_P]] if rows else begin_P
    return BestFitRows(tokens_N, seq_len, mask_documents, row_offsets, starts_P, lengths_P, columns_P, nexts_P)


_PiecesByRow = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Start, length and row of each piece, by row, and whether it ends its document."""


def _best_fit(starts_D: np.ndarray, lengths_D: np.ndarray, seq_len: int) -> _PiecesByRow:
    count_D = -(-lengths_D // seq_len)
    into_P = _ranges(count_D) * seq_len
    starts_P = np.repeat(starts_D, count_D) + into_P
    left_P = np.repeat(lengths_D, count_D) - into_P
    lengths_P = np.minimum(left_P, seq_len)
    row_P = np.empty(len(lengths_P), np.int64)
    rows = 0
    with_room: list[list[int]] = [[] for _ in range(seq_len)]  # the rows with exactly so much room
    rooms = 0  # bit r is set while with_room[r] has a row: the smallest room that fits is a lowest set bit
    order = np.argsort(-lengths_P, kind="stable")
    for piece, length in zip(order.tolist(), lengths_P[order].tolist(), strict=True):
        if fitting := rooms >> length:
            room = length + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, row = seq_len, rows
            rows += 1
        row_P[piece] = row
        if room := room - length:
            with_room[room].append(row)
            rooms |= 1 << room
    by_row = np.argsort(row_P, kind="stable")
    return starts_P[by_row], lengths_P[by_row], row_P[by_row], (left_P <= seq_len)[by_row]


def _ranges(counts: np.ndarray) -> np.ndarray:
    """``[0..counts[0]-1, 0..counts[1]-1, ...]`` as one array."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def _spread(firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """``[firsts[0], firsts[0] + 1, ... (counts[0] of them), firsts[1], ...]`` as one array."""
    return np.repeat(firsts, counts) + _ranges(counts)
