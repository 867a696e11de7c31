"""Everything that a compiled step costs, in one dictionary that JSON can hold."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from pathlib import Path
from typing import Any

from jaxpar.audit import collectives as wire
from jaxpar.audit import flops
from jaxpar.audit.analytic import executed_flops
from jaxpar.audit.cycles import estimated_cycles
from jaxpar.audit.hlo import parse
from jaxpar.audit.memory import hbm_bytes, largest_buffers
from jaxpar.audit.roofline import roofline
from jaxpar.audit.traffic import hbm_traffic
from jaxpar.compat import hlo_text
from jaxpar.mesh.devices import device_memory
from jaxpar.mesh.targets import chip_of
from jaxpar.program import Program


def audit(program: Program, compiled: Any, dump: Path | None = None, most: int = 12) -> dict[str, Any]:
    """The costs of ``compiled``, the program's step, per device and step unless a key says otherwise.

    ``dump``: the folder that XLA wrote its buffer assignment to, for ``largest_buffers``. Keys:

    - ``hbm_bytes``: see ``memory.hbm_bytes``; ``hbm_limit``: what a device has; ``fits``: ``peak`` within it;
    - ``flops``: ``hlo`` counted, ``analytic`` by formula, ``model`` (6 per weight and token, attention's causal half,
      nothing recomputed), ``kernels``, and what is not in the count by name (``unknown``, ``unknown_loops``);
    - ``wire_bytes``: ``total``, ``by_kind``, ``by_axis``, ``by_axis_and_kind``, ``asynchronous``;
    - ``unrequested``: the collectives that no line of the program asked for, the largest first; ``unnamed_bytes``: of
      those that XLA left without a name, of which nothing can be said (TPU slices);
    - ``hbm_traffic``, ``estimated_cycles`` (TPU);
    - ``seconds.roofline`` and ``mfu``: see ``roofline``; None for a device that chips.toml does not have.
    """
    module = parse(hlo_text(compiled))
    experiment, device = program.experiment, program.mesh.devices.flat[0]
    chip = chip_of(device)
    counted = flops.count(module)
    records = wire.collectives(module, program.sizes)
    unrequested = wire.unrequested(records)
    traffic, cycles = hbm_traffic(module), sum(estimated_cycles(module).values())
    hbm, limit = hbm_bytes(program, compiled), chip.hbm_bytes if chip else device_memory(program.mesh.devices.flat)
    devices = program.mesh.devices.size
    model = experiment.model.flops_per_token(experiment.train.seq_len) * experiment.tokens_per_step / devices
    times = roofline(counted.total, program.dtype, traffic, records, chip, program.mesh) if chip else None
    best = model / chip.peak(program.dtype) if chip else 0.0
    buffers = largest_buffers(dump, {i.name: i.op_name for i in module}, most) if dump else []
    return {
        "device": device.device_kind,
        "devices": devices,
        "mesh": dict(program.sizes),
        "kernel": program.kernel,
        "compute_dtype": program.dtype.name,
        "parameters": program.num_parameters,
        "tokens_per_step": experiment.tokens_per_step,
        "fits": not limit or hbm["peak"] <= limit,
        "hbm_limit": limit,
        "hbm_bytes": hbm,
        "largest_buffers": [dataclasses.asdict(buffer) for buffer in buffers],
        "flops": {
            "hlo": counted.total,
            "analytic": executed_flops(program),
            "model": model,
            "matmul": counted.matmul,
            "kernels": counted.kernels,
            "unknown": counted.unknown,
            "unknown_loops": counted.unknown_loops,
        },
        "wire_bytes": wire.summary(records),
        "unrequested": _listed(unrequested.resharding, most),
        "unnamed_bytes": sum(r.total_bytes for r in unrequested.unnamed),
        "hbm_traffic": traffic,
        "estimated_cycles": cycles or None,
        "seconds": {"roofline": times},
        "mfu": {name: best / times[name] for name in ("overlapped", "serial")} if times else None,
        "versions": versions(program.platform),
    }


def _listed(records: list[wire.Collective], most: int) -> list[dict[str, Any]]:
    found = sorted((r for r in records if r.total_bytes), key=lambda r: -r.total_bytes)
    return [
        {"kind": r.kind, "axis": r.axis, "bytes": r.total_bytes, "op": r.op_name or r.instruction, "source": r.source}
        for r in found[:most]
    ]


def versions(platform: str) -> dict[str, str]:
    """Of what decides what is compiled for a platform."""
    plugin = {"tpu": ("libtpu",), "gpu": ("jax-cuda13-plugin",)}.get(platform, ())
    found = {}
    for name in ("jaxpar", "jax", "jaxlib", "flax", "optax", *plugin):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
