"""``jaxpar parity``: every layout against one device, in one table.

The same weights take one step on the same ragged batch of random tokens and documents under every layout, and the loss,
each gradient leaf and each updated parameter are compared with those of one device in one piece. AdamW's epsilon is
raised and its warmup dropped, so that the update is a smooth, non-zero function of the gradient.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxpar.errors import ConfigError
from jaxpar.experiment import Experiment
from jaxpar.mesh.axes import MESH_AXES, MeshConfig
from jaxpar.mesh.rules import ZeroStage
from jaxpar.optim.optimizers import AdamWConfig
from jaxpar.optim.schedules import ScheduleConfig
from jaxpar.program import Program

TOLERANCE = {"loss": 1e-5, "gradient": 1e-5, "update": 1e-5}  # relative; a leaf is relative to its largest value
_RUNNING = threading.Lock()  # two programs whose virtual devices wait for each other must not share the cores
FAST_COMPILE: dict[str, str | bool] = {"xla_llvm_disable_expensive_passes": True, "xla_backend_optimization_level": "0"}


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to run the experiment."""

    mesh: MeshConfig
    zero: ZeroStage
    microbatches: int = 1

    @property
    def name(self) -> str:
        """For example ``fsdp 4 x tensor 2, ZeRO 3, 2 microbatches``."""
        axes = " x ".join(f"{a} {getattr(self.mesh, a)}" for a in MESH_AXES if getattr(self.mesh, a) > 1)
        zero = f", ZeRO {self.zero}" if self.mesh.fsdp > 1 else ""
        pieces = f", {self.microbatches} microbatches" if self.microbatches > 1 else ""
        return (axes or "one device") + zero + pieces

    def of(self, experiment: Experiment) -> Experiment:
        """The experiment in this layout."""
        return dataclasses.replace(
            experiment,
            mesh=self.mesh,
            rules=dataclasses.replace(experiment.rules, zero=self.zero),
            train=dataclasses.replace(experiment.train, microbatches=self.microbatches),
        )


def layouts() -> Iterator[Case]:
    """Each axis, pairs of axes, ZeRO stages, accumulation, on eight devices."""

    def mesh(**axes: int) -> MeshConfig:
        return MeshConfig(**{"fsdp": 1, **axes})

    yield Case(mesh(), 3, microbatches=2)
    yield Case(mesh(data=8), 3)
    yield Case(mesh(expert=8), 3)
    yield Case(mesh(context=8), 3)
    yield Case(mesh(tensor=4, data=2), 3)
    stages: tuple[ZeroStage, ...] = (0, 1, 2, 3)
    for zero in stages:
        yield Case(mesh(fsdp=8), zero)
    for zero in stages[1:]:
        yield Case(mesh(fsdp=4, data=2), zero, microbatches=2)
    for zero in stages:
        yield Case(mesh(fsdp=2, tensor=4), zero)
    yield Case(mesh(data=2, context=4), 3)
    yield Case(mesh(data=2, expert=4), 3)
    yield Case(mesh(fsdp=4, context=2), 3, microbatches=2)
    yield Case(mesh(fsdp=4, expert=2), 3)
    yield Case(mesh(expert=2, context=4), 3)
    yield Case(mesh(expert=2, tensor=4), 3)
    yield Case(mesh(context=2, tensor=4), 3)
    yield Case(mesh(fsdp=2, context=2, tensor=2), 2, microbatches=2)
    yield Case(mesh(data=2, fsdp=2, tensor=2), 3, microbatches=2)


def run_parity(experiment: Experiment, devices: list[Any], only: str | None, as_json: bool) -> int:
    """Print the table; 1 if any layout differs or none could run, else 0."""
    if len(devices) < 8:
        raise ConfigError("--devices", len(devices), "is too few for the layouts of parity", "8 or more")
    experiment = _smooth(experiment)
    batch = ragged_batch(experiment)
    chosen = [layout for layout in layouts() if only is None or only in layout.name]
    if not chosen:
        raise ConfigError("--only", only, "is in no layout's name", "for example: fsdp, tensor, ZeRO 2, microbatches")
    start = time.perf_counter()
    alone = Case(MeshConfig(fsdp=1), 3)
    reference = _one_step(alone.of(experiment), devices[:1], batch)
    rows = []
    if not as_json:
        print(f"{'layout':<54} {'loss':>9} {'gradient':>9} {'update':>9}  {'state MB/device':>15}  result")
        print(
            f"{alone.name:<54} {reference['loss']:>9.5f} {'':>9} {'':>9}  {reference['bytes'] / 1e6:>15.2f}  reference"
        )
    with ThreadPoolExecutor(2) as pool:  # XLA compiles outside Python's lock
        compare = functools.partial(_compare, experiment=experiment, devices=devices, batch=batch, reference=reference)
        for layout, result in zip(chosen, pool.map(compare, chosen), strict=True):
            rows.append({"layout": layout.name, **result})
            if not as_json:
                _print(rows[-1])
    failed = [row for row in rows if row["result"] == "DIFFERS"]
    ran = [row for row in rows if "loss" in row]
    if as_json:
        print(json.dumps({"reference": {"loss": reference["loss"], "bytes": reference["bytes"]}, "layouts": rows}))
    else:
        verdict = f"{len(failed)} of {len(ran)} layouts differ" if failed else f"all {len(ran)} layouts agree"
        print(f"{verdict}; differences are relative, tolerance 1e-5; {time.perf_counter() - start:.0f} s")
    return 1 if failed or not ran else 0


