"""Bytes on the wire, by hand: kinds, axes, executions, asynchrony, and who asked."""

import pytest
from hlo_modules import loop

from jaxpar.audit import hlo
from jaxpar.audit.collectives import collectives, summary, unrequested

MESH = {"data": 2, "fsdp": 4}  # partition = data * 4 + fsdp
FSDP, DATA, ALL = "{{0,1,2,3},{4,5,6,7}}", "{{0,4},{1,5},{2,6},{3,7}}", "{}"
ADD = "%add (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)\n  ROOT %s = f32[] add(%a, %b)\n}\n"  # noqa: E501
GROUPED = "channel_id=1, replica_groups={}, use_global_device_ids=true"


def program(lines, computations=""):
    """Eight partitions; the entry reads %x f32[8,16] (512 bytes)."""
    lines = f"  %x = f32[8,16] parameter(0)\n{lines}\n  ROOT %end = f32[] constant(0)\n"
    entry = f"ENTRY %main (x: f32[8,16]) -> f32[] {{\n{lines}}}"
    return hlo.parse(f"HloModule m, num_partitions=8\n\n{ADD}\n{computations}\n{entry}\n")


def only(lines, computations=""):
    """The one record of a program."""
    (record,) = collectives(program(lines, computations), MESH)
    return record


def grouped(groups):
    return f"channel_id=1, replica_groups={groups}, use_global_device_ids=true"


@pytest.mark.parametrize(
    ("line", "kind", "axis", "wire"),
    [
        (f"f32[32,16] all-gather(%x), {grouped(FSDP)}, dimensions={{0}}", "all-gather", "fsdp", 3 * 512),
        (f"f32[16,16] all-gather(%x), {grouped(DATA)}, dimensions={{0}}", "all-gather", "data", 512),
        (f"f32[2,16] reduce-scatter(%x), {grouped(FSDP)}, to_apply=%add", "reduce-scatter", "fsdp", 512 * 3 / 4),
        (f"f32[8,16] all-reduce(%x), {grouped(FSDP)}, to_apply=%add", "all-reduce", "fsdp", 2 * 512 * 3 / 4),
        (f"f32[8,16] all-reduce(%x), {grouped(ALL)}, to_apply=%add", "all-reduce", "data+fsdp", 2 * 512 * 7 / 8),
        ("f32[8,16] all-reduce(%x), channel_id=1, replica_groups={{0}}, to_apply=%add", "all-reduce", "data+fsdp", 896),
        (f"f32[8,16] all-to-all(%x), channel_id=1, replica_groups={FSDP}, dimensions={{0}}", "all-to-all", "fsdp", 384),
        (
            "f32[8,16] collective-permute(%x), channel_id=1, source_target_pairs={{0,4},{4,0},{1,5},{5,1}}",
            "collective-permute",
            "data",
            512,
        ),
        (
            "f32[8,16] collective-permute(%x), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,3}}",
            "collective-permute",
            "fsdp",
            512,
        ),
        (
            f"f32[8,16] collective-broadcast(%x), channel_id=1, replica_groups={FSDP}",
            "collective-broadcast",
            "fsdp",
            512,
        ),
        (
            f"f32[64,16] ragged-all-to-all(%x, %x, %x, %x, %x, %x), channel_id=1, replica_groups={FSDP}",
            "ragged-all-to-all",
            "fsdp",
            384,
        ),
        (
            "f32[16,16] all-gather(%x), channel_id=1, replica_groups=[4,2]<=[8], use_global_device_ids=true",
            "all-gather",
            "fsdp(2 of 4)",
            512,
        ),
        (
            "f32[32,16] all-gather(%x), channel_id=1, replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp'}, "
            "dimensions={0}, use_global_device_ids=true",
            "all-gather",
            "fsdp",
            3 * 512,
        ),
    ],
)
def test_conventions(line, kind, axis, wire):
    """(g-1)/g of the whole for gathers and scatters, twice that for an all-reduce, a permute once."""
    record = only(f"  %c = {line}")
    assert (record.kind, record.axis, record.total_bytes) == (kind, axis, wire)
    assert record.executions == 1 and not record.asynchronous and record.dims == (8, 16)


