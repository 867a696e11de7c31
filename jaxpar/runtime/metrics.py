"""What a run measures of itself: throughput, where its time went, memory."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import resource
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxpar.words import duration

# What the seconds of a run are spent on, and in words.
PHASES = {
    "step": "steps",  # dispatching a step, waiting for the device, writing the metrics down
    "data": "waiting for data",  # the loop, for the loader
    "compile": "compiling",  # the step and the evaluation
    "evaluate": "evaluation",
    "checkpoint": "checkpoints",  # what the loop itself waits for; the rest is written meanwhile
    "start": "start",  # reading data, building, restoring or making the first state; starting and writing a profile
    "lost": "lost to restarts",  # in earlier sessions, after the checkpoint that the run was resumed from
}


@dataclasses.dataclass(frozen=True)
class Reading:
    """One step as measured."""

    tokens_per_second: float  # positions, padding included, over the last steps
    mfu: float | None  # share of peak FLOP/s spent on model FLOPs; None where no peak is known


class Meter:
    """Throughput over a sliding window of steps, and the seconds of the run by phase.

    Every moment since ``started`` (of ``time.perf_counter``) belongs to the innermost phase that is open, or to
    "start": the phases add up to the time that passed. Throughput counts the time in "data" and "step" alone.
    """

    def __init__(self, tokens_per_step: int, flops_per_token: float, started: float, window: int = 20):
        self.tokens_per_step, self.flops_per_token = tokens_per_step, flops_per_token
        self.peak_flops = 0.0  # of all devices; 0: not known
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._phase, self._since = "start", started
        self._marks: collections.deque[float] = collections.deque([0.0], maxlen=window + 1)

    @contextlib.contextmanager
    def phase(self, name: str, step: int | None = None) -> Iterator[None]:
        """Charge what happens inside to a phase, and show it under that name in a profile; ``step``: as that step."""
        plain, numbered = jax.profiler.TraceAnnotation, jax.profiler.StepTraceAnnotation
        outer = self._switch(name)
        try:
            with plain(name) if step is None else numbered(name, step_num=step):
                yield
        finally:
            self._switch(outer)

    def _switch(self, phase: str) -> str:
        """Charge the time since the last switch to the open phase, and open another; returns the one left."""
        now, left = time.perf_counter(), self._phase
        self._spent[left] += now - self._since
        self._since, self._phase = now, phase
        return left

    def step(self) -> Reading:
        """Note that a step has ended."""
        self._switch(self._phase)
        self._marks.append(self._spent["data"] + self._spent["step"])
        took = (self._marks[-1] - self._marks[0]) / (len(self._marks) - 1)
        rate = self.tokens_per_step / max(took, 1e-9)
        mfu = rate * self.flops_per_token / self.peak_flops if self.peak_flops else None
        return Reading(rate, mfu)

    def seconds(self) -> dict[str, float]:
        """Seconds of the run so far, as metrics.jsonl has them, cumulative over its sessions.

        ``seconds``: in all, which never decreases from one record to the next; ``seconds_PHASE``: its parts;
        ``goodput``: the share of "step", of work that was kept.
        """
        self._switch(self._phase)
        total = sum(self._spent.values())
        parts = {f"seconds_{name}": round(spent, 3) for name, spent in self._spent.items()}
        return {"seconds": round(total, 3), **parts, "goodput": round(self._spent["step"] / max(total, 1e-9), 4)}

    def carry_over(self, step: int, earlier: Iterable[Mapping[str, Any]]) -> None:
        """Add the earlier sessions of a run that goes on from ``step``; ``earlier``: records with their ``seconds()``.

        What the latest of them at or before ``step`` says is kept by phase; what passed after it is lost. (Where
        metrics were not written every step, the steps since that record count as lost too.)
        """
        timed = sorted((r for r in earlier if "seconds_step" in r), key=lambda r: r["seconds"])
        kept: Mapping[str, Any] = max((r for r in timed if r["step"] <= step), key=lambda r: r["seconds"], default={})
        for name in PHASES:
            self._spent[name] += kept.get(f"seconds_{name}", 0.0)
        if timed:
            self._spent["lost"] += timed[-1]["seconds"] - kept.get("seconds", 0.0)
        self._marks = collections.deque([self._spent["data"] + self._spent["step"]], maxlen=self._marks.maxlen)

    def shares(self) -> str:
        """Where the time went, in words: ``1 min 40 s: 92 % steps, 5 % compiling, 3 % start``."""
        total = self.seconds()["seconds"]
        shares = {PHASES[name]: 100 * spent / max(total, 1e-9) for name, spent in self._spent.items()}
        ordered = sorted(shares.items(), key=lambda item: -item[1])
        return f"{duration(total)}: " + ", ".join(f"{share:.0f} % {name}" for name, share in ordered if share >= 0.5)


def memory(devices: list[Any]) -> dict[str, int]:
    """Bytes in use: ``memory_bytes``, the peak of the fullest of these devices; ``host_bytes``, of this process now.

    Devices that keep no count (CPUs) give no ``memory_bytes``.
    """
    here = jax.process_index()
    statistics = [device.memory_stats() or {} for device in devices if device.process_index == here]
    peaks = [found["peak_bytes_in_use"] for found in statistics if "peak_bytes_in_use" in found]
    return {**({"memory_bytes": max(peaks)} if peaks else {}), "host_bytes": _resident_bytes()}


def _resident_bytes() -> int:
    """The resident set of this process; where there is no /proc, the largest it has been."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
