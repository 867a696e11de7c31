"""FLOPs of hand-written kernels: XLA sees a custom call and nothing in it.

A Pallas kernel may carry its author's cost estimate. JAX's splash attention carries none: what it computes is the
blocks that its block mask leaves, and the mask is a constant of the program, so the count comes from there.
"""

from __future__ import annotations

import json
import math
import re

from jaxpar.audit.hlo import Instruction, Module
from jaxpar.audit.loops import origin
from jaxpar.audit.shapes import Array, arrays

SPLASH = re.compile(r"splash_(?:mha|mqa)_(fwd|dq|dkv)")
# Products of [block_q, head_dim] x [head_dim, block_kv] size in each kernel: scores and output; scores, dP and dQ;
# scores, dV, dP and dK. Source: jax/experimental/pallas/ops/tpu/splash_attention/splash_attention_kernel.py.
PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
BLOCKS = {"fwd": ("block_q", "block_kv"), "dq": ("block_q_dq", "block_kv_dq"), "dkv": ("block_q_dkv", "block_kv_dkv")}


def name(instruction: Instruction) -> str:
    """What the kernel is called: the last part of its op_name before ``pallas_call``, else its target."""
    parts = [part for part in instruction.op_name.split("/") if part and part != "pallas_call"]
    target = instruction.attributes.get("custom_call_target", "").strip('"')
    return parts[-1] if parts else target or instruction.name


def signature(instruction: Instruction) -> tuple[object, ...]:
    """What two calls of one kernel on the same shapes have in common, wherever their arrays lie."""
    shapes = [array for part in (instruction, *instruction.operands) for array in arrays(part.shape)]
    return (name(instruction), *((array.dtype, array.dims) for array in shapes))


def known(module: Module, instruction: Instruction) -> float | None:
    """FLOPs of one execution, from the kernel's own cost estimate or from what is known of it; else None."""
    estimate = instruction.backend_config.get("custom_call_config", {}).get("cost_estimate")
    if estimate and int(estimate.get("flops", 0)):
        return float(estimate["flops"])
    found = SPLASH.search(instruction.op_name or instruction.name)
    return _splash(module, instruction, found[1]) if found else None


def _splash(module: Module, instruction: Instruction, phase: str) -> float | None:
    """Blocks computed x FLOPs of a block; None where the block mask is not printed in the text.

    The operands are [data_next, block_mask, ..., q, k, v, ...]; q is [..., heads, S, head_dim], the mask
    [heads or 1, query blocks, key blocks].
    """
    settings = re.search(
        r'"xprof_metadata":\s*("(?:[^"\\]|\\.)*")', instruction.attributes.get("frontend_attributes", "")
    )
    if settings is None:
        return None
    blocks = json.loads(json.loads(settings[1]))
    mask = instruction.operands[1]
    computed = _nonzero(module, mask)
    q = next((a for o in instruction.operands if (a := _floating(o)) is not None), None)
    if computed is None or q is None:
        return None
    mask_heads = arrays(mask.shape)[0].dims[0]
    size = math.prod(blocks[key] for key in BLOCKS[phase])
    products = 5 if phase == "dkv" and blocks.get("use_fused_bwd_kernel") else PRODUCTS[phase]
    return 2.0 * products * math.prod(q.dims[:-2]) * computed / mask_heads * size * q.dims[-1]


def _nonzero(module: Module, instruction: Instruction) -> int | None:
    """How many entries of a constant are not zero; None where it is no constant, or not printed."""
    place, _ = origin(module, instruction)
    if place.opcode != "constant" or "..." in place.operand_text:
        return None
    return sum(int(n) != 0 for n in re.findall(r"-?\d+", place.operand_text))


def _floating(instruction: Instruction) -> Array | None:
    array = arrays(instruction.shape)[0]
    return array if array.dtype in ("bf16", "f32", "f16") and len(array.dims) >= 3 else None