@pytest.mark.parametrize(
    "line",
    [
        f"f32[8,16] all-reduce(%x), {grouped('{{0},{1},{2},{3},{4},{5},{6},{7}}')}, to_apply=%add",
        "f32[8,16] all-reduce(%x), replica_groups={}, to_apply=%add",  # of replicas, and there is one
        "f32[8,16] collective-permute(%x), channel_id=1, source_target_pairs={{0,0},{1,1}}",
    ],
)
def test_one_member_moves_nothing(line):
    """*Wrong*: ids without channel_id taken for partitions: 896 bytes."""
    assert collectives(program(f"  %c = {line}"), MESH) == []


def test_pairs_count_once_and_are_asynchronous():
    """A start and its done, in the forms of every backend; *wrong*: both, or the start's tuple as the operand."""
    lines = f"""
  %g = ((f32[8,16]), f32[32,16]) all-gather-start(%x), {grouped(FSDP)}, dimensions={{0}}
  %gd = f32[32,16] all-gather-done(%g)
  %p = (f32[8,16], f32[8,16], u32[], u32[]) collective-permute-start(%x), channel_id=2, source_target_pairs={{{{0,1}}}}
  %pd = f32[8,16] collective-permute-done(%p)
  %r = ((f32[8,16]), f32[2,16]) reduce-scatter-start(%x), {grouped(FSDP)}, dimensions={{0}}, to_apply=%add
  %rd = f32[2,16] reduce-scatter-done(%r)
  %s = ((f32[8,16]), f32[8,16]) all-reduce-start(%x), {grouped(DATA)}, to_apply=%add, backend_config={{"collective_backend_config":{{"is_sync":true}}}}
  %sd = f32[8,16] all-reduce-done(%s)
  %a = ((f32[8,16]), f32[8,16], s32[]) async-start(%x), calls=%wrapped
  %ad = f32[8,16] async-done(%a), calls=%wrapped
"""  # noqa: E501
    wrapped = f"%wrapped (w: f32[8,16]) -> f32[8,16] {{\n  %w = f32[8,16] parameter(0)\n  ROOT %t = f32[8,16] all-to-all(%w), channel_id=3, replica_groups={FSDP}, dimensions={{0}}\n}}\n"  # noqa: E501
    records = collectives(program(lines, wrapped), MESH)
    assert {r.kind: (r.total_bytes, r.asynchronous) for r in records} == {
        "all-gather": (3 * 512, True),
        "collective-permute": (512, True),
        "reduce-scatter": (384, True),
        "all-reduce": (512, False),  # the backend runs it as one
        "all-to-all": (384, True),
    }
    assert len(records) == 5
    total = summary(records)
    assert total["total"] == 1536 + 512 + 384 + 512 + 384 and total["asynchronous"] == total["total"] - 512
    assert total["by_axis"] == {"fsdp": 1536 + 512 + 384 + 384, "data": 512}
    assert total["by_axis_and_kind"]["data"] == {"all-reduce": 512} and total["by_kind"]["all-gather"] == 1536