def _smooth(experiment: Experiment) -> Experiment:
    """No warmup (its first step has learning rate 0), and an epsilon above the noise of tiny gradients."""
    optim = dataclasses.replace(experiment.optim, schedule=ScheduleConfig(kind="constant"), learning_rate=0.1)
    if isinstance(optim, AdamWConfig):
        optim = dataclasses.replace(optim, eps=1e-2)
    train = dataclasses.replace(experiment.train, compute="float32", global_batch=16, microbatches=1)
    return dataclasses.replace(experiment, optim=optim, train=train)


def ragged_batch(experiment: Experiment, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tokens [B, S] in documents of random lengths; row i has about i / B of its targets valid, row 0 none."""
    random = np.random.default_rng(seed)
    B, S = experiment.train.global_batch, experiment.train.seq_len
    starts_BS = random.random((B, S)) < 4 / S
    starts_BS[:, 0] = True
    at_BS = np.broadcast_to(np.arange(S), (B, S))
    return {
        "tokens": random.integers(0, experiment.model.vocab_size, (B, S)),
        "targets": random.integers(0, experiment.model.vocab_size, (B, S)),
        "mask": random.random((B, S)) < np.arange(B)[:, None] / B,
        "segments": np.cumsum(starts_BS, axis=1),
        "positions": at_BS - np.maximum.accumulate(np.where(starts_BS, at_BS, 0), axis=1),
    }


def _one_step(experiment: Experiment, devices: list[Any], batch: dict[str, np.ndarray]) -> dict[str, Any]:
    """Loss, gradients and updated parameters of one step, on the host, and the bytes of state on a device."""
    program = Program(experiment, devices)
    with _RUNNING:
        state = jax.block_until_ready(program.init())
    resident = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))

    def step(state: Any, batch: Any, scalars: Any) -> Any:
        grads, metrics = program.gradients(state["params"], batch, scalars)
        new_state, metrics = program.update(state, grads, metrics, scalars)
        return metrics["loss"], grads, new_state["params"]

    arguments = (state, program.put(batch), program.scalars())
    with program.tracing():
        compiled = jax.jit(step).lower(*arguments).compile(FAST_COMPILE)
    with _RUNNING:
        loss, grads, params = jax.device_get(compiled(*arguments))
    initial = jax.device_get(state["params"])
    updates = jax.tree.map(np.subtract, params, initial)
    names = [p.name for p in program.parameters]
    leaves = [dict(zip(names, jax.tree.leaves(tree), strict=True)) for tree in (grads, updates, initial)]
    return {"loss": float(loss), "grads": leaves[0], "updates": leaves[1], "initial": leaves[2], "bytes": resident}


def _compare(
    layout: Case, experiment: Experiment, devices: list[Any], batch: dict[str, np.ndarray], reference: dict[str, Any]
) -> dict[str, Any]:
    count = int(np.prod([getattr(layout.mesh, a) for a in MESH_AXES]))
    try:
        found = _one_step(layout.of(experiment), devices[:count], batch)
    except ConfigError as error:
        return {"result": "does not apply", "reason": str(error)}
    gradient, leaf = max((_apart(found["grads"][n], g), n) for n, g in reference["grads"].items())
    update, _ = max((_apart(found["updates"][n], u), n) for n, u in reference["updates"].items())
    loss = abs(found["loss"] - reference["loss"]) / abs(reference["loss"])
    same_start = all(np.array_equal(found["initial"][n], w) for n, w in reference["initial"].items())
    within = loss <= TOLERANCE["loss"] and gradient <= TOLERANCE["gradient"] and update <= TOLERANCE["update"]
    return {
        "loss": loss,
        "gradient": gradient,
        "update": update,
        "worst_leaf": leaf,
        "bytes": found["bytes"],
        "same_initial_weights": same_start,
        "result": "same" if within and same_start else "DIFFERS",
    }


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference, relative to the largest value of ``b``; NaN counts as infinitely far."""
    difference = float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30))
    return difference if np.isfinite(difference) else float("inf")


def _print(row: dict[str, Any]) -> None:
    if "loss" not in row:
        print(f"{row['layout']:<54} {row['result']}: {row['reason']}")
        return
    note = "" if row["result"] == "same" else f" ({row['worst_leaf']})"
    print(
        f"{row['layout']:<54} {row['loss']:>9.1e} {row['gradient']:>9.1e} {row['update']:>9.1e}  "
        f"{row['bytes'] / 1e6:>15.2f}  {row['result']}{note}",
        flush=True,
    )
