"""Compiled HLO text read into computations and instructions, kept as text until asked for.

``compiled.as_text()`` is what XLA runs on one device, after partitioning: every shape is a shard, every collective is
there. A ``while`` body is printed once and runs many times, so nothing may be counted from the text alone: see
``executions``.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

from jaxpar.audit.shapes import Shape, parse_shape

START = re.compile(r"  (ROOT )?%?([\w.\-]+) = ")
OPCODE = re.compile(r"\s([a-z][\w\-]*)\(")
COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
NAME = re.compile(r"%([\w.\-]+)")
QUOTED = r'"[^"\\]*(?:\\.[^"\\]*)*"'
TOKEN = re.compile(QUOTED + r"|[(){}\[\],]")
OP_NAME = re.compile(r'op_name=("[^"\\]*(?:\\.[^"\\]*)*")')
CALLS = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations|true_computation|false_computation|called_computations)="
)
TABLE_ROW = re.compile(r'(\d+) (?:"(.*)"|\{(.*)\})$')
HEADER_NUMBER = re.compile(r"(\w+)=(\d+)")


class Instruction:
    """One instruction of a computation. Everything past its operands is parsed when asked for."""

    def __init__(self, computation: Computation, head: re.Match[str], text: str) -> None:
        opcode = OPCODE.search(text, head.end() - 1)
        if opcode is None:
            raise ValueError(f"no opcode in the HLO instruction {text[:200]!r}")
        self.computation = computation
        self.name = head[2]
        self.is_root = head[1] is not None
        self.opcode = opcode[1]
        self._shape_text = text[head.end() : opcode.start()].strip()
        close = _closing(text, opcode.end() - 1)
        self.operand_text = text[opcode.end() : close]  # of a constant: its literal
        self._rest = text[close + 1 :]

    def __repr__(self) -> str:
        return f"%{self.name} = {self._shape_text} {self.opcode}({self.operand_text})"

    @functools.cached_property
    def shape(self) -> Shape:
        """What it makes, on one device."""
        return parse_shape(self._shape_text)

    @functools.cached_property
    def operand_names(self) -> list[str]:
        """The names between its parentheses; none for constants, parameters and the like."""
        if self.opcode in ("constant", "parameter", "iota"):
            return []
        return NAME.findall(self.operand_text)

    @functools.cached_property
    def operands(self) -> list[Instruction]:
        """The instructions it reads, of the same computation."""
        return [self.computation.by_name[name] for name in self.operand_names]

    @functools.cached_property
    def attributes(self) -> dict[str, str]:
        """Everything after the operands, as text: ``{"channel_id": "3", "metadata": "{op_name=...}", ...}``."""
        found: dict[str, str] = {}
        for part in split(self._rest):
            key, equals, value = part.strip().partition("=")
            if key == "device_ids":  # replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}
                found["replica_groups"] += part
            elif equals:
                found[key] = value.strip()
        return found

    def numbers(self, attribute: str) -> list[int]:
        """The integers of an attribute such as ``lhs_contracting_dims={1,2}``; none where it is absent."""
        return [int(n) for n in re.findall(r"-?\d+", self.attributes.get(attribute, ""))]

    @functools.cached_property
    def called(self) -> dict[str, list[str]]:
        """The computations it names, by role: ``body``, ``condition``, ``calls``, ``to_apply``, branches."""
        if CALLS.search(self._rest) is None:
            return {}
        roles = {}
        for role in CALLS.findall(self._rest):
            value = self.attributes.get(role[:-1])
            if value is not None:
                roles[role[:-1]] = [n.strip().lstrip("%") for n in value.strip("{}").split(",") if n.strip()]
        return roles

    @functools.cached_property
    def op_name(self) -> str:
        """Where the program made it: ``jit(step)/shard_map/.../all_gather``; empty where XLA does not say."""
        found = OP_NAME.search(self.attributes.get("metadata", ""))
        return _unquoted(found[1]) if found else ""

    @functools.cached_property
    def backend_config(self) -> dict[str, Any]:
        """The backend's settings where they are JSON, else an empty dict."""
        text = self.attributes.get("backend_config", "")
        if text.startswith('"'):
            text = _unquoted(text)
        try:
            config = json.loads(text)
        except ValueError:
            return {}
        return config if isinstance(config, dict) else {}

    @property
    def base_opcode(self) -> str:
        """The opcode without ``-start``: what an asynchronous pair does."""
        return self.opcode.removesuffix("-start")


