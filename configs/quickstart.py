"""A small byte-level language model of Python source text.

    jaxpar train configs/quickstart.py

The text is the standard library of the Python that runs it: nothing is downloaded.
"""

from jaxpar.experiment import (
    AdamWConfig,
    DecoderConfig,
    Experiment,
    TrainConfig,
)
from jaxpar.optim.schedules import ScheduleConfig


def config() -> Experiment:
    """The run described above."""
    return Experiment(
        model=DecoderConfig(
            vocab_size=320, num_layers=4, embed=128, num_heads=4, num_kv_heads=4, mlp_width=384, scan_unroll=4
        ),
        optim=AdamWConfig(learning_rate=4e-3, schedule=ScheduleConfig(kind="cosine", warmup_steps=30)),
        train=TrainConfig(steps=400, global_batch=16, seq_len=256, eval_every=100, checkpoint_every=100),
    )
