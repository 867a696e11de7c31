"""The TPU compiler's own estimate of the time of a step: ``estimated_cycles`` of its operations, executed."""

from __future__ import annotations

from jaxpar.audit.executions import executions
from jaxpar.audit.hlo import Instruction, Module


def estimated_cycles(module: Module) -> dict[str, int]:
    """Cycles per step by class of operation: "matmul" (fusions with a product), "other"; empty off TPU.

    A fusion carries the estimate of all it holds; kernels and collectives carry none. Of a conditional the branch with
    the most cycles counts. Useful as a ratio of two programs for one chip.
    """
    counts = executions(module, _cycles)
    found: dict[str, int] = {}
    for computation in module.computations.values():
        times = counts[computation.name]
        for instruction in computation.instructions if times else ():
            cycles = _cycles(instruction) * times
            if cycles:
                kind = "matmul" if _has_product(module, instruction) else "other"
                found[kind] = found.get(kind, 0) + cycles
    return found


def _cycles(instruction: Instruction) -> int:
    cycles = int(instruction.backend_config.get("window_config", {}).get("estimated_cycles", 0))
    return cycles if cycles < 2**62 else 0  # the largest number: no estimate


def _has_product(module: Module, instruction: Instruction) -> bool:
    if instruction.base_opcode in ("convolution", "dot"):
        return True
    return any(
        _has_product(module, inner)
        for names in instruction.called.values()
        for name in names
        for inner in module.computations[name].instructions
    )