class Computation:
    """A list of instructions in the order they are scheduled, and the one whose value is returned."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.instructions: list[Instruction] = []

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Its instructions by name."""
        return {i.name: i for i in self.instructions}

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose value the computation returns."""
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that read each instruction."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for name in dict.fromkeys(instruction.operand_names):
                found.setdefault(name, []).append(instruction)
        return found

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Its parameters by number."""
        return {int(i.operand_text): i for i in self.instructions if i.opcode == "parameter"}


class Module:
    """A compiled program of one device of ``num_partitions``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_partitions = 1
        self.num_replicas = 1
        self.computations: dict[str, Computation] = {}
        self.entry: Computation
        self.tables: dict[str, dict[int, str]] = {}

    def __iter__(self) -> Iterator[Instruction]:
        for computation in self.computations.values():
            yield from computation.instructions

    @functools.cached_property
    def callers(self) -> dict[str, list[Instruction]]:
        """The instructions that name each computation, in any role."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self:
            for names in instruction.called.values():
                for name in names:
                    found.setdefault(name, []).append(instruction)
        return found

    def source(self, instruction: Instruction) -> str:
        """``file:line`` of the Python that made it, or empty."""
        metadata = instruction.attributes.get("metadata", "")
        frame = re.search(r"stack_frame_id=(\d+)", metadata)
        if frame is None:
            file, line = (re.search(p, metadata) for p in (r'source_file="([^"]*)"', r"source_line=(\d+)"))
            return f"{file[1]}:{line[1]}" if file and line else ""
        location = _numbers(self.tables.get("StackFrames", {}).get(int(frame[1]), "")).get("file_location_id", 0)
        place = _numbers(self.tables.get("FileLocations", {}).get(location, ""))
        file_name = self.tables.get("FileNames", {}).get(place.get("file_name_id", 0), "")
        return f"{file_name}:{place['line']}" if file_name and "line" in place else ""


def parse(text: str) -> Module:
    """Read the text of one module. Raises ``ValueError`` where it is not HLO text."""
    lines = text.split("\n")
    if not lines[0].startswith("HloModule "):
        raise ValueError("this is not the text of an HLO module: its first line does not begin with 'HloModule'")
    module = Module(lines[0][10:].split(",", 1)[0].strip())
    header = dict(HEADER_NUMBER.findall(lines[0]))
    module.num_partitions = int(header.get("num_partitions", 1))
    module.num_replicas = int(header.get("replica_count", 1))
    computation: Computation | None = None
    table: dict[int, str] | None = None
    pending: list[str] = []  # the lines of one instruction: string attributes may hold line breaks

    def finish() -> None:
        if pending and computation is not None:
            whole = "\n".join(pending)
            head = START.match(whole)
            assert head is not None
            computation.instructions.append(Instruction(computation, head, whole))
            pending.clear()

    for line in lines[1:]:
        if computation is not None:
            if START.match(line):
                finish()
                pending.append(line)
            elif line == "}" or line.startswith('}, execution_thread="'):
                finish()
                computation = None
            elif pending:
                pending.append(line)
        elif opening := (COMPUTATION.match(line) if line.endswith("{") else None):
            computation = module.computations[opening[2]] = Computation(opening[2])
            if opening[1]:
                module.entry = computation
        elif row := TABLE_ROW.match(line):
            if table is not None:
                table[int(row[1])] = row[2] if row[2] is not None else row[3]
        elif line.isidentifier():
            table = module.tables.setdefault(line, {})
    if not hasattr(module, "entry"):
        raise ValueError(f"the HLO module {module.name} has no ENTRY computation")
    return module


def split(text: str) -> list[str]:
    """``text`` cut at the commas that stand outside all brackets and strings."""
    parts, depth, begin = [], 0, 0
    for token in TOKEN.finditer(text):
        mark = token[0]
        if mark in "({[":
            depth += 1
        elif mark in ")}]":
            depth -= 1
        elif mark == "," and depth == 0:
            parts.append(text[begin : token.start()])
            begin = token.end()
    return [*parts, text[begin:]]


def _closing(text: str, at: int) -> int:
    """Where the parenthesis opened at ``at`` closes."""
    close = text.find(")", at)
    if text.find("(", at + 1, close) < 0 and text.find('"', at, close) < 0:
        return close
    depth = 0
    for token in TOKEN.finditer(text, at):
        if token[0] == "(":
            depth += 1
        elif token[0] == ")":
            depth -= 1
            if depth == 0:
                return token.start()
    raise ValueError(f"a parenthesis is not closed in the HLO instruction {text[:200]!r}")


def _unquoted(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text[1:-1])


def _numbers(text: str) -> dict[str, int]:
    return {key: int(value) for key, value in HEADER_NUMBER.findall(text)}
