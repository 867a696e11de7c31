"""Llama 3.1 8B on 8 nodes of 8 H100s: FSDP within a node, and only gradients between nodes.

    jaxpar compile configs/llama3_8b_h100.py --target h100:8x8
    jaxpar train configs/llama3_8b_h100.py --smoke --devices cpu:8

The compiler says, of each GPU and step: 24 GB of 85, 40 GB on the wire within the node and 3.5 GB between nodes, 98 %
of it asynchronous, 5.37e14 FLOPs. At least 0.54 s of products and 0.07 s between nodes; attention in chunks of XLA
operations moves memory for about 2.0 s at this length, which a fused kernel would not (22 % MFU with it).
"""

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
