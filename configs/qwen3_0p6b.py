"""Qwen3 0.6B (arXiv:2505.09388): QK-norm, grouped-query attention, heads wider than embed / num_heads, tied embeddings.

jaxpar show configs/qwen3_0p6b.py --devices 8
jaxpar train configs/qwen3_0p6b.py --smoke
"""

import dataclasses

from configs.llama2_7b import config as llama2_7b
from configs.llama2_7b import shrink
from jaxpar.experiment import DecoderConfig, Experiment
from jaxpar.models.rope import RopeConfig


def config() -> Experiment:
    """The published shape; 8 sequences of 4096 tokens for each of 8 devices."""
    base = llama2_7b()
    return dataclasses.replace(
        base,
        model=DecoderConfig(
            vocab_size=151936,
            num_layers=28,
            embed=1024,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            mlp_width=3072,
            qk_norm=True,
            tie_embeddings=True,
            rope=RopeConfig(theta=1_000_000.0),
        ),
        train=dataclasses.replace(base.train, global_batch=64, seq_len=4096),
    )


def smoke() -> Experiment:
    """Two narrow layers, a few steps."""
    return shrink(config())
