"""Llama 2 7B (arXiv:2307.09288): 6.7B weights.

    jaxpar compile configs/llama2_7b.py --target v5e:16x16    # what a step costs there, from any machine
    jaxpar train configs/llama2_7b.py --smoke                 # the same shape of experiment, on any CPU

FSDP over every device, with each layer recomputed in the backward pass. For 256 TPU v5e the compiler says, of each
device and step (jax 0.12.0.1, libtpu 0.0.50.1): 3.8 GB live at once of 16.9 (106 MB of it parameters, 211 MB optimizer
state), 40 GB on the wire, 44 % of it asynchronous, 4.39e14 FLOPs; at least 2.2 s, 2.7 s if nothing overlaps (77 and 64
% MFU).
"""

import dataclasses

from jaxpar.experiment import AdamWConfig, DecoderConfig, Experiment, TrainConfig
from jaxpar.optim.schedules import ScheduleConfig

# Percent of a TPU's memory that XLA's scheduler may plan with. Its default, 95, trades memory for overlap that brings
# little more; far below what the step needs it gives all overlap up.
MEMORY_LIMIT = "xla_tpu_scheduler_percent_shared_memory_limit"


def config() -> Experiment:
    """4 sequences of 2048 tokens for each of 256 devices."""
    return Experiment(
        model=DecoderConfig(
            vocab_size=32000,
            num_layers=32,
            embed=4096,
            num_heads=32,
            num_kv_heads=32,
            mlp_width=11008,
            norm_eps=1e-5,
        ),
        optim=AdamWConfig(learning_rate=3e-4, schedule=ScheduleConfig(kind="cosine", warmup_steps=2000)),
        train=TrainConfig(
            steps=500_000,
            global_batch=1024,
            seq_len=2048,
            remat="full",
            reduce_dtype="bfloat16",
            compiler_options=(f"{MEMORY_LIMIT}=22",),
            eval_every=1000,
            checkpoint_every=1000,
        ),
    )


def smoke() -> Experiment:
    """Two narrow layers, a few steps."""
    return shrink(config())


def shrink(full: Experiment) -> Experiment:
    """The same kinds of layers, narrow; heads in the same ratio."""
    ratio = full.model.num_heads // full.model.num_kv_heads
    model = dataclasses.replace(
        full.model,
        vocab_size=320,
        num_layers=2,
        embed=64,
        num_heads=4 * min(ratio, 2),
        num_kv_heads=4,
        head_dim=16,
        mlp_width=192,
    )
    return dataclasses.replace(
        full,
        model=model,
        optim=dataclasses.replace(full.optim, learning_rate=3e-3, schedule=ScheduleConfig(warmup_steps=5)),
        train=dataclasses.replace(
            full.train,
            steps=20,
            global_batch=16,
            seq_len=128,
            reduce_dtype="float32",
            eval_every=10,
            eval_batches=2,
            checkpoint_every=10,
        ),
    )
