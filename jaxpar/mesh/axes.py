"""The six mesh axes, always all of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxpar.errors import ConfigError, divisors

MESH_AXES = ("data", "fsdp", "pipe", "expert", "context", "tensor")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; their product is the number of devices. One of them may be -1: whatever is left."""

    data: int = 1  # replicas: whole copies of the (sharded) state, each with its part of the batch
    fsdp: int = -1  # ZeRO shards: a part of the batch and, by stage, of optimizer state, gradients, parameters
    pipe: int = 1  # pipeline stages
    expert: int = 1  # expert shards; a part of the batch too
    context: int = 1  # shards of the sequence
    tensor: int = 1  # shards of heads, MLP width and vocabulary; norms and residuals are sharded over the sequence

    def resolve(self, num_devices: int) -> dict[str, int]:
        """Axis sizes for ``num_devices`` devices, in mesh order. Raises ConfigError when they do not multiply out."""
        sizes = {a: getattr(self, a) for a in MESH_AXES}
        for axis, size in sizes.items():
            if size < 1 and size != -1:
                raise ConfigError(f"mesh.{axis}", size, "is not a size", "a positive integer, or -1 for what is left")
        free = [a for a in MESH_AXES if sizes[a] == -1]
        if len(free) > 1:
            raise ConfigError(f"mesh.{free[1]}", -1, f"is the second free axis beside mesh.{free[0]}", "one -1 at most")
        fixed = math.prod(s for s in sizes.values() if s != -1)
        asked = " x ".join(f"{a} {s}" for a, s in sizes.items() if s not in (1, -1)) or "1"
        if num_devices % fixed or (not free and fixed != num_devices):
            raise ConfigError(
                "mesh",
                asked,
                f"needs {'a multiple of ' if free else ''}{fixed} devices, there are {num_devices}",
                f"sizes whose product {'divides' if free else 'is'} {num_devices}, from {divisors(num_devices)}",
            )
        for axis in free:
            sizes[axis] = num_devices // fixed
        return sizes


def make_mesh(sizes: dict[str, int], devices: Sequence[Any]) -> Any:
    """A ``jax.sharding.Mesh`` of all six axes, Explicit axis types.

    TPU devices are laid out so that the inner axes are neighbours on the torus; others keep their order. Several slices
    lie along the first of data, fsdp and pipe whose size is a multiple of their number, so that only that axis
    crosses the slow network between them.
    """
    import jax
    import numpy as np

    shape = [sizes[a] for a in MESH_AXES]
    if devices[0].platform == "tpu":
        by_slice: dict[int, list[Any]] = {}
        for device in devices:
            by_slice.setdefault(slice_of(device), []).append(device)
        grid = _on_slices(sizes, list(by_slice.values()))
    else:
        grid = np.asarray(devices, dtype=object).reshape(shape)
    return jax.sharding.Mesh(grid, MESH_AXES, axis_types=(jax.sharding.AxisType.Explicit,) * len(MESH_AXES))


def _on_slices(sizes: dict[str, int], slices: list[list[Any]]) -> Any:
    """The grid of devices, each slice on its own torus."""
    import numpy as np
    from jax.experimental import mesh_utils

    outer = next((a for a in ("data", "fsdp", "pipe") if sizes[a] % len(slices) == 0), None)
    if outer is None or len({len(devices) for devices in slices}) > 1:
        rule = f"is not a multiple of the {len(slices)} slices, and no other outer axis is"
        raise ConfigError("mesh.data", sizes["data"], rule, f"multiples of {len(slices)}")
    inner = [sizes[a] // (len(slices) if a == outer else 1) for a in MESH_AXES]
    grids = [mesh_utils.create_device_mesh(inner, devices, allow_split_physical_axes=True) for devices in slices]
    fsdp = _along(grids[0], "fsdp")
    if len(_stages(_places(fsdp))) == 1 and sum(len(set(column)) > 1 for column in _places(fsdp).T) > 1:
        # JAX winds one ring through all of a small slice; over it XLA makes no reduce-scatters (see torus_stages).
        ordered = [sorted(devices, key=lambda d: (*d.coords, d.core_on_chip)) for devices in slices]
        grids = [np.asarray(devices, dtype=object).reshape(inner) for devices in ordered]
    return np.concatenate(grids, axis=MESH_AXES.index(outer))


def slice_of(device: Any) -> int:
    """The TPU slice that a device belongs to; 0 where there is one."""
    return getattr(device, "slice_index", None) or 0


def torus_stages(mesh: Any, axis: str) -> tuple[int, ...]:
    """The axis as a product of torus dimensions, outermost first; one number where it follows a single dimension.

    Moving along the axis, the last of them counts fastest. Devices without coordinates (CPU, GPU) have one.
    """
    line = _along(mesh.devices, axis)
    return _stages(_places(line)) if line[0].platform == "tpu" else (len(line),)


def _along(grid: Any, axis: str) -> Any:
    """The devices along an axis, at the beginning of all others."""
    import numpy as np

    return np.moveaxis(grid, MESH_AXES.index(axis), 0)[:, 0, 0, 0, 0, 0]


def _places(line: Any) -> Any:
    """[devices, coordinates] of TPU devices: slice, torus, core."""
    import numpy as np

    return np.array([(slice_of(d), *d.coords, d.core_on_chip) for d in line])


def _stages(places: Any) -> tuple[int, ...]:
    """The line as a product of runs that move along one coordinate; one number where it is none."""
    import numpy as np

    stages: list[int] = []
    while len(places) > 1:
        moving = np.logical_or.accumulate(places != places[0]).sum(axis=1)  # coordinates that have moved by then
        run = int((moving <= 1).sum())
        if run == 1 or len(places) % run or not _repeats(places, run):
            run = len(places)  # no product of dimensions
        stages.insert(0, run)
        places = places[::run]
    return tuple(stages) or (1,)


def _repeats(places: Any, run: int) -> bool:
    """Whether every ``run`` places are the first ones, moved as a whole."""
    blocks = places.reshape(-1, run, places.shape[1])
    return bool(((blocks - blocks[:, :1]) == (blocks[:1] - blocks[:1, :1])).all())
