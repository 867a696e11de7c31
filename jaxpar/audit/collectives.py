"""Bytes that one device puts on the wire in one step, per kind of collective and per mesh axis.

Conventions, g devices in a group: an all-gather and a reduce-scatter move (g-1)/g of the whole array, an all-reduce
twice that, an all-to-all (g-1)/g of its operand, a permute and a broadcast their operand once. A group of one moves
nothing. A ragged all-to-all is counted as if every row were sent and the load even: what moves depends on the data.

Between TPU slices XLA hands arrays to the hosts: a ``send`` names what they do with it. Such modules lose most
op_names.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jaxpar.audit.executions import executions
from jaxpar.audit.groups import groups_of, label, permute_label
from jaxpar.audit.hlo import Computation, Instruction, Module
from jaxpar.audit.loops import within
from jaxpar.audit.shapes import Array, arrays

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "collective-broadcast",
)
# The last part of an op_name that says: the program asked for this movement (inside shard_map, or by a reshard).
ASKED = frozenset(
    """
    all_gather all_gather_invariant all_gather_reduced reduce_scatter unreduced_reduce_scatter psum psum_invariant
    unreduced_psum pmax pmin unreduced_pmax unreduced_pmin ppermute psend precv pbroadcast pbroadcast_dynamic
    all_to_all ragged_all_to_all reshard sharding_constraint
    """.split()  # noqa: SIM905
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One array moved by one collective. A collective of several arrays (a tuple) makes one record for each."""

    kind: str
    axis: str  # as ``groups.label``: "fsdp", "data+fsdp", "fsdp(2 of 4)", "mixed"
    group_size: int  # devices that exchange; of a permute the number of pairs
    wire_bytes: float  # per device and execution
    executions: int  # per step
    asynchronous: bool  # started and waited for apart: it can overlap with what stands between
    dtype: str
    dims: tuple[int, ...]  # of the operand, on one device
    op_name: str
    source: str  # file:line
    instruction: str
    by_partitioner: bool  # marked by XLA's partitioner as its own (jax 0.12), not written in a shard_map
    between_slices: bool = False  # by the hosts of TPU slices, over the data-centre network

    @property
    def total_bytes(self) -> float:
        """Bytes per device and step."""
        return self.wire_bytes * self.executions

    @property
    def operand_bytes(self) -> int:
        """Of the array on one device, before it moves."""
        return Array(self.dtype, self.dims).nbytes

    def to_json(self) -> dict[str, Any]:
        """All fields, and the total."""
        return {**dataclasses.asdict(self), "total_bytes": self.total_bytes}


def collectives(module: Module, mesh: Mapping[str, int]) -> list[Collective]:
    """Every collective of the step with its executions; ``mesh`` gives the axis sizes, outermost first.

    Of a conditional the branch with the most bytes counts.
    """
    asynchronous = {
        name for i in module if i.opcode == "async-start" and not _is_sync(i) for name in i.called.get("calls", [])
    }
    found = {c.name: _of_computation(module, c, mesh, c.name in asynchronous) for c in module.computations.values()}
    bytes_of: dict[int, float] = {}
    for records in found.values():
        for instruction, record in records:
            bytes_of[id(instruction)] = bytes_of.get(id(instruction), 0.0) + record.wire_bytes
    counts = executions(module, lambda i: bytes_of.get(id(i), 0.0))
    return [
        dataclasses.replace(record, executions=counts[name])
        for name, records in found.items()
        for _, record in records
        if counts[name]
    ]


def summary(records: Iterable[Collective]) -> dict[str, Any]:
    """Bytes per device and step: total, by kind, by axis, by both, and how much of it is asynchronous."""
    out: dict[str, Any] = {"total": 0.0, "by_kind": {}, "by_axis": {}, "by_axis_and_kind": {}, "asynchronous": 0.0}
    for r in records:
        out["total"] += r.total_bytes
        out["asynchronous"] += r.total_bytes * r.asynchronous
        of_axis = out["by_axis_and_kind"].setdefault(r.axis, {})
        for table, key in ((out["by_kind"], r.kind), (out["by_axis"], r.axis), (of_axis, r.kind)):
            table[key] = table.get(key, 0.0) + r.total_bytes
    return out