def test_loops_and_conditionals():
    """3 x 4 gathers inside, 4 scatters outside; of two branches the one of more bytes."""
    gather = f"  %g = f32[32,16] all-gather(%big), {grouped(FSDP)}, dimensions={{0}}"
    big = "  %{0} = f32[8,16] constant({{...}})\n"
    inner, inside = loop("inner", big.format("big") + gather, bound=3, carried="%outer.x")
    scatter = big.format("b2") + f"  %s = f32[2,16] reduce-scatter(%b2), {grouped(FSDP)}, to_apply=%add\n"
    outer, lines = loop("outer", inside + scatter, trips=4, carried="%y")
    branch = "%{0} (p: f32[8,16]) -> f32[] {{\n  %{0}.p = f32[8,16] parameter(0)\n  %{0}.c = {1}\n  ROOT %{0}.r = f32[] constant(0)\n}}\n"  # noqa: E501
    few = branch.format("few", f"f32[8,16] all-reduce(%few.p), {grouped(DATA)}, to_apply=%add")
    many = branch.format("many", f"f32[32,16] all-gather(%many.p), {grouped(FSDP)}, dimensions={{0}}")
    switch = "  %i = s32[] constant(0)\n  %c = f32[] conditional(%i, %x, %x), branch_computations={%few, %many}\n"
    records = collectives(
        program(f"  %y = f32[8] constant({{...}})\n{lines}{switch}", inner + outer + few + many), MESH
    )
    counted = {(r.kind, r.instruction): (r.executions, r.total_bytes) for r in records}
    assert counted == {
        ("all-gather", "g"): (12, 12 * 1536),
        ("reduce-scatter", "s"): (4, 4 * 384),
        ("all-gather", "many.c"): (1, 1536),
    }


FUSED = """
%start (a: f32[8,16]) -> (f32[8,16], f32[32,16], u32[]) {{
  %a1 = f32[8,16] parameter(0)
  %g1 = f32[32,16] all-gather(%a1), {0}, dimensions={{0}}, backend_config={{"async_collective_fusion_config":{{"flag_start":"-1"}}}}
  ROOT %s1 = (f32[8,16], f32[32,16], u32[]) custom-call(%g1), custom_call_target="AsyncCollectiveStart"
}}

%along (a: f32[8,16], b: f32[32,16]) -> (f32[8,8], f32[32,16]) {{
  %a2 = f32[8,16] parameter(0)
  %d2 = f32[8,8] dot(%a2, %a2), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
  %g2 = f32[32,16] all-gather(%a2), {0}, dimensions={{0}}, backend_config={{"async_collective_fusion_config":{{"flag_start":"2"}}}}
  ROOT %t2 = (f32[8,8], f32[32,16]) tuple(%d2, %g2)
}}

%done (a: f32[8,16], b: f32[32,16]) -> f32[32,16] {{
  %a3 = f32[8,16] parameter(0)
  %g3 = f32[32,16] all-gather(%a3), {0}, dimensions={{0}}, backend_config={{"async_collective_fusion_config":{{"flag_start":"2"}}}}
  ROOT %s3 = f32[32,16] custom-call(%a3, %g3), custom_call_target="AsyncCollectiveDone"
}}
""".format(grouped(FSDP))  # noqa: E501


def test_a_collective_spread_over_fusions_counts_once():
    """XLA:TPU prints it in the fusion that starts it, in those that carry it along, and in the one that waits.

    *Wrong*: three times the bytes.
    """
    lines = """
  %f1 = (f32[8,16], f32[32,16], u32[]) fusion(%x), kind=kCustom, calls=%start
  %e = f32[32,16] get-tuple-element(%f1), index=1
  %f2 = (f32[8,8], f32[32,16]) fusion(%x, %e), kind=kOutput, calls=%along
  %f3 = f32[32,16] fusion(%x, %e), kind=kCustom, calls=%done
"""
    record = only(lines, FUSED)
    assert record.total_bytes == 1536 and record.asynchronous and record.instruction == "g1"


def scattering(cut):
    return f"""
%fused (a: f32[8,16], i: s32[]) -> f32[] {{
  %v = f32[8,16] parameter(0)
  %i = s32[] parameter(1)
  %r = f32[8,16] all-reduce(%v), {grouped(FSDP)}, to_apply=%add
  %bc = f32[8,16] bitcast(%r)
  ROOT %d = f32[{cut}] dynamic-slice(%bc, %i, %i), dynamic_slice_sizes={{{cut}}}
}}
"""


