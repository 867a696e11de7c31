"""FLOPs of one step on one device, counted in the compiled HLO: a multiply and an add are two.

Only products are counted: ``dot``, ``convolution`` (what XLA:TPU makes of every product), the GPU and CPU libraries'
calls, and hand-written kernels. What XLA computes twice counts twice, and a loop's body as often as it runs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxpar.audit import kernels
from jaxpar.audit.executions import executions
from jaxpar.audit.hlo import Instruction, Module
from jaxpar.audit.loops import unknown_trip_counts
from jaxpar.audit.shapes import Array, arrays

# Custom calls that place, move, sort or call back: targets begin so.
NOT_PRODUCTS = (
    *("AllocateBuffer", "AssumeGather", "AsyncCollective", "ConcatBitcast", "CreateBuffer", "MoveTo", "PadToStatic"),
    *("PartialReduce", "Pin", "Sharding", "SliceId", "SliceToDynamic", "SPMD", "TopK", "Unpin"),
    *("X64", "ZeroCrop"),
    *("__cub$", "annotate_device_placement", "xla_ffi", "xla_python"),
)


@dataclasses.dataclass(frozen=True)
class Flops:
    """What a device computes in a step. ``unknown`` and ``unknown_loops`` say what the numbers leave out."""

    matmul: float  # dots, convolutions, library calls
    kernels: dict[str, float]  # of hand-written kernels, by name
    unknown: list[str]  # kernels whose FLOPs nothing tells: not in the sum
    unknown_loops: list[str]  # loops of unknown length: their bodies are counted once

    @property
    def total(self) -> float:
        """Everything that is known."""
        return self.matmul + sum(self.kernels.values())


def count(module: Module, kernel_flops: Mapping[str, Callable[[Instruction], float]] | None = None) -> Flops:
    """The FLOPs of one step, trip-count aware.

    A kernel's FLOPs are its own cost estimate, else those of ``kernels.known``, else those of the first pattern of
    ``kernel_flops`` found in its name or op_name, else those of the same kernel on the same shapes elsewhere in the
    module, where all of those agree.
    """
    of_kernel = {i.name: kernels.known(module, i) for i in module if products(i) is None}
    alike: dict[Any, set[float]] = {}
    for instruction in module:
        if (known := of_kernel.get(instruction.name)) is not None:
            alike.setdefault(kernels.signature(instruction), set()).add(known)

    @functools.cache
    def kernel(instruction: Instruction) -> float | None:
        found = of_kernel[instruction.name]
        if found is None:
            for pattern, function in (kernel_flops or {}).items():
                if re.search(pattern, f"{instruction.name} {instruction.op_name}"):
                    return function(instruction)
            if len(same := alike.get(kernels.signature(instruction), set())) == 1:
                (found,) = same
        return found

    def cost(instruction: Instruction) -> float:
        flops = products(instruction)
        return flops if flops is not None else kernel(instruction) or 0.0

    counts = executions(module, cost)
    matmul = 0.0
    by_kernel: dict[str, float] = {}
    unknown: set[str] = set()
    for computation in module.computations.values():
        times = counts[computation.name]
        for instruction in computation.instructions if times else ():
            flops = products(instruction)
            if flops is not None:
                matmul += times * flops
                continue
            name, flops = kernels.name(instruction), kernel(instruction)
            if flops is None:
                unknown.add(name)
            else:
                by_kernel[name] = by_kernel.get(name, 0.0) + times * flops
    return Flops(matmul, by_kernel, sorted(unknown), unknown_trip_counts(module))


def products(instruction: Instruction) -> float | None:
    """FLOPs of one execution of ``instruction``, its callees' not included; None for a kernel only its author knows."""
    opcode = instruction.base_opcode
    if opcode == "dot":
        return _dot(instruction)
    if opcode == "ragged-dot":
        return _ragged_dot(instruction)
    if opcode == "convolution":
        return _convolution(instruction)
    if opcode == "custom-call":
        return _custom_call(instruction)
    return 0.0


def _result(instruction: Instruction) -> Array:
    """The array an operation makes: of the tuple (result, workspace, ...) of a library's call the first."""
    return arrays(instruction.shape)[0]


def _operand(instruction: Instruction, number: int) -> Array:
    return arrays(instruction.operands[number].shape)[0]


def _dot(instruction: Instruction) -> float:
    lhs = _operand(instruction, 0)
    contracted = math.prod(lhs.dims[d] for d in instruction.numbers("lhs_contracting_dims"))
    return 2.0 * _result(instruction).elements * contracted


def _ragged_dot(instruction: Instruction) -> float:
    """Every row meets the weights of its own group alone; with the contracted dimension ragged, of its own result."""
    flops = _dot(instruction)
    if set(instruction.numbers("lhs_ragged_dims")) & set(instruction.numbers("lhs_contracting_dims")):
        flops /= _operand(instruction, 2).elements
    return flops


