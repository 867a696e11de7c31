"""What a mesh's layout does to gradients on their way back."""

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.experiment import DecoderConfig
from jaxpar.mesh.axes import MESH_AXES
from jaxpar.mesh.rules import ShardingRules
from jaxpar.models.layers import RMSNorm
from jaxpar.models.layout import SingleDevice
from jaxpar.parallel.collectives import Lent, ZeroCollectives
from jaxpar.parallel.layout import MeshLayout

LAYOUT = MeshLayout(
    sizes=dict.fromkeys(MESH_AXES, 1), rules=ShardingRules(), zero_dims={("embed",): None},
    zero=ZeroCollectives((1,)), dtype=jnp.float32, platform="cpu", kernel="chunked", remat_policy="none",
)  # fmt: skip


@pytest.mark.parametrize("layout", [LAYOUT, SingleDevice()], ids=["mesh", "single device"])
def test_reducing_first_changes_nothing(layout):
    """Neither values nor gradients of weights and input: only their order, where the compiler may look for one."""
    graph, params = nnx.split(RMSNorm(DecoderConfig(), embed=6))
    scale = nnx.to_pure_dict(params)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 6)), jnp.float32)

    def loss(scale, x, first):
        module = nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(scale)))
        if first:
            module, x = layout.reduce_first(module, x)
        return jnp.sum(jnp.sin(module(x)))

    values = [jax.value_and_grad(loss, (0, 1))(scale, x, first) for first in (True, False)]
    jax.tree.map(np.testing.assert_array_equal, *values)
    text = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2).lower(scale, x, True).as_text()
    assert ("optimization_barrier" in text) == (layout is LAYOUT)


def test_lent_parameters_pass():
    """At ZeRO 2 a parameter is two arrays, and its gradient leaves by another way."""
    module = RMSNorm(DecoderConfig(), embed=6)
    module.scale = nnx.Param(Lent(jnp.ones(6), jnp.ones(3)))
    x = jnp.ones((1, 1, 6))
    same, y = LAYOUT.reduce_first(module, x)
    assert same is module and y is x
