"""Which mesh axes a collective runs over, from its replica groups.

A partition's number is its row-major position in the mesh. A group's label joins the axes that vary in it:
``fsdp``, ``data+fsdp``; part of an axis is ``fsdp(2 of 4)``; what is no product of axes is ``mixed``.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence

from jaxpar.audit.hlo import Instruction, Module

MIXED = "mixed"
AXIS = re.compile(r"'?([^',=\[{]+?)'?=(\d+)")
AXIS_REF = re.compile(r"'?([^',:{}]+)'?(?::\((\d+)\)(\d+))?")
IOTA = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")

Groups = tuple[tuple[int, ...], ...]


def groups_of(module: Module, instruction: Instruction) -> Groups:
    """The groups of partitions that talk to each other; all of them where the text names none."""
    text = instruction.attributes.get("replica_groups", "")
    everyone = module.num_partitions * module.num_replicas
    crosses_partitions = "channel_id" in instruction.attributes
    if instruction.attributes.get("use_global_device_ids") == "true" or instruction.base_opcode not in REPLICA_IDS:
        return parse_groups(text, everyone)
    replicas = parse_groups(text, module.num_replicas)
    if not crosses_partitions:  # ids are of replicas: every partition talks to its copies alone
        return replicas
    parts = range(module.num_partitions)
    return tuple(tuple(r * module.num_partitions + p for r in group for p in parts) for group in replicas)


# Without use_global_device_ids these number replicas; all-to-all, permute and broadcast number partitions.
REPLICA_IDS = frozenset({"all-gather", "all-reduce", "reduce-scatter"})


@functools.lru_cache(maxsize=4096)
def parse_groups(text: str, everyone: int) -> Groups:
    """``{{0,1},{2,3}}``, ``{}``, ``[2,4]<=[4,2]T(1,0)`` and ``mesh['a'=2,'b'=4] {'b'}``."""
    text = text.strip()
    if text.startswith("mesh"):
        return _mesh_groups(text)
    if "<=" in text:
        shape, _, iota = text.partition("<=")
        ids, size = _iota(iota), _ints(shape)[1]
        return tuple(tuple(ids[i : i + size]) for i in range(0, len(ids), size))
    listed = tuple(tuple(_ints(group)) for group in re.findall(r"\{([\d, ]+)\}", text))
    return listed or (tuple(range(everyone)),)


def _mesh_groups(text: str) -> Groups:
    """Groups printed as the axes they run over, of a mesh with its own names; ``'a':(2)4`` is a part of ``'a'``."""
    close = text.index("]")
    axes = {name: int(size) for name, size in AXIS.findall(text[text.index("[") + 1 : close])}
    sizes = list(axes.values())
    ids: Sequence[int] = range(math.prod(sizes))
    if found := re.search(r"device_ids=\((.*)\)", text[close:]):
        ids = _iota(found[1]) if found[1].startswith("[") else _ints(found[1])
    at = text.rindex("{")
    digits: dict[str, list[tuple[int, int]]] = {}  # of each axis: (stride, size) of the varying parts
    for name, before, size in AXIS_REF.findall(text[at:].strip("{} ")):
        whole = axes[name]
        parts = (whole // (int(before) * int(size)), int(size)) if before else (1, whole)
        digits.setdefault(name, []).append(parts)
    groups: dict[tuple[int, ...], list[int]] = {}
    for position in itertools.product(*(range(n) for n in sizes)):
        rest = list(position)
        for index, name in enumerate(axes):
            for stride, size in digits.get(name, []):
                rest[index] -= position[index] // stride % size * stride
        groups.setdefault(tuple(rest), []).append(ids[_row_major(position, sizes)])
    return tuple(tuple(group) for group in groups.values())


def _iota(text: str) -> list[int]:
    """The numbers that ``[4,2]T(1,0)`` spells, flat: an iota of that shape, transposed."""
    found = IOTA.match(text)
    if found is None:
        raise ValueError(f"{text!r} is no iota of an HLO replica group list")
    dims = _ints(found[1])
    order = _ints(found[2]) if found[2] else list(range(len(dims)))
    strides = [math.prod(dims[d + 1 :]) for d in range(len(dims))]
    return [
        sum(i * strides[d] for i, d in zip(index, order, strict=True))
        for index in itertools.product(*(range(dims[d]) for d in order))
    ]


@functools.lru_cache(maxsize=4096)
def label(groups: Groups, mesh: tuple[tuple[str, int], ...]) -> str:
    """The axes of ``mesh`` (name and size, outermost first) that vary in each of ``groups``."""
    labels = {_label(group, mesh) for group in groups}
    return labels.pop() if len(labels) == 1 else MIXED


def _label(group: tuple[int, ...], mesh: tuple[tuple[str, int], ...]) -> str:
    seen = [sorted(set(axis)) for axis in zip(*(_position(i, mesh) for i in group), strict=True)]
    if math.prod(len(s) for s in seen) != len(group):
        return MIXED
    names = []
    for (name, size), values in zip(mesh, seen, strict=True):
        if len(values) == size > 1:
            names.append(name)
        elif len(values) > 1:
            if size % len(values) or not _regular([v - values[0] for v in values]):
                return MIXED
            names.append(f"{name}({len(values)} of {size})")
    return "+".join(names)


def _regular(values: list[int]) -> bool:
    """Whether the values are sums of strided runs: 0 2 4 6, or 0 1 4 5."""
    if len(values) == 1:
        return True
    run = next((n for n, v in enumerate(values) if v != n * values[1]), len(values))
    heads = values[::run]
    repeats = all(values[i] == heads[i // run] + i % run * values[1] for i in range(len(values)))
    return len(values) % run == 0 and repeats and _regular(heads)


def permute_label(pairs: Sequence[tuple[int, int]], mesh: Mapping[str, int]) -> str:
    """The axes along which senders and receivers differ."""
    axes = tuple(mesh.items())
    moved = set()
    for source, target in pairs:
        ends = zip(axes, _position(source, axes), _position(target, axes), strict=True)
        moved |= {name for (name, _), a, b in ends if a != b}
    return "+".join(name for name in mesh if name in moved)


def _position(partition: int, mesh: tuple[tuple[str, int], ...]) -> list[int]:
    position = []
    for _, size in reversed(mesh):
        partition, index = divmod(partition, size)
        position.append(index)
    return position[::-1]


def _row_major(position: Sequence[int], sizes: Sequence[int]) -> int:
    flat = 0
    for index, size in zip(position, sizes, strict=True):
        flat = flat * size + index
    return flat


def _ints(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]
