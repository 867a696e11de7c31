"""How every figure looks, and how it becomes a PNG file and an SVG inside a page.

A figure of the report is one plot (``Canvas``) with margins in points that are the same in all of them, so that plots
side by side line up. In a page the SVG takes its colours and its font from the page's style sheet, and a legend there
serves all figures; the PNG stands alone, with a title and a legend of its own.
"""

from __future__ import annotations

import dataclasses
import html
import io
import math
import re
import warnings
from pathlib import Path
from typing import Any

from jaxpar.words import short, shortened

# Okabe and Ito's palette without yellow and black: told apart with every common colour blindness, on white and black.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
DASHES: tuple[Any, ...] = ("solid", (0, (5, 1.6)), (0, (1.6, 1.2)), (0, (7, 1.6, 1.6, 1.6)))
# Paul Tol's "light" scheme, for parts of a bar, with black text on them; a run never has these.
LIGHT = ("#77aadd", "#ee8866", "#eedd88", "#44bb99", "#bbcc33", "#ffaabb", "#dddddd")
BLACK = "#000000"
INK, MUTED, GRID = "#1c1e21", "#63676e", "#e3e4e6"  # each a colour that nothing else has: a page replaces them
WIDTH, HEIGHT = 520, 290  # points of a plot with its margins
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 40  # margins, points
PNG_DPI = 180


@dataclasses.dataclass(frozen=True)
class Style:
    """The colour and the dashes of one line, the same in every figure."""

    color: str
    dash: Any = "solid"


