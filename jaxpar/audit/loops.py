"""How often a ``while`` runs, and where a value comes from.

GPU and CPU programs carry ``known_trip_count``. A compiled TPU program does not: there the count is read from the
condition's comparison, the body's increment and the first value.
"""

from __future__ import annotations

from jaxpar.audit.hlo import Computation, Instruction, Module

SAME_VALUE = frozenset({"copy", "bitcast", "convert", "reshape", "copy-start", "copy-done", "optimization-barrier"})
SWAPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}

Place = tuple[Instruction, tuple[int, ...]]  # an instruction, and which element of its (nested) tuple
Affine = tuple[tuple[int, ...] | None, int]  # an element of a computation's parameter (None: zero) plus a constant


def trip_count(module: Module, loop: Instruction) -> int | None:
    """How often the body of ``loop`` runs each time it is reached, or None where the text does not say."""
    known = loop.backend_config.get("known_trip_count")
    return int(known["n"]) if known else _inferred(module, loop)


def unknown_trip_counts(module: Module) -> list[str]:
    """The loops whose length the text does not tell; whatever they hold is counted once."""
    return [i.name for i in module if i.opcode == "while" and trip_count(module, i) is None]


def _inferred(module: Module, loop: Instruction) -> int | None:
    """From ``element < bound``, ``element += step`` and the element's first value, all constants."""
    condition = module.computations[loop.called["condition"][0]]
    compare, _ = within(module, condition.root)
    if compare.opcode != "compare" or len(compare.operands) != 2:
        return None
    direction = compare.attributes.get("direction", "")
    left, right = (_affine(module, condition, operand) for operand in compare.operands)
    if left is None or right is None:
        return None
    (element, added), (other, bound) = _fixed(module, loop, *left), _fixed(module, loop, *right)
    if element is None:  # the constant stands on the left
        element, added, other, bound = other, bound, element, added
        direction = SWAPPED.get(direction, "")
    if element is None or other is not None:
        return None
    body = module.computations[loop.called["body"][0]]
    after = _affine(module, body, body.root, element)
    first = constant(module, loop.operands[0], element)
    if after is None or after[0] != element or first is None:
        return None
    return _count(direction, bound - added - first, after[1])


def _count(direction: str, distance: int, step: int) -> int | None:
    """How many of 0, step, 2 step, ... pass ``x <direction> distance`` before the first that does not."""
    if direction in ("GT", "GE"):
        direction, distance, step = SWAPPED[direction], -distance, -step
    if direction == "LE":
        direction, distance = "LT", distance + 1
    if direction == "LT" and step > 0:
        return max(0, -(-distance // step))
    if direction == "NE" and step and distance % step == 0 and distance // step >= 0:
        return distance // step
    return None


def _fixed(module: Module, loop: Instruction, element: tuple[int, ...] | None, added: int) -> Affine:
    """A carried element that the loop never changes, as the constant it is."""
    if element is not None and unchanged(module, loop, element):
        value = constant(module, loop.operands[0], element)
        if value is not None:
            return None, value + added
    return element, added


def _affine(module: Module, home: Computation, instruction: Instruction, path: tuple[int, ...] = ()) -> Affine | None:
    """An integer as an element of the parameter of ``home`` plus a constant, where it is one."""
    place, path = within(module, instruction, path, home)
    if place.opcode == "constant":
        return (None, int(place.operand_text)) if place.operand_text.lstrip("-").isdigit() else None
    if place.opcode == "parameter":
        return path, 0
    if place.opcode in ("add", "subtract"):
        sign = 1 if place.opcode == "add" else -1
        left, right = (_affine(module, home, operand) for operand in place.operands)
        if left and right and right[0] is None:
            return left[0], left[1] + sign * right[1]
        if left and right and left[0] is None and sign == 1:
            return right[0], left[1] + right[1]
    return None


def constant(module: Module, instruction: Instruction, path: tuple[int, ...] = ()) -> int | None:
    """The integer that ``instruction`` always is, or None."""
    place, _ = origin(module, instruction, path)
    text = place.operand_text
    return int(text) if place.opcode == "constant" and text.lstrip("-").isdigit() else None


def unchanged(module: Module, loop: Instruction, path: tuple[int, ...]) -> bool:
    """Whether the body hands the element of its tuple on as it got it."""
    place, after = within(module, module.computations[loop.called["body"][0]].root, path)
    return place.opcode == "parameter" and after == path


def within(
    module: Module, instruction: Instruction, path: tuple[int, ...] = (), home: Computation | None = None
) -> Place:
    """Where a value comes from inside ``home``: through copies, tuples and fusions, to what makes it."""
    home = home or instruction.computation
    while True:
        if instruction.opcode in SAME_VALUE:
            instruction = instruction.operands[0]
        elif instruction.opcode == "get-tuple-element":
            path = (instruction.numbers("index")[0], *path)
            instruction = instruction.operands[0]
        elif instruction.opcode == "tuple" and path:
            instruction, path = instruction.operands[path[0]], path[1:]
        elif instruction.opcode in ("fusion", "call"):
            callee = next(iter(instruction.called.values()))[0]
            instruction = module.computations[callee].root
        elif instruction.opcode == "parameter" and instruction.computation is not home:
            caller = _only_caller(module, instruction)
            if caller is None:
                return instruction, path
            instruction = caller.operands[int(instruction.operand_text)]
        else:
            return instruction, path


def origin(module: Module, instruction: Instruction, path: tuple[int, ...] = ()) -> Place:
    """Where a value comes from in the whole program; out of loops that do not change it, and out of what calls."""
    while True:
        instruction, path = within(module, instruction, path)
        if instruction.opcode == "while" and path and unchanged(module, instruction, path):
            instruction = instruction.operands[0]
        elif (
            instruction.opcode == "parameter"
            and len(callers := module.callers.get(instruction.computation.name, [])) == 1
        ):
            caller = callers[0]
            if caller.opcode == "while":
                if not unchanged(module, caller, path):
                    return instruction, path
                instruction = caller.operands[0]
            elif caller.opcode in ("fusion", "call"):
                instruction = caller.operands[int(instruction.operand_text)]
            else:
                return instruction, path
        else:
            return instruction, path


def _only_caller(module: Module, parameter: Instruction) -> Instruction | None:
    """The instruction that calls the computation of ``parameter``, where there is just one."""
    callers = module.callers.get(parameter.computation.name, [])
    return callers[0] if len(callers) == 1 else None
