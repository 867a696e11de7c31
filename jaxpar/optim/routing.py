"""Which optimizer group a parameter belongs to: the same on every mesh, scanned or not."""

from __future__ import annotations

from typing import Literal

from jaxpar.logical import LogicalAxes, is_matrix

Group = Literal["matrix", "embedding", "head", "vector"]


def group_of(logical_axes: LogicalAxes) -> Group:
    """The group of a parameter.

    ``embedding``: the token table; ``head``: the matrix to logits; ``matrix``: every other weight matrix, one per
    scanned layer; ``vector``: norm scales and biases, whatever their number of dimensions.
    """
    if "vocab" in logical_axes:
        return "embedding" if logical_axes[0] == "vocab" else "head"
    return "matrix" if is_matrix(logical_axes) else "vector"
