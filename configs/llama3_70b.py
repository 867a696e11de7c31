"""FIG"""

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
