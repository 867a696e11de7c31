"""What people read: the type of what prints a line, and numbers, bytes and time in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Say = Callable[[str], None]
"""Called with a line for the user."""


def mesh_text(sizes: Mapping[str, int]) -> str:
    """``fsdp 64 x tensor 4``: the axes of a mesh with more than one device; ``1`` where there is none."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "1"


def short(number: float) -> str:
    """``1.5M`` for 1,500,000."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:g}{letter}"
    return f"{number:g}"


def bytes_text(count: float) -> str:
    """``31.9 MB`` for 31,896,128."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}" if count < 999.5 * size else f"{count / size:,.0f} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """``1 h 02 min``, ``3 min 20 s``, ``8.4 s``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    minutes, hours, days = whole // 60 % 60, whole // 3600 % 24, whole // 86400
    if days:
        return f"{days:,} d {hours:02} h"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {whole % 60:02} s"


def shortened(text: str, most: int) -> str:
    """The text with its middle left out where it is longer than ``most`` characters."""
    if len(text) <= most:
        return text
    head = (most - 1) // 2
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"
