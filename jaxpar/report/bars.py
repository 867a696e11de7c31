"""What of a run is drawn as a bar cut into parts: memory by class, and where the time went."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpar.report import canvas as look
from jaxpar.report.canvas import Canvas, Drawing, Key, Style, number_axis, styles
from jaxpar.report.compile import CLASSES
from jaxpar.report.runs import PHASES, Run, Series
from jaxpar.words import bytes_text, duration, shortened

ROW, NAMES, NOTES = 24, 136, 112  # points: the height of a run, the room for its name, and for what stands behind it
LONGEST = 20  # characters of a name


@dataclasses.dataclass(frozen=True)
class _Bar:
    """One run: the sizes of its parts (none: not recorded), a measured value, and a note."""

    run: Run
    style: Style
    parts: Mapping[str, float]
    mark: float | None
    note: str


def draw_bars(series: Sequence[Series]) -> Iterator[Drawing]:
    """Memory and time, each where a run recorded it."""
    runs = [(run, style) for one, style in zip(series, styles(len(series)), strict=True) for run in one.runs]
    memory = [_memory(run, style) for run, style in runs]
    if any(bar.parts for bar in memory):
        longest = max(sum(bar.parts.values()) for bar in memory)
        unit, size = next(
            (u, s) for u, s in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1)) if longest >= s or s == 1
        )
        canvas = _draw(memory, list(CLASSES.values()), size, f"memory per device ({unit})")
        caption = "As compiled: what the training step holds on each device."
        if any(bar.mark is not None for bar in memory):
            caption += " Upright lines: measured peaks."
        yield Drawing("memory", "Memory", caption, canvas)
    time = [_time(run, style) for run, style in runs]
    if any(bar.parts for bar in time):
        canvas = _draw(time, list(PHASES.values()), 0.01, "share of the run's time (%)")
        caption = "Over all sessions of a run; behind each bar, how long that was."
        yield Drawing("time", "Where the time went", caption, canvas)


def memory_classes(run: Run) -> dict[str, float]:
    """Bytes on each device by class as compiled; empty if not recorded."""
    planned = run.compiled.get("hbm_bytes") or {}
    return {name: float(planned.get(name, 0)) for name in CLASSES} if planned else {}


def phases(run: Run) -> dict[str, float]:
    """Seconds by phase, cumulative, as the last record has them; empty if not recorded."""
    found = {field: run.last(field) for field in PHASES}
    return {field: seconds for field, seconds in found.items() if seconds} if any(found.values()) else {}


def _memory(run: Run, style: Style) -> _Bar:
    parts = {CLASSES[name]: count for name, count in memory_classes(run).items()}
    peak = run.training["memory_bytes"]
    mark = float(np.nanmax(peak)) if np.isfinite(peak).any() else None
    note = bytes_text(sum(parts.values())) if parts else "not recorded"
    return _Bar(run, style, parts, mark, note if mark is None else f"{note}, peak {bytes_text(mark)}")


def _time(run: Run, style: Style) -> _Bar:
    seconds = phases(run)
    total = sum(seconds.values())
    parts = {PHASES[field]: value / total for field, value in seconds.items()}
    return _Bar(run, style, parts, None, duration(total) if parts else "not recorded")


def _draw(bars: Sequence[_Bar], names: Sequence[str], size: float, label: str) -> Canvas:
    """One bar a run, cut into the parts ``names``; ``size`` is how much is 1 on the axis."""
    canvas = Canvas(height=ROW * len(bars) + look.TOP + look.BOTTOM, left=NAMES, right=NOTES)
    axes = canvas.axes
    end = max(max(sum(bar.parts.values()), bar.mark or 0.0) for bar in bars) / size
    for row, bar in enumerate(bars):
        start = 0.0
        for name, color in zip(names, look.LIGHT, strict=False):
            width = bar.parts.get(name, 0.0) / size
            axes.barh(row, width, left=start, height=0.62, color=color, linewidth=0)
            if width > 0.12 * end:
                share = f"{100 * width * size / sum(bar.parts.values()):.0f} %"
                axes.text(start + width / 2, row, share, ha="center", va="center_baseline", size=9, color=look.BLACK)
            start += width
        if bar.mark is not None:
            axes.plot([bar.mark / size] * 2, [row - 0.42, row + 0.42], color=look.INK, linewidth=1.8)
        outside: dict[str, Any] = {
            "xycoords": axes.get_yaxis_transform(),
            "va": "center_baseline",
            "size": 9,
            "parse_math": False,
        }
        name = shortened(bar.run.name, LONGEST)
        axes.annotate(name, (0, row), (-24, 0), textcoords="offset points", ha="right", color=look.INK, **outside)
        axes.annotate(bar.note, (1, row), (8, 0), textcoords="offset points", ha="left", color=look.MUTED, **outside)
        place = (-19 / (look.WIDTH - NAMES - NOTES), -6 / (look.WIDTH - NAMES - NOTES))
        axes.plot(
            place, (row, row), color=bar.style.color, linestyle=bar.style.dash, linewidth=2.2, clip_on=False,
            transform=axes.get_yaxis_transform(),
        )  # fmt: skip
    used = [name for name in names if any(bar.parts.get(name) for bar in bars)]
    canvas.keys = [Key(name, Style(look.LIGHT[names.index(name)]), patch=True) for name in used]
    canvas.own_keys = True
    axes.set(xlim=(0, end or 1), ylim=(len(bars) - 0.5, -0.5), yticks=[], xlabel=label)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    number_axis(axes.xaxis)
    return canvas
