"""Compile a step for a target, look at what it costs, and keep it for a run to load."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jaxpar.audit.audit import audit, versions
from jaxpar.audit.hlo import parse
from jaxpar.audit.memory import hbm_bytes_resident, largest_buffers, readable_name
from jaxpar.compat import hlo_text
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
    the process until the step was compiled. A step that XLA refuses for want of memory gives ``fits`` false and
    ``hbm_bytes``, with all that a step adds among the ``activations``, its ``largest_buffers``, and nothing more.
    ``hlo``: a file for the optimized HLO; ``save``: one for the executable, whose largest buffers are not looked for;
    of a step that XLA refuses there is neither.

    Raises ConfigError where target and experiment do not fit, RunError when XLA fails.
    """
    begin = time.perf_counter() if started is None else started
    if hlo is not None and save is not None and hlo.absolute() == save.absolute():
        raise ConfigError("--save", str(save), "is the file of --hlo too", "two files")
    for field, path in (("--hlo", hlo), ("--save", save)):
        if path is not None:
            _check_writable(field, path)
    program = Program(experiment, target.devices())
    seconds = {"import": time.perf_counter() - begin}
    with _timed(seconds, "lower"):
        lowered = program.lower_step()
    with tempfile.TemporaryDirectory(prefix="jaxpar-") as folder:
        dump = Path(folder)
        # a saved executable would dump wherever it is loaded
        dumped: dict[str, str | bool] = {} if save else {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        options: dict[str, Any] = {**dumped, **program.compiler_options}
        options |= OPTIONS.get(program.platform, {}) if target.described else {}
        try:
            with _timed(seconds, "compile"), _no_cache():
                compiled = lowered.compile(options)
        except jax.errors.JaxRuntimeError as error:
            return {"target": target.text, **_refused(program, error, dump), "seconds": seconds}
        seconds["processor"] = sum(os.times()[:2])
        with _timed(seconds, "audit"):
            result = audit(program, compiled, dump)
    if hlo is not None:
        _write(hlo, hlo_text(compiled).encode(), "--hlo")
    if save is not None:
        save_step(save, program, compiled)
    result["seconds"] = {**seconds, **result["seconds"]}
    return {"target": target.text, **result}


@contextlib.contextmanager
def _timed(seconds: dict[str, float], name: str) -> Any:
    begin = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = time.perf_counter() - begin


@contextlib.contextmanager
def _no_cache() -> Any:
    """Compile afresh, and keep nothing: an executable from the cache dumps no buffer assignment, its time would be
    none, and XLA:CPU writes one that was read from a file with functions missing.
    """
    config: Any = jax.config
    before = config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()  # JAX asks the option once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        reset_cache()


def _refused(program: Program, error: Exception, dump: Path) -> dict[str, Any]:
    """What can be said of a step that XLA found no room for."""
    text = " ".join(str(error).split())
    resident = hbm_bytes_resident(program)
    found = re.search(r"Used ([\d.]+[KMG]) of ([\d.]+[KMG]) hbm", text) or re.search(
        r"required for HLO temporaries \(([\d.]+[KMG])\) exceeds available HBM \(([\d.]+[KMG])\)", text
    )  # of the latter the first number holds the arguments too
    if found is None:
        raise RunError(f"XLA does not compile the step: {text[:400]}") from None
    needed, limit = map(_bytes, found.groups())
    return {
        "device": program.mesh.devices.flat[0].device_kind,
        "devices": program.mesh.devices.size,
        "mesh": dict(program.sizes),
        "parameters": program.num_parameters,
        "fits": False,
        "hbm_limit": limit,
        "hbm_bytes": {"total": needed, "peak": needed, **resident, "activations": needed - sum(resident.values())},
        "largest_buffers": _assigned(dump) or _largest(str(error)),
        "versions": versions(program.platform),
    }


def _assigned(dump: Path) -> list[dict[str, Any]]:
    """The largest buffers of the assignment that XLA wrote before it gave up; none without a dump."""
    modules = sorted(dump.glob("*after_optimizations.txt"), key=lambda file: file.stat().st_size)
    op_names = {i.name: i.op_name for i in parse(modules[-1].read_text(errors="replace"))} if modules else {}
    return [dataclasses.asdict(buffer) for buffer in largest_buffers(dump, op_names)] if modules else []


def _largest(text: str) -> list[dict[str, Any]]:
    """XLA's own list of the largest allocations."""
    return [
        {"bytes": _bytes(size), "shape": shape, "name": readable_name(op) or "a constant or a copy"}
        for size, op, shape in re.findall(
            r"Size: ([\d.]+[KMG])\s+(?:Operator: op_name=\"([^\"]*)\"[^\n]*\n)?\s*Shape: (\S+)", text
        )
    ]


def _bytes(text: str) -> int:
    """Of XLA's ``15.75G``."""
    return int(float(text[:-1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[text[-1]])


def _check_writable(field: str, path: Path) -> None:
    """Raise ConfigError now, not after minutes of compiling."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(field, str(path), "is in a folder that does not exist", "a file in a folder that does")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(field, str(path), "cannot be written", "a file that can")


def _write(path: Path, content: bytes, field: str) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise cannot_write(field, path, error) from error
