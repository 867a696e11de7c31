"""FLOPs of products, by hand, in every form in which XLA prints one."""

import json

import pytest
from hlo_modules import loop, module

from jaxpar.audit import flops, hlo


def product(line, *operands, extra=""):
    """A module whose entry is ``line`` over parameters %p0, %p1, ... of the given shapes."""
    parameters = "".join(f"  %p{n} = {shape} parameter({n})\n" for n, shape in enumerate(operands))
    return hlo.parse(f"HloModule m\n\n{extra}ENTRY %main () -> f32[] {{\n{parameters}  ROOT %r = {line}\n}}\n")


@pytest.mark.parametrize(
    ("line", "operands", "expected"),
    [
        (
            "f32[5,7]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
            ["f32[5,11]", "f32[11,7]"],
            2 * 5 * 7 * 11,
        ),
        (
            "f32[3,5,7] dot(%p0, %p1), lhs_batch_dims={0}, lhs_contracting_dims={1,3}, rhs_batch_dims={0}, "
            "rhs_contracting_dims={1,2}",
            ["f32[3,2,5,11]", "f32[3,2,11,7]"],
            2 * 3 * 5 * 7 * 22,
        ),
        (  # rows meet their own group's weights
            "f32[64,7] ragged-dot(%p0, %p1, %p2), lhs_contracting_dims={1}, rhs_contracting_dims={1}, "
            "lhs_ragged_dims={0}, rhs_group_dims={0}",
            ["f32[64,11]", "f32[4,11,7]", "s32[4]"],
            2 * 64 * 7 * 11,
        ),
        (  # the gradient of the weights: each row adds to its own group's result
            "f32[4,11,7] ragged-dot(%p0, %p1, %p2), lhs_contracting_dims={0}, rhs_contracting_dims={0}, "
            "lhs_ragged_dims={0}",
            ["f32[64,11]", "f32[64,7]", "s32[4]"],
            2 * 64 * 7 * 11,
        ),
        ("f32[5,7] convolution(%p0, %p1), dim_labels=bf_io->bf", ["f32[5,11]", "f32[11,7]"], 2 * 5 * 7 * 11),
        (  # a batch dimension as a spatial one of the same size in the kernel, contracted over
            "bf16[11,7,1] convolution(%p0, %p1), window={size=4}, dim_labels=0fb_0io->bf0",
            ["bf16[4,2048,11]", "bf16[4,2048,7]"],
            2 * 4 * 2048 * 11 * 7,
        ),
        (  # heads as a spatial dimension of the kernel, slid over padding: of 32 x 32 pairs, 32 meet the input
            "bf16[4,2048,32,128] convolution(%p0, %p1), window={size=1x32 pad=0_0x31_31 rhs_reversal=0x1}, "
            "dim_labels=0bf1_i1o0->0b1f",
            ["bf16[4,2048,4096,1]", "bf16[4096,32,128,1]"],
            2 * 4 * 2048 * 4096 * 32 * 128,
        ),
        (  # a true convolution, same padding: the first and the last of 10 outputs miss one of three taps
            "f32[2,10,7] convolution(%p0, %p1), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f",
            ["f32[2,10,11]", "f32[3,11,7]"],
            2 * 2 * 7 * 11 * (3 * 10 - 2),
        ),
        (  # stride 2, no padding
            "f32[2,4,7] convolution(%p0, %p1), window={size=3 stride=2}, dim_labels=b0f_0io->b0f",
            ["f32[2,10,11]", "f32[3,11,7]"],
            2 * 2 * 7 * 11 * 3 * 4,
        ),
        (  # the input dilated by 2: 19 positions, 10 of them holes' neighbours; each output meets the odd or even taps
            "f32[2,17,7] convolution(%p0, %p1), window={size=3 lhs_dilate=2}, dim_labels=b0f_0io->b0f",
            ["f32[2,10,11]", "f32[3,11,7]"],
            2 * 2 * 7 * 11 * (9 * 2 + 8 * 1),
        ),
        (  # the kernel dilated by 2
            "f32[2,6,7] convolution(%p0, %p1), window={size=3 rhs_dilate=2}, dim_labels=b0f_0io->b0f",
            ["f32[2,10,11]", "f32[3,11,7]"],
            2 * 2 * 7 * 11 * 3 * 6,
        ),
        (  # depthwise: each output feature meets one input feature
            "f32[2,8,11] convolution(%p0, %p1), window={size=3}, dim_labels=b0f_0io->b0f, feature_group_count=11",
            ["f32[2,10,11]", "f32[3,1,11]"],
            2 * 2 * 8 * 11 * 3,
        ),
        (
            '(bf16[5,7], s8[4096]) custom-call(%p0, %p1), custom_call_target="__cublas$lt$matmul", backend_config='
            '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"]}}}',
            ["bf16[11,5]", "bf16[11,7]"],
            2 * 5 * 7 * 11,
        ),
        (
            'f32[5,7] custom-call(%p0, %p1), custom_call_target="__onednn$matmul", '
            'backend_config={"onednn_matmul_config":{}}',
            ["f32[5,11]", "f32[11,7]"],
            2 * 5 * 7 * 11,
        ),
        ("f32[5,7] add(%p0, %p1)", ["f32[5,7]", "f32[5,7]"], 0),
    ],
)
def test_products(line, operands, expected):
    """*Wrong* for XLA:TPU's padded windows: every (output, kernel) pair, 32 times too many."""
    counted = flops.count(product(line, *operands))
    assert counted.matmul == expected == counted.total
    assert counted.unknown == [] == counted.unknown_loops


