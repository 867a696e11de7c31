"""Times by hand: which network an axis runs on, and what the slowest resource takes."""

import functools

import pytest

from jaxpar.audit.collectives import Collective
from jaxpar.audit.roofline import Level, network_of, roofline
from jaxpar.mesh.axes import MESH_AXES, make_mesh
from jaxpar.mesh.targets import chips, parse_target, prepare_to_describe


@functools.cache
def mesh_on(text, **given):
    prepare_to_describe()
    return make_mesh({a: given.get(a, 1) for a in MESH_AXES}, parse_target(text).devices())


def collective(axis, size, executions=1, **more):
    return Collective(
        kind="all-gather", axis=axis, group_size=2, wire_bytes=size, executions=executions, asynchronous=False,
        dtype="f32", dims=(1,), op_name="", source="", instruction="", by_partitioner=False, **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    "text, mesh, axis, level, links",
    [
        # two rings, a link each way on both
        ("v5e:16x16", dict(fsdp=256), "fsdp", "ici", 4),
        ("v5e:16x16", dict(fsdp=256), "fsdp(16 of 256)", "ici", 2),
        ("v5e:16x16", dict(fsdp=64, tensor=4), "fsdp(16 of 64)", "ici", 2),
        # a part of a dimension does not close: one link
        ("v5e:16x16", dict(fsdp=64, tensor=4), "tensor", "ici", 1),
        ("v5e:16x16", dict(fsdp=64, tensor=4), "fsdp(4 of 64)", "ici", 1),
        # a slice too small to close at all
        ("v5e:4x8", dict(fsdp=32), "fsdp", "ici", 2),
        ("v5e:4x8", dict(fsdp=32), "fsdp(4 of 32)", "ici", 1),
        ("v5p:4x4x4", dict(fsdp=64), "fsdp", "ici", 6),
        ("v5p:4x4x4", dict(fsdp=64), "fsdp(4 of 64)", "ici", 2),
        ("v5p:4x4x4", dict(fsdp=64), "mixed", "ici", 6),
        # two cores of one chip
        ("tpu7x:2x2x1", dict(fsdp=4, tensor=2), "tensor", "ici", 1),
        # between slices each device has its share of the hosts' network; 8 devices of each slice share theirs
        ("v5e:2x4*2", dict(data=2, fsdp=8), "data", "dcn", 1),
        ("v5e:2x4*2", dict(data=2, fsdp=8), "data+fsdp", "dcn", 8),
        ("v5e:2x4*2", dict(data=2, fsdp=8), "fsdp", "ici", 2),
        ("h100:1x8", dict(fsdp=8), "fsdp", "nvlink", 1),
        ("h100:2x4", dict(data=2, fsdp=4), "fsdp", "nvlink", 1),
        ("h100:2x4", dict(data=2, fsdp=4), "data", "network", 1),
        ("h100:2x4", dict(fsdp=8), "fsdp", "network", 4),
    ],
)
def test_the_network_of_an_axis(text, mesh, axis, level, links):
    """*Wrong*: one link for everything, or a torus that closes where it does not."""
    chip = parse_target(text).chip
    assert network_of(axis, mesh_on(text, **mesh), chip) == Level(level, links * chip.networks[level])


def test_nodes_cannot_send_faster_than_nvlink():
    """Eight NICs of 400 Gbit/s are 400 GB/s, below an H100's 450; of an A100 they are 200 of 300."""
    for name in ("a100", "h100"):
        level = network_of("fsdp", mesh_on(f"{name}:2x8", fsdp=16), chips()[name])
        assert level.bandwidth == min(8 * chips()[name].networks["network"], chips()[name].networks["nvlink"])


def test_times():
    """Each resource alone, the slowest of them, and the networks one after the other on top."""
    chip = chips()["v5e"]
    records = [
        collective("fsdp", 90e9, executions=2),  # two open dimensions of 45 GB/s
        collective("data", 3.125e9, between_slices=True),
    ]
    mesh = mesh_on("v5e:2x4*2", data=2, fsdp=8)
    times = roofline(3 * 197e12, "bfloat16", 1.5 * 819e9, records, chip, mesh)
    assert times == pytest.approx({"compute": 3, "hbm": 1.5, "ici": 2, "dcn": 1, "overlapped": 3, "serial": 3 + 2 + 1})
    assert roofline(0, "bfloat16", 5 * 819e9, [], chip, mesh)["overlapped"] == pytest.approx(5)


def test_what_slices_exchange_is_on_their_network():
    """Whatever else runs along the axis it is named after: half of data lies within a slice here."""
    mesh = mesh_on("v5e:4x8*2", data=4, fsdp=16)
    records = [collective("data(2 of 4)", 45e9), collective("data(2 of 4)", 3.125e9, between_slices=True)]
    times = roofline(0, "bfloat16", 0, records, chips()["v5e"], mesh)
    assert (times["ici"], times["dcn"]) == pytest.approx((1, 1))
