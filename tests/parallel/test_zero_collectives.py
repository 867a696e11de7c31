"""Collectives over the ZeRO axis in stages, and the dtype in which gradients are added."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.mesh.axes import MESH_AXES
from jaxpar.mesh.rules import ShardingRules
from jaxpar.parallel.collectives import ZeroCollectives, gather_weight
from jaxpar.program import Program

STAGES = [(8,), (2, 4), (4, 2), (2, 2, 2)]
RAGGED = dict(empty_rows=range(4, 8))


@functools.cache
def line():
    """Eight devices along fsdp."""
    return jax.make_mesh((1, 8, 1, 1, 1, 1), MESH_AXES)


def on_each(function, x, check_vma=False):
    """``function`` of the rows [8, ...] of ``x``, one a device; the results, stacked."""
    with jax.set_mesh(line()):
        mapped = jax.shard_map(
            lambda row: function(row[0])[None], in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=check_vma
        )
        return np.asarray(jax.jit(mapped, compiler_options=oracle.FAST_COMPILE)(jax.device_put(x, jax.P("fsdp"))))


def values(shape, dtype):
    """Small whole numbers, whose sums are exact in any order and any of these dtypes."""
    return np.random.default_rng(0).integers(-8, 9, (8, *shape)).astype(dtype)


def staged_and_flat(stages, function, x, check_vma):
    return (on_each(functools.partial(function, ZeroCollectives(s)), x, check_vma) for s in (stages, (8,)))


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "int32", jnp.bfloat16], ids=str)
@pytest.mark.parametrize("stages", STAGES[1:], ids=str)
def test_stages_move_what_one_collective_does(stages, dtype, check_vma):
    """Bit for bit, along every dimension, also beside dimensions of 1; shards in the order of the axis.

    *Wrong*: the order of the stages reversed, which permutes the shards.
    """
    shape = (8, 1, 16)
    x = values(shape, dtype)
    for dim in (0, 2):
        gathered, flat = staged_and_flat(stages, lambda zero, row, d=dim: zero.all_gather(row, d), x, check_vma)
        np.testing.assert_array_equal(gathered, flat)
        np.testing.assert_array_equal(gathered[3], np.concatenate(list(x), axis=dim))
        assert gathered.dtype == x.dtype
        scattered, flat = staged_and_flat(stages, lambda zero, row, d=dim: zero.reduce_scatter(row, d), x, check_vma)
        np.testing.assert_array_equal(scattered, flat)
        want = np.stack(np.split(x.astype(np.float64).sum(0), 8, axis=dim))
        np.testing.assert_array_equal(scattered.astype(np.float64), want)
        assert scattered.dtype == x.dtype


def test_a_middle_dimension_of_one_device_each():
    """Scattering a dimension of 8 to 1 each, and what is whole 1 stays."""
    x = values((1, 8, 1), "float32")
    got = on_each(lambda row: ZeroCollectives((2, 4)).reduce_scatter(row, 1), x)
    np.testing.assert_array_equal(got[:, 0, 0, 0], x.sum(0)[0, :, 0])
    assert got.shape == (8, 1, 1, 1)


@pytest.mark.parametrize("stages", STAGES, ids=str)
def test_gather_and_scatter_are_inverse(stages):
    """Scattering what all devices gathered alike gives eight times the shard back."""
    zero, x = ZeroCollectives(stages), values((2, 3), "float32")
    np.testing.assert_array_equal(on_each(lambda row: zero.reduce_scatter(zero.all_gather(row, 0), 0), x), 8 * x)


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
def test_the_gradient_of_a_gathered_weight(reduce_dtype):
    """Added in ``reduce_dtype``, handed on in fp32. 257 is no bf16 number: added in bf16 it becomes 256."""
    zero = ZeroCollectives((2, 4), jnp.dtype(reduce_dtype))

    def gradient(row):
        _, backward = jax.vjp(lambda w: gather_weight(w, zero, 0, jnp.float32), row)
        return backward(jnp.full(8, 257.0, jnp.float32))[0]

    got = on_each(gradient, np.zeros((8, 1), np.float32))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, {"float32": 8 * 257.0, "bfloat16": 8 * 256.0}[reduce_dtype])


# -- Programs --------------------------------------------------------------------------------------------------------


def staged_program(monkeypatch, stages, reduce_dtype="float32", **kind):
    """A Program on eight CPU devices whose ZeRO axis is said to be a product of torus dimensions."""
    monkeypatch.setattr("jaxpar.program.torus_stages", lambda mesh, axis: stages)
    experiment = oracle.program(**kind).experiment
    experiment = dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, reduce_dtype=reduce_dtype))
    return Program(experiment, jax.devices())


@pytest.mark.parametrize(
    "stages, zero, kind",
    [
        ((2, 4), 1, dict(model="gemma", fsdp=8)),
        pytest.param((2, 4), 2, dict(model="gemma", fsdp=8), marks=pytest.mark.slow),
        ((2, 2, 2), 3, dict(model="gemma", fsdp=8, microbatches=2)),
        ((2, 2), 3, dict(model="relu2", fsdp=4, tensor=2)),
    ],
    ids=str,
)
def test_gradients_in_stages_are_the_oracles(monkeypatch, stages, zero, kind):
    """*Wrong*: shards in another order than the layout's, or sums over one stage alone."""
    program = staged_program(monkeypatch, stages, rules=ShardingRules(zero=zero), **kind)
    want, want_loss = oracle.expected_gradients(oracle.program(kind["model"]), **RAGGED)
    got, metrics = oracle.program_gradients(program, oracle.ragged_batch(**RAGGED))
    oracle.assert_leaves_close(got, want)
    np.testing.assert_allclose(metrics["loss"], want_loss, rtol=1e-6)


