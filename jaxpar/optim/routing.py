"""Which optimizer group a parameter belongs to: the same on every mesh, scanned or not."""

from __future__ import annotations

from typing import Literal

Group = Literal["matrix", "embedding", "head", "vector"]


def group_of(name: str, logical_axes: tuple[str, ...]) -> Group:
    """The group of the parameter ``name``.

    ``embedding``: the token table; ``head``: the matrix to logits; ``matrix``: every other weight matrix, one per
    scanned layer; ``vector``: norm scales and biases, whatever their number of dimensions.
    """
    if name.rsplit(".", 1)[-1] == "scale" or name.endswith("bias"):
        return "vector"
    if "vocab" in logical_axes:
        return "embedding" if logical_axes[0] == "vocab" else "head"
    return "matrix" if len([a for a in logical_axes if a != "layers"]) > 1 else "vector"
