"""Run folders as training leaves them, written without training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.experiment import AdamWConfig, DecoderConfig, Experiment, TrainConfig
from jaxpar.serialize import to_json

SHARES = {
    "step": 0.85,
    "data": 0.02,
    "compile": 0.04,
    "evaluate": 0.04,
    "checkpoint": 0.02,
    "start": 0.02,
    "lost": 0.01,
}


def experiment(steps: int = 100, seed: int = 0, learning_rate: float = 1e-3) -> Experiment:
    model = DecoderConfig(vocab_size=264, num_layers=2, embed=16, num_heads=4, num_kv_heads=4, mlp_width=32)
    return Experiment(
        model=model, optim=AdamWConfig(learning_rate=learning_rate), train=TrainConfig(steps=steps, seed=seed)
    )


def records(
    steps: int, seed: int = 0, speed: float = 1.0, floor: float = 2.0, timed: bool = True
) -> list[dict[str, Any]]:
    """Training records of every step and ten evaluations; ``timed``: with where the time went and memory."""
    rng = np.random.default_rng(seed)
    found: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        done = step / steps
        loss = floor + 4.4 * math.exp(-9 * done) + rng.normal(0, 0.06)
        seconds = 3 + 0.02 * step / speed
        record: dict[str, Any] = {
            "step": step, "tokens": step * 2048, "loss": loss,
            "grad_norm": math.exp(rng.normal(1 - 2 * min(1, 4 * done), 0.25)),
            "learning_rate": 1e-3 * min(1, 20 * done) * (1 + math.cos(math.pi * done)) / 2, "skipped": 0,
            "tokens_per_second": speed * 1e5 * (1 + rng.normal(0, 0.01)), "mfu": 0.31 * speed,
            "seconds": round(seconds, 3),
        }  # fmt: skip
        if timed:
            record |= {f"seconds_{phase}": round(share * seconds, 4) for phase, share in SHARES.items()}
            record |= {"goodput": SHARES["step"], "memory_bytes": 2.9e9, "host_bytes": 1.1e9 + 2e5 * done * seed}
        found.append(record)
        if step % max(1, steps // 10) == 0:
            found.append({"step": step, "tokens": step * 2048, "eval_loss": loss + 0.05, "eval_tokens": 4096})
    return found


def write_run(
    path: Path,
    config: Experiment | None = None,
    metrics: list[dict[str, Any]] | None = None,
    compiled: bool = True,
    entropy: float | None = 3.15,
) -> Path:
    """A run folder with these records; by default those of its whole length."""
    config = config or experiment()
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(to_json(config)))
    metrics = records(config.train.steps, config.train.seed) if metrics is None else metrics
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in metrics))
    if compiled:
        sizes = {
            "parameters": 3e8,
            "optimizer": 6e8,
            "gradients": 3e8,
            "activations": 1.8e9,
            "code": 3e6,
            "padding": 1e7,
        }
        mesh = {"data": 1, "fsdp": 4, "pipe": 1, "expert": 1, "context": 1, "tensor": 2}
        about = {"parameters": 124_439_808, "mesh": mesh, "device": "NVIDIA H100 80GB HBM3"}
        about |= {"versions": {"jax": "0.10.2"}, "seconds": {"compile": 9.1}}
        total = sum(sizes.values())
        (path / "compile.json").write_text(json.dumps({"hbm_bytes": {"total": total, "peak": total, **sizes}, **about}))
    if entropy is not None:
        (path / "data.json").write_text(json.dumps({"unigram_entropy": entropy}))
    return path
