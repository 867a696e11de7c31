"""A compiled step in a file: made on one machine, loaded by a run on another.

The file is a line of JSON, which says what the step was compiled from, and JAX's serialized executable. That part is a
pickle: load only files that you made.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

import jaxpar
from jaxpar.audit.audit import versions
from jaxpar.errors import ConfigError, RunError, cannot_write
from jaxpar.program import Program
from jaxpar.serialize import flatten, word
from jaxpar.words import mesh_text, shortened

KIND = "jaxpar step"
# Fields that never reach the compiled step, or by way of what the program makes of them; nor do the traced numbers of
# optimizer and task.
OF_THE_HOST = (
    "train.steps", "train.seed", "train.init_from", "train.eval_every", "train.eval_batches", "train.checkpoint_every",
    "train.keep_checkpoints", "train.keep_every", "train.log_every", "train.max_skipped", "train.profile",
)  # fmt: skip
RESOLVED = ("mesh.", "train.compute", "train.compiler_options")
SOURCES = ("models", "parallel", "optim", "tasks", "mesh", "program.py", "experiment.py", "logical.py", "compat.py")


def compiled_from(program: Program) -> dict[str, str]:
    """What the step of a program depends on: versions, jaxpar's own source, devices, mesh and config fields."""
    experiment, devices = program.experiment, list(program.mesh.devices.flat)
    traced = set(experiment.scalars())
    fields = {
        name: word(value)
        for name, value in flatten(experiment).items()
        if not name.startswith(("data.", "samples.", "track.", *RESOLVED))
        and name not in OF_THE_HOST
        and not (name.startswith(("optim.", "task.")) and name.rpartition(".")[2] in traced)
    }
    on_cpu = {"processor": _processor()} if program.platform == "cpu" else {}
    return {
        **versions(program.platform),
        "jaxpar's source": _source(),
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "device ids": _ranges(device.id for device in devices),
        **on_cpu,
        "mesh": mesh_text(program.sizes),
        "train.compute": program.dtype.name,
        "train.compiler_options": word(tuple(f"{k}={word(v)}" for k, v in program.compiler_options.items())) or "none",
        "kernel": program.kernel,
        "data.mask_documents": word(experiment.data.mask_documents),
        **fields,
        "state": _digest(str(jax.tree.map(lambda x: (x.shape, x.dtype.name), program.abstract_state)).encode()),
    }


def save_step(path: Path, program: Program, compiled: Any) -> None:
    """Write the compiled step. Raises ConfigError or RunError when it cannot be written."""
    try:
        content = pickle.dumps(serialize_executable.serialize(compiled))
    except Exception as error:  # of XLA, of any kind
        raise RunError(f"--save: this step cannot be written to a file: {_one_line(error)}") from error
    header = {"kind": KIND, "sha256": hashlib.sha256(content).hexdigest(), "compiled_from": compiled_from(program)}
    try:
        path.write_bytes(json.dumps(header).encode() + b"\n" + content)
    except OSError as error:
        raise cannot_write("--save", path, error) from error


def load_step(path: Path, program: Program) -> Any:
    """The step of ``program`` from the file.

    Raises ConfigError where the file is none, or was compiled from something else, naming the first difference;
    RunError where it is damaged.
    """
    try:
        header, _, content = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise ConfigError("--compiled", str(path), f"cannot be read: {error.strerror}") from error
    then, checksum = _parse(path, header)
    now = compiled_from(program)
    for name in dict.fromkeys([*now, *then]):
        if then.get(name) != now.get(name):
            here, there = (shortened(str(each.get(name, "none")), 60) for each in (now, then))
            legal = "a step compiled from the same, or a run without --compiled"
            raise ConfigError("--compiled", str(path), f"was compiled with {name} {there}, here: {here}", legal)
    if hashlib.sha256(content).hexdigest() != checksum:
        raise RunError(f"--compiled: {path} is damaged: its checksum is another; save the step again")
    try:
        serialized, arguments, results = pickle.loads(content)
        devices = list(program.mesh.devices.flat)
        return serialize_executable.deserialize_and_load(serialized, arguments, results, devices[0].client, devices)
    except Exception as error:  # of XLA, of any kind
        raise RunError(f"--compiled: {path} cannot be loaded: {_one_line(error)}") from error


def _parse(path: Path, header: bytes) -> tuple[dict[str, str], str]:
    """What the file says it was compiled from, and its checksum."""
    try:
        saved = json.loads(header)
        if saved["kind"] == KIND:
            return dict(saved["compiled_from"]), saved["sha256"]
    except (ValueError, TypeError, KeyError, RecursionError):  # no JSON, or another's
        pass
    raise ConfigError("--compiled", str(path), "is not a compiled step", "a file of jaxpar compile CONFIG --save FILE")


def _source() -> str:
    """A digest of the source that the step is traced from."""
    root = Path(jaxpar.__file__).parent
    files = [file for name in SOURCES for file in sorted([root / name, *(root / name).rglob("*")])]
    return _digest(b"".join(file.read_bytes() for file in files if file.suffix in (".py", ".toml")))


def _processor() -> str:
    """The kind of CPU: its code may run on no other."""
    try:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.machine()


def _ranges(numbers: Iterable[int]) -> str:
    """``0-3, 2048-2051``, in their order."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
