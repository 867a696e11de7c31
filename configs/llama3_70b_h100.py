"""FIG"""

import dataclasses

from configs.llama2_7b import shrink
from configs.llama3_70b import config as base
from jaxpar.experiment import Experiment, MeshConfig


def config() -> Experiment:
    """Every product split over the GPUs of a node, the state over the nodes."""
    return dataclasses.replace(
        base(), mesh=MeshConfig(fsdp=-1, tensor=8), train=dataclasses.replace(base().train, global_batch=256)
    )


def smoke() -> Experiment:
    """Two narrow layers, a few steps, on any number of devices that 2 divides."""
    return dataclasses.replace(shrink(config()), mesh=MeshConfig(fsdp=-1, tensor=2))
