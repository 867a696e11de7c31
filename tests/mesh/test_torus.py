"""How a mesh lies on TPU tori, slices and GPU nodes, for described devices."""

import functools
import math
import types

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from jax.experimental import mesh_utils

from jaxpar.errors import ConfigError
from jaxpar.mesh.axes import MESH_AXES, make_mesh, torus_stages
from jaxpar.mesh.targets import parse_target, prepare_to_describe


def sizes(**given):
    return {a: given.get(a, 1) for a in MESH_AXES}


@functools.cache
def described(text):
    prepare_to_describe()
    return parse_target(text).devices()


def mesh_on(text, **given):
    return make_mesh(sizes(**given), described(text))


@pytest.mark.parametrize(
    "text, mesh, stages",
    [
        ("v5e:16x16", dict(fsdp=256), (16, 16)),
        ("v5e:16x16", dict(fsdp=64, tensor=4), (4, 16)),
        ("v5e:16x16", dict(fsdp=16, tensor=16), (16,)),
        ("v5e:16x16", dict(tensor=256), (1,)),
        ("v5e:4x8", dict(fsdp=32), (4, 8)),
        ("v5e:4x4", dict(fsdp=8, tensor=2), (2, 4)),
        ("v5p:4x4x4", dict(fsdp=64), (4, 4, 4)),
        ("v5p:4x4x4", dict(fsdp=16, tensor=4), (4, 4)),
        ("v5p:4x4x4*2", dict(data=2, fsdp=64), (4, 4, 4)),
        ("v5p:4x4x4*2", dict(fsdp=128), (2, 4, 4, 4)),
        ("v5e:1x1", dict(fsdp=1), (1,)),
        ("h100:2x4", dict(fsdp=8), (8,)),
    ],
)
def test_stages(text, mesh, stages):
    """One for each torus dimension that the axis runs along, and one for the slices; *wrong*: (256,)."""
    assert torus_stages(mesh_on(text, **mesh), "fsdp") == stages


@pytest.mark.parametrize(("text", "stages"), [("v5e:4x4", (4, 4)), ("v5e:2x4", (2, 4))])
def test_no_ring_is_wound_through_a_slice(text, stages):
    """JAX winds one through small slices. *Wrong*: a single stage, over which XLA makes no reduce-scatters."""
    grid = mesh_utils.create_device_mesh((len(described(text)),), described(text))
    wound = types.SimpleNamespace(devices=grid.reshape(1, -1, 1, 1, 1, 1))
    assert torus_stages(wound, "fsdp") == (len(described(text)),)
    assert torus_stages(mesh_on(text, fsdp=len(described(text))), "fsdp") == stages


def test_two_cores_of_a_chip():
    """They count as a dimension of their own, whatever else moves."""
    for text in ("tpu7x:2x2x1", "tpu7x:4x4x4"):
        mesh = mesh_on(text, fsdp=len(described(text)))
        assert math.prod(torus_stages(mesh, "fsdp")) == len(described(text))
    mesh = mesh_on("tpu7x:4x4x4", fsdp=128)
    assert sorted(torus_stages(mesh, "fsdp")) == [2, 4, 4, 4]


def test_cpu_devices_have_one_stage():
    """Without coordinates there is nothing to follow."""
    mesh = make_mesh(sizes(fsdp=4, tensor=2), jax.devices())
    assert torus_stages(mesh, "fsdp") == (4,)
    assert torus_stages(mesh, "data") == (1,)


@pytest.mark.parametrize("text, mesh", [("v5e:16x16", dict(fsdp=64, tensor=4)), ("v5p:4x4x4", dict(fsdp=64))])
def test_a_stage_moves_along_one_dimension(text, mesh):
    """Every group of every stage, on every line of the mesh: devices that differ in one coordinate alone."""
    from jaxpar.parallel.collectives import ZeroCollectives

    made = mesh_on(text, **mesh)
    for line in np.moveaxis(made.devices, 1, 0).reshape(mesh["fsdp"], -1).T:
        for groups in ZeroCollectives(torus_stages(made, "fsdp"))._groups():
            for group in groups:
                places = np.array([line[i].coords for i in group])
                assert ((places != places[0]).any(0)).sum() == 1


def line_mesh(places):
    """A mesh of one axis, fsdp, over made-up TPU devices at these places."""
    devices = np.empty(len(places), object)
    for i, (*coords, core) in enumerate(places):
        devices[i] = types.SimpleNamespace(platform="tpu", slice_index=0, coords=tuple(coords), core_on_chip=core)
    return types.SimpleNamespace(devices=devices.reshape(1, -1, 1, 1, 1, 1))


@hypothesis.settings(max_examples=80, deadline=None, derandomize=True)
@hypothesis.given(
    st.lists(st.integers(1, 4), min_size=4, max_size=4).filter(lambda s: math.prod(s) <= 64),
    st.randoms(),
    st.booleans(),
)
def test_any_order_of_the_devices_has_the_right_product(shape, random, shuffled):
    """Also none at all. *Wrong*: a second device that differs in two coordinates never ended."""
    places = [tuple(map(int, place)) for place in np.ndindex(*shape)]
    if shuffled:
        random.shuffle(places)
    stages = torus_stages(line_mesh(places), "fsdp")
    assert math.prod(stages) == len(places) and all(size > 1 for size in stages[1:])
    if not shuffled:
        assert stages == (tuple(n for n in shape if n > 1) or (1,))


def crossing(mesh):
    """The mesh axes along which the slice, or the node, changes."""

    def home(device):
        return (getattr(device, "slice_index", 0) or 0) if device.platform == "tpu" else device.process_index

    grid = np.vectorize(home, otypes=[int])(mesh.devices)
    return {a for n, a in enumerate(MESH_AXES) if (grid != grid.take([0], n)).any()}


@pytest.mark.parametrize(
    "text, mesh, axes",
    [
        ("v5e:2x4*2", dict(data=2, fsdp=8), {"data"}),
        ("v5e:2x4*2", dict(data=4, fsdp=4), {"data"}),
        ("v5e:2x4*2", dict(data=2, fsdp=2, tensor=4), {"data"}),
        ("v5e:2x4*2", dict(fsdp=16), {"fsdp"}),
        ("v5e:2x4*2", dict(fsdp=2, tensor=8), {"fsdp"}),
        ("v5e:2x4*2", dict(data=1, pipe=2, tensor=8), {"pipe"}),
        ("v5e:2x4", dict(data=2, fsdp=4), set()),
        ("h100:2x4", dict(data=2, fsdp=4), {"data"}),
        ("h100:2x4", dict(fsdp=8), {"fsdp"}),
    ],
)
def test_which_axis_crosses_the_slow_network(text, mesh, axes):
    """The outermost that can, and no other."""
    made = mesh_on(text, **mesh)
    assert crossing(made) == axes
    assert len(set(made.devices.flat)) == made.devices.size == len(described(text))


def test_no_axis_can_cross():
    """One line, naming data."""
    with pytest.raises(ConfigError, match=r"^mesh\.data: 1 is not a multiple of the 2 slices.*legal: multiples of 2"):
        mesh_on("v5e:2x4*2", tensor=16)
