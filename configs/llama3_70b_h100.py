"""Llama 3.1 70B on 32 nodes of 8 H100s: tensor parallelism within a node, FSDP between nodes.

    jaxpar compile configs/llama3_70b_h100.py --target h100:32x8
    jaxpar train configs/llama3_70b_h100.py --smoke --devices cpu:8

The compiler says, of each GPU and step: 25 GB of 85, 881 GB on the wire (831 of them over tensor), 92 % of it
asynchronous, 4.65e15 FLOPs. At least 4.7 s of products, 1.8 s within a node and 1.0 s between nodes; attention in
chunks of XLA operations moves memory for about 12 s, which a fused kernel would not (30 % MFU with it).
"""

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
