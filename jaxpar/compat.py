"""What differs between the oldest and the newest supported JAX, in one place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which ``x`` differs between devices inside a type-checked ``shard_map``."""
    kind = jax.typeof(x)
    manual = getattr(kind, "manual_axis_type", None)
    return frozenset(manual.varying if manual is not None else getattr(kind, "vma", ()))


def as_varying(tree: Any, axes: Iterable[str]) -> Any:
    """Mark every leaf as differing over ``axes`` (no data moves), so that its gradient stays per device."""
    axes = tuple(axes)

    def cast(x: Any) -> Any:
        missing = tuple(a for a in axes if a not in varying_axes(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)
