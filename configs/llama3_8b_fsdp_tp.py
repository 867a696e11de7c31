"""FIG"""

import dataclasses

from configs.llama2_7b import shrink
from configs.llama3_8b import config as base
from jaxpar.experiment import Experiment, MeshConfig


def config() -> Experiment:
    """64 shards of the state x 4 of every product."""
    return dataclasses.replace(base(), mesh=MeshConfig(fsdp=-1, tensor=4))


def smoke() -> Experiment:
    """Two narrow layers, a few steps, on any number of devices that 2 divides."""
    return dataclasses.replace(shrink(config()), mesh=MeshConfig(fsdp=-1, tensor=2))
