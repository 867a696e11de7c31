"""The training curve of a run as a PNG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Records = Sequence[Mapping[str, Any]]

MOST_POINTS = 1000  # of one line; about as many as the figure has pixels across
BLUE, RED, GREY = "#1f5fa8", "#c8442b", "#6b6b6b"
DASHES = ((0, (6, 3)), (0, (2, 2)), (0, (6, 2, 1, 2)))


def draw_loss(records: Records, path: Path, title: str, reference: Mapping[str, float] | None = None) -> None:
    """Draw loss and learning rate against step, with a second axis in tokens, and write a PNG to ``path``.

    ``records`` are the lines of ``metrics.jsonl``: training records have "step", "tokens" (so far), "loss" (nats/token)
    and "learning_rate", evaluation records "step" and "eval_loss" (nats/token). Values that are not finite are left
    out. ``reference`` gives levels to compare with, in nats/token, by label: ``{"unigram entropy": 3.34}``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.6), dpi=150, layout="constrained")
    loss_axes, rate_axes = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    training, evaluation = _series(records, "loss"), _series(records, "eval_loss")
    reference = reference or {}

    smooth = _smooth(training)
    if len(smooth) < len(training) or not np.array_equal(smooth, training):
        loss_axes.plot(*_envelope(training).T, color=BLUE, alpha=0.25, linewidth=0.7, label="training loss")
        loss_axes.plot(*_thin(smooth).T, color=BLUE, linewidth=1.6, label="training loss, smoothed")
    elif len(training):
        loss_axes.plot(*training.T, ".-", color=BLUE, linewidth=1.6, label="training loss")
    if len(evaluation):
        style = "o-" if len(evaluation) <= 50 else "-"
        loss_axes.plot(*_thin(evaluation).T, style, color=RED, markersize=4, linewidth=1.2, label="evaluation loss")
    for number, (label, level) in enumerate(reference.items()):
        dash = DASHES[number % len(DASHES)]
        loss_axes.axhline(level, color=GREY, linestyle=dash, linewidth=1.2, label=f"{label}, {level:.3f}")
    rate = _thin(_series(records, "learning_rate"))
    rate_axes.plot(*rate.T, ".-" if len(rate) == 1 else "-", color=BLUE, linewidth=1.2)

    figure.suptitle(title.encode("utf-8", "replace").decode(), x=0.01, ha="left", fontsize=11, fontweight="bold")
    loss_axes.set(ylabel="loss (nats/token)", ylim=_limits(training, smooth, evaluation, list(reference.values())))
    rate_axes.set(xlabel="step", ylabel="learning rate", ylim=(0, 1.1 * max(rate[:, 1], default=0) or None))
    rate_axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    rate_axes.set_xlim(0, 1.02 * max((record["step"] for record in records), default=0) or 1)
    rate_axes.xaxis.get_major_locator().set_params(integer=True)
    rate_axes.xaxis.set_major_formatter("{x:,.0f}")
    _add_token_axis(loss_axes, records)
    for axes in (loss_axes, rate_axes):
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _series(records: Records, name: str) -> np.ndarray:
    """The finite values of a field as rows of (step, value)."""
    rows = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    rows = [row for row in rows if math.isfinite(row[1])]
    return np.array(rows, dtype=float).reshape(-1, 2)


def _smooth(series: np.ndarray) -> np.ndarray:
    """The mean over a window around each point, 2 % of the run wide and narrower at its ends."""
    count, half = len(series), len(series) // 100
    sums = np.concatenate([[0.0], np.cumsum(series[:, 1])])
    reach = np.minimum(half, np.minimum(np.arange(count), np.arange(count)[::-1]))
    first, last = np.arange(count) - reach, np.arange(count) + reach + 1
    values = series[:, 1] if half == 0 else (sums[last] - sums[first]) / (last - first)
    return np.stack([series[:, 0], values], axis=1)


def _envelope(series: np.ndarray) -> np.ndarray:
    """At most ``2 * MOST_POINTS`` rows that keep the lowest and highest value of each stretch, and so every spike."""
    if len(series) <= 2 * MOST_POINTS:
        return series
    stretches = np.array_split(series, MOST_POINTS)
    return np.concatenate([s[np.sort([s[:, 1].argmin(), s[:, 1].argmax()])] for s in stretches])


def _thin(series: np.ndarray) -> np.ndarray:
    """At most ``MOST_POINTS`` rows, evenly chosen, the first and the last among them."""
    chosen = np.linspace(0, len(series) - 1, min(len(series), MOST_POINTS)).round().astype(int)
    return series[chosen]


def _limits(training: np.ndarray, smooth: np.ndarray, evaluation: np.ndarray, levels: list[float]) -> Any:
    """Limits of the loss axis that single spikes do not stretch."""
    shown = [*smooth[:, 1], *evaluation[:, 1], *levels]
    if len(training):
        shown += [*np.percentile(training[:, 1], [0.5, 99.5])]
    if not shown:
        return None
    margin = 0.05 * (max(shown) - min(shown)) or 0.1
    return min(shown) - margin, max(shown) + margin


def _add_token_axis(axes: Any, records: Records) -> None:
    """A scale in tokens above, at the run's mean number of tokens per step."""
    counted = [record for record in records if record["step"] and record.get("tokens")]
    if counted:
        per_step = counted[-1]["tokens"] / counted[-1]["step"]
        top = axes.secondary_xaxis("top", functions=(lambda step: step * per_step, lambda tokens: tokens / per_step))
        top.set_xlabel("tokens")
        top.xaxis.set_major_formatter(lambda tokens, _: _short(tokens))


def _short(number: float) -> str:
    """``1.5M`` for 1,500,000."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:g}{letter}"
    return f"{number:g}"