@dataclasses.dataclass(frozen=True)
class Unrequested:
    """Collectives that the program did not ask for by name."""

    resharding: list[Collective]  # data moved because an operation needed it elsewhere
    reductions: list[Collective]  # small all-reduces (norms, counts) of sums over sharded arrays
    unnamed: list[Collective]  # in a program of several TPU slices: XLA left no name, so nothing can be said


def unrequested(records: Iterable[Collective], asked: Collection[str] = ASKED, small_bytes: int = 1024) -> Unrequested:
    """What XLA's partitioner put in: the collectives whose op_name does not end in one of ``asked``.

    ``.../shard_map/.../all_gather`` was asked for; ``.../dot_general`` or ``.../add`` names the operation whose
    operands or result lay otherwise. All-reduces of at most ``small_bytes`` are listed apart.
    """
    found, records = Unrequested([], [], []), list(records)
    names_lost = any(r.between_slices for r in records)
    for r in records:
        if _primitives(r.op_name) <= set(asked):
            continue
        small = r.kind == "all-reduce" and r.operand_bytes <= small_bytes
        unnamed = names_lost and (not r.op_name or r.op_name.endswith("optimization_barrier"))  # that moves nothing
        (found.reductions if small else found.unnamed if unnamed else found.resharding).append(r)
    return found


def _primitives(op_name: str) -> set[str]:
    """The last parts of an op_name; XLA:GPU names what it merged ``before/(a/all_gather:b/all_gather)``."""
    merged = re.search(r"/\((.*:.*)\)$", op_name)
    names = merged[1].split(":") if merged else [op_name]
    return {name.rsplit("/", 1)[-1].removesuffix("_start").removesuffix("_done") for name in names}


def _of_computation(
    module: Module, computation: Computation, mesh: Mapping[str, int], in_async: bool
) -> list[tuple[Instruction, Collective]]:
    return [
        (instruction, record)
        for instruction in computation.instructions
        if instruction.base_opcode in KINDS and not _continues(instruction)
        for record in _records(module, instruction, mesh, in_async)
    ] + [
        (instruction, record)
        for instruction in computation.instructions
        if instruction.opcode == "send"
        for record in _sent_between_slices(module, instruction, mesh)
    ]


def _records(module: Module, instruction: Instruction, mesh: Mapping[str, int], in_async: bool) -> list[Collective]:
    kind = instruction.base_opcode
    if kind == "collective-permute":
        pairs = [
            (int(a), int(b))
            for a, b in re.findall(r"\{(\d+),(\d+)\}", instruction.attributes["source_target_pairs"])
            if a != b
        ]
        axis, size = permute_label(pairs, mesh), len(pairs)
    else:
        groups = groups_of(module, instruction)
        size = max(len(group) for group in groups)
        axis = label(groups, tuple(mesh.items()))
    if kind == "all-reduce" and _is_scattered(module, instruction, size):
        kind = "reduce-scatter"
    if size < (1 if kind == "collective-permute" else 2):
        return []
    operands = instruction.operands[:1] if kind == "ragged-all-to-all" else instruction.operands
    moved = [array for operand in operands for array in arrays(operand.shape)]
    origins = _origins(module, instruction, len(moved))
    return [
        Collective(
            kind=kind,
            axis=axis,
            group_size=size,
            wire_bytes=_wire(kind, size) * array.nbytes,
            executions=0,
            asynchronous=in_async or _asynchronous(instruction),
            dtype=array.dtype,
            dims=array.dims,
            op_name=op_name,
            source=source,
            instruction=instruction.name,
            by_partitioner=partitioner,
        )
        for array, (op_name, source, partitioner) in zip(moved, origins, strict=True)
    ]


