"""``jaxpar report``: one page that holds everything about some runs, and its figures as PNG files.

The page is a single HTML file: figures are SVG inside it, and it names no other file. Which runs are shown and against
what is up to its style sheet; the one script reads values off the curves and can be missing.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar import __version__
from jaxpar.errors import ConfigError, cannot_write
from jaxpar.report.bars import draw_bars, memory_classes
from jaxpar.report.canvas import PALETTE, Drawing, Key, styles
from jaxpar.report.curves import draw_curves
from jaxpar.report.runs import Run, Series, group_seeds, printable, read_runs
from jaxpar.runtime.run_folder import replace_file
from jaxpar.serialize import difference, flatten, word
from jaxpar.words import bytes_text, duration

ABSENT = "–"


def write_report(paths: Sequence[Path], output: Path | None = None) -> Path:
    """Write the report of the runs in ``paths`` and return the page's path.

    ``output`` names the page; the figures go beside it, into a folder of its name with ``-figures``. Without it, one
    run's page is its ``report.html`` with figures in ``figures/``, and that of several is ``./report.html``.

    Raises:
        ConfigError: for a folder that holds no run, one given twice, or a page that cannot be written.
        RunError: for a damaged file, or a full disk.
    """
    runs = read_runs(paths)
    if output is None and len(runs) == 1:
        page, figures = runs[0].path / "report.html", runs[0].path / "figures"
    else:
        page = output or Path("report.html")
        if page.suffix.lower() not in (".html", ".htm"):  # no file of a run, and no folder
            raise ConfigError("--output", str(page), "is no name of an HTML page", f"{page.name or 'report'}.html")
        figures = page.with_name(f"{page.stem}-figures")
    series = group_seeds(runs)
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    drawings = [*draw_curves(series), *draw_bars(series)]
    text = render(runs, series, drawings, title)
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        replace_file(page, text)
        for drawing in drawings:
            name = f"{title}: {drawing.title.lower()}" if len(runs) == 1 else drawing.title
            drawing.canvas.png(figures / f"{drawing.name}.png", name)
    except OSError as error:
        file = str(error.filename or page).removesuffix(".new")
        raise cannot_write("--output", file, error) from error
    return page


def draw_loss(path: Path) -> Path | None:
    """Draw the report's first figure of the run in ``path``, loss against steps; the PNG, or None without any loss."""
    run = read_runs([path])[0]
    drawing = next(draw_curves([Series((run,))]), None)
    if drawing is None:
        return None
    figure = run.path / "figures" / f"{drawing.name}.png"
    drawing.canvas.png(figure, f"{run.name}: {drawing.title.lower()}")
    return figure


