"""The order as arithmetic: exact shares at every moment, and permutations that are permutations."""

import math
from collections import Counter
from itertools import permutations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.data.mixture import Mixture, fold, permute

WEIGHTS = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=9)


@settings(deadline=None, max_examples=60)
@given(weights=WEIGHTS, first=st.integers(0, 10**12))
def test_counts_are_never_far_from_their_due(weights, first):
    mixture = Mixture(weights)
    source_B, index_B = mixture.assign(first, 200)
    slack = math.ceil(math.log2(len(weights))) / 2
    for k, share in enumerate(mixture.shares):
        at = np.flatnonzero(source_B == k)
        assert (np.diff(index_B[at]) == 1).all()
        for b in at.tolist():
            before = int(index_B[b])  # how many of source k come before sequence first + b
            assert abs(before - (first + b) * share) <= slack
            assert abs(before + 1 - (first + b + 1) * share) <= slack


@settings(deadline=None, max_examples=60)
@given(weights=WEIGHTS, cut=st.integers(0, 100))
def test_seeking_is_slicing(weights, cut):
    mixture = Mixture(weights)
    for whole, tail in zip(mixture.assign(0, 100), mixture.assign(cut, 100 - cut), strict=True):
        assert (whole[cut:] == tail).all()


def test_every_source_counts_from_zero():
    source_B, index_B = Mixture([0.5, 0.2, 0.2, 0.1]).assign(0, 1000)
    for k, count in enumerate([500, 200, 200, 100]):
        assert index_B[source_B == k].tolist() == list(range(count))


def test_a_weight_of_two_millionths():
    weights = [1.0, 2e-6, 0.5, 2e-6]
    source_B, _ = Mixture(weights).assign(0, 1_500_000)
    counts = np.bincount(source_B, minlength=4)
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - 1_500_000 * weight / sum(weights)) <= 1


def test_shares_are_exact_where_floats_are_not():
    first = 2**60 + 1
    source_B, index_B = Mixture([1, 2]).assign(first, 3)
    assert np.bincount(source_B).tolist() == [1, 2]
    assert index_B[source_B == 0].tolist() == [(first + int(np.flatnonzero(source_B == 0)[0])) // 3]


@settings(deadline=None, max_examples=100)
@given(length=st.integers(1, 300), key=st.integers(0, 2**64 - 1))
def test_permute_is_a_bijection(length, key):
    shuffled = permute(np.arange(length), length, fold(key, 0))
    assert sorted(shuffled) == list(range(length))
    one_by_one = [permute(np.array([i]), length, fold(key, 0))[0] for i in range(0, length, 37)]
    assert shuffled[::37].tolist() == one_by_one


def test_permute_takes_a_length_for_each():
    lengths = np.array([1, 2, 3, 5, 100, 10**6])
    keys = fold(1, lengths)
    together = permute(lengths - 1, lengths, keys)
    apart = [permute(lengths[i : i + 1] - 1, int(lengths[i]), keys[i : i + 1])[0] for i in range(6)]
    assert together.tolist() == apart


def test_permute_stays_inside_a_huge_range():
    length = 10**12 + 7
    places = permute(np.arange(1000), length, fold(3, 1))
    assert len(set(places.tolist())) == 1000
    assert places.min() >= 0 and places.max() < length
    assert 0.45 < places.mean() / length < 0.55


def test_all_permutations_are_about_equally_likely():
    keys = fold(7, np.arange(6000))
    columns = [permute(np.full(6000, i), 4, keys).tolist() for i in range(4)]
    counts = Counter(zip(*columns, strict=True))
    assert set(counts) == set(permutations(range(4)))
    chi_square = sum((count - 250) ** 2 / 250 for count in counts.values())
    assert chi_square < 49.7  # 23 degrees of freedom: exceeded once in a thousand


def test_neighbours_part():
    gaps = np.diff(permute(np.arange(10_000), 10_000, fold(0, 0)))
    assert (gaps == 1).sum() < 10
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1] + 0.5) < 0.05  # -1/2 for a uniform permutation


def test_keys_do_not_collide():
    grid = {int(fold(fold(seed, k), epoch)[0]) for seed in range(20) for k in range(10) for epoch in range(10)}
    assert len(grid) == 2000
