"""Documents into rows of ``seq_len`` tokens, and rows into batches.

Packing is a table of *pieces*, runs of consecutive tokens of one document, and never copies a token; ``fill`` gathers
any rows of it, in any order, straight into a batch. Nothing is dropped: every token of every document is an input in
exactly one row, and ``tokens + padding == rows * seq_len``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PACKINGS = ("concat", "first_fit")

_COUNT_CHUNK = 1 << 24  # bincount turns its input into 8-byte integers

Batch = dict[str, np.ndarray]
"""The five arrays [B, S] of a batch:

- ``tokens`` int32: the inputs; 0 where there is padding.
- ``targets`` int32: the token that follows each input; 0 where there is none.
- ``segments`` int32: 1, 2, ... by document piece within the row; 0 is padding.
- ``positions`` int32: 0, 1, ... within the piece; 0 where there is padding.
- ``mask`` bool: whether the target counts.
"""


@dataclass(frozen=True)
class PackedRows:
    """The rows of one split of one source.

    Row ``r`` holds pieces ``row_offsets[r]:row_offsets[r + 1]``. Piece ``p`` is
    ``tokens_N[starts_P[p]:starts_P[p] + lengths_P[p]]`` at column ``columns_P[p]``, and the target of its last token is
    ``tokens_N[nexts_P[p]]``, or masked where ``nexts_P[p]`` is -1. The target of any other token is the token after it.

    With ``mask_documents`` a piece is its own segment with its own positions, and the last token of a document has
    no target. Without, a row is one plain stretch of text: segment 1, positions 0..S-1, and the last token of a
    document predicts the first of the next.
    """

    tokens_N: np.ndarray
    seq_len: int
    mask_documents: bool
    starts_P: np.ndarray
    lengths_P: np.ndarray
    columns_P: np.ndarray
    nexts_P: np.ndarray
    row_offsets: np.ndarray

    @property
    def rows(self) -> int:
        """Rows in one epoch."""
        return len(self.row_offsets) - 1

    def counts(self) -> dict[str, int | float]:
        """Rows, pieces, tokens (inputs), targets that count, padding, and the filled share of the rows."""
        tokens, places = int(self.lengths_P.sum()), self.rows * self.seq_len
        targets = tokens - int((self.nexts_P < 0).sum())
        return {
            "rows": self.rows,
            "pieces": len(self.starts_P),
            "tokens": tokens,
            "targets": targets,
            "padding": places - tokens,
            "packing_efficiency": tokens / places if places else 1.0,
        }

    def token_counts(self, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
        """How often each token is an input, and how often a target that counts; two int64 arrays [vocab_size]."""
        edges = np.zeros(len(self.tokens_N) + 1, np.int8)
        edges[self.starts_P] += 1
        edges[self.starts_P + self.lengths_P] -= 1
        used_N = np.cumsum(edges[:-1], dtype=np.int8).astype(bool)  # pieces never overlap
        inputs_V = np.zeros(vocab_size, np.int64)
        for begin in range(0, len(used_N), _COUNT_CHUNK):
            part = slice(begin, begin + _COUNT_CHUNK)
            inputs_V += np.bincount(self.tokens_N[part][used_N[part]], minlength=vocab_size)
        first_V = np.bincount(self.tokens_N[self.starts_P], minlength=vocab_size)
        next_V = np.bincount(self.tokens_N[self.nexts_P[self.nexts_P >= 0]], minlength=vocab_size)
        return inputs_V, inputs_V - first_V + next_V  # within a piece, all inputs but the first are targets

    def fill(self, batch: Batch, at_R: np.ndarray, rows_R: np.ndarray) -> None:
        """Write rows ``rows_R`` of this packing into rows ``at_R`` of ``batch``, which hold nothing yet.

        One gather for all of them: the work is a few array operations over tokens and pieces, with no loop.
        """
        first_R = self.row_offsets[rows_R]
        count_R = self.row_offsets[rows_R + 1] - first_R
        order_P = _ranges(count_R)  # 0, 1, ... within each row
        pieces_P = np.repeat(first_R, count_R) + order_P
        length_P = self.lengths_P[pieces_P]
        column_P = self.columns_P[pieces_P]
        place_P = np.repeat(at_R * self.seq_len, count_R) + column_P
        next_P = self.nexts_P[pieces_P]

        within_T = _ranges(length_P)  # 0, 1, ... within each piece
        source_T = np.repeat(self.starts_P[pieces_P], length_P) + within_T
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


def empty_batch(rows: int, seq_len: int) -> Batch:
    """A batch of nothing but padding."""
    batch: Batch = {key: np.zeros((rows, seq_len), np.int32) for key in ("tokens", "targets", "segments", "positions")}
    return batch | {"mask": np.zeros((rows, seq_len), bool)}


def pack(
    tokens_N: np.ndarray,
    starts_D: np.ndarray,
    lengths_D: np.ndarray,
    seq_len: int,
    packing: str = "concat",
    mask_documents: bool = True,
) -> PackedRows:
    """Pack documents ``tokens_N[starts_D[d]:starts_D[d] + lengths_D[d]]``, all of length 1 or more.

    ``"concat"`` lays them end to end in the given order and cuts every ``seq_len`` tokens; only the last row has
    padding. A document cut by a row's end goes on in the next row, and the target at the cut is the token that goes on.

    ``"first_fit"`` cuts documents longer than ``seq_len`` into pieces of ``seq_len`` and packs the rest without
    cutting, the longest first, each into the fullest row with room for it (best-fit decreasing: at most 11/9 of the
    fewest rows possible, Johnson et al. 1974, SIAM J. Comput. 3(4)).
    """
    starts_P, lengths_P, row_P, ends_P = (_concat if packing == "concat" else _best_fit)(starts_D, lengths_D, seq_len)
    nexts_P = starts_P + lengths_P
    if mask_documents:
        nexts_P = np.where(ends_P, -1, nexts_P)
    else:
        reachable_P = (row_P[1:] == row_P[:-1]) | (packing == "concat")
        following_P = np.append(np.where(reachable_P, starts_P[1:], -1), -1)
        nexts_P = np.where(ends_P, following_P, nexts_P)
    rows = int(row_P[-1]) + 1 if len(row_P) else 0
    row_offsets = np.searchsorted(row_P, np.arange(rows + 1))
    begin_P = np.cumsum(lengths_P) - lengths_P
    columns_P = begin_P - begin_P[row_offsets[row_P]] if rows else begin_P
    return PackedRows(tokens_N, seq_len, mask_documents, starts_P, lengths_P, columns_P, nexts_P, row_offsets)


_Pieces = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Start, length and row of each piece, by row, and whether it ends its document."""


def _concat(starts_D: np.ndarray, lengths_D: np.ndarray, seq_len: int) -> _Pieces:
    ends_D = np.cumsum(lengths_D)
    total = int(ends_D[-1]) if len(ends_D) else 0
    cuts = np.union1d(np.arange(0, total, seq_len), ends_D)  # every row's first token, every document's end
    begin_P, end_P = cuts[:-1], cuts[1:]
    document_P = np.searchsorted(ends_D, begin_P, side="right")
    into_P = begin_P - (ends_D - lengths_D)[document_P]
    return starts_D[document_P] + into_P, end_P - begin_P, begin_P // seq_len, end_P == ends_D[document_P]


def _best_fit(starts_D: np.ndarray, lengths_D: np.ndarray, seq_len: int) -> _Pieces:
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
