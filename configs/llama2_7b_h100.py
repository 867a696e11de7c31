"""FIG"""

import dataclasses

from configs.llama2_7b import config as base
from configs.llama2_7b import shrink
from jaxpar.experiment import Experiment, MeshConfig


def config() -> Experiment:
    """4 sequences for each of 64 GPUs."""
    return dataclasses.replace(base(), train=dataclasses.replace(base().train, global_batch=256))


def smoke() -> Experiment:
    """Two narrow layers, a few steps, on any number of devices."""
    return dataclasses.replace(shrink(config()), mesh=MeshConfig())
