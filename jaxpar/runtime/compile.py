"""Compile a step for a target, look at what it costs, and keep it for a run to load."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from jaxpar.audit.audit import audit, versions
from jaxpar.audit.memory import hbm_bytes_resident
from jaxpar.errors import ConfigError, RunError, cannot_write
from jaxpar.experiment import Experiment
from jaxpar.mesh.targets import Target
from jaxpar.program import Program
from jaxpar.runtime.executables import save_step

# No GPU is there to try kernels on; what is chosen without trying runs, and the sizes of everything are the same.
OPTIONS = {"gpu": {"xla_gpu_autotune_level": 0}}


def compile_for(
    experiment: Experiment,
    target: Target,
    *,
    started: float | None = None,
    hlo: Path | None = None,
    save: Path | None = None,
) -> dict[str, Any]:
    """Compile the experiment's step for ``target`` and audit it (see ``audit.audit``).

    Adds ``target`` and ``seconds.{import, lower, compile, audit, processor}``: since ``started`` (``perf_counter``)
    until devices are there, of tracing and lowering, of XLA, of reading the result, and of all cores from the start of
    the process until the step was compiled. A step that XLA refuses for want of memory gives ``fits`` false, ``hbm_needed`` and what lies in memory
    between steps, and nothing more. ``hlo``: a file for the optimized HLO; ``save``: one for the executable.

    Raises ConfigError where target and experiment do not fit, RunError when XLA fails.
    """
    begin = time.perf_counter() if started is None else started
    for path in (hlo, save):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError("--hlo" if path is hlo else "--save", str(path), "is in no folder", "a file in a folder")
    program = Program(experiment, target.devices())
    seconds = {"import": time.perf_counter() - begin}
    with _timed(seconds, "lower"):
        lowered = program.lower_step()
    with tempfile.TemporaryDirectory(prefix="jaxpar-") as folder:
        dump = Path(folder)
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True, **program.compiler_options}
        options |= OPTIONS.get(program.platform, {}) if target.described else {}
        try:
            with _timed(seconds, "compile"), _no_cache():
                compiled = lowered.compile(options)
        except jax.errors.JaxRuntimeError as error:
            return {**_refused(program, error), "target": target.text, "seconds": seconds}
        seconds["processor"] = sum(os.times()[:2])
        with _timed(seconds, "audit"):
            result = audit(program, compiled, dump)
    if hlo is not None:
        _write(hlo, compiled.as_text().encode(), "--hlo")
    if save is not None:
        save_step(save, program, compiled)
    result["seconds"] = {**seconds, **result["seconds"]}
    return {"target": target.text, **result}


@contextlib.contextmanager
def _timed(seconds: dict[str, float], name: str) -> Any:
    begin = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - begin


@contextlib.contextmanager
def _no_cache() -> Any:
    """An executable from the cache would have no buffer assignment, and its time would be none."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


def _refused(program: Program, error: Exception) -> dict[str, Any]:
    """What can be said of a step that XLA found no room for."""
    text = " ".join(str(error).split())
    found = re.search(r"Used ([\d.]+)([KMG]) of ([\d.]+)([KMG]) hbm", text)
    if "RESOURCE_EXHAUSTED" not in text or found is None:
        raise RunError(f"XLA does not compile the step: {text[:400]}") from None
    unit = {"K": 2**10, "M": 2**20, "G": 2**30}
    needed, limit = float(found[1]) * unit[found[2]], float(found[3]) * unit[found[4]]
    return {
        "device": program.mesh.devices.flat[0].device_kind,
        "devices": program.mesh.devices.size,
        "mesh": dict(program.sizes),
        "parameters": program.num_parameters,
        "fits": False,
        "hbm_limit": int(limit),
        "hbm_needed": int(needed),
        "hbm_bytes": hbm_bytes_resident(program),
        "largest_buffers": _largest(str(error)),
        "versions": versions(),
    }


def _largest(text: str) -> list[dict[str, Any]]:
    """XLA's own list of the largest allocations."""
    from jaxpar.audit.memory import readable_name

    unit = {"K": 2**10, "M": 2**20, "G": 2**30}
    return [
        {"bytes": int(float(size) * unit[letter]), "shape": shape, "name": readable_name(op) or "?"}
        for size, letter, op, shape in re.findall(
            r"Size: ([\d.]+)([KMG])\s+(?:Operator: op_name=\"([^\"]*)\"[^\n]*\n)?\s*Shape: (\S+)", text
        )
    ]


def _write(path: Path, content: bytes, field: str) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise cannot_write(field, path, error) from error
