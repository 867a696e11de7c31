"""FIG"""

import dataclasses

from configs.llama2_7b import MEMORY_LIMIT, shrink
from configs.llama2_7b import config as base
from jaxpar.experiment import Experiment, MeshConfig


def config() -> Experiment:
    """64 shards of the state x 4 of every product."""
    fsdp = base()
    train = dataclasses.replace(fsdp.train, compiler_options=(f"{MEMORY_LIMIT}=28",))
    return dataclasses.replace(fsdp, mesh=MeshConfig(fsdp=-1, tensor=4), train=train)


def smoke() -> Experiment:
    """Two narrow layers, a few steps, on any number of devices that 2 divides."""
    return dataclasses.replace(shrink(config()), mesh=MeshConfig(fsdp=-1, tensor=2))