def render(runs: Sequence[Run], series: Sequence[Series], drawings: Sequence[Drawing], title: str) -> str:
    """The page as HTML."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(loader=jinja2.PackageLoader("jaxpar.report"), autoescape=True)
    one = len(runs) == 1
    legend = [_swatch(Key(s.label, style)) for s, style in zip(series, styles(len(series)), strict=True)]
    facts, columns, rows = _table(series, legend)
    return environment.get_template("report.html").render(
        title=title,
        place=printable(runs[0].path) if one else "",
        palette=PALETTE,
        facts=facts,
        columns=columns,
        rows=rows,
        unlike=unlike([run for s in series for run in s.runs]),
        legend=legend if len(legend) > 1 else [],
        repeats=any(len(s.runs) > 1 for s in series),
        switch=list(dict.fromkeys(d.against for d in drawings if d.against)),
        figures=[
            {
                "title": drawing.title,
                "caption": drawing.caption,
                "against": drawing.against,
                "svg": Markup(drawing.canvas.svg(drawing.name, drawing.title)),
                "entries": [_swatch(key) for key in drawing.canvas.keys] if drawing.canvas.own_keys else [],
            }
            for drawing in drawings
        ],
        configs=[
            {
                "name": run.name,
                "path": printable(run.path),
                "text": "\n".join(f"{k} = {word(v)}" for k, v in flatten(run.config).items()),
            }
            for run in runs
        ],
        footer=f"jaxpar {__version__}, {datetime.datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
    )


# -- tables ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Column:
    """A fact of a run. Where it is ``averaged``, repeats of a run get its mean and standard deviation."""

    title: str
    of: Callable[[Run], Any]  # None: not known
    text: Callable[[Any], str] = str
    number: bool = True
    averaged: bool = False
    once: bool = False  # said once above the table where it is the same for all


def _loss(value: float) -> str:
    return f"{value:.4f}"


def _steps(run: Run) -> str:
    done, steps = int(run.last("step") or 0), run.config.train.steps
    return f"{done:,}" if done == steps else f"{done:,} of {steps:,}"


def _best(run: Run) -> float | None:
    losses = run.evaluation["eval_loss"]
    return float(np.nanmin(losses)) if np.isfinite(losses).any() else None


def _evaluated(run: Run) -> float | None:
    losses = run.evaluation["eval_loss"]
    return float(losses[-1]) if len(losses) and math.isfinite(losses[-1]) else None


def _trained(run: Run) -> float | None:
    """The mean training loss of the last 2 % of the steps."""
    losses = run.training["loss"]
    losses = losses[-max(1, len(losses) // 50) :]
    return float(np.nanmean(losses)) if np.isfinite(losses).any() else None


def _median(field: str) -> Callable[[Run], float | None]:
    def of(run: Run) -> float | None:
        values = run.training[field]
        return float(np.nanmedian(values)) if np.isfinite(values).any() else None

    return of


def _mesh(run: Run) -> str | None:
    sizes = run.compiled.get("mesh")
    if not sizes:
        return None
    axes = " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    return f"{math.prod(sizes.values()):,} {run.compiled.get('device', '')}{f': {axes}' if axes else ''}"


COLUMNS = (
    Column("status", lambda run: run.status, number=False),
    Column("eval loss", _evaluated, _loss, averaged=True),
    Column("best eval", _best, _loss),
    Column("train loss", _trained, _loss, averaged=True),
    Column("steps", _steps),
    Column("tokens", lambda run: run.last("tokens"), lambda count: f"{count:,.0f}"),
    Column("time", lambda run: run.last("seconds"), duration),
    Column("tokens/s", _median("tokens_per_second"), lambda rate: f"{rate:,.0f}", averaged=True),
    Column("MFU", _median("mfu"), lambda share: f"{100 * share:.1f} %"),
    Column("goodput", lambda run: run.last("goodput"), lambda share: f"{100 * share:.1f} %"),
    Column("memory/device", lambda run: sum(memory_classes(run).values()) or None, bytes_text, once=True),
    Column("parameters", lambda run: run.compiled.get("parameters"), lambda count: f"{count:,}", once=True),
    Column("devices", _mesh, number=False, once=True),
    Column("jax", lambda run: run.compiled.get("versions", {}).get("jax"), number=False, once=True),
)


Table = tuple[list[tuple[str, str]], list[Column], list[dict[str, Any]]]


def _table(series: Sequence[Series], legend: Sequence[dict[str, Any]]) -> Table:
    """What is said once; the columns of a table, and its rows: one a run and, below repeats, one with their mean."""
    runs = [run for one in series for run in one.runs]
    columns = [column for column in COLUMNS if any(column.of(run) is not None for run in runs)]
    once = [c for c in columns if len(runs) == 1 or (c.once and len({c.of(run) for run in runs}) == 1)]
    facts = [(column.title, column.text(column.of(runs[0]))) for column in once]
    columns = [column for column in columns if column not in once]
    rows: list[dict[str, Any]] = []
    for one, key in zip(series, legend, strict=True):
        values = [[column.of(run) for run in one.runs] for column in columns]
        for number, run in enumerate(one.runs):
            cells = [ABSENT if v[number] is None else c.text(v[number]) for c, v in zip(columns, values, strict=True)]
            rows.append({"name": run.name, "key": key, "cells": cells, "mean": False})
        if len({run.last("step") for run in one.runs}) == 1 < len(one.runs):
            cells = [_mean(c, [x for x in v if x is not None]) for c, v in zip(columns, values, strict=True)]
            rows.append({"name": f"mean ± s.d. of {len(one.runs)}", "cells": cells, "mean": True})
    return facts, columns, rows


def _mean(column: Column, values: list[float]) -> str:
    if not column.averaged or len(values) < 2:
        return ""
    return f"{column.text(statistics.fmean(values))} ± {column.text(statistics.stdev(values))}"


def unlike(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """The config fields that are not the same in all runs, in the order of the config, with each run's value."""
    changed = {path for run in runs[1:] for path in difference(runs[0].config, run.config)}
    leaves = [flatten(run.config) for run in runs]
    paths = [path for path in dict.fromkeys(path for leaf in leaves for path in leaf) if path in changed]
    return [(path, [word(leaf[path]) if path in leaf else ABSENT for leaf in leaves]) for path in paths]


def _swatch(key: Key) -> dict[str, Any]:
    """A legend entry for the template."""
    dash = "" if key.style.dash == "solid" else " ".join(f"{2.2 * length:g}" for length in key.style.dash[1])
    known = key.style.color in PALETTE
    color = f"var(--c{PALETTE.index(key.style.color)})" if known else key.style.color
    return {"label": key.label, "color": color, "dash": dash, "marker": key.marker, "patch": key.patch}
