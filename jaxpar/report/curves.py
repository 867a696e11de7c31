"""Everything of a run that is drawn as a curve: loss, gradient norm, learning rate, throughput, host memory.

A curve is drawn from rows of (x, y), with a mean over the rows around each. A long one is thinned to what a plot can
show; where single values are drawn too, the thinning keeps every spike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxpar.report.canvas import MUTED, Canvas, Drawing, Key, Style, number_axis, styles
from jaxpar.report.runs import Run, Series

MOST_POINTS = 600  # of one curve; a plot is about as many points wide
MOST_RAW = 3  # as many series as show single values behind their mean


@dataclasses.dataclass(frozen=True)
class Measure:
    """A field of the records and how it is drawn."""

    field: str
    title: str
    unit: str
    caption: str = ""
    factor: float = 1.0  # from the field's unit to the one that is shown
    smoothed: bool = True
    from_zero: bool = True  # the y axis begins there


AROUND = "Line: mean over the 2 % of the run around each step"
LOSS = Measure("loss", "Training loss", "nats/token", f"{AROUND}.", from_zero=False)
EVAL_LOSS = Measure(
    "eval_loss", "Evaluation loss", "nats/token", "Mean over held-out tokens.", smoothed=False, from_zero=False
)
GRAD_NORM = Measure("grad_norm", "Gradient norm", "global L2 norm", f"Before clipping. {AROUND}.", from_zero=False)
MEASURES = (
    GRAD_NORM,
    Measure("learning_rate", "Learning rate", "learning rate", smoothed=False),
    Measure("tokens_per_second", "Throughput", "tokens/s", "Padding included; evaluations and checkpoints left out."),
    Measure("mfu", "Model FLOPs utilisation", "% of peak FLOP/s", "What is recomputed does not count.", 100),
    Measure("host_bytes", "Host memory", "GB", "Resident memory of the first process.", 1e-9, smoothed=False),
)


def draw_curves(series: Sequence[Series]) -> Iterator[Drawing]:
    """The figures for which a run has values; losses against steps, tokens and time."""
    for measure in (LOSS, EVAL_LOSS) if len(series) > 1 else (LOSS,):
        for against in ("step", "tokens", "seconds"):
            yield from _draw(measure, series, against)
    for measure in MEASURES:
        yield from _draw(measure, series, "step")


def _draw(measure: Measure, series: Sequence[Series], against: str) -> Iterator[Drawing]:
    """One figure, or none where there is nothing to show."""
    label, size = _x_axis([run for one in series for run in one.runs], against)
    members = [_members(one, measure, against, size) for one in series]
    evaluated = _members(series[0], EVAL_LOSS, against, size) if measure is LOSS and len(series) == 1 else []
    if not any(members) and not evaluated:
        return
    plot = _Plot(raw=measure.smoothed and len(series) <= MOST_RAW, settled=measure is LOSS and len(series) > 1)
    for number, (one, style, group) in enumerate(zip(series, styles(len(series)), members, strict=True)):
        plot.add(number, measure.title.lower() if evaluated else one.label, style, group, measure)
    if evaluated:
        plot.add(1, EVAL_LOSS.title.lower(), styles(2)[1], evaluated, EVAL_LOSS)
        plot.canvas.own_keys = True
    if measure is LOSS:
        plot.add_levels([run.unigram_entropy for one in series for run in one.runs if run.unigram_entropy is not None])
    captions = [measure.caption.replace(AROUND, f"{AROUND}; faint: single steps" if plot.raw_shown else AROUND)]
    if measure is GRAD_NORM and plot.add_skipped(series):
        captions.append("Crosses: steps skipped because they were not finite.")
    hidden = plot.scale(measure, label)
    if hidden is not None:
        captions.append(f"Values above {hidden:.3g} are not shown.")
    several = measure in (LOSS, EVAL_LOSS)
    x = {"step": "steps", "tokens": "tokens", "seconds": "time"}[against]
    name = measure.field if against == "step" else f"{measure.field}-{x}"
    yield Drawing(
        name,
        "Loss" if evaluated else measure.title,
        " ".join(filter(None, captions)),
        plot.canvas,
        x if several else "",
    )


def _x_axis(runs: Sequence[Run], against: str) -> tuple[str, float]:
    """The label of the x axis, and how much of the field is 1 on it: a unit of time that suits the longest run."""
    if against != "seconds":
        return against, 1.0
    longest = max((run.last("seconds") or 0.0 for run in runs), default=0.0)  # below 0 in a damaged file
    unit, size = next(
        (u, s) for u, s, least in (("h", 3600.0, 7200), ("min", 60.0, 120), ("s", 1.0, -np.inf)) if longest >= least
    )
    return f"time ({unit})", size


def _members(series: Series, measure: Measure, against: str, size: float) -> list[np.ndarray]:
    """Of each run that has any: the finite values of a field as rows of (x, y)."""
    found = []
    for run in series.runs:
        columns = run.evaluation if measure is EVAL_LOSS else run.training
        rows = np.stack([columns[against] / size, columns[measure.field] * measure.factor], axis=1)
        rows = rows[np.isfinite(rows).all(axis=1)]
        found += [rows] if len(rows) else []
    return found


class _Plot:
    """Curves on a canvas, and what of them decides the scales.

    ``raw`` shows single values behind their mean; ``settled`` leaves the first 5 % of a curve out of the y scale, for
    what is compared lies after them.
    """

    def __init__(self, raw: bool, settled: bool):
        self.canvas, self.raw, self.settled = Canvas(), raw, settled
        self.axes, self.raw_shown = self.canvas.axes, False
        self.shown: list[float] = []  # values that the y axis has room for
        self.firsts: list[float] = []  # those where the curves begin
        self.highest = -math.inf  # of the curves
        self.end = 0.0  # of the x axis

    def add(self, number: int, label: str, style: Style, members: list[np.ndarray], measure: Measure) -> None:
        """The curve of one run, or mean and range of several; of class "sN", and the curve of class "read" too."""
        if not members:
            return
        curves = [smooth(rows) if measure.smoothed else rows for rows in members]
        self.end = max(self.end, *(rows[-1, 0] for rows in members))
        kept = [curve[len(curve) // 20 if self.settled else 0 :, 1] for curve in curves]
        self.firsts += [values[0] for values in kept]
        self.highest = max(self.highest, *(curve[:, 1].max() for curve in curves))
        self.shown += [edge for values in kept for edge in (values.min(), values.max())]
        marker = "o" if measure is EVAL_LOSS or max(map(len, curves)) == 1 else ""
        paint: dict[str, Any] = {"color": style.color, "gid": f"s{number}"}
        if len(curves) == 1:
            if self.raw and not np.array_equal(curves[0], members[0]):
                self.axes.plot(*envelope(members[0], MOST_POINTS).T, **paint, alpha=0.3, linewidth=0.7)
                self.shown += [*np.percentile(members[0][-len(kept[0]) :, 1], [0.5, 99.5])]
                self.raw_shown = True
                self.shown += [members[0][:, 1].max()] if measure is GRAD_NORM else []
            middle = thin(curves[0], MOST_POINTS)
        else:
            for curve in curves:
                self.axes.plot(*thin(curve, MOST_POINTS).T, **paint, alpha=0.5, linewidth=0.6)
            rows = mean_and_range(curves, MOST_POINTS)
            self.axes.fill_between(rows[:, 0], rows[:, 2], rows[:, 3], **paint, alpha=0.2, linewidth=0)
            middle = rows[:, :2]
        paint["gid"] += " read"
        self.axes.plot(*middle.T, **paint, linestyle=style.dash, linewidth=1.5, marker=marker, markersize=3.5)
        self.canvas.keys.append(Key(label, style, marker=marker))

    def add_levels(self, levels: list[float]) -> None:
        """Dashed lines at unigram entropies; those too close to be told apart are one, at their mean."""
        if not levels or not self.shown:
            return
        apart = 0.06 * (max(*self.shown, *levels) - min(*self.shown, *levels))
        levels = sorted(levels)
        for group in np.split(levels, np.flatnonzero(np.diff(levels) > apart) + 1):
            level = float(np.mean(group))
            self.axes.axhline(level, color=MUTED, linestyle=(0, (5, 3)), linewidth=1)
            self.axes.annotate(
                f"unigram entropy {level:.2f}", (1, level), (-2, 3), self.axes.get_yaxis_transform(), "offset points",
                horizontalalignment="right", color=MUTED, size=9,
            )  # fmt: skip
            self.shown.append(level)

    def add_skipped(self, series: Sequence[Series]) -> bool:
        """Crosses at the foot of the plot where steps were skipped; whether there are any."""
        found = False
        for number, (one, style) in enumerate(zip(series, styles(len(series)), strict=True)):
            for run in one.runs:
                counted = np.nan_to_num(run.training["skipped"])
                steps = run.training["step"][np.diff(counted, prepend=0) > 0]
                if len(steps):
                    x, found = thin(steps[:, None], MOST_POINTS)[:, 0], True
                    self.axes.plot(
                        x, np.full(len(x), 0.03), "x", color=style.color, markersize=5, gid=f"s{number}",
                        transform=self.axes.get_xaxis_transform(),
                    )  # fmt: skip
        return found

    def scale(self, measure: Measure, label: str) -> float | None:
        """Set limits, ticks and labels of both axes; returns the highest value shown, if curves go beyond it."""
        low, high = min(self.shown), max(self.shown)
        unit, exponent = measure.unit, 0
        if measure is GRAD_NORM and low > 0 and high > 10 * low:
            self.axes.set(yscale="log", ylim=(low * (low / high) ** 0.05, high * (high / low) ** 0.05))
        elif measure.from_zero:
            self.axes.set_ylim(0, 1.08 * high or 1)
        else:
            if high > 2 * max(self.firsts) > 0:  # a run diverged: the others would be a flat line
                high = 1.3 * max(self.firsts)
            room = 0.05 * (high - low) or 0.1
            self.axes.set_ylim(low - room, high + room)
        if measure.title == "Learning rate" and 0 < high < 0.1:
            exponent = math.floor(math.log10(high))
            unit += f" (10{str(exponent).translate(_SUPERSCRIPTS)})"
        self.axes.set_xlim(0, 1.02 * self.end or 1)
        self.axes.set(xlabel=label, ylabel=unit)
        number_axis(self.axes.xaxis, whole=label == "step")
        number_axis(self.axes.yaxis, factor=10.0**-exponent)
        self.canvas.readout = {"x": label, "y": measure.unit if measure.unit != "learning rate" else ""}
        top = self.axes.get_ylim()[1]
        return top if self.highest > top else None


_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


# -- rows of (x, y) ----------------------------------------------------------------------------------------------


def smooth(rows: np.ndarray) -> np.ndarray:
    """The mean over a window around each point, 2 % of the rows wide; a straight line stays what it is.

    The window narrows at the start, where a curve is steep. At the end, which is read off as a result, a line fitted
    to the last window stands for the rows that have no whole one.
    """
    count, half = len(rows), len(rows) // 100
    if half == 0:
        return rows
    sums = np.concatenate([[0.0], np.cumsum(rows[:, 1])])
    reach = np.minimum(half, np.minimum(np.arange(count), np.arange(count)[::-1]))
    first, last = np.arange(count) - reach, np.arange(count) + reach + 1
    values = (sums[last] - sums[first]) / (last - first)
    if half > 1:
        window = np.arange(-2 * half, 0)
        values[-half:] = np.polyval(np.polyfit(window, rows[window, 1], 1), window[half:])
    return np.stack([rows[:, 0], values], axis=1)


def envelope(rows: np.ndarray, most: int) -> np.ndarray:
    """At most ``most`` rows that keep the lowest and highest value of each stretch, and so every spike."""
    if len(rows) <= most:
        return rows
    stretches = np.array_split(rows, most // 2)
    return np.concatenate([s[np.sort([s[:, 1].argmin(), s[:, 1].argmax()])] for s in stretches])


def thin(rows: np.ndarray, most: int) -> np.ndarray:
    """At most ``most`` rows, evenly chosen, the first and the last among them."""
    chosen = np.linspace(0, len(rows) - 1, min(len(rows), most)).round().astype(int)
    return rows[chosen]


def mean_and_range(members: Sequence[np.ndarray], most: int) -> np.ndarray:
    """Rows of (x, mean, lowest, highest) where all members have values, interpolated between their points."""
    start, end = max(m[0, 0] for m in members), min(m[-1, 0] for m in members)
    x = np.unique(np.concatenate([m[:, 0] for m in members]))
    x = thin(x[(x >= start) & (x <= end), None], most)[:, 0]
    values = np.stack([np.interp(x, *m.T) for m in members])
    return np.stack([x, values.mean(0), values.min(0), values.max(0)], axis=1)
