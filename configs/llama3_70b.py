"""Llama 3.1 70B (arXiv:2407.21783): 70.6B weights.

    jaxpar compile configs/llama3_70b.py --target v5p:8x8x8
    jaxpar train configs/llama3_70b.py --smoke

FSDP over every device. For 512 TPU v5p the compiler says, of each device and step: 20 GB live at once of 102, 426 GB on
the wire, none of it asynchronous, 4.75e15 FLOPs; at least 10.3 s, 12.7 s as nothing overlaps (78 and 63 % MFU).
"""

import dataclasses

from configs.llama2_7b import shrink
from configs.llama3_8b import config as base
from jaxpar.experiment import Experiment


def config() -> Experiment:
    """1 sequence of 8192 tokens for each of 512 devices."""
    small = base()
    return dataclasses.replace(
        small,
        model=dataclasses.replace(small.model, num_layers=80, embed=8192, num_heads=64, mlp_width=28672),
        train=dataclasses.replace(small.train, global_batch=512),
    )


def smoke() -> Experiment:
    """Two narrow layers, a few steps."""
    return shrink(config())
