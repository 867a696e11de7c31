"""Llama 3.1 8B, FSDP x tensor parallelism.

    jaxpar compile configs/llama3_8b_fsdp_tp.py --target v5e:16x16
    jaxpar train configs/llama3_8b_fsdp_tp.py --smoke --devices cpu:8

For 256 TPU v5e the compiler says, of each device and step: 5.1 GB live at once of 16.9, 84 GB on the wire (72 of them
over tensor), 21 % of it asynchronous, 5.56e14 FLOPs; at least 2.8 s, 4.6 s if nothing overlaps (76 and 46 % MFU).
"""

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
