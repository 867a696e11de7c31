"""Programs compiled for eight CPU devices: counts equal formulas, and XLA's own where there is no loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import compat
from jaxpar.audit import flops, hlo
from jaxpar.audit.collectives import collectives, summary, unrequested
from jaxpar.audit.loops import unknown_trip_counts

FAST_COMPILE = {"xla_backend_optimization_level": 0}
MESH = {"a": 2, "b": 2, "c": 2}


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh(tuple(MESH.values()), tuple(MESH))


def compile_text(function, *arguments, mesh=None):
    """HLO text and XLA's own count; an argument is a shape, or (shape, spec) on ``mesh``."""

    def array(shape, spec=None):
        return jax.ShapeDtypeStruct(
            shape, jnp.float32, sharding=NamedSharding(mesh, spec) if spec is not None else None
        )

    structs = [array(*a) if a and isinstance(a[0], tuple) else array(a) for a in arguments]
    if mesh is None:
        compiled = jax.jit(function).lower(*structs).compile(FAST_COMPILE)
    else:
        with jax.set_mesh(mesh):
            compiled = jax.jit(function).lower(*structs).compile(FAST_COMPILE)
    return hlo.parse(compat.hlo_text(compiled)), compiled.cost_analysis().get("flops", 0)


@pytest.fixture(scope="module")
def looped(mesh):
    """Five steps of: gather over a, product, scatter over a, ring over b, exchange over c, sum over b and c.

    Each has three more products of its own in an inner loop; then a reshard and a norm outside.
    """

    def local(x, w):  # x [8, 16] of [16, 16], w [16, 16]
        def step(x, _):
            whole = jax.lax.all_gather(x, "a", axis=0, tiled=True)  # [16, 16]
            y = jax.lax.psum_scatter(jnp.sin(whole @ w), "a", scatter_dimension=0, tiled=True)  # [8, 16]
            y = jax.lax.ppermute(y, "b", [(0, 1), (1, 0)])
            y = jax.lax.all_to_all(y, "c", 0, 1, tiled=True)  # [4, 32]
            y = jax.lax.all_to_all(y, "c", 1, 0, tiled=True)
            y, _ = jax.lax.scan(lambda z, _: (jnp.cos(z @ w), None), y, None, length=3)
            scale = jax.lax.psum(y[0], ("b", "c"))  # [16]
            return y * scale, None

        return jax.lax.scan(step, x, None, length=5)[0]

    def program(x, w):
        y = jax.shard_map(local, in_specs=(P("a"), P()), out_specs=P("a"), check_vma=False)(x, w)
        return jax.reshard(y, P(None, "a")), jnp.sqrt(jnp.sum(y * y))

    return compile_text(program, ((16, 16), P("a")), ((16, 16), P()), mesh=mesh)[0]


def test_flops_of_nested_loops(looped):
    """*Wrong*: the bodies once: 2 x 16 x 16 x (16 + 8)."""
    counted = flops.count(looped)
    assert counted.matmul == 5 * (2 * 16 * 16 * 16 + 3 * 2 * 8 * 16 * 16)
    assert counted.unknown == [] == counted.unknown_loops == unknown_trip_counts(looped)


def test_wire_of_nested_loops(looped):
    """Per kind and axis, as the formulas of the collectives say."""
    records = collectives(looped, MESH)
    row = 16 * 4
    inside = {
        "a": {"all-gather": 8 * row, "reduce-scatter": 16 * row / 2},
        "b": {"collective-permute": 8 * row},
        "c": {"all-to-all": 2 * 8 * row / 2},
        "b+c": {"all-reduce": 2 * row * 3 / 4},
    }
    found = summary(r for r in records if "shard_map" in r.op_name)
    assert found["by_axis_and_kind"] == {
        axis: {kind: 5 * size for kind, size in kinds.items()} for axis, kinds in inside.items()
    }
    assert found["asynchronous"] == 0  # XLA:CPU has no asynchronous collectives
    assert all(r.source.split(":")[0].endswith("test_compiled.py") for r in records)


def test_what_was_asked_for(looped):
    """All of it; the norm's sum of one number is listed apart."""
    found = unrequested(collectives(looped, MESH))
    assert found.resharding == []
    assert {(r.op_name.rsplit("/", 1)[-1], r.axis, r.total_bytes) for r in found.reductions} == {("reduce_sum", "a", 4)}


