"""Axis sizes, layouts of parameters, and the devices asked for."""

import jax
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxpar.errors import ConfigError
from jaxpar.mesh.axes import MESH_AXES, MeshConfig, make_mesh
from jaxpar.mesh.devices import peak_flops, start_devices
from jaxpar.mesh.rules import ShardingRules, live, place, spec, unsplit_axes


def sizes(**given):
    return {a: given.get(a, 1) for a in MESH_AXES}


def test_the_free_axis_takes_what_is_left():
    """``fsdp`` by default."""
    assert MeshConfig().resolve(8) == sizes(fsdp=8)
    assert MeshConfig(tensor=4).resolve(8) == sizes(fsdp=2, tensor=4)
    assert MeshConfig(data=-1, fsdp=2).resolve(8) == sizes(data=4, fsdp=2)
    assert MeshConfig(fsdp=1).resolve(1) == sizes()


@pytest.mark.parametrize(
    "config, message",
    [
        (MeshConfig(tensor=3), r"mesh: tensor 3 needs a multiple of 3 devices, there are 8 \(legal: .*\)"),
        (MeshConfig(fsdp=4), r"mesh: fsdp 4 needs 4 devices, there are 8 \(legal: .*\)"),
        (MeshConfig(fsdp=16), r"mesh: fsdp 16 needs 16 devices, there are 8 \(legal: .*\)"),
        (MeshConfig(data=-1), r"mesh\.fsdp: -1 is the second free axis beside mesh\.data \(legal: one -1 at most\)"),
        (MeshConfig(data=0), r"mesh\.data: 0 is not a size \(legal: .*\)"),
        (MeshConfig(tensor=-2), r"mesh\.tensor: -2 is not a size \(legal: .*\)"),
    ],
)
def test_sizes_that_do_not_fit(config, message):
    """One line with the numbers."""
    with pytest.raises(ConfigError, match=f"^{message}$"):
        config.resolve(8)


def test_mesh_has_all_axes_and_explicit_types():
    """In mesh order, the last axis over neighbouring devices."""
    mesh = make_mesh(sizes(fsdp=4, tensor=2), jax.devices())
    assert mesh.axis_names == MESH_AXES
    assert mesh.axis_types == (AxisType.Explicit,) * 6
    assert mesh.devices[0, 0, 0, 0, 0].tolist() == jax.devices()[:2]


P = PartitionSpec


@pytest.mark.parametrize(
    "axes, shape, used, sharded, dim",
    [
        # a whole dimension before a split one, by zero_order
        (("embed", "mlp"), (32, 64), P(None, "tensor"), P("fsdp", "tensor"), 0),
        (("layers", "mlp", "embed"), (2, 64, 32), P(None, "tensor", None), P(None, "tensor", "fsdp"), 2),
        (("vocab", "embed"), (48, 32), P("tensor", None), P("tensor", "fsdp"), 1),
        # embed 30 does not divide by 4, but mlp 64 over tensor 2 x fsdp 4 does
        (("embed", "mlp"), (30, 64), P(None, "tensor"), P(None, ("tensor", "fsdp")), 1),
        (("heads", "head_dim"), (4, 4), P("tensor", None), P("tensor", "fsdp"), 1),
        # vectors stay whole when nothing divides, also those with two axes
        (("embed",), (30,), P(None), P(None), None),
        (("layers", "embed"), (4, 30), P(None, None), P(None, None), None),
        (("layers", "heads", "head_dim"), (4, 2, 6), P(None, "tensor", None), P(None, "tensor", None), None),
    ],
)
def test_place(axes, shape, used, sharded, dim):
    """tensor 2, fsdp 4. The layers are never cut."""
    layout = place("w", axes, shape, sizes(tensor=2, fsdp=4), ShardingRules())
    assert (layout.used, layout.sharded, layout.zero_dim) == (used, sharded, dim)
    stage0 = place("w", axes, shape, sizes(tensor=2, fsdp=4), ShardingRules(zero=0))
    assert stage0.used == stage0.sharded == used


def test_a_dimension_tensor_parallelism_does_not_divide():
    """Named, with what would divide it."""
    with pytest.raises(
        ConfigError, match=r"^layers\.attention\.k: kv_heads 2 is not divisible by mesh\.tensor 4 \(legal: 1, 2\)$"
    ):
        place("layers.attention.k", ("layers", "embed", "kv_heads", "head_dim"), (2, 32, 2, 8), sizes(tensor=4),
              ShardingRules())  # fmt: skip


def test_a_matrix_zero_cannot_cut():
    """Named; the legal sizes divide every dimension, so any of them works."""
    with pytest.raises(ConfigError, match=r"^head\.kernel: 30x46 has no dimension that mesh\.fsdp 4 divides") as error:
        place("head.kernel", ("embed", "vocab"), (30, 46), sizes(fsdp=4), ShardingRules())
    assert error.value.legal == "mesh.fsdp from 1, 2"


@pytest.mark.parametrize(
    "rules, field",
    [
        (ShardingRules(mlp=("fsdp",)), "mlp"),
        (ShardingRules(vocab=("tensor", "fsdp")), "vocab"),
        (ShardingRules(zero_order=("embd",)), "zero_order"),
        (ShardingRules(zero_order=("zero",)), "zero_order"),
    ],
)
def test_rules_no_layer_follows(rules, field):
    """One line naming the rule."""
    with pytest.raises(ConfigError, match=rf"^rules\.{field}: "):
        rules.validate()


def test_specs():
    """Axes of one device do not appear, and the others are found back."""
    s = sizes(data=2, tensor=2, fsdp=2)
    assert live(("data", "expert", "tensor"), s) == ("data", "tensor")
    assert spec(s, (), ("data", "expert"), ("data", "fsdp")) == P(None, "data", ("data", "fsdp"))
    assert unsplit_axes(P(None, ("tensor", "fsdp")), s) == ("data",)
    assert unsplit_axes(P(), s) == ("data", "fsdp", "tensor")


def test_devices():
    """The first ones; more than there are is one line."""
    assert start_devices("3") == start_devices("cpu:3") == jax.devices()[:3]
    assert start_devices() == jax.devices()
    with pytest.raises(ConfigError, match=r"^--devices: 9 devices are not there \(legal: 1 to 8 \(cpu\)\)$"):
        start_devices("9")
    with pytest.raises(ConfigError, match=r"^--devices: 0 "):
        start_devices("0")


def test_peak_of_known_devices():
    """The bf16 peak of all of them together."""

    class Device:
        device_kind, platform = "TPU v5 lite", "tpu"

    assert peak_flops([Device()] * 4) == (4 * 197e12, "TPU v5 lite bf16 peak")


def test_no_peak_for_an_unknown_kind():
    """No figure rather than a wrong one."""

    class Device:
        device_kind, platform = "abacus", "other"

    assert peak_flops([Device()]) == (0.0, "")
