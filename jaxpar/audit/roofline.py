"""How long a step must take: what it computes, reads and sends, each against what the machine can do."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxpar.audit.collectives import Collective
from jaxpar.mesh.axes import MESH_AXES
from jaxpar.mesh.targets import Chip, Target


@dataclasses.dataclass(frozen=True)
class Level:
    """A network and the bandwidth of one device in it, bytes/s, for one kind of group."""

    name: str  # ici, dcn, nvlink, network
    bandwidth: float


def network_of(axis: str, mesh: Any, chip: Chip, target: Target) -> Level:
    """The network that a collective over ``axis`` (a label such as "fsdp" or "fsdp(16 of 256)") runs on.

    A TPU ring uses a link each way along each torus dimension that the group spans whole where it wraps around, else one
    link; groups that cross slices are bound by the data-centre network. GPUs of several nodes share their NICs: a node
    sends what its members send through as many NICs as it has members.
    """
    devices = _line(axis, mesh)
    slices = {getattr(d, "slice_index", None) or 0 for d in devices}
    if chip.platform == "gpu":
        nodes = len({d.process_index for d in devices})
        if nodes == 1:
            return Level("nvlink", chip.networks["nvlink"])
        members = max(1, len(devices) // nodes)
        return Level("network", min(chip.networks["nvlink"], members * chip.networks["network"]))
    if len(slices) > 1:
        return Level("dcn", chip.networks["dcn"] * max(1, len(devices) // len(slices)))
    places = np.array([d.coords for d in devices])
    links = 0
    for dimension, size in enumerate(target.shape):
        spanned = len(set(places[:, dimension]))
        if spanned > 1:
            links += 2 if spanned == size and target.wrap[dimension] else 1
    return Level("ici", chip.networks["ici"] * max(links, 1))  # 0: the two cores of a chip


def _line(axis: str, mesh: Any) -> list[Any]:
    """The devices of the first group along the axes that a label names; of every axis for "mixed"."""
    names = [part.partition("(")[0] for part in axis.split("+")]
    taken = [a in names or axis == "mixed" for a in MESH_AXES]
    grid = mesh.devices[tuple(slice(None) if t else 0 for t in taken)].reshape(-1)
    if "(" in axis and "+" not in axis:
        ways, _, whole = axis.partition("(")[2].rstrip(")").partition(" of ")
        # a stage of the axis: which one the label does not say; the innermost, as wide as any other on a square torus
        return list(grid[: int(ways)]) if int(whole) == len(grid) else list(grid)
    return list(grid)


def roofline(
    flops: float, dtype: Any, traffic: float, records: Iterable[Collective], chip: Chip, target: Target, mesh: Any
) -> dict[str, Any]:
    """Seconds per step of products, memory and each network, and of the step with and without overlap.

    ``overlapped``: everything runs beside everything else, the slowest decides. ``serial``: products and memory
    overlap, the networks wait for them and for each other. A real step lies between.
    """
    seconds: dict[str, float] = {"compute": flops / chip.peak(dtype), "hbm": traffic / chip.hbm}
    networks: dict[str, float] = dict.fromkeys(_levels(chip), 0.0)
    levels: dict[str, Level] = {}
    for record in records:
        level = levels.setdefault(record.axis, network_of(record.axis, mesh, chip, target))
        networks[level.name] += record.total_bytes / level.bandwidth
    seconds |= networks
    return {
        **seconds,
        "overlapped": max(seconds.values()),
        "serial": max(seconds["compute"], seconds["hbm"]) + sum(networks.values()),
    }


def _levels(chip: Chip) -> Mapping[str, float]:
    return chip.networks