def _convolution(instruction: Instruction) -> float:
    """2 x (kernel position, output position) pairs that meet a true input x input features x outputs.

    XLA:TPU writes batch dimensions as spatial ones with padding or dilation; what the window reads there is no input.
    Source of the attributes: openxla.org/xla/operation_semantics, ConvWithGeneralPadding.
    """
    lhs, rhs, output = re.split("_|->", instruction.attributes["dim_labels"])
    inputs, kernel, out = _operand(instruction, 0), _operand(instruction, 1), _result(instruction)
    window = _window(instruction.attributes.get("window", ""))
    pairs = 1
    for spatial in sorted(label for label in rhs if label.isdigit()):
        at = int(spatial)
        pairs *= _pairs(
            inputs.dims[lhs.index(spatial)],
            kernel.dims[rhs.index(spatial)],
            out.dims[output.index(spatial)],
            stride=window["stride"][at] if "stride" in window else 1,
            pad=window["pad"][at] if "pad" in window else 0,
            lhs_dilate=window["lhs_dilate"][at] if "lhs_dilate" in window else 1,
            rhs_dilate=window["rhs_dilate"][at] if "rhs_dilate" in window else 1,
        )
    return 2.0 * pairs * kernel.dims[rhs.index("i")] * out.dims[output.index("b")] * out.dims[output.index("f")]


def _window(text: str) -> dict[str, list[int]]:
    """``{size=1x32 pad=0_0x31_31}`` -> size [1, 32], pad [0, 31] (the low side)."""
    fields = dict(part.split("=", 1) for part in text.strip("{}").split())
    return {key: [int(value.split("_")[0]) for value in text.split("x")] for key, text in fields.items()}


def _pairs(size: int, kernel: int, out: int, *, stride: int, pad: int, lhs_dilate: int, rhs_dilate: int) -> int:
    """How many (output, kernel) positions of one dimension read an input: neither padding nor a dilation's hole."""
    total = 0
    for k in range(kernel):
        shift = k * rhs_dilate - pad  # output o reads position o * stride + shift of the dilated input
        first = max(0, -(shift // stride))  # smallest o with o * stride + shift >= 0
        last = min(out - 1, ((size - 1) * lhs_dilate - shift) // stride)
        if lhs_dilate == 1:
            total += max(0, last - first + 1)
        else:
            total += sum((o * stride + shift) % lhs_dilate == 0 for o in range(first, last + 1))
    return total


def _custom_call(instruction: Instruction) -> float | None:
    target = instruction.attributes.get("custom_call_target", "").strip('"')
    if target.startswith(("__cublas$", "__onednn$matmul", "__cudnn$fmha", "__cudnn$conv")):
        return _library(target, instruction)
    return 0.0 if target.startswith(NOT_PRODUCTS) else None


def _library(target: str, instruction: Instruction) -> float | None:
    """CuBLAS and oneDNN products, cuDNN's attention; None for a library call whose arithmetic is not told."""
    config = instruction.backend_config
    if target.startswith("__cublas$"):
        gemm = config.get("gemm_backend_config", config)
        numbers = gemm.get("dot_dimension_numbers", {}).get("lhs_contracting_dimensions", [])
        return 2.0 * _result(instruction).elements * math.prod(_operand(instruction, 0).dims[int(d)] for d in numbers)
    if target == "__onednn$matmul":
        transposed = config.get("onednn_matmul_config", {}).get("transpose_a", False)
        return 2.0 * _result(instruction).elements * _operand(instruction, 0).dims[-2 if transposed else -1]
    if target.startswith("__cudnn$fmha"):
        return _cudnn_attention(target, instruction, config.get("cudnn_fmha_backend_config", {}))
    if target == "__cudnn$convForward":
        return _convolution(instruction)
    return None


def _cudnn_attention(target: str, instruction: Instruction, config: Mapping[str, Any]) -> float | None:
    """Two products forward (scores, output), five backward (scores, dV, dP, dQ, dK), of the pairs the mask leaves.

    The tiles that cuDNN computes along the diagonal, half of them masked, are not known and not counted.
    """
    shape = [int(d) for d in config.get("intermediate_tensor_shape", {}).get("dimensions", [])]
    if len(shape) != 4:
        return None
    batch, heads, queries, keys = shape
    pairs = queries * keys
    if config.get("mask_type") in ("CAUSAL", "PADDING_CAUSAL"):
        window = int(config.get("sliding_window_length", 0)) or keys
        pairs = sum(min(q + 1, keys, window) for q in range(queries))
    products = 5 if "Backward" in target else 2
    return 2.0 * products * batch * heads * pairs * _operand(instruction, 0).dims[-1]
