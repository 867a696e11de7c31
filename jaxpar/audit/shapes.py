"""Array shapes as HLO prints them: ``bf16[4,2048]{1,0:T(8,128)(2,1)S(1)}``, and tuples of them."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

BITS = {"pred": 8, "token": 0, "opaque": 0}
ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\](?:\{([^{}]*)\})?")
SPACE = re.compile(r"S\((\d+)\)")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a device: element type, dimensions, the text of its layout and its memory space (0: HBM)."""

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""
    memory_space: int = 0

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Bytes without the padding of tiles; elements of fewer than eight bits are packed."""
        return -(-self.elements * bits(self.dtype) // 8)


Shape = Array | tuple["Shape", ...]


def bits(dtype: str) -> int:
    """Bits of one element: ``s4`` 4, ``f8e4m3fn`` 8, ``pred`` 8, ``c64`` 64."""
    if dtype in BITS:
        return BITS[dtype]
    number = re.match(r"[a-z]+(\d+)", dtype)
    if number is None:
        raise ValueError(f"element type {dtype!r} of an HLO shape is not known")
    return int(number[1])


@functools.lru_cache(maxsize=65536)
def parse_shape(text: str) -> Shape:
    """The shape that ``text`` spells."""
    shape, end = _shape(text, 0)
    if text[end:].strip():
        raise ValueError(f"{text!r} is not an HLO shape")
    return shape


def _shape(text: str, at: int) -> tuple[Shape, int]:
    at = _skip(text, at)
    if text[at] != "(":
        found = ARRAY.match(text, at)
        if found is None:
            raise ValueError(f"{text!r} is not an HLO shape")
        dtype, dims, layout = found[1], found[2], found[3] or ""
        space = SPACE.search(layout)
        sizes = tuple(int(d.lstrip("<= ")) for d in dims.split(",") if d)
        return Array(dtype, sizes, layout, int(space[1]) if space else 0), found.end()
    parts = []
    at = _skip(text, at + 1)
    while text[at] != ")":
        part, at = _shape(text, at)
        parts.append(part)
        at = _skip(text, at)
    return tuple(parts), at + 1


def _skip(text: str, at: int) -> int:
    """Past blanks, commas and ``/*index=5*/``."""
    while at < len(text) and text[at] in " ,/":
        at = text.index("*/", at) + 2 if text[at] == "/" else at + 1
    return at


def arrays(shape: Shape) -> list[Array]:
    """The arrays of a shape, in order."""
    return [shape] if isinstance(shape, Array) else [a for part in shape for a in arrays(part)]


def nbytes(shape: Shape) -> int:
    """Bytes of all arrays of a shape."""
    return sum(a.nbytes for a in arrays(shape))
