"""Conservation, borders and labels of packed rows (checks E7 and G12)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.data.packing import PACKINGS, empty_batch

LENGTHS = st.lists(st.integers(1, 25), min_size=1, max_size=12)
both_packings = pytest.mark.parametrize("packing", PACKINGS)


def all_rows(packed):
    batch = empty_batch(packed.rows, packed.seq_len)
    packed.fill(batch, np.arange(packed.rows), np.arange(packed.rows))
    return batch


def conserved(packed, batch, lengths):
    """Every token is an input exactly once, and the rest is declared padding."""
    inputs = batch["tokens"][batch["segments"] > 0]
    assert sorted(inputs) == list(range(1, sum(lengths) + 1))
    counts = packed.counts()
    assert counts["tokens"] == sum(lengths)
    assert counts["tokens"] + counts["padding"] == packed.rows * packed.seq_len
    assert counts["targets"] == batch["mask"].sum()
    for key in ("tokens", "targets", "positions", "mask"):
        assert not batch[key][batch["segments"] == 0].any()


@both_packings
@settings(deadline=None, max_examples=150)
@given(lengths=LENGTHS, seq_len=st.integers(1, 9))
def test_rows_of_separate_documents(numbered, packing, lengths, seq_len):
    packed = numbered(lengths, seq_len, packing)
    batch = all_rows(packed)
    conserved(packed, batch, lengths)
    last_tokens = set(np.cumsum(lengths).tolist())
    for row in range(packed.rows):
        segment, expected, before = 0, 0, None
        for column in range(seq_len):
            token, target, mask, seen, position = (
                int(batch[key][row, column]) for key in ("tokens", "targets", "mask", "segments", "positions")
            )
            if not seen:
                continue
            goes_on = before is not None and token == before + 1 and before not in last_tokens
            segment, expected = (segment, expected + 1) if goes_on else (segment + 1, 0)
            assert (seen, position) == (segment, expected)
            assert (mask, target) == ((0, 0) if token in last_tokens else (1, token + 1))
            before = token


@settings(deadline=None, max_examples=100)
@given(lengths=LENGTHS, seq_len=st.integers(1, 9))
def test_concat_without_document_masks_is_one_text(numbered, lengths, seq_len):
    packed = numbered(lengths, seq_len, "concat", mask_documents=False)
    batch = all_rows(packed)
    conserved(packed, batch, lengths)
    total = sum(lengths)
    flat = {key: array.reshape(-1)[:total] for key, array in batch.items()}
    assert flat["targets"].tolist() == [*range(2, total + 1), 0]
    assert flat["mask"].tolist() == [True] * (total - 1) + [False]
    assert (flat["segments"] == 1).all()
    assert (flat["positions"] == np.arange(total) % seq_len).all()


@settings(deadline=None, max_examples=100)
@given(lengths=LENGTHS, seq_len=st.integers(1, 9))
def test_best_fit_without_document_masks_predicts_along_the_row(numbered, lengths, seq_len):
    batch = all_rows(numbered(lengths, seq_len, "best_fit", mask_documents=False))
    inside = batch["segments"][:, 1:] > 0
    assert (batch["targets"][:, :-1] == batch["tokens"][:, 1:])[inside].all()
    assert batch["mask"][:, :-1][inside].all()
    assert (batch["positions"] == np.where(batch["segments"] > 0, np.arange(seq_len), 0)).all()


@both_packings
@pytest.mark.parametrize("length", [1, 7, 8, 9, 80])
@pytest.mark.parametrize("copies", [1, 3])
def test_no_length_is_dropped(numbered, packing, length, copies):
    packed = numbered([length] * copies, 8, packing)
    batch = all_rows(packed)
    conserved(packed, batch, [length] * copies)
    assert packed.counts()["targets"] == copies * (length - 1)  # a row border costs no target


def test_the_last_token_of_a_document_predicts_nothing(numbered):
    batch = all_rows(numbered([3, 5], 8))
    assert batch["tokens"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert batch["targets"].tolist() == [[2, 3, 0, 5, 6, 7, 8, 0]]  # wrong: 4 after 3
    assert batch["mask"].tolist() == [[True, True, False, True, True, True, True, False]]
    assert batch["segments"].tolist() == [[1, 1, 1, 2, 2, 2, 2, 2]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]


def test_a_document_crossing_a_row_keeps_its_target(numbered):
    batch = all_rows(numbered([2, 4], 4))
    assert batch["tokens"].tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert batch["targets"].tolist() == [[2, 0, 4, 5], [6, 0, 0, 0]]
    assert batch["segments"].tolist() == [[1, 1, 2, 2], [1, 1, 0, 0]]
    assert batch["positions"].tolist() == [[0, 1, 0, 1], [0, 1, 0, 0]]


def test_replacing_one_document_changes_nothing_of_its_neighbour(numbered):
    packed = numbered([3, 5], 8)
    before = all_rows(packed)
    packed.tokens_N[:3] = 99
    after = all_rows(packed)
    for key in before:
        assert (before[key][:, 3:] == after[key][:, 3:]).all()


@settings(deadline=None, max_examples=100)
@given(lengths=LENGTHS, seq_len=st.integers(1, 9))
def test_best_fit_cuts_only_what_is_too_long(numbered, lengths, seq_len):
    packed = numbered(lengths, seq_len, "best_fit")
    assert len(packed.starts_P) == sum(-(-length // seq_len) for length in lengths)
    assert packed.rows <= len(packed.starts_P)


@pytest.mark.parametrize(
    ("lengths", "rows"), [([5, 3] * 10, 10), ([2] * 12, 3), ([6, 1, 1, 7, 1, 4, 4], 3), ([8, 8], 2), ([5] * 4, 4)]
)
def test_best_fit_fills_rows(numbered, lengths, rows):
    assert numbered(lengths, 8, "best_fit").rows == rows


def test_best_fit_is_tight_on_many_documents(numbered):
    lengths = np.random.default_rng(0).integers(1, 100, 600)
    assert numbered(lengths, 128, "best_fit").counts()["packing_efficiency"] > 0.97


@both_packings
@settings(deadline=None, max_examples=50)
@given(lengths=LENGTHS, seq_len=st.integers(1, 9), data=st.data())
def test_fill_puts_any_rows_anywhere(numbered, packing, lengths, seq_len, data):
    packed = numbered(lengths, seq_len, packing)
    rows = np.array(data.draw(st.lists(st.integers(0, packed.rows - 1), max_size=6)), np.int64)
    at = np.array(data.draw(st.permutations(range(6))), np.int64)[: len(rows)]
    batch, every = empty_batch(6, seq_len), all_rows(packed)
    packed.fill(batch, at, rows)
    for key, array in batch.items():
        assert (array[at] == every[key][rows]).all()
        assert not np.delete(array, at, axis=0).any()


@both_packings
@pytest.mark.parametrize("mask_documents", [True, False])
def test_token_counts_are_those_of_the_rows(numbered, packing, mask_documents):
    packed = numbered([3, 9, 1, 20], 4, packing, mask_documents)
    batch = all_rows(packed)
    inputs_V, targets_V = packed.token_counts(40)
    assert (inputs_V == np.bincount(batch["tokens"][batch["segments"] > 0], minlength=40)).all()
    assert (targets_V == np.bincount(batch["targets"][batch["mask"]], minlength=40)).all()


def test_dtypes():
    dtypes = {key: array.dtype for key, array in empty_batch(1, 1).items()}
    integers = dict.fromkeys(("tokens", "targets", "segments", "positions"), np.dtype(np.int32))
    assert dtypes == integers | {"mask": np.dtype(bool)}
