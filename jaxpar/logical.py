"""Logical axes: the names a model gives to the dimensions of its parameters, and what can be told from them.

``layers`` (of a scanned stack, always first), ``embed``, ``heads``, ``kv_heads``, ``head_dim``, ``mlp``, ``vocab``.
"""

from __future__ import annotations

LogicalAxes = tuple[str, ...]


def of_one_layer(axes: LogicalAxes) -> LogicalAxes:
    """The axes of one layer's slice of a scanned parameter."""
    return axes[1:] if axes[:1] == ("layers",) else axes


def is_matrix(axes: LogicalAxes) -> bool:
    """Whether a parameter maps to or from the residual; norm scales and biases, per head too, are vectors."""
    return "embed" in axes and len(of_one_layer(axes)) > 1
