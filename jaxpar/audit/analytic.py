"""The FLOPs that a step of a decoder must do on one device, by formula: what the count in the HLO is held against."""

from __future__ import annotations

import math

from jaxpar.models.attention import CHUNK, block_pairs
from jaxpar.models.layers import GATED
from jaxpar.parallel.attention import splash_block
from jaxpar.program import Program


def executed_flops(program: Program) -> float:
    """FLOPs of one step on one device, forward, backward and recomputed: matrix products and attention.

    2 per weight and token going forward, 4 going back, and again what ``train.remat`` does not keep. A layer's last
    product is never made again, and the head never. Attention counts the blocks that its kernel computes: 2 products
    forward, 4 (one block), 5 (chunks) or 7 (splash) back. Rotary positions on a TPU are a product too.
    """
    experiment, model = program.experiment, program.experiment.model
    train, sizes = experiment.train, program.sizes
    K, H, G = model.width_of_head, model.num_heads, model.num_kv_heads
    weights = {  # of a layer
        "qkv": model.embed * (H + 2 * G) * K,
        "o": H * K * model.embed,
        "up": (2 if model.mlp in GATED else 1) * model.embed * model.mlp_width,
        "down": model.mlp_width * model.embed,
    }
    again = {
        "none": (), "dots": ("attention",), "qkv": ("attention", "o", "up"), "attention": ("rope", "qkv", "up"),
        "full": ("rope", "qkv", "attention", "o", "up"),
    }["full" if train.remat == "offload" else train.remat]  # fmt: skip
    tokens = experiment.tokens_per_step / math.prod(sizes.values())
    heads_whole = sizes["tensor"] if sizes["tensor"] > 1 and not experiment.rules.mesh_axes("heads") else 1
    flops = 6.0 * tokens * model.embed * model.vocab_size
    for layer in range(model.num_layers):
        mask = model.kinds()[layer % len(model.kinds())][0]
        for name, count in weights.items():
            times = 6 + (2 if name in again else 0)
            flops += times * tokens * count * (heads_whole if name in ("qkv", "o") else 1)
        if program.platform == "tpu":  # the product that exchanges halves
            flops += (4 + (2 if "rope" in again else 0)) * tokens * (H + G) * K * K
        keys, backward = _attention(program, mask.window)
        products = 2 + backward + (2 if "attention" in again else 0)
        if train.remat == "attention" and backward == 4:
            products += 1  # one block keeps no sums of its softmax: the scores are made again
        flops += 2 * products * tokens * H * K * keys * heads_whole
    return flops


def _attention(program: Program, window: int | None) -> tuple[float, int]:
    """Keys that a query meets, whole blocks of them, and the products of the backward pass."""
    S, context = program.experiment.train.seq_len, program.sizes["context"]
    if program.kernel == "splash":
        block = splash_block(S)
        n = S // block
        return len(block_pairs(n, n, block, window, True)) * block / n, 7
    if max(S // context, S) <= CHUNK:
        return S, 4
    queries, keys = -(-S // context // CHUNK), -(-S // CHUNK)
    pairs = len(block_pairs(queries, keys, CHUNK, window, context == 1))
    return pairs * CHUNK / (S / context / CHUNK), 5
