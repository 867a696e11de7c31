"""The order of the data as arithmetic: which source, and which of its rows, is sequence ``n``.

Both questions are answered in closed form for any ``n``, so seeking costs nothing and no state is carried. Everything
is integer arithmetic of our own, so that no library upgrade can change the order of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 8


class Mixture:
    """Interleaves K sources by weight so evenly that counts are exact at every moment.

    The sources are the leaves of a binary tree. A node that hands the share ``p`` of its sequences to the left has
    given it ``floor(n p + 1/2)`` of its first ``n`` (Bresenham's line, in exact rationals), and its sequence ``n`` goes
    left when that number grows from ``n`` to ``n + 1``. Each level adds at most 1/2 to a count's distance from its due,
    so after ``n`` sequences a source of share ``w`` has had ``n w`` of them within ``ceil(log2 K) / 2``, and they are
    its own sequences 0, 1, 2, ...
    """

    def __init__(self, weights: Sequence[float]):
        exact = [Fraction(str(float(weight))) for weight in weights]
        self.shares = [weight / sum(exact, Fraction()) for weight in exact]

    def assign(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """For sequences ``first .. first + count - 1``: the source of each and its number within that source."""
        source_B, index_B = np.empty(count, np.int64), np.empty(count, np.int64)

        def split(low: int, high: int, begin: int, places: np.ndarray) -> None:
            """Share ``places``, the sequences ``begin, begin + 1, ...`` of the node of sources ``low .. high - 1``."""
            if not len(places):
                return
            if high - low == 1:
                source_B[places], index_B[places] = low, begin + np.arange(len(places))
                return
            middle = (low + high) // 2
            share = sum(self.shares[low:middle], Fraction()) / sum(self.shares[low:high], Fraction())
            twice, whole = 2 * share.numerator, share.denominator
            lefts = [(n * twice + whole) // (2 * whole) for n in range(begin, begin + len(places) + 1)]
            goes_left = np.diff(lefts) == 1
            split(low, middle, lefts[0], places[goes_left])
            split(middle, high, begin - lefts[0], places[~goes_left])

        split(0, len(self.shares), first, np.arange(count))
        return source_B, index_B


def fold(key: np.ndarray | int, data: np.ndarray | int) -> np.ndarray:
    """A 64-bit key for each pair of ``key`` and ``data`` (elementwise); the finalizer of SplitMix64.

    Steele, Lea, Flood (2014), "Fast splittable pseudorandom number generators", with Stafford's "Mix13" constants.
    """
    with np.errstate(over="ignore"):
        x = _uint64(key) + (_uint64(data) + np.uint64(1)) * _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def permute(index: np.ndarray, length: np.ndarray | int, key: np.ndarray) -> np.ndarray:
    """Where each ``index`` goes in the permutation of ``0 .. length - 1`` that its ``key`` names; O(1) in ``length``.

    ``length`` and ``key`` are one for all, or one for each.

    A Feistel network on a grid ``a x b`` just larger than ``length``, each round adding to one coordinate a random
    function of the other; an index that lands outside walks on until it is inside (Black and Rogaway 2002, "Ciphers
    with arbitrary finite domains", methods 2 and 3).
    """
    out = np.array(index, np.int64)
    length = np.broadcast_to(np.asarray(length, np.int64), out.shape)
    key = np.broadcast_to(key, out.shape)
    walking = np.arange(len(out))
    while len(walking):
        a = np.sqrt(length[walking]).astype(np.int64) + 1
        b = -(-length[walking] // a)
        row, column = np.divmod(out[walking], b)
        for turn in range(_ROUNDS):
            round_key = fold(key[walking], turn)
            if turn % 2:
                row = (row + _below(a, fold(round_key, column))) % a
            else:
                column = (column + _below(b, fold(round_key, row))) % b
        out[walking] = row * b + column
        walking = walking[out[walking] >= length[walking]]
    return out


def _below(limit: np.ndarray, word: np.ndarray) -> np.ndarray:
    """A random 64-bit ``word`` as a number below ``limit``."""
    return (word % limit.astype(np.uint64)).astype(np.int64)


def _uint64(number: np.ndarray | int) -> np.ndarray:
    """Integers of any size and sign as 64-bit words, in an array of at least one element."""
    if isinstance(number, int):
        number = np.array([number % 2**64], np.uint64)
    return number.astype(np.uint64, copy=False)
