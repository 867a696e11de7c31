"""How often each computation of a compiled program runs in one step."""

from __future__ import annotations

import functools
from collections.abc import Callable

from jaxpar.audit.hlo import Instruction, Module
from jaxpar.audit.loops import trip_count

BRANCHES = ("branch_computations", "true_computation", "false_computation")


def executions(module: Module, cost: Callable[[Instruction], float] = lambda _: 0.0) -> dict[str, int]:
    """How often each computation runs in one step of one device, along the calls from the entry.

    Nested loops multiply, several callers add up. Of a conditional the branch of the largest ``cost`` (its
    instructions' and what they call, executed) counts as taken every time and the others never: an upper bound where
    the branches alternate. Loops of unknown length count once; ``loops.unknown_trip_counts`` names them. The small
    functions that a reduction, sort or scatter applies to elements are not followed.
    """

    @functools.cache
    def total(name: str) -> float:
        return sum(
            cost(i) + sum(times * total(callee) for callee, times in calls(i))
            for i in module.computations[name].instructions
        )

    @functools.cache
    def calls(instruction: Instruction) -> tuple[tuple[str, int], ...]:
        called, opcode = instruction.called, instruction.base_opcode
        if not called or opcode.endswith(("-done", "-update")):
            return ()
        if opcode == "while":
            trips = trip_count(module, instruction)
            trips = 1 if trips is None else trips
            return (called["body"][0], trips), (called["condition"][0], trips + 1)
        if opcode == "conditional":
            branches = [name for role in BRANCHES for name in called.get(role, [])]
            return ((max(branches, key=total), 1),)
        if opcode in ("fusion", "call", "async", "custom-call"):
            return tuple((name, 1) for names in called.values() for name in names)
        return ()

    counts = dict.fromkeys(module.computations, 0)
    counts[module.entry.name] = 1
    for name in _callers_first(module, calls):
        for instruction in module.computations[name].instructions:
            for callee, times in calls(instruction):
                counts[callee] += counts[name] * times
    return counts


def _callers_first(module: Module, calls: Callable[[Instruction], tuple[tuple[str, int], ...]]) -> list[str]:
    """Every computation the entry reaches, each after all that call it."""
    order: list[str] = []
    seen: set[str] = set()

    def visit(name: str) -> None:
        if name not in seen:
            seen.add(name)
            for instruction in module.computations[name].instructions:
                for callee, _ in calls(instruction):
                    visit(callee)
            order.append(name)

    visit(module.entry.name)
    return order[::-1]