def _sent_between_slices(module: Module, send: Instruction, mesh: Mapping[str, int]) -> list[Collective]:
    """What the hosts of several slices are to do with an array, if that is what the ``send`` is for.

    Slices lie along the outermost mesh axis whose size is a multiple of their number (``mesh.axes.make_mesh``).
    """
    attributes = send.attributes.get("frontend_attributes", "")
    found = {name: re.search(rf'_xla_megascale_{name}="([^"]*)"', attributes) for name in ("transfer_type", "target")}
    transfer, target = found["transfer_type"], found["target"]
    if transfer is None or target is None:
        return []
    kind = transfer[1].lower().replace("_", "-")
    kind = kind if kind in KINDS else "collective-permute"
    slices = _slices(target[1])
    axis, ways = next(((a, n) for a, n in mesh.items() if n > 1 and n % slices == 0), ("mixed", slices))
    array = arrays(send.operands[0].shape)[0]
    return [
        Collective(
            kind=kind,
            axis=axis if ways == slices else f"{axis}({slices} of {ways})",
            group_size=slices,
            wire_bytes=_wire(kind, slices) * array.nbytes,
            executions=0,
            asynchronous=True,
            dtype=array.dtype,
            dims=array.dims,
            op_name=send.op_name,
            source=module.source(send),
            instruction=send.name,
            by_partitioner=False,
            between_slices=True,
        )
    ]


def _slices(target: str) -> int:
    """How many slices ``{1,2}x{0:7}`` names: slices 1 and 2, devices 0 to 7 of each."""
    total = 0
    for part in target.partition("x")[0].strip("{}").split(","):
        first, _, last = part.partition(":")
        total += int(last or first) - int(first) + 1
    return total


def _wire(kind: str, size: int) -> float:
    """Bytes on the wire for each byte of the operand."""
    return {
        "all-gather": size - 1.0,  # (g-1)/g of g operands
        "all-reduce": 2 * (size - 1) / size,
        "collective-permute": 1.0,
        "collective-broadcast": 1.0,
    }.get(kind, (size - 1) / size)


def _origins(module: Module, instruction: Instruction, arrays: int) -> list[tuple[str, str, bool]]:
    """Of each array moved: op_name, source and whether the partitioner made it.

    XLA merges collectives and leaves the names on the elements taken out; one that it rewrote has a name only in its
    reduction's parameters.
    """
    parts = {
        user.numbers("index")[0]: user
        for user in instruction.computation.users.get(instruction.name, [])
        if user.opcode == "get-tuple-element"
    }
    applied = [
        parameter
        for name in instruction.called.get("to_apply", [])
        for parameter in module.computations[name].parameters.values()
        if parameter.op_name
    ]
    found = []
    for number in range(arrays):
        names = [i for i in (parts.get(number) if arrays > 1 else None, instruction, *applied) if i and i.op_name]
        origin = names[0] if names else instruction
        marked = any("is_spmd_generated" in i.attributes.get("frontend_attributes", "") for i in (origin, instruction))
        found.append((origin.op_name, module.source(origin), marked))
    return found


def _asynchronous(instruction: Instruction) -> bool:
    started = instruction.opcode.endswith("-start") and not _is_sync(instruction)
    return started or "async_collective_fusion_config" in instruction.backend_config


def _is_sync(instruction: Instruction) -> bool:
    """XLA:GPU prints pairs that it runs as one as a plain operation, or marks them."""
    return bool(instruction.backend_config.get("collective_backend_config", {}).get("is_sync", False))


def _continues(instruction: Instruction) -> bool:
    """Whether this only repeats a collective begun elsewhere.

    XLA:TPU spreads an asynchronous collective over fusions: one that starts it (an ``AsyncCollectiveStart`` takes it),
    one that carries it along a product, one that waits. Each prints the whole operation.
    """
    if "async_collective_fusion_config" not in instruction.backend_config:
        return False
    users = instruction.computation.users.get(instruction.name, [])
    return not any("AsyncCollectiveStart" in user.attributes.get("custom_call_target", "") for user in users)


def _is_scattered(module: Module, instruction: Instruction, size: int) -> bool:
    """Whether an all-reduce inside a fusion is cut there to each device's own part: a reduce-scatter.

    XLA:TPU writes ``fusion(...), kind=kCustom, calls=%all-reduce-scatter``: an all-reduce, then a dynamic-slice.
    """
    callers = module.callers.get(instruction.computation.name, [])
    if not any(caller.base_opcode == "fusion" for caller in callers):
        return False
    whole = sum(a.elements for operand in instruction.operands for a in arrays(operand.shape))
    for cut in instruction.computation.instructions:
        if cut.opcode == "dynamic-slice" and within(module, cut.operands[0])[0] is instruction:
            return size > 1 and whole <= arrays(cut.shape)[0].elements * size < whole + size * size
    return False
