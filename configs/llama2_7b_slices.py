"""Llama 2 7B on two TPU slices: FSDP within a slice, and only gradients between them.

    jaxpar compile configs/llama2_7b_slices.py --target "v5e:16x16*2"
    jaxpar train configs/llama2_7b_slices.py --smoke --devices cpu:8

For two slices of 256 TPU v5e the compiler says, of each device and step: 3.8 GB live at once of 16.9, 40 GB on the
wire within the slice as on a single one, and 53 MB between the slices, which is the all-reduce of this device's
gradients in bf16: 17 ms of 2.2 s.
"""

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
