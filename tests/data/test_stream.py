"""The training order as a function of seed and sequence number, and the one-pass evaluation."""

from collections import Counter

import numpy as np
import pytest

from jaxpar.data.stream import Evaluation, Stream


@pytest.fixture
def stream(numbered):
    return Stream([numbered([8] * 10, 8), numbered([3, 20, 9], 8, "best_fit")], [3.0, 1.0], seed=5)


def test_every_row_once_per_epoch(numbered):
    stream = Stream([numbered([8] * 10, 8)], [1.0], seed=0)
    epochs = [stream.order(first, 10)[1].tolist() for first in range(0, 50, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 5


def test_every_row_once_per_epoch_of_its_source(stream):
    source_B, row_B = stream.order(0, 400)
    for k, packed in enumerate(stream.sources):
        rows = row_B[source_B == k]
        whole = len(rows) // packed.rows * packed.rows
        assert whole >= 2 * packed.rows
        for epoch in rows[:whole].reshape(-1, packed.rows):
            assert sorted(epoch) == list(range(packed.rows))


def test_four_rows_five_times(numbered):
    stream = Stream([numbered([8] * 4, 8)], [1.0], seed=1)
    firsts = np.concatenate([stream.batch(n, 2)["tokens"][:, 0] for n in range(0, 20, 2)])
    assert Counter(firsts.tolist()) == {1: 5, 9: 5, 17: 5, 25: 5}


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 60])
def test_batch_size_does_not_matter(stream, batch):
    whole = stream.batch(0, 60)
    parts = [stream.batch(first, min(batch, 60 - first)) for first in range(0, 60, batch)]
    for key, array in whole.items():
        assert (np.concatenate([part[key] for part in parts]) == array).all()


def test_seed_matters(numbered):
    orders = {tuple(Stream([numbered([8] * 10, 8)], [1.0], seed).order(0, 10)[1]) for seed in range(8)}
    assert len(orders) == 8


def test_sources_are_shuffled_apart(numbered):
    packed = numbered([8] * 50, 8)
    source_B, row_B = Stream([packed, packed], [1.0, 1.0], seed=0).order(0, 100)
    assert row_B[source_B == 0].tolist() != row_B[source_B == 1].tolist()


@pytest.mark.parametrize("hosts", [1, 2, 4])
@pytest.mark.parametrize("global_batch", [4, 8, 32])
def test_evaluation_is_one_pass(numbered, hosts, global_batch):
    evaluation = Evaluation([numbered([8] * 10, 8), numbered([5], 8)])
    parts = np.arange(global_batch).reshape(hosts, -1)
    per_host = [list(evaluation.batches(global_batch, None, rows)) for rows in parts]
    batches = [batch for batches in per_host for batch in batches]
    assert {len(batches) for batches in per_host} == {-(-11 // global_batch)}
    assert {batch["tokens"].shape for batch in batches} == {(global_batch // hosts, 8)}
    inputs = np.concatenate([batch["tokens"][batch["segments"] > 0] for batch in batches])
    assert sorted(inputs) == sorted([*range(1, 81), *range(1, 6)])
    assert sum(batch["mask"].sum() for batch in batches) == 10 * 7 + 4  # padding rows weigh nothing


def test_evaluation_order_is_fixed_and_mixed(numbered):
    evaluation = Evaluation([numbered([8] * 40, 8), numbered([4] * 40, 8)])
    order = np.concatenate([batch["segments"].max(axis=1) for batch in evaluation.batches(5)])
    again = np.concatenate([batch["segments"].max(axis=1) for batch in evaluation.batches(4, max_batches=5)])
    assert order[:20].tolist() == again.tolist()
    assert set(order[:20].tolist()) == {1, 2}
