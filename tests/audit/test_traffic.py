"""Bytes between memory and cores, by hand."""

import pytest
from hlo_modules import loop, module

from jaxpar.audit import hlo
from jaxpar.audit.traffic import hbm_traffic

COPY = 2 * 8 * 4  # the entry's own ``copy`` of f32[8]: read and written


@pytest.mark.parametrize(
    "lines, expected",
    [
        ("  %y = f32[8] add(%x, %x)", 3 * 32),
        ("  %y = f32[8]{0:S(1)} add(%x, %x)", 2 * 32),  # the result stays in a core's own memory
        ("  %y = f32[8]{0:S(1)} copy(%x)\n  %z = f32[8] negate(%y)", 32 + 32),
        ("  %y = f32[2] slice(%x), slice={[0:2]}", 2 * 8),
        ("  %i = s32[] constant(0)\n  %y = f32[2] dynamic-slice(%x, %i), dynamic_slice_sizes={2}", 2 * 8),
        (
            "  %i = s32[] constant(0)\n  %u = f32[2] slice(%x), slice={[0:2]}\n"
            "  %y = f32[8] dynamic-update-slice(%x, %u, %i)",
            2 * 8 + 2 * 8,
        ),
        ("  %t = (f32[8], f32[8]) tuple(%x, %x)\n  %y = f32[8] get-tuple-element(%t), index=1", 0),
        ("  %y = f32[2,4] bitcast(%x)\n  %c = f32[1000] constant({...})\n  %i = f32[99] iota(), iota_dimension=0", 0),
        ("  %y = f32[8] custom-call(%x), custom_call_target=\"tpu_custom_call\"", 2 * 32),
    ],
)  # fmt: skip
def test_plain_operations(lines, expected):
    """Operands and results in memory once; a slice and an update only their part."""
    assert hbm_traffic(module("", lines)) == COPY + expected


def fusion(body, shape="f32[8]", operands="%x"):
    lines = f"  %y = {shape} fusion({operands}), kind=kLoop, calls=%fused"
    return module(f"\n%fused (a: f32[8]) -> {shape} {{\n{body}\n}}\n", lines)


def test_a_fusion_reads_and_writes_once():
    """Whatever happens inside."""
    body = """  %a = f32[8] parameter(0)
  %s = f32[8] sine(%a)
  %c = f32[8] cosine(%a)
  ROOT %r = f32[8] add(%s, %c)"""
    assert hbm_traffic(fusion(body)) == COPY + 2 * 32


def test_a_fusion_that_slices_reads_the_slice():
    """One layer's weights out of a stack; *wrong*: the whole stack for every layer."""
    body = """  %a = f32[8] parameter(0)
  %i = s32[] constant(0)
  %s = f32[2] dynamic-slice(%a, %i), dynamic_slice_sizes={2}
  ROOT %r = f32[2] sine(%s)"""
    assert hbm_traffic(fusion(body, "f32[2]")) == COPY + 8 + 8


def test_a_fusion_that_updates_writes_the_part():
    """One layer's gradient into a stack, in place; the part comes from inside."""
    body = """  %a = f32[8] parameter(0)
  %b = f32[2] parameter(1)
  %i = s32[] constant(0)
  %s = f32[2] sine(%b)
  ROOT %r = f32[8] dynamic-update-slice(%a, %s, %i)"""
    text = "\n%fused (a: f32[8], b: f32[2]) -> f32[8] {\n" + body + "\n}\n"
    lines = "  %u = f32[2]{0:S(1)} slice(%x), slice={[0:2]}\n  %y = f32[8] fusion(%x, %u), kind=kLoop, calls=%fused"
    assert hbm_traffic(module(text, lines)) == COPY + 0 + 8  # the slice's result and the fusion's operand: not in HBM


def test_loops_multiply():
    """Three times four; reducers and the loop's own counter of four bytes beside it."""
    inner, inside = loop("inner", "  %y = f32[8] add(%inner.x, %inner.x)", trips=3, carried="%outer.x")
    outer, lines = loop("outer", inside, trips=4)
    counter = 3 * 4  # add: two operands and a result
    compare = 4 + 4 + 1
    copy = 2 * 4  # of the first index
    inner_cost = 3 * (96 + counter) + 4 * compare
    got = hbm_traffic(module(inner + outer, lines))
    assert got == pytest.approx(COPY + copy + 4 * (inner_cost + copy + counter) + 5 * compare, abs=2 * 4 * compare)
    assert got > COPY + 12 * 96


def test_a_reducer_is_not_run_from_memory():
    """What ``reduce`` applies to each pair is arithmetic inside it."""
    text = """HloModule m

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

ENTRY %main (x: f32[8]) -> f32[] {
  %x = f32[8] parameter(0)
  %zero = f32[] constant(0)
  ROOT %r = f32[] reduce(%x, %zero), dimensions={0}, to_apply=%sum
}
"""
    assert hbm_traffic(hlo.parse(text)) == 32 + 4 + 4
