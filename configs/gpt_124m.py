"""A GPT-2-small-class model: 124M weights with tied embeddings, 0.5M tokens a step.

    jaxpar train configs/gpt_124m.py --data.tokenizer tokenizer.json    # on accelerators
    jaxpar train configs/gpt_124m.py --smoke                            # the same shape of experiment, on any CPU

The text is Python's standard library until ``--data.sources`` names another; bytes need no tokenizer file.
"""

import dataclasses

from jaxpar.experiment import AdamWConfig, DecoderConfig, Experiment, TrainConfig
from jaxpar.optim.schedules import ScheduleConfig
from jaxpar.tasks.language_model import LanguageModelConfig


def config() -> Experiment:
    """GPT-2 small's widths with rotary positions and RMSNorm; 0.5M tokens a step, 10B tokens."""
    return Experiment(
        model=DecoderConfig(
            vocab_size=50304,  # GPT-2's 50,257, rounded up to a multiple of 128
            num_layers=12,
            embed=768,
            num_heads=12,
            num_kv_heads=12,
            mlp_width=3072,
            mlp="gelu",
            tie_embeddings=True,
        ),
        task=LanguageModelConfig(z_loss=1e-4),
        optim=AdamWConfig(learning_rate=6e-4, schedule=ScheduleConfig(kind="cosine", warmup_steps=700)),
        train=TrainConfig(
            steps=19073, global_batch=512, seq_len=1024, remat="none", eval_every=250, checkpoint_every=1000
        ),
    )


def smoke() -> Experiment:
    """Two narrow layers, a few steps."""
    full = config()
    return dataclasses.replace(
        full,
        model=dataclasses.replace(
            full.model, vocab_size=320, num_layers=2, embed=64, num_heads=4, num_kv_heads=4, mlp_width=256
        ),
        optim=dataclasses.replace(full.optim, schedule=ScheduleConfig(kind="cosine", warmup_steps=5)),
        train=dataclasses.replace(
            full.train, steps=20, global_batch=16, seq_len=128, eval_every=10, eval_batches=2, checkpoint_every=10
        ),
    )
