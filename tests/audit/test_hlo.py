"""HLO text is read as XLA prints it: tuples, layouts, tiles, memory spaces, attributes over several lines."""

import pytest

from jaxpar.audit import hlo
from jaxpar.audit.shapes import Array, arrays, nbytes, parse_shape

TEXT = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[4]{0})->f32[4]{0}}, num_partitions=8

FileNames
1 "/somewhere/model.py"

FunctionNames
1 "layer"

FileLocations
1 {file_name_id=1 function_name_id=1 line=17 end_line=17 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%region_0.1 (a.1: f32[], b.1: f32[]) -> f32[] {
  %a.1 = f32[]{:T(128)} parameter(0)
  %b.1 = f32[]{:T(128)} parameter(1)
  ROOT %sum.1 = f32[]{:T(128)} add(%a.1, %b.1)
}

ENTRY %main.1 (x.1: f32[4]) -> (f32[4], bf16[2,8]) {
  %x.1 = f32[4]{0:T(128)S(1)} parameter(0), sharding={replicated}, metadata={op_name="state[\\'a\\']"}
  %kernel.1 = (bf16[2,8]{1,0:T(8,128)(2,1)}, /*index=1*/f32[]{:T(128)}) custom-call(%x.1, /*index=5*/%x.1), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512, \\"calls=%nothing\\": 1}"
}}, metadata={op_name="jit(step)/kernel/pallas_call" stack_frame_id=1}, backend_config={"custom_call_config":{"body":"a)b}c,d="}}
  %get-tuple-element.1 = bf16[2,8]{1,0:T(8,128)(2,1)} get-tuple-element(%kernel.1), index=0
  %all-reduce.1 = f32[4]{0:T(128)} all-reduce(%x.1), channel_id=3, replica_groups=[2,4]<=[8], to_apply=%region_0.1
  ROOT %tuple.1 = (f32[4]{0:T(128)}, bf16[2,8]{1,0:T(8,128)(2,1)}) tuple(%all-reduce.1, %get-tuple-element.1)
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def module():
    return hlo.parse(TEXT)


def test_computations_instructions_and_the_entry(module):
    """*Wrong*: the line break inside an attribute ends the instruction, and the rest is lost or becomes one."""
    assert module.name == "jit_step" and module.num_partitions == 8 and module.num_replicas == 1
    assert list(module.computations) == ["region_0.1", "main.1"] and module.entry.name == "main.1"
    names = ["x.1", "kernel.1", "get-tuple-element.1", "all-reduce.1", "tuple.1"]
    assert [i.name for i in module.entry.instructions] == names
    assert module.entry.root.name == "tuple.1" and module.computations["region_0.1"].root.opcode == "add"
    assert [i.name for i in module.entry.users["x.1"]] == ["kernel.1", "all-reduce.1"]


def test_operands_attributes_and_called_computations(module):
    """*Wrong*: brackets, commas or "calls=%..." inside a string count as structure."""
    kernel, reduced = module.entry.by_name["kernel.1"], module.entry.by_name["all-reduce.1"]
    assert kernel.opcode == "custom-call" and kernel.operand_names == ["x.1", "x.1"] and kernel.called == {}
    assert kernel.attributes["custom_call_target"] == '"tpu_custom_call"'
    assert kernel.backend_config == {"custom_call_config": {"body": "a)b}c,d="}}
    assert kernel.op_name == "jit(step)/kernel/pallas_call" and module.source(kernel) == "/somewhere/model.py:17"
    assert module.entry.by_name["x.1"].op_name == "state['a']" and module.source(reduced) == ""
    assert reduced.called == {"to_apply": ["region_0.1"]} and reduced.attributes["replica_groups"] == "[2,4]<=[8]"
    assert module.callers == {"region_0.1": [reduced]}


def test_source_where_metadata_carries_it():
    """Older text names file and line in the metadata itself."""
    text = (
        'ENTRY %m (x: f32[]) -> f32[] {\n  ROOT %x = f32[] parameter(0), metadata={source_file="a.py" source_line=3}\n}'
    )
    module = hlo.parse("HloModule m\n\n" + text)
    assert module.source(module.entry.root) == "a.py:3"


@pytest.mark.parametrize(
    ("text", "shape", "size"),
    [
        ("f32[]", Array("f32", ()), 4),
        ("pred[3]{0}", Array("pred", (3,), "0"), 3),
        ("bf16[4,2048]{1,0:T(8,128)(2,1)S(1)}", Array("bf16", (4, 2048), "1,0:T(8,128)(2,1)S(1)", 1), 16384),
        ("s4[5]{0:E(4)}", Array("s4", (5,), "0:E(4)"), 3),
        ("f8e4m3fn[2,3]", Array("f8e4m3fn", (2, 3)), 6),
        ("c64[2]", Array("c64", (2,)), 16),
        ("f32[0,3]{1,0}", Array("f32", (0, 3), "1,0"), 0),
        ("s32[<=7]{0}", Array("s32", (7,), "0"), 28),
        ("token[]", Array("token", ()), 0),
        ("((f32[2]{0}, u8[]), /*index=1*/s8[3])", ((Array("f32", (2,), "0"), Array("u8", ())), Array("s8", (3,))), 12),
        ("()", (), 0),
    ],
)
def test_shapes(text, shape, size):
    """Types, layouts and memory spaces; bytes without tile padding, four-bit elements packed."""
    assert parse_shape(text) == shape
    assert nbytes(shape) == size == sum(a.nbytes for a in arrays(shape))


def test_text_that_is_no_module():
    """StableHLO, or a module without an entry, is refused rather than counted as nothing."""
    with pytest.raises(ValueError, match="HloModule"):
        hlo.parse("module @jit_f {\n}")
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.parse("HloModule m\n")
