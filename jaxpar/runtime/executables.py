"""A compiled step in a file: made on one machine, loaded by a run on another.

The file is a line of JSON, which says what the step was compiled from, and JAX's serialized executable. That part is a
pickle: load only files that you made.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

from jax.experimental import serialize_executable

import jaxpar
from jaxpar.audit.audit import versions
from jaxpar.errors import ConfigError, RunError, cannot_write
from jaxpar.program import Program
from jaxpar.serialize import flatten

MAGIC = "jaxpar step"
# Fields that never reach the compiled step; the traced numbers of optimizer and task do not either.
OF_THE_HOST = (
    "train.steps", "train.seed", "train.init_from", "train.eval_every", "train.eval_batches", "train.checkpoint_every",
    "train.keep_checkpoints", "train.keep_every", "train.log_every", "train.max_skipped", "train.profile",
)  # fmt: skip


def compiled_from(program: Program) -> dict[str, Any]:
    """What the step of a program depends on: config fields, mesh, devices, versions, and jaxpar's own source."""
    experiment, devices = program.experiment, program.mesh.devices
    traced = set(experiment.scalars())
    config = {
        name: str(value)
        for name, value in flatten(experiment).items()
        if not name.startswith(("data.", "samples.", "track."))
        and name not in OF_THE_HOST
        and not (name.startswith(("optim.", "task.")) and name.rpartition(".")[2] in traced)
    }
    config["data.mask_documents"] = str(experiment.data.mask_documents)
    source = hashlib.sha256()
    for file in sorted(Path(jaxpar.__file__).parent.rglob("*.py")):
        if file.parent.name in ("models", "parallel", "optim", "tasks", "mesh") or file.name == "program.py":
            source.update(file.read_bytes())
    return {
        **config,
        "mesh": " x ".join(f"{axis} {size}" for axis, size in program.sizes.items()),
        "devices": f"{devices.size} x {devices.flat[0].device_kind}",
        **versions(),
        "jaxpar's source": source.hexdigest()[:16],
    }


def save_step(path: Path, program: Program, compiled: Any) -> None:
    """Write the compiled step. Raises ConfigError or RunError when it cannot be written."""
    parts = serialize_executable.serialize(compiled)
    header = json.dumps({"kind": MAGIC, "compiled_from": compiled_from(program)})
    try:
        path.write_bytes(header.encode() + b"\n" + pickle.dumps(parts))
    except OSError as error:
        raise cannot_write("--save", path, error) from error


def load_step(path: Path, program: Program) -> Any:
    """The step of ``program`` from the file.

    Raises ConfigError where the file is none, or was compiled from something else, naming the first difference.
    """
    try:
        header, _, parts = path.read_bytes().partition(b"\n")
        saved = json.loads(header)
    except OSError as error:
        raise ConfigError("--compiled", str(path), f"cannot be read: {error.strerror}") from error
    except ValueError:
        saved = None
    if not isinstance(saved, dict) or saved.get("kind") != MAGIC:
        raise ConfigError("--compiled", str(path), "is no compiled step", "a file of jaxpar compile --save")
    then, now = saved["compiled_from"], compiled_from(program)
    for name in dict.fromkeys([*now, *then]):
        if then.get(name) != now.get(name):
            rule = f"was compiled for {name} {then.get(name)}, which is {now.get(name)} here"
            raise ConfigError("--compiled", str(path), rule, "the same, or a run without --compiled")
    try:
        return serialize_executable.deserialize_and_load(
            *pickle.loads(parts), execution_devices=list(program.mesh.devices.flat)
        )
    except Exception as error:  # of pickle, of XLA
        raise RunError(f"--compiled {path} cannot be loaded: {' '.join(str(error).split())[:300]}") from error
