"""Sharding rules: which mesh axes split which logical axis, and what each ZeRO stage keeps sharded.

A parameter carries logical axis names, ``("embed", "heads", "head_dim")``. The rules turn them into two layouts:

- *used*: as the layer that reads it needs it (tensor parallelism);
- *sharded*: the same, with one more dimension cut over the ZeRO axis ``fsdp``.

ZeRO stage 0 keeps everything in the *used* layout; 1 shards the optimizer state; 2 gradients too; 3 parameters too,
gathered layer by layer while they are used. Vectors (norm scales, biases) stop at stage 1: they weigh nothing, and
gathering them in every layer would cost a collective each.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from jaxpar.errors import ConfigError, divisors
from jaxpar.logical import is_matrix
from jaxpar.mesh.axes import MESH_AXES

# The batch is split over these axes and the sequence over those; norms and residuals split the sequence further.
BATCH_AXES = ("data", "fsdp", "expert")
SEQ_AXES = ("context",)
ZERO_AXIS = "fsdp"
ZeroStage = Literal[0, 1, 2, 3]


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """Logical axis -> mesh axes. A layout is changed here, never in a model."""

    heads: tuple[str, ...] = ("tensor",)  # query heads, and key/value heads with them: ("tensor",) or ()
    mlp: tuple[str, ...] = ("tensor",)  # MLP width: ("tensor",) or ()
    vocab: tuple[str, ...] = ("tensor",)  # embedding rows and head columns: ("tensor",) or ()
    zero: ZeroStage = 3  # ZeRO stage over the fsdp axis
    zero_order: tuple[str, ...] = ("embed", "mlp", "head_dim", "heads", "kv_heads", "vocab")  # the dimension ZeRO cuts

    def validate(self) -> None:
        """Raise ConfigError for a rule that no layer can follow."""
        for name in ("heads", "mlp", "vocab"):
            if getattr(self, name) not in ((), ("tensor",)):
                raise ConfigError(f"rules.{name}", getattr(self, name), "is not a layout", "('tensor',) or ()")
        known = ("embed", "mlp", "head_dim", "heads", "kv_heads", "vocab")
        for name in self.zero_order:
            if name not in known:
                raise ConfigError("rules.zero_order", name, "is not a logical axis of weights", ", ".join(known))

    def mesh_axes(self, logical: str) -> tuple[str, ...]:
        """Mesh axes that split ``logical`` while it is used."""
        split = {"heads": self.heads, "kv_heads": self.heads, "mlp": self.mlp, "vocab": self.vocab}
        return split.get(logical, ())


@dataclasses.dataclass(frozen=True)
class LeafLayout:
    """Where one parameter lies."""

    used: Any  # PartitionSpec while it is read
    sharded: Any  # PartitionSpec with the ZeRO axis; equal to ``used`` when nothing divides
    zero_dim: int | None  # the dimension that the ZeRO axis cuts
    stage: int  # the ZeRO stage of this leaf
    matrix: bool  # not a norm scale or a bias

    @property
    def stored(self) -> Any:
        """PartitionSpec of the parameter between steps."""
        return self.sharded if self.stage == 3 else self.used

    @property
    def updated(self) -> Any:
        """PartitionSpec of its reduced gradient, and of what the optimizer keeps for it."""
        return self.sharded if self.stage else self.used


def live(axes: tuple[str, ...], sizes: dict[str, int]) -> tuple[str, ...]:
    """Those of ``axes`` with more than one device."""
    return tuple(a for a in axes if sizes[a] > 1)


def spec(sizes: dict[str, int], *dims: tuple[str, ...]) -> Any:
    """PartitionSpec of one tuple of mesh axes per dimension, axes of size 1 left out."""
    from jax.sharding import PartitionSpec

    kept = [live(d, sizes) for d in dims]
    return PartitionSpec(*[k[0] if len(k) == 1 else (k or None) for k in kept])


def place(
    name: str, axes: tuple[str, ...], shape: tuple[int, ...], sizes: dict[str, int], rules: ShardingRules
) -> LeafLayout:
    """Lay out the parameter ``name`` with logical ``axes`` and ``shape`` on a mesh of ``sizes``.

    Raises ConfigError when tensor parallelism does not divide a dimension, or when a matrix has no dimension that the
    ZeRO axis divides. Vectors (norm scales, biases) that do not divide stay whole; ``jaxpar show`` lists them.
    """
    used = [live(rules.mesh_axes(a), sizes) for a in axes]
    for axis, size, cut in zip(axes, shape, used, strict=True):
        ways = math.prod(sizes[m] for m in cut)
        if size % ways:
            raise ConfigError(name, f"{axis} {size}", f"is not divisible by mesh.{cut[0]} {ways}", divisors(size))
    ways = sizes[ZERO_AXIS]
    zero_dim = None
    if rules.zero and ways > 1:
        whole = [d for d, cut in enumerate(used) if not cut and shape[d] % ways == 0]
        split = [d for d, cut in enumerate(used) if cut and shape[d] % (ways * math.prod(sizes[m] for m in cut)) == 0]
        ranked = [d for group in (whole, split) for a in rules.zero_order for d in group if axes[d] == a]
        if ranked:
            zero_dim = ranked[0]
        elif is_matrix(axes):
            raise ConfigError(
                name,
                "x".join(map(str, shape)),
                f"has no dimension that mesh.fsdp {ways} divides",
                f"mesh.fsdp from {divisors(math.gcd(*[s for a, s in zip(axes, shape, strict=True) if a != 'layers']))}",
            )
    sharded = [(*cut, ZERO_AXIS) if d == zero_dim else cut for d, cut in enumerate(used)]
    stage = rules.zero if is_matrix(axes) else min(rules.zero, 1)
    return LeafLayout(spec(sizes, *used), spec(sizes, *sharded), zero_dim, stage, is_matrix(axes))


def unsplit_axes(partition: Any, sizes: dict[str, int]) -> tuple[str, ...]:
    """Live mesh axes over which an array with this PartitionSpec is replicated."""
    cut = {a for entry in partition if entry for a in ((entry,) if isinstance(entry, str) else entry)}
    return tuple(a for a in MESH_AXES if sizes[a] > 1 and a not in cut)