@pytest.mark.parametrize(
    ("target", "mask", "window", "pairs", "products"),
    [
        ("__cudnn$fmhaSoftmax", "NO_MASK", 0, 8 * 8, 2),
        ("__cudnn$fmhaSoftmax", "CAUSAL", 0, 8 * 9 // 2, 2),
        ("__cudnn$fmhaSoftmaxBackward", "CAUSAL", 0, 8 * 9 // 2, 5),
        ("__cudnn$fmhaSoftmax", "CAUSAL", 3, 1 + 2 + 6 * 3, 2),
    ],
)
def test_cudnn_attention(target, mask, window, pairs, products):
    """Two products forward and five backward, of the pairs that the mask leaves."""
    config = {"intermediate_tensor_shape": {"dimensions": ["2", "4", "8", "8"]}, "mask_type": mask}
    config["sliding_window_length"] = window
    line = f'(bf16[2,8,4,16], u8[0]) custom-call(%p0), custom_call_target="{target}", backend_config='
    counted = flops.count(product(line + json.dumps({"cudnn_fmha_backend_config": config}), "bf16[2,8,4,16]"))
    assert counted.matmul == 2 * products * 2 * 4 * pairs * 16


DOT = "  %{0} = f32[8,8] dot(%{1}, %{1}), lhs_contracting_dims={{}}, rhs_contracting_dims={{}}\n"


def test_loops_fusions_and_conditionals():
    """3 x 4 inner products, 4 outer ones in a fusion, and of two branches the one of two products."""
    fused = f"\n%fused (a: f32[8]) -> f32[8,8] {{\n  %a = f32[8] parameter(0)\n{DOT.format('d', 'a')}}}\n"
    inner, inside = loop("inner", DOT.format("d1", "inner.x"), bound=3, carried="%outer.x")
    fusion = "  %f = f32[8,8] fusion(%outer.x), kind=kOutput, calls=%fused\n"
    outer, lines = loop("outer", inside + fusion, bound=4)
    branch = "\n%{0} (a: f32[8]) -> f32[8,8] {{\n  %{0}.a = f32[8] parameter(0)\n{1}}}\n"
    one = branch.format("one", DOT.format("d2", "one.a"))
    two = branch.format("two", DOT.format("d3", "two.a") + DOT.format("d4", "two.a"))
    switch = "  %i = s32[] constant(0)\n  %s = f32[8,8] conditional(%i, %x, %x), branch_computations={%one, %two}\n"
    counted = flops.count(module(fused + inner + outer + one + two, lines + switch))
    assert counted.matmul == 128 * (12 + 4 + 2)


def test_a_loop_of_unknown_length_is_named():
    """Its body is in the sum once, and the audit says so: *wrong*: silently once."""
    counted = flops.count(module(*loop("w", DOT.format("d", "w.x"), step=0)))
    assert counted.matmul == 128 and counted.unknown_loops == ["w"]


KERNEL = 'f32[8] custom-call(%p0), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/mine/pallas_call"}'


def test_kernels_tell_are_told_or_are_named():
    """A kernel's own estimate, else the caller's function for its name, else its name: *wrong*: silently zero."""
    estimated = KERNEL + ', backend_config={"custom_call_config":{"body":"x","cost_estimate":{"flops":"123"}}}'
    assert flops.count(product(estimated, "f32[8]")).kernels == {"mine": 123}
    assert flops.count(product(KERNEL, "f32[8]")).unknown == ["mine"]
    told = flops.count(product(KERNEL, "f32[8]"), {"other": lambda i: 1.0, "mi.e": lambda i: 2.0 * len(i.operands)})
    assert told.kernels == {"mine": 2} and told.unknown == [] and told.total == 2
    moves = 'f32[8] custom-call(%p0), custom_call_target="AllocateBuffer"'
    assert flops.count(product(moves, "f32[8]")).unknown == []


def splash(phase, blocks, mask="{ { { 1, 0, 0 }, { 2, 1, 0 }, { 0, 2, 1 } } }", **settings):
    """A call of a splash kernel as XLA:TPU prints it; block mask [1, 3, 3]: five of nine blocks."""
    sizes = {"block_q": 2, "block_kv": 2, "block_q_dkv": 2, "block_kv_dkv": 2, "block_q_dq": 2, "block_kv_dq": 2}
    metadata = json.dumps(json.dumps(sizes | blocks | settings))
    return f"""HloModule m

ENTRY %main () -> bf16[2,4,6,8] {{
  %next = s8[1,3,3] constant({{...}})
  %mask = s8[1,3,3] constant({mask})
  %start = (s8[1,3,3], s8[1,3,3], u32[]) copy-start(%mask)
  %done = s8[1,3,3]{{2,1,0:S(1)}} copy-done(%start)
  %q = bf16[2,4,6,8] parameter(0)
  ROOT %k = bf16[2,4,6,8] custom-call(%next, %done, %q, %q, %q), custom_call_target="tpu_custom_call", frontend_attributes={{kernel_metadata={{
"xprof_metadata":{metadata}
}}}}, metadata={{op_name="jit(f)/splash_mha_{phase}_residuals/pallas_call"}}
}}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("phase", "blocks", "settings", "expected"),
    [
        ("fwd", {}, {}, 2 * 2 * (2 * 4) * 5 * (2 * 2) * 8),
        ("dq", {"block_kv_dq": 4}, {}, 2 * 3 * (2 * 4) * 5 * (2 * 4) * 8),
        ("dkv", {"block_q_dkv": 6}, {}, 2 * 4 * (2 * 4) * 5 * (6 * 2) * 8),
        ("dkv", {}, {"use_fused_bwd_kernel": True}, 2 * 5 * (2 * 4) * 5 * (2 * 2) * 8),
    ],
)
def test_splash_kernels_count_the_blocks_of_their_mask(phase, blocks, settings, expected):
    """FLOPs x products x (batch x heads) x blocks left x block area x head size; *wrong*: all nine blocks."""
    counted = flops.count(hlo.parse(splash(phase, blocks, **settings)))
    assert list(counted.kernels.values()) == [expected] and counted.unknown == []


def test_a_splash_mask_for_each_head():
    """Four masks of 5, 4, 3 and 2 blocks; *wrong*: their sum for each of the four heads."""
    masks = (
        "{ {{1,0,0},{2,1,0},{0,2,1}}, {{1,0,0},{2,1,0},{0,0,1}}, {{1,0,0},{0,1,0},{0,0,1}}, {{1,0,0},{0,1,0},{0,0,0}} }"
    )
    text = splash("fwd", {}, mask=masks).replace("s8[1,3,3]", "s8[4,3,3]")
    assert flops.count(hlo.parse(text)).total == 2 * 2 * 2 * (5 + 4 + 3 + 2) * (2 * 2) * 8


def test_a_splash_kernel_whose_mask_is_not_printed_is_named():
    """``as_text()`` leaves larger constants away; then nothing is known."""
    counted = flops.count(hlo.parse(splash("fwd", {}, mask="{...}")))
    assert counted.kernels == {} and counted.unknown == ["splash_mha_fwd_residuals"]


@pytest.mark.parametrize(("other", "times"), [("{ { { 1, 0, 0 }, { 2, 1, 0 }, { 0, 2, 1 } } }", 2), ("{...}", 0)])
def test_a_splash_kernel_is_like_its_equals(other, times):
    """Called again on the same shapes, with a mask that is not to be seen: as many blocks, if one of them is known."""
    text = splash("fwd", {}, mask=other)
    head, call = text[: text.index("  ROOT")], text[text.index("  ROOT") :]
    second = call.replace("ROOT %k", "ROOT %k2").replace("%done", "%hidden")
    first = call.replace("ROOT %k", "%k").removesuffix("}\n")
    counted = flops.count(hlo.parse(f"{head}  %hidden = s8[1,3,3] constant({{...}})\n{first}{second}"))
    assert counted.total == times * 2 * 2 * (2 * 4) * 5 * (2 * 2) * 8
    assert bool(counted.unknown) == (times == 0)
