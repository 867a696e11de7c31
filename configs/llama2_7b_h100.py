"""Llama 2 7B on 8 nodes of 8 H100s, FSDP over all of them.

    jaxpar compile configs/llama2_7b_h100.py --target h100:8x8
    jaxpar train configs/llama2_7b_h100.py --smoke

The compiler says, of each GPU and step: 6.9 GB of 85, 39 GB on the wire, 99 % of it asynchronous, 4.32e14 FLOPs. At
least 0.44 s of products (78 % MFU) and 0.10 s between nodes; attention in chunks of XLA operations moves memory for
about 0.77 s, which a fused kernel would not (44 % MFU with it).
"""

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
