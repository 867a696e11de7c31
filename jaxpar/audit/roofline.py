"""How long a step must take: what it computes, reads and sends, each against what the machine can do."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from jaxpar.audit.collectives import Collective
from jaxpar.mesh.axes import MESH_AXES, slice_of
from jaxpar.mesh.targets import Chip


@dataclasses.dataclass(frozen=True)
class Level:
    """A network and the bandwidth of one device in it, bytes/s, for one kind of group."""

    name: str  # ici, dcn, nvlink, network
    bandwidth: float


def network_of(axis: str, mesh: Any, chip: Chip) -> Level:
    """The network that a collective over ``axis`` (a label such as "fsdp" or "fsdp(16 of 256)") runs on.

    A TPU ring uses a link each way along each torus dimension that the group spans whole where that closes, else one
    link; groups that cross slices are bound by the data-centre network. GPUs of several nodes share their NICs: a node
    sends what its members send through as many NICs as it has members.
    """
    devices = _group(axis, mesh)
    if chip.platform == "gpu":
        nodes = len({d.process_index for d in devices})
        if nodes == 1:
            return Level("nvlink", chip.networks["nvlink"])
        members = max(1, len(devices) // nodes)
        return Level("network", min(chip.networks["nvlink"], members * chip.networks["network"]))
    slices = len({slice_of(d) for d in devices})
    if slices > 1:
        return Level("dcn", chip.networks["dcn"] * max(1, len(devices) // slices))
    torus = _extent(mesh.devices.reshape(-1))
    links = 0
    for size, spanned, closes in zip(torus, _extent(devices), chip.closes(torus[: chip.dims]), strict=False):
        if spanned > 1:
            links += 2 if spanned == size and closes else 1
    return Level("ici", chip.networks["ici"] * max(links, 1))  # none: the two cores of a chip


def _extent(devices: Iterable[Any]) -> tuple[int, ...]:
    """Over how many places the devices are spread along each torus dimension."""
    return tuple(len(set(column)) for column in zip(*[d.coords for d in devices], strict=True))


def _group(axis: str, mesh: Any) -> list[Any]:
    """The devices of one group along the axes that a label names; all of them for "mixed"."""
    names = [part.partition("(")[0] for part in axis.split("+")]
    line = mesh.devices[tuple(slice(None) if axis == "mixed" or a in names else 0 for a in MESH_AXES)].reshape(-1)
    part = re.fullmatch(r"\w+\((\d+) of (\d+)\)", axis)
    if part is None or int(part[2]) != len(line):
        return list(line)
    # Which stage of the axis the label does not say: the innermost or the outermost, whichever is a line in a slice.
    inner, outer = line[: int(part[1])], line[:: len(line) // int(part[1])]
    if line[0].platform != "tpu":
        return list(inner)
    return list(
        min(inner, outer, key=lambda group: (len(set(map(slice_of, group))), sum(n > 1 for n in _extent(group))))
    )


def roofline(
    flops: float, dtype: Any, traffic: float, records: Iterable[Collective], chip: Chip, mesh: Any
) -> dict[str, float]:
    """Seconds per step of products, memory and each network, and of the step with and without overlap.

    ``overlapped``: everything runs beside everything else, the slowest decides. ``serial``: products and memory
    overlap, the networks wait for them and for each other. A real step lies between.
    """
    seconds = {"compute": flops / chip.peak(dtype), "hbm": traffic / chip.hbm}
    networks = dict.fromkeys(chip.networks, 0.0)
    levels: dict[str, Level] = {}
    for record in records:
        if record.axis not in levels and not record.between_slices:
            levels[record.axis] = network_of(record.axis, mesh, chip)
        level = Level("dcn", chip.networks["dcn"]) if record.between_slices else levels[record.axis]
        networks[level.name] += record.total_bytes / level.bandwidth
    seconds |= networks
    serial = max(seconds["compute"], seconds["hbm"]) + sum(networks.values())
    return {**seconds, "overlapped": max(seconds.values()), "serial": serial}
