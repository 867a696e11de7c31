"""Bytes on each device: what lies there between steps, what a step adds, and the largest buffers by name."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import jax

from jaxpar.program import Program
from jaxpar.words import bytes_text


def shard_bytes(tree: Any) -> int:
    """Bytes on one device of arrays with shapes, dtypes and shardings."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def hbm_bytes_resident(program: Program) -> dict[str, int]:
    """Bytes on each device of what lies there between steps and of a batch: the sums of their shards'."""
    state = program.abstract_state
    rest = {name: value for name, value in state.items() if name != "params"}
    return {
        "parameters": shard_bytes(state["params"]),
        "optimizer": shard_bytes(rest),
        "batch": shard_bytes(program.abstract_batch),
    }


def hbm_bytes(program: Program, compiled: Any) -> dict[str, int]:
    """Bytes on each device by class; they add up to ``total``.

    ``total`` is XLA's own sum, arguments + outputs - aliases + temporaries + code (``memory_analysis``).
    ``parameters``, ``optimizer`` (with the step counters) and ``batch`` are the sums of the shards' bytes.
    ``gradients``: in fp32, where the optimizer has them. ``activations``: the temporaries without them. ``padding``:
    what XLA's layouts add to the arguments, and outputs that are no argument's memory. Besides, ``peak``: the most that
    is live at once, by XLA's count, which is less than ``total`` where XLA lays temporaries over each other only on the
    device (TPU). That count has a core's own memory (VMEM) too, which makes it more than ``total`` for tiny steps:
    ``peak`` is the smaller.
    """
    memory = compiled.memory_analysis()
    fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
    total = memory.argument_size_in_bytes + fresh + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    of = hbm_bytes_resident(program)
    gradients = min(_gradient_bytes(program), memory.temp_size_in_bytes)
    of |= {"gradients": gradients, "activations": memory.temp_size_in_bytes - gradients}
    of |= {"code": memory.generated_code_size_in_bytes}
    of["padding"] = total - sum(of.values())
    tpu = program.platform == "tpu"  # elsewhere XLA's peak leaves temporaries out
    return {"total": total, "peak": min(memory.peak_memory_in_bytes, total) if tpu else total, **of}


def verdict(audit: dict[str, Any]) -> str:
    """Whether what was audited fits, in words: ``3.79 MB of 3.16 GB on each device: fits``."""
    limit, need = audit["hbm_limit"], audit["hbm_bytes"]["peak"]
    if not limit:
        return f"{bytes_text(need)} on each device, of an amount that is not known"
    fits = "fits" if audit["fits"] else f"does not fit by {bytes_text(need - limit)}"
    return f"{bytes_text(need)} of {bytes_text(limit)} on each device: {fits}"


def _gradient_bytes(program: Program) -> int:
    from jax.sharding import NamedSharding

    return sum(
        4 * math.prod(NamedSharding(program.mesh, p.layout.updated).shard_shape(p.shape)) for p in program.parameters
    )


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A piece of a device's memory, and the largest of the values that lie in it one after the other."""

    bytes: int
    shape: str
    name: str


def largest_buffers(dump: Path, op_names: dict[str, str], most: int = 12) -> list[Buffer]:
    """The largest buffers of a program, from the buffer assignment that XLA wrote into the folder ``dump``.

    ``op_names``: of the program's instructions. Values at the same place share one buffer.
    """
    places: dict[tuple[int, int, int], list[tuple[str, str]]] = {}
    allocation, in_hbm = 0, False
    for line in _assignment(dump):
        if found := re.match(r"allocation (\d+): size \d+,(.*)", line):
            allocation, in_hbm = int(found[1]), "color" not in found[2]
        elif in_hbm and (found := _VALUE.match(line)):
            name, size, offset, shape = found[1], int(found[2]), int(found[3]), found[4]
            places.setdefault((allocation, offset, size), []).append((name, shape))
    largest = sorted(places.items(), key=lambda item: -item[0][2])[:most]
    return [
        Buffer(size, values[0][1].partition("{")[0], _telling([op_names.get(name, "") for name, _ in values]))
        for (_, _, size), values in largest
    ]