def test_parameters_are_stored_whole_from_stages(monkeypatch):
    """What ZeRO 1 all-gathers after the update, in the order of the layout."""
    program = staged_program(monkeypatch, (2, 2, 2), model="gemma", fsdp=8, rules=ShardingRules(zero=1))
    params = oracle.random_params(program)
    with jax.set_mesh(program.mesh):
        shardings = jax.tree.map(lambda spec: jax.NamedSharding(program.mesh, spec), program._updated)
        stored = jax.jit(program._store, compiler_options=oracle.FAST_COMPILE)(jax.device_put(params, shardings))
    jax.tree.map(np.testing.assert_array_equal, stored, params)
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(stored))


@pytest.mark.parametrize(
    "kind",
    [
        *(dict(fsdp=4, data=2, rules=ShardingRules(zero=z)) for z in (0, 2)),
        pytest.param(dict(fsdp=4, data=2, rules=ShardingRules(zero=1)), marks=pytest.mark.slow),
        dict(fsdp=2, data=2, tensor=2, microbatches=2),
    ],
    ids=str,
)
def test_gradients_added_in_bfloat16(monkeypatch, kind):
    """Matrices near and of the right size, vectors as exact as in fp32."""
    program = staged_program(monkeypatch, (kind.get("fsdp", 1),), "bfloat16", model="gpt", **kind)
    want, _ = oracle.expected_gradients(oracle.program("gpt"), **RAGGED)
    got, _ = oracle.program_gradients(program, oracle.ragged_batch(**RAGGED))
    vectors = {p.name for p in program.parameters if not p.layout.matrix}
    assert vectors and len(vectors) < len(program.parameters)
    rounded = 0
    for p, g, w in zip(program.parameters, jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == np.float32
        error = np.abs(g - w).max() / np.abs(w).max()
        if p.name in vectors:
            assert error < 1e-5, p.name
        else:
            assert error < 0.02, p.name
            np.testing.assert_allclose(np.vdot(g, w) / np.vdot(w, w), 1, atol=2e-3, err_msg=p.name)
            rounded += error > 1e-4
    assert rounded == len(program.parameters) - len(vectors)  # all of them were added in bfloat16