def test_an_all_reduce_cut_inside_its_fusion_is_a_reduce_scatter():
    """*Wrong*: the bytes of an all-reduce, twice too many; but one that keeps more than its share is one."""
    lines = "  %zero = s32[] constant(0)\n  %f = f32[2,16] fusion(%x, %zero), kind=kCustom, calls=%fused\n"
    record = only(lines, scattering("2,16"))
    assert (record.kind, record.total_bytes) == ("reduce-scatter", 384)
    record = only(lines, scattering("4,16"))
    assert (record.kind, record.total_bytes) == ("all-reduce", 768)


def test_merged_collectives_keep_their_names():
    """One all-reduce of three arrays made of three: a record each, named by the element taken out."""
    lines = f"""
  %y = bf16[4] constant({{...}})
  %z = f32[] constant(0)
  %m = (f32[8,16], bf16[4], f32[]) all-reduce(%x, %y, %z), {grouped(FSDP)}, to_apply=%add, metadata={{op_name="jit(f)/shard_map/psum"}}
  %e1 = bf16[4] get-tuple-element(%m), index=1, frontend_attributes={{is_spmd_generated="true"}}, metadata={{op_name="jit(f)/add"}}
  %e2 = f32[] get-tuple-element(%m), index=2, metadata={{op_name="jit(f)/reduce_sum"}}
"""  # noqa: E501
    records = collectives(program(lines), MESH)
    assert [(r.op_name, r.dtype, r.wire_bytes, r.by_partitioner) for r in records] == [
        ("jit(f)/shard_map/psum", "f32", 768, False),
        ("jit(f)/add", "bf16", 12, True),
        ("jit(f)/reduce_sum", "f32", 6, False),
    ]


def test_a_rewritten_collective_is_named_by_its_reduction():
    """XLA:TPU makes an all-reduce of a reduce-scatter and drops its name; the reduction's parameters keep it."""
    region = '%region (a: f32[], b: f32[]) -> f32[] {\n  %p = f32[] parameter(0), metadata={op_name="layer/reduce_scatter"}\n  %q = f32[] parameter(1)\n  ROOT %t = f32[] add(%p, %q)\n}\n'  # noqa: E501
    record = only(f"  %c = f32[8,16] all-reduce(%x), {grouped(FSDP)}, to_apply=%region", region)
    assert record.op_name == "layer/reduce_scatter" and unrequested([record]).resharding == []


def test_what_nobody_asked_for():
    """By the primitive that the op_name ends in; small all-reduces apart; a nameless one is shown."""
    lines = f"""
  %asked = f32[32,16] all-gather(%x), {grouped(FSDP)}, dimensions={{0}}, metadata={{op_name="jit(f)/shard_map/while/body/all_gather"}}
  %moved = f32[32,16] all-gather(%x), {grouped(FSDP)}, dimensions={{0}}, metadata={{op_name="jit(f)/bd,df->bf/dot_general"}}
  %large = f32[8,16] all-reduce(%x), {grouped(FSDP)}, to_apply=%add, metadata={{op_name="jit(f)/reduce_sum"}}
  %one = f32[] constant(1)
  %small = f32[] all-reduce(%one), {grouped(FSDP)}, to_apply=%add, metadata={{op_name="jit(f)/reduce_sum"}}
  %begun = f32[32,16] all-gather(%x), {grouped(FSDP)}, dimensions={{0}}, metadata={{op_name="jit(f)/all_gather_start"}}
  %placed = f32[32,16] all-gather(%x), {grouped(DATA)}, dimensions={{0}}, metadata={{op_name="jit(f)/reshard"}}
  %nameless = f32[32,16] all-gather(%x), {grouped(FSDP)}, dimensions={{0}}
"""  # noqa: E501
    records = collectives(program(lines), MESH)
    found = unrequested(records, small_bytes=256)
    assert [r.instruction for r in found.resharding] == ["moved", "large", "nameless"]
    assert [r.instruction for r in found.reductions] == ["small"]
    found = unrequested(records, asked={"dot_general", "reduce_sum"})
    assert [r.instruction for r in found.resharding] == ["asked", "begun", "placed", "nameless"]
    assert records[0].to_json()["total_bytes"] == 1536