def test_a_product_that_moves_data(mesh):
    """A contraction split over c leaves a sum over c that no line of the program asks for."""

    def program(x, w):
        return jnp.einsum("bd,df->bf", x, w, out_sharding=P("a", None))

    module, _ = compile_text(program, ((16, 32), P("a", "c")), ((32, 8), P("c", None)), mesh=mesh)
    (record,) = unrequested(collectives(module, MESH), small_bytes=64).resharding
    assert (record.kind, record.axis, record.dims) == ("all-reduce", "c", (8, 8))
    assert record.op_name.endswith("dot_general") and flops.count(module).matmul == 2 * 8 * 16 * 8


def test_reshard_over_part_of_an_axis():
    """Turning a 4 x 2 layout exchanges halves of x with y: asked for, and named after the axis it is part of."""
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    module, _ = compile_text(lambda x: jax.reshard(x, P("y", "x")), ((16, 16), P("x", "y")), mesh=mesh)
    records = collectives(module, {"x": 4, "y": 2})
    assert {(r.kind, r.axis) for r in records} == {("all-to-all", "x(2 of 4)"), ("collective-permute", "x+y")}
    assert unrequested(records).resharding == []


CONVOLUTIONS = {
    "same": {"window_strides": (1, 1), "padding": "SAME"},
    "strided": {"window_strides": (2, 1), "padding": [(1, 2), (0, 3)]},
    "kernel dilated": {"window_strides": (1, 2), "padding": "VALID", "rhs_dilation": (2, 1)},
    "input dilated": {"window_strides": (1, 1), "padding": [(2, 2), (1, 1)], "lhs_dilation": (2, 3)},
    "both": {"window_strides": (2, 2), "padding": [(3, 0), (2, 2)], "lhs_dilation": (3, 1), "rhs_dilation": (2, 2)},
    "grouped": {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 2},
    "batch grouped": {"window_strides": (1, 1), "padding": "SAME", "batch_group_count": 2},
}


@pytest.mark.parametrize("settings", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutions_as_xla_counts_them(settings):
    """Padding, strides, dilation and groups; *wrong*: what a window reads beyond the edge counted as products."""
    group = settings.get("feature_group_count", 1)

    def convolution(x, k):
        return jax.lax.conv_general_dilated(x, k, dimension_numbers=("NHWC", "HWIO", "NHWC"), **settings)

    module, expected = compile_text(convolution, (2, 9, 7, 4), (3, 2, 4 // group, 6))
    assert flops.count(module).matmul == expected


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bd,df->bf", [(48, 32), (32, 40)]),
        ("bsd,dhk->bshk", [(2, 24, 32), (32, 4, 8)]),
        ("bshk,bthk->bhst", [(2, 16, 4, 8), (2, 24, 4, 8)]),
        ("bsd,bsf->df", [(2, 24, 32), (2, 24, 40)]),
    ],
)
def test_products_as_xla_counts_them(equation, shapes):
    """The forms a decoder has, where nothing is counted but products."""
    module, expected = compile_text(lambda *x: jnp.einsum(equation, *x), *shapes)
    sizes = {name: n for labels, shape in zip(equation.split("->")[0].split(","), shapes, strict=True)
             for name, n in zip(labels, shape, strict=True)}  # fmt: skip
    assert flops.count(module).matmul == 2 * np.prod(list(sizes.values())) == expected


def test_a_loop_of_unknown_length():
    """A search that ends when it ends: its product counts once and the loop is named."""

    def search(x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) > 0, lambda x: jnp.sin(x @ x), x)

    module, _ = compile_text(search, (16, 16))
    counted = flops.count(module)
    assert counted.matmul == 2 * 16**3 and len(counted.unknown_loops) == 1


def test_the_dearest_branch():
    """Two products in one branch, one in the other."""

    def program(i, x):
        return jax.lax.switch(i[0].astype(int), [lambda x: x @ x, lambda x: jnp.sin(x @ x) @ x, lambda x: x], x)

    module, _ = compile_text(program, (1,), (16, 16))
    assert flops.count(module).matmul == 2 * 2 * 16**3