def styles(count: int) -> list[Style]:
    """``count`` styles: colours first, then the same colours with other dashes."""
    colors = len(PALETTE)
    return [Style(PALETTE[i % colors], DASHES[i // colors % len(DASHES)]) for i in range(count)]


@dataclasses.dataclass(frozen=True)
class Key:
    """One entry of a PNG's legend."""

    label: str
    style: Style
    width: float = 1.6
    alpha: float = 1.0
    marker: str = ""
    patch: bool = False  # a filled square instead of a line


class Canvas:
    """A figure of one plot, before it is written.

    ``readout`` is what a reader's pointer shows: "x" and "y", the labels of both values.
    """

    def __init__(self, height: float = HEIGHT, left: float = LEFT, right: float = RIGHT):
        from matplotlib.figure import Figure

        self.height, self.left, self.right = height, left, right
        self.keys: list[Key] = []
        self.own_keys = False  # the keys are not the runs of the page's legend
        self.readout: dict[str, str] = {}
        self.figure = Figure()
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_facecolor("none")
        self.axes.tick_params(colors=MUTED, labelcolor=INK, labelsize=10, width=0.8, length=3)
        self.axes.grid(color=GRID, linewidth=0.8)
        self.axes.set_axisbelow(True)
        self.axes.spines[["top", "right"]].set_visible(False)
        self.axes.spines[["left", "bottom"]].set_color(MUTED)
        self.axes.xaxis.label.set(color=INK, size=10)
        self.axes.yaxis.label.set(color=INK, size=10)

    def svg(self, name: str, label: str) -> str:
        """The figure as an ``<svg>`` element to put into a page; artists with a gid become elements of that class."""
        self._place(self.height, 0)
        text = _write(self.figure, "svg", name).decode()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
        text = re.sub(r"<defs>\s*</defs>", "", text)
        text = re.sub(r'<g id="(s\d+[\w ]*)"', r'<g class="\1"', text)
        text = re.sub(r'<g id="[^"]*"', "<g", text)
        text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
        text = re.sub(r' transform="rotate\(-0 [^)]*\)"', "", text)
        text = re.sub(r"(\d\.\d\d)\d+", r"\1", text)  # hundredths of a point are enough
        text = re.sub(r"\s*\n\s*", "\n", text)
        text = re.sub(r" *\n([LCMz])", r"\1", text)
        for color, variable in _VARIABLES.items():
            text = text.replace(color, f"var({variable})")
        named = {"aria-label": label, **{f"data-{key}": value for key, value in self._readout().items()}}
        attributes = " ".join(f'{key}="{html.escape(value)}"' for key, value in named.items())
        head = f'<svg viewBox="0 0 {WIDTH} {self.height:g}" role="img" {attributes}>'
        return re.sub(r"<svg.*?>", lambda _: head, text, count=1, flags=re.DOTALL).strip()

    def png(self, path: Path, title: str) -> None:
        """The figure as a PNG file, with a title above and its legend below."""
        labels = [shortened(key.label, int((WIDTH - self.left - 40) / 6.2)) for key in self.keys]
        longest = max(map(len, labels), default=0)
        columns = max(1, min(4, int((WIDTH - 20) / (6.0 * longest + 44)), len(self.keys)))
        rows = math.ceil(len(self.keys) / columns)
        head, foot = 26, 14 * rows + (6 if rows else 0)
        height = self.height + head + foot
        self._place(height, foot, head)
        heading: dict[str, Any] = {"color": INK, "size": 11, "weight": "bold", "va": "top", "parse_math": False}
        self.figure.text(10 / WIDTH, 1 - 9 / height, title, **heading)
        if self.keys:
            handles = [_handle(key) for key in self.keys]
            legend = self.figure.legend(
                handles=handles, labels=labels, loc="lower left", ncols=columns, frameon=False,
                bbox_to_anchor=((self.left - 8) / WIDTH, 4 / height), fontsize=9, labelcolor=INK, borderpad=0,
                handlelength=2.2, columnspacing=1.6, labelspacing=0.45, borderaxespad=0,
            )  # fmt: skip
            for text in legend.get_texts():
                text.set_parse_math(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_write(self.figure, "png"))

    def _place(self, height: float, foot: float, head: float = 0) -> None:
        """Set the size of the figure and the place of the plot in it."""
        self.figure.set_size_inches(WIDTH / 72, height / 72)
        bottom = (foot + BOTTOM) / height
        box = (self.left / WIDTH, bottom, 1 - (self.left + self.right) / WIDTH)
        self.axes.yaxis.set_label_coords(-(self.left - 15) / (WIDTH - self.left - self.right), 0.5)
        self.axes.set_position((*box, (height - foot - head - BOTTOM - TOP) / height))

    def _readout(self) -> dict[str, str]:
        if not self.readout:
            return {}
        box = (self.left, self.height - BOTTOM, WIDTH - self.right, TOP)
        limits = (*self.axes.get_xlim(), *self.axes.get_ylim())
        return {
            "box": " ".join(f"{x:g}" for x in box),
            "limits": " ".join(f"{x:.9g}" for x in limits),
            "scale": self.axes.get_yscale(),
            **({"names": "|".join(key.label for key in self.keys)} if self.own_keys else {}),
            **self.readout,
        }


@dataclasses.dataclass
class Drawing:
    """A figure of the report. ``name`` is the stem of its file, ``against`` its x axis where there are several."""

    name: str
    title: str
    caption: str
    canvas: Canvas
    against: str = ""


_VARIABLES = {
    INK: "--ink", MUTED: "--muted", GRID: "--grid",
    **{color: f"--c{number}" for number, color in enumerate(PALETTE)},
}  # fmt: skip


def _handle(key: Key) -> Any:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if key.patch:
        return Patch(facecolor=key.style.color, edgecolor="none", alpha=key.alpha)
    line: Any = "none" if key.width == 0 else key.style.dash
    return Line2D(
        [],
        [],
        color=key.style.color,
        linestyle=line,
        linewidth=key.width,
        alpha=key.alpha,
        marker=key.marker,
        markersize=4,
    )


def _write(figure: Any, kind: str, salt: str = "") -> bytes:
    """The content of a figure's file, the same whenever it is written; ``salt`` keeps ids of two figures apart."""
    import matplotlib

    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": salt, "path.simplify_threshold": 0.2}
    absent = "Date" if kind == "svg" else "Software"
    paper = "none" if kind == "svg" else "white"
    buffer = io.BytesIO()
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # a name in a script that the font lacks
        figure.savefig(buffer, format=kind, dpi=PNG_DPI, metadata={absent: None}, facecolor=paper)
    return buffer.getvalue()


def number_axis(axis: Any, whole: bool = False, factor: float = 1.0) -> None:
    """Few ticks between the limits, labelled with ``factor`` times their value; ``whole``: there are no fractions."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    low, high = axis.get_view_interval()
    locator: Any = MaxNLocator(6, integer=whole, steps=(1, 2, 2.5, 5, 10))
    if axis.get_scale() == "log":
        locator = LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,), numticks=8)
    ticks = [float(tick) for tick in locator.tick_values(low, high) if low <= tick <= high]
    shown = [f"{tick * factor:.6g}" for tick in ticks]
    places = 0 if axis.get_scale() == "log" else max((len(text.partition(".")[2]) for text in shown), default=0)
    if high * factor >= 1e6 or "e" in "".join(shown):
        texts = [short(float(text)) for text in shown]
    else:
        texts = [f"{float(text):,.{places or len(text.partition('.')[2])}f}" for text in shown]
    axis.set_ticks(ticks, texts)
    axis.set_ticks([], minor=True)