MEGASCALE = (
    '_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="psum.9_0",'
    '_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{TARGET}x{0:7}",'
    '_xla_megascale_transfer_type="TYPE"'
)


@pytest.mark.parametrize(
    ("transfer", "target", "mesh", "kind", "axis", "wire"),
    [
        ("ALL_REDUCE", "{1,2}", {"data": 2, "fsdp": 8}, "all-reduce", "data", 2 * 512 / 2),
        ("ALL_REDUCE", "{1:4}", {"data": 8, "fsdp": 4}, "all-reduce", "data(4 of 8)", 2 * 512 * 3 / 4),
        ("ALL_GATHER", "{1,2,3,4}", {"data": 2, "fsdp": 16}, "all-gather", "fsdp(4 of 16)", 3 * 512),
        ("REDUCE_SCATTER", "{1,2}", {"data": 1, "fsdp": 16}, "reduce-scatter", "fsdp(2 of 16)", 512 / 2),
        ("ONE_TO_ONE", "{1,2}", {"data": 1, "fsdp": 1, "pipe": 2}, "collective-permute", "pipe", 512),
    ],
)
def test_what_slices_exchange(transfer, target, mesh, kind, axis, wire):
    """A ``send`` to the hosts is the only sign of it in the text; *wrong*: nothing crosses the slow network."""
    attributes = MEGASCALE.replace("{TARGET}", target).replace("TYPE", transfer)
    lines = f"""  %token = token[] after-all()
  %s = (f32[8,16], u32[], token[]) send(%x, %token), channel_id=3, is_host_transfer=true, frontend_attributes={{{attributes}}}
  %done = token[] send-done(%s), channel_id=3, is_host_transfer=true
  %r = (f32[8,16], u32[], token[]) recv(%token), channel_id=4, is_host_transfer=true, frontend_attributes={{{attributes}}}
  %got = (f32[8,16], token[]) recv-done(%r), channel_id=4, is_host_transfer=true"""  # noqa: E501
    (record,) = collectives(program(lines), mesh)
    assert (record.kind, record.axis, record.total_bytes) == (kind, axis, wire)
    assert record.between_slices and record.asynchronous and record.dims == (8, 16)
    assert unrequested([record], small_bytes=0).unnamed == [record]


def test_a_send_to_the_host_is_no_collective():
    """Host callbacks and infeeds use it too."""
    lines = """  %token = token[] after-all()
  %s = (f32[8,16], u32[], token[]) send(%x, %token), channel_id=3, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="tf"}"""  # noqa: E501
    assert collectives(program(lines), MESH) == []


@pytest.mark.parametrize(
    ("op_name", "asked"),
    [
        ("jit(f)/shard_map/(a.q/all_gather:a.k/all_gather)", True),
        ("jit(f)/shard_map/transpose(jvp())/(reduce_scatter:transpose(jvp(table))/reduce_scatter)", True),
        ("jit(f)/shard_map/(a.q/all_gather:mlp/dot_general)", False),
        ("jit(f)/shard_map/jvp()/all_gather", True),
        ("jit(f)/shard_map/transpose(jvp())/add", False),
    ],
)
def test_collectives_that_xla_merged_have_merged_names(op_name, asked):
    """XLA:GPU's form; one part that nobody asked for is enough."""
    lines = (
        f'  %g = f32[16,16] all-gather(%x), replica_groups={DATA}, dimensions={{0}}, metadata={{op_name="{op_name}"}}'
    )
    found = unrequested(collectives(program(lines), MESH))
    assert (found.resharding == []) == asked and found.unnamed == []
