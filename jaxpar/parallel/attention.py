"""Which attention kernel runs, chosen by the platform of the mesh (not of the host)."""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxpar.models.attention import Mask, attention

Kernel = Literal["splash", "cudnn", "chunked"]


def choose_kernel(
    platform: str,
    *,
    seq_len: int,
    head_dim: int,
    dtype: Any,
    documents_masked: bool,
    softcap: float | None,
    context: int = 1,
    cudnn: bool | None = None,
) -> tuple[Kernel, str]:
    """The kernel for ``platform`` ("tpu", "gpu"/"cuda", "cpu") and why it is that one.

    TPU: splash, where sequence and head sizes fit its tiles. GPU: cuDNN's flash attention, where its wheel is there
    and rows hold one document each. Otherwise the chunked XLA path.
    """
    if context > 1:
        return "chunked", "the sequence is split over context: every key block is computed, the masked half too"
    if platform == "cpu":
        return "chunked", "the platform is cpu"
    if platform == "tpu":
        if seq_len % 128 or head_dim % 64:
            return "chunked", f"splash needs seq_len % 128 == 0 and head_dim % 64 == 0, not {seq_len} and {head_dim}"
        return "splash", "the platform is tpu"
    there = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cudnn") if cudnn is None else cudnn
    if not there:
        return "chunked", "cuDNN's wheel is not installed"
    if documents_masked:
        return "chunked", "cuDNN's kernel cannot mask documents (data.mask_documents)"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16) or softcap is not None:
        return "chunked", "cuDNN's kernel needs 16-bit compute and no softcap"
    if head_dim % 8 or head_dim > 128:
        return "chunked", f"cuDNN's kernel needs head_dim % 8 == 0 and at most 128, not {head_dim}"
    return "cudnn", "the platform is gpu"


def run_kernel(
    kernel: Kernel, q_BSHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, segments_BS: jax.Array | None, mask: Mask
) -> jax.Array:
    """Causal attention of whole sequences on this device, [B, S, H, K]; no collectives."""
    if kernel == "splash":
        return _splash(q_BSHK, k_BSGK, v_BSGK, segments_BS, mask)
    if kernel == "cudnn":
        window = None if mask.window is None else (mask.window - 1, 0)
        return jax.nn.dot_product_attention(
            q_BSHK, k_BSGK, v_BSGK, scale=mask.scale, is_causal=True, local_window_size=window, implementation="cudnn"
        )
    return attention(q_BSHK, k_BSGK, v_BSGK, segments_BS, segments_BS, mask)


def _splash(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, mask: Mask, interpret: bool = False
) -> jax.Array:
    kernel = _splash_kernel(q.shape[1], q.shape[2], mask, interpret)
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    ids = None if segments is None else splash.SegmentIds(segments, segments)
    heads_first = [x.transpose(0, 2, 1, 3) for x in (mask.scaled(q), k, v)]
    return jax.vmap(kernel)(*heads_first, segment_ids=ids).transpose(0, 2, 1, 3)


def splash_block(seq_len: int) -> int:
    """Queries, and keys, of a block of the splash kernel."""
    return max(b for b in (128, 256, 512) if seq_len % b == 0)


def _splash_kernel(seq_len: int, heads: int, mask: Mask, interpret: bool) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape = (seq_len, seq_len)
    one: masks.Mask = masks.CausalMask(shape)
    if mask.window is not None:
        one = masks.LocalMask(shape, (mask.window - 1, 0), 0)
    block = splash_block(seq_len)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    return splash.make_splash_mha(
        masks.MultiHeadMask([one] * heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=mask.softcap,
        residual_checkpoint_name="attended",
        interpret=interpret,
    )
