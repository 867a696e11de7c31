"""FIG"""

import dataclasses

from configs.llama2_7b import config as base
from configs.llama2_7b import shrink
from jaxpar.experiment import Experiment, MeshConfig


def config() -> Experiment:
    """A whole copy of the state on each slice, and twice the batch."""
    return dataclasses.replace(
        base(), mesh=MeshConfig(data=2, fsdp=-1), train=dataclasses.replace(base().train, global_batch=2048)
    )


def smoke() -> Experiment:
    """Two narrow layers, a few steps, on any number of devices that 2 divides."""
    return dataclasses.replace(shrink(config()), mesh=MeshConfig(data=2, fsdp=-1))
