"""A small byte-level language model of Python source text.

    jaxpar train configs/quickstart.py

The text is the standard library of the Python that runs it: nothing is downloaded. About two minutes on two CPU cores;
expect an evaluation loss near 1.68 nats per byte, where a model of byte frequencies alone scores 3.15.
"""

import dataclasses

from jaxpar.experiment import AdamWConfig, DecoderConfig, Experiment, TrainConfig
from jaxpar.optim.schedules import ScheduleConfig


def config() -> Experiment:
    """The run described above."""
    return Experiment(
        model=DecoderConfig(
            vocab_size=320, num_layers=4, embed=128, num_heads=4, num_kv_heads=4, mlp_width=384, scan_unroll=4
        ),
        optim=AdamWConfig(learning_rate=3e-3, schedule=ScheduleConfig(kind="cosine", warmup_steps=30)),
        train=TrainConfig(steps=360, global_batch=8, seq_len=256, eval_every=120, checkpoint_every=120),
    )


def smoke() -> Experiment:
    """Two narrow layers, a few steps."""
    full = config()
    return dataclasses.replace(
        full,
        model=dataclasses.replace(
            full.model, num_layers=2, embed=64, num_heads=4, num_kv_heads=4, mlp_width=192, scan_unroll=1
        ),
        optim=dataclasses.replace(full.optim, schedule=ScheduleConfig(kind="cosine", warmup_steps=5)),
        train=dataclasses.replace(
            full.train, steps=20, global_batch=16, seq_len=64, eval_every=10, eval_batches=2, checkpoint_every=10
        ),
    )
