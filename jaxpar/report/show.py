"""``jaxpar show``: what a config resolves to on these devices, before anything runs."""

from __future__ import annotations

import math
from typing import Any

from jaxpar.mesh.rules import BATCH_AXES
from jaxpar.program import Program
from jaxpar.serialize import flatten, to_json


def describe_program(program: Program) -> dict[str, Any]:
    """Everything ``render`` prints, ready for JSON.

    ``parameters`` lists for each leaf its shape, logical axes, PartitionSpecs (as stored, as used, as the optimizer
    has it), optimizer group, and whether a ZeRO shard of it exists.
    """
    experiment, train = program.experiment, program.experiment.train
    groups: dict[str, dict[str, int]] = {}
    for p in program.parameters:
        group = groups.setdefault(p.group, {"leaves": 0, "weights": 0})
        group["leaves"] += 1
        group["weights"] += math.prod(p.shape)
    return {
        "config": to_json(experiment),
        "mesh": {axis: size for axis, size in program.sizes.items()},
        "platform": program.platform,
        "compute_dtype": program.dtype.name,
        "attention": {"kernel": program.kernel, "reason": program.kernel_reason},
        "num_parameters": program.num_parameters,
        "flops_per_token": experiment.model.flops_per_token(train.seq_len),
        "batch": {
            "global_batch": train.global_batch,
            "microbatches": train.microbatches,
            "sequences_per_microbatch": train.global_batch // train.microbatches,
            "sequences_per_device": train.global_batch
            / train.microbatches
            / math.prod(program.sizes[a] for a in BATCH_AXES),
            "seq_len": train.seq_len,
            "tokens_per_step": experiment.tokens_per_step,
            "tokens": experiment.tokens_per_step * train.steps,
        },
        "optimizer": {"name": type(experiment.optim).__name__.removesuffix("Config"), "groups": groups},
        "parameters": [
            {
                "name": p.name,
                "shape": list(p.shape),
                "axes": list(p.axes),
                "stored": _spec(p.layout.stored),
                "used": _spec(p.layout.used),
                "optimizer": _spec(p.layout.updated),
                "group": p.group,
                "zero_sharded": p.layout.zero_dim is not None,
            }
            for p in program.parameters
        ],
    }


def _spec(spec: Any) -> list[Any]:
    return [list(entry) if isinstance(entry, tuple) else entry for entry in spec]


def render(description: dict[str, Any]) -> str:
    """The description as text."""
    batch, mesh = description["batch"], description["mesh"]
    lines = ["config"]
    from jaxpar.experiment import Experiment
    from jaxpar.serialize import from_json

    lines += [f"  {path} = {value}" for path, value in flatten(from_json(Experiment, description["config"])).items()]
    sizes = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
    kernel = description["attention"]
    lines += [
        "",
        f"mesh        {sizes}  ({math.prod(mesh.values())} {description['platform']} devices)",
        f"compute     {description['compute_dtype']}; attention: {kernel['kernel']} ({kernel['reason']})",
        f"batch       {batch['global_batch']} sequences a step = {batch['microbatches']} microbatches x "
        f"{batch['sequences_per_microbatch']}, {batch['sequences_per_device']:g} on a device at a time",
        f"tokens      {batch['tokens_per_step']:,} a step, {batch['tokens']:,} in all",
        f"parameters  {description['num_parameters']:,}; "
        f"{description['flops_per_token']:.3g} model FLOPs per token (forward and backward)",
        "",
        f"optimizer   {description['optimizer']['name']}",
    ]
    for group, count in description["optimizer"]["groups"].items():
        lines.append(f"  {group:<10} {count['weights']:>16,} weights in {count['leaves']} leaves")
    lines.append("")
    rows = [("parameter", "shape", "group", "stored", "used", "optimizer state")]
    for p in description["parameters"]:
        shape = ", ".join(f"{axis} {size}" for axis, size in zip(p["axes"], p["shape"], strict=True))
        rows.append(
            (p["name"], shape, p["group"], *(_layout(p["axes"], p[k]) for k in ("stored", "used", "optimizer")))
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def _layout(axes: list[str], spec: list[Any]) -> str:
    """``embed/fsdp heads/tensor``: which dimension is cut over which mesh axes."""
    cuts = [
        f"{axis}/{'+'.join(cut) if isinstance(cut, list) else cut}"
        for axis, cut in zip(axes, spec, strict=False)
        if cut
    ]
    return " ".join(cuts) or "whole"
