"""Throughput of a run: tokens/s and model FLOPs utilisation."""

from __future__ import annotations

import collections
import dataclasses
import time


@dataclasses.dataclass(frozen=True)
class Reading:
    """One step as measured."""

    seconds: float  # since the loop started, this session
    tokens_per_second: float  # positions, padding included, over the last steps
    mfu: float | None  # share of peak FLOP/s spent on model FLOPs; None where no peak is known


class Meter:
    """Throughput over a sliding window of steps; ``pause`` leaves evaluations and checkpoints out."""

    def __init__(self, tokens_per_step: int, flops_per_token: float, peak_flops: float, window: int = 20):
        self.tokens_per_step, self.flops_per_token, self.peak_flops = tokens_per_step, flops_per_token, peak_flops
        self._start = time.perf_counter()
        self._excluded = 0.0
        self._marks: collections.deque[float] = collections.deque([self._start], maxlen=window + 1)

    def step(self) -> Reading:
        """Note that a step has ended."""
        now = time.perf_counter()
        self._marks.append(now - self._excluded)
        took = (self._marks[-1] - self._marks[0]) / (len(self._marks) - 1)
        rate = self.tokens_per_step / max(took, 1e-9)
        mfu = rate * self.flops_per_token / self.peak_flops if self.peak_flops else None
        return Reading(now - self._start, rate, mfu)

    def pause(self, seconds: float) -> None:
        """Leave ``seconds`` that just passed out of the throughput."""
        self._excluded += seconds
