"""Llama 2 7B, FSDP x tensor parallelism.

    jaxpar compile configs/llama2_7b_fsdp_tp.py --target v5e:16x16
    jaxpar train configs/llama2_7b_fsdp_tp.py --smoke --devices cpu:8

For 256 TPU v5e the compiler says, of each device and step: 4.9 GB live at once of 16.9, 82 GB on the wire (72 of them
over tensor), 20 % of it asynchronous, 4.39e14 FLOPs; at least 2.2 s, 4.0 s if nothing overlaps (77 and 43 % MFU).
"""

import dataclasses

from configs.llama2_7b import config as base
from configs.llama2_7b import shrink
from jaxpar.experiment import Experiment, MeshConfig


def config() -> Experiment:
    """64 shards of the state x 4 of every product."""
    fsdp = base()
    train = dataclasses.replace(fsdp.train, compiler_options=())
    return dataclasses.replace(fsdp, mesh=MeshConfig(fsdp=-1, tensor=4), train=train)


def smoke() -> Experiment:
    """Two narrow layers, a few steps, on any number of devices that 2 divides."""
    return dataclasses.replace(shrink(config()), mesh=MeshConfig(fsdp=-1, tensor=2))