_VALUE = re.compile(r" value: <\d+ ([^ {]+)\S*(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (\S+)")


def _assignment(dump: Path) -> list[str]:
    """The lines of the step's buffer assignment: the largest file, should others have been compiled too."""
    files = sorted(dump.glob("*buffer-assignment.txt"), key=lambda file: file.stat().st_size)
    return files[-1].read_text(errors="replace").splitlines() if files else []


def _telling(op_names: list[str]) -> str:
    """Of the values that lie in one buffer: the argument if one is, else the one whose name says most."""
    arguments = [name for name in op_names if name.startswith(ARGUMENTS)]
    readable = [name for name in map(readable_name, arguments or op_names) if name]
    return max(readable, key=len, default="a constant or a copy")


ARGUMENTS = ("state[", "batch[", "scalars[")
_WRAPPED = re.compile(r"(\w+)\((.*)\)")
_NOISE = {
    "", "step", "shard_map", "while", "body", "eval_jaxpr", "closed_call", "checkpoint", "rematted_computation",
    "dynamic_update_index_in_dim",
}  # fmt: skip


def readable_name(op_name: str) -> str:
    """``backward: layers.attention.o (bshk,hkd->bsd dot_general)`` of XLA's name of an operation.

    Phases: forward, backward, recomputed (forward again, for the backward pass) and update (of the optimizer). An
    argument such as ``state['params']['layers']['mlp']['up']`` becomes ``parameter layers.mlp.up``. Empty where XLA's
    name says nothing.
    """
    op_name = op_name.replace("\\'", "'")
    if op_name.startswith(ARGUMENTS):
        return _argument(op_name)
    if several := re.fullmatch(r"(.*/)?\(([^:]+)((?::[^:]+)+)\)", op_name):  # that XLA made one
        return f"{readable_name((several[1] or '') + several[2])} and {several[3].count(':')} more"
    parts, wrappers = [], set()
    for part in op_name.split("/"):
        while found := _WRAPPED.fullmatch(part):
            wrappers.add(found[1])
            part = found[2]
        parts.append(part.lstrip("_"))
    phase = ""
    if "rematted_computation" in parts:
        phase = "recomputed"
    elif "transpose" in wrappers:
        phase = "backward"
    elif "jvp" in wrappers:
        phase = "forward"
    elif op_name.startswith("jit(_step)/") and "shard_map" not in parts:
        phase = "update"
    *places, primitive = [re.sub(r"\.\d+$", "", part) for part in parts]
    equation = places.pop() if places and "->" in places[-1] else ""
    place = ".".join(dict.fromkeys(part for part in places if part not in _NOISE))
    if not place and primitive == "dynamic_update_slice" and "body" in places:
        place = "stacked over a loop"
    operation = " ".join(word for word in (equation, primitive) if word not in _NOISE)
    said = f"{place} ({operation})" if place and operation else place or operation
    return f"{phase}: {said}" if phase and said else said


def _argument(op_name: str) -> str:
    """``state['opt'][0].mu['layers']['mlp']['up']``: ``optimizer mu of layers.mlp.up``."""
    keys = [a or b for a, b in re.findall(r"\['?([^'\]]+)'?\]|\.(\w+)", op_name)]
    kind, *rest = [op_name.partition("[")[0], *(key for key in keys if not key.isdigit())]
    if kind != "state":
        return f"{kind} {'.'.join(rest)}"
    if rest[0] == "params":
        return f"parameter {'.'.join(rest[1:])}"
    if rest[0] == "opt":
        slot, *name = [key for key in rest[1:] if key != "inner_state"]
        return f"optimizer {slot} of {'.'.join(name)}" if name else f"optimizer {slot}"
    return f"{'.'.join(rest)} of the state"
