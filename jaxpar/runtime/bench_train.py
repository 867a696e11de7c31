"""``jaxpar bench train``: the step against a hand-written one, the loader against the step, and a peer's shape.

The two steps take turns in one process, a few steps at a time, so that a noisy machine slows both; the ratio is the
median over the turns.
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar.experiment import AdamWConfig, DecoderConfig, Experiment, TrainConfig
from jaxpar.overrides import load_config
from jaxpar.program import Program
from jaxpar.runtime.opening import load_data
from jaxpar.runtime.parity import ragged_batch

TURNS, STEPS_A_TURN = 9, 4
# MaxText 0.2.5 on this shape, 1 CPU device fp32, jax 0.12.0.1, a machine with 2 cores: tokens/s.
PEER_TOKENS_PER_SECOND = 1956
Step = Callable[[], None]


def run_bench(as_json: bool) -> int:
    """Measure on one CPU device and print; the exit code is 0."""
    device = jax.devices("cpu")[:1]
    quickstart: Any = load_config("quickstart")
    result = {**_against_handwritten(quickstart, device), **_loader(quickstart), **_peer_shape(device)}
    result["loader_over_step"] = result["loader_tokens_per_second"] / result["tokens_per_second"]
    if as_json:
        print(json.dumps(result))
        return 0
    turns = f"turns: {result['ratio_low']:.2f} to {result['ratio_high']:.2f}"
    print(f"quickstart step    {result['tokens_per_second']:>12,.0f} tokens/s")
    print(f"hand-written step  {result['handwritten_tokens_per_second']:>12,.0f} tokens/s")
    print(f"ratio              {result['ratio']:>12.2f}  ({turns})")
    print(f"loader alone       {result['loader_tokens_per_second']:>12,.0f} tokens/s")
    print(f"loader over step   {result['loader_over_step']:>12,.0f}")
    print(f"the peer's shape   {result['peer_shape_tokens_per_second']:>12,.0f} tokens/s")
    print(f"the peer           {PEER_TOKENS_PER_SECOND:>12,} tokens/s  (MaxText, on another such machine)")
    return 0


def _alternate(a: Step, b: Step) -> tuple[list[float], list[float]]:
    """Seconds per step of the two, turn by turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(TURNS + 1):
        for step, record in ((a, times[0]), (b, times[1])):
            start = time.perf_counter()
            for _ in range(STEPS_A_TURN):
                step()
            if turn:  # the first turn warms up
                record.append((time.perf_counter() - start) / STEPS_A_TURN)
    return times


def _program_step(experiment: Experiment, devices: list[Any], batch: dict[str, np.ndarray]) -> Step:
    """One step of the Program, waiting for its loss, as the loop does."""
    program = Program(experiment, devices)
    state, scalars = program.init(), program.scalars()

    def step() -> None:
        nonlocal state
        state, metrics = program.step(state, program.put(batch), scalars)
        jax.block_until_ready(metrics)

    return step


def _against_handwritten(experiment: Experiment, devices: list[Any]) -> dict[str, float]:
    data = load_data(experiment)
    batch = dict(data.train.batch(0, experiment.train.global_batch))
    ours, theirs = _alternate(_program_step(experiment, devices, batch), handwritten_step(experiment, batch))
    ratios = [t / o for o, t in zip(ours, theirs, strict=True)]
    tokens = experiment.tokens_per_step
    return {
        "tokens_per_second": tokens / statistics.median(ours),
        "handwritten_tokens_per_second": tokens / statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
    }


def _loader(experiment: Experiment, batches: int = 200) -> dict[str, float]:
    """Tokens per second of the loader alone, at the quickstart's batch."""
    with load_data(experiment).loader(experiment.train.global_batch) as loader:
        next(loader)
        start = time.perf_counter()
        for _ in range(batches):
            next(loader)
        took = time.perf_counter() - start
    return {"loader_tokens_per_second": batches * experiment.tokens_per_step / took}


def _peer_shape(devices: list[Any]) -> dict[str, float]:
    """Tokens per second on the shape of the peer's CPU figure: 4 layers, width 256, 2,048 tokens a step."""
    experiment = Experiment(
        model=DecoderConfig(
            vocab_size=4096, num_layers=4, embed=256, num_heads=4, num_kv_heads=4, mlp_width=1024, scan_unroll=4
        ),
        optim=AdamWConfig(),
        train=TrainConfig(global_batch=8, seq_len=256),
    )
    step = _program_step(experiment, devices, ragged_batch(experiment))
    times, _ = _alternate(step, lambda: None)
    return {"peer_shape_tokens_per_second": experiment.tokens_per_step / statistics.median(times)}


# -- the same model and optimizer, written as one would without a framework ---------------------------------------


def handwritten_step(experiment: Experiment, batch: dict[str, np.ndarray]) -> Step:
    """A plain JAX step on one device: a Python loop over layers, dense attention, whole logits, optax AdamW."""
    c, optim = experiment.model, experiment.optim
    assert isinstance(optim, AdamWConfig) and c.mlp == "swiglu" and not c.tie_embeddings
    random = np.random.default_rng(0)

    def matrix(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(0, shape[0] ** -0.5, shape), jnp.float32)

    D, heads, F = c.embed, c.num_heads * c.width_of_head, c.mlp_width
    params = {
        "embed": matrix(c.vocab_size, D),
        "layers": [
            {
                "n1": jnp.ones(D), "wq": matrix(D, heads), "wk": matrix(D, heads), "wv": matrix(D, heads),
                "wo": matrix(heads, D), "n2": jnp.ones(D), "up": matrix(D, F), "gate": matrix(D, F),
                "down": matrix(F, D),
            }
            for _ in range(c.num_layers)
        ],
        "norm": jnp.ones(D),
        "head": matrix(D, c.vocab_size),
    }  # fmt: skip
    schedule = optax.warmup_cosine_decay_schedule(0.0, optim.learning_rate, 30, experiment.train.steps)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, optim.b1, optim.b2, optim.eps, weight_decay=0.1)
    )
    arrays = {k: jnp.asarray(v) for k, v in batch.items()}

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + c.norm_eps) * scale

    def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        tokens, segments = batch["tokens"], batch["segments"]
        B, S = tokens.shape
        K = c.width_of_head
        angles = batch["positions"][:, :, None, None] * c.rope.theta ** -(jnp.arange(0, K, 2) / K)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        seen = jnp.tril(jnp.ones((S, S), bool)) & (segments[:, :, None] == segments[:, None, :])
        x = params["embed"][tokens]
        for layer in params["layers"]:
            h = norm(x, layer["n1"])
            q, k, v = ((h @ layer[w]).reshape(B, S, -1, K) for w in ("wq", "wk", "wv"))
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            logits = jnp.einsum("bshk,bthk->bhst", q, k) * K**-0.5
            p = jax.nn.softmax(jnp.where(seen[:, None], logits, -1e30), -1)
            x = x + jnp.einsum("bhst,bthk->bshk", p, v).reshape(B, S, -1) @ layer["wo"]
            h = norm(x, layer["n2"])
            x = x + (jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]
        logits = norm(x, params["norm"]) @ params["head"]
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.sum(nll * batch["mask"]) / jnp.sum(batch["mask"])

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Any, opt: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, loss

    opt = tx.init(params)

    def step() -> None:
        nonlocal params, opt
        params, opt, loss = update(params, opt, arrays)
        jax.block_until_ready(loss)

    return step
