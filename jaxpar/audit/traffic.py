"""Bytes that a step moves between a device's memory and its cores, estimated from the compiled HLO."""

from __future__ import annotations

from typing import Any

from jaxpar.audit.executions import executions
from jaxpar.audit.hlo import Instruction, Module
from jaxpar.audit.shapes import Shape, arrays

# These name or regroup memory, wait, or move what their partner or their body is counted for.
FREE = frozenset(
    """
    parameter constant tuple get-tuple-element bitcast while conditional call after-all optimization-barrier
    partition-id replica-id async-start async-update iota
    """.split()  # noqa: SIM905
)


def hbm_traffic(module: Module) -> float:
    """Bytes read and written per device and step: the operands and results in HBM of every operation that runs.

    A fusion reads its operands once and writes its results; what stays inside, or in a core's own memory, is free. A
    slice reads, and an update in place writes, only its part. Kernels count as one pass over operands and results.
    """
    fused = {name for i in module if i.base_opcode == "fusion" for name in i.called.get("calls", [])}
    reducers = {name for i in module for name in i.called.get("to_apply", [])}
    inside = fused | reducers
    counts = executions(module, lambda i: 0.0 if i.computation.name in inside else _bytes(module, i))
    return sum(
        counts[computation.name] * _bytes(module, instruction)
        for computation in module.computations.values()
        if computation.name not in inside and counts[computation.name]
        for instruction in computation.instructions
    )


def _bytes(module: Module, instruction: Instruction) -> float:
    kind = instruction.base_opcode
    if kind in FREE or kind.endswith("-done"):
        return 0.0
    if kind == "dynamic-update-slice":
        return 2.0 * _in_hbm(instruction.operands[1].shape)
    if kind in ("dynamic-slice", "slice", "gather"):
        return 2.0 * _in_hbm(instruction.shape)
    if kind == "fusion":
        return _of_fusion(module, instruction)
    return _in_hbm(instruction.shape) + sum(_in_hbm(operand.shape) for operand in instruction.operands)


def _of_fusion(module: Module, fusion: Instruction) -> float:
    inner = module.computations[fusion.called["calls"][0]]
    result: Any = fusion.shape
    if fusion.opcode != "fusion":  # started apart: (operands, result, context)
        result = result[1]
    total = 0.0
    updates = [i for i in inner.instructions if i.opcode == "dynamic-update-slice"]
    updated = {update.operand_names[0] for update in updates}  # in place: only the part moves
    for number, operand in enumerate(fusion.operands):
        parameter = inner.parameters.get(number)
        users = inner.users.get(parameter.name, []) if parameter else []
        if parameter is not None and parameter.name in updated:
            continue
        if users and all(user.opcode in ("dynamic-slice", "slice", "gather") for user in users):
            in_hbm = any(array.memory_space == 0 for array in arrays(operand.shape))
            total += sum(array.nbytes for user in users for array in arrays(user.shape)) * in_hbm
        else:
            total += _in_hbm(operand.shape)
    written = _in_hbm(result)
    for update in updates:
        whole, part = arrays(update.shape)[0].nbytes, arrays(update.operands[1].shape)[0].nbytes
        if written >= whole:
            written += part - whole
    return total + written


def _in_hbm(shape: Shape) -> float:
    return float(sum(array.nbytes for array in arrays(shape) if array.memory_space == 0))
