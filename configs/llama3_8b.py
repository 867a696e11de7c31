"""Llama 3.1 8B (arXiv:2407.21783): 8.0B weights, grouped-query attention, a vocabulary of 128,256.

    jaxpar compile configs/llama3_8b.py --target v5e:16x16
    jaxpar train configs/llama3_8b.py --smoke

FSDP over every device. For 256 TPU v5e the compiler says, of each device and step: 6.5 GB live at once of 16.9, 47 GB
on the wire, 55 % of it asynchronous, 5.56e14 FLOPs; at least 2.8 s, 3.3 s if nothing overlaps (76 and 64 % MFU).
"""

import dataclasses

from configs.llama2_7b import config as llama2_7b
from configs.llama2_7b import shrink
from jaxpar.experiment import DecoderConfig, Experiment
from jaxpar.models.rope import RopeConfig


def config() -> Experiment:
    """1 sequence of 8192 tokens for each of 256 devices."""
    base = llama2_7b()
    return dataclasses.replace(
        base,
        model=DecoderConfig(
            vocab_size=128256,
            num_layers=32,
            embed=4096,
            num_heads=32,
            num_kv_heads=8,
            mlp_width=14336,
            norm_eps=1e-5,
            rope=RopeConfig(theta=500_000.0, scaling="llama3", factor=8.0),
        ),
        train=dataclasses.replace(base.train, global_batch=256, seq_len=8192, compiler_options=()),
    )


def smoke() -> Experiment:
    """Two narrow layers, a few steps."""
    return shrink(config())
