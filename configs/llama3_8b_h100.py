"""FIG"""

import dataclasses

from configs.llama2_7b import shrink
from configs.llama3_8b import config as base
from jaxpar.experiment import Experiment, MeshConfig


def config() -> Experiment:
    """A whole copy of the state on each node, 1 sequence for each of 64 GPUs."""
    return dataclasses.replace(
        base(), mesh=MeshConfig(data=-1, fsdp=8), train=dataclasses.replace(base().train, global_batch=64)
    )


def smoke() -> Experiment:
    """Two narrow layers, a few steps, on any number of devices that 2 divides."""
    return dataclasses.replace(shrink(config()), mesh=MeshConfig(data=-1, fsdp=2))
