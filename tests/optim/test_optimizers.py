"""Schedules number by number, updates against arithmetic written out, and who is decayed."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.errors import ConfigError
from jaxpar.optim.optimizers import AdamWConfig, SGDConfig
from jaxpar.optim.routing import group_of
from jaxpar.optim.schedules import ScheduleConfig

PARAMS = {"matrix": np.float32([[1, -2], [3, 4]]), "vector": np.float32([5, -6])}
GROUPS = {"matrix": "matrix", "vector": "vector"}


def factors(schedule, total):
    """At every step of the run, and at the one after it."""
    return [float(schedule.factor(jnp.int32(t), schedule.scalars(total))) for t in range(total + 1)]


def test_warmup_in_optimizer_steps():
    """[0, .25, .5, .75], then the peak (A5)."""
    assert factors(ScheduleConfig("constant", warmup_steps=4), 6) == [0, 0.25, 0.5, 0.75, 1, 1, 1]


def test_linear():
    """From the peak at the end of the warmup to the final share, exactly, at step ``total``."""
    got = factors(ScheduleConfig("linear", warmup_steps=2, final_ratio=0.2), 6)
    np.testing.assert_allclose(got, [0, 0.5, 1, 0.8, 0.6, 0.4, 0.2], rtol=1e-6)


def test_cosine():
    """Half a cosine."""
    got = factors(ScheduleConfig("cosine", warmup_steps=1, final_ratio=0.1), 5)
    want = [0, *(0.1 + 0.9 * (1 + np.cos(np.pi * i / 4)) / 2 for i in range(5))]
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_warmup_stable_decay():
    """Flat until ``decay_steps`` before the end; a fifth of the run when not given."""
    got = factors(ScheduleConfig("wsd", warmup_steps=2, decay_steps=4, final_ratio=0.0), 10)
    np.testing.assert_allclose(got, [0, 0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0], atol=1e-6)
    assert ScheduleConfig("wsd").scalars(50)["decay_steps"] == 10


def updates(config, grads, steps):
    """The updates of a chain over ``steps`` equal gradients."""
    chain = config.transform(config.scalars(10), GROUPS)
    state, out = chain.init(PARAMS), None
    for _ in range(steps):
        out, state = chain.update(grads, state, PARAMS)
    return out


def test_adamw_by_hand():
    """Three equal steps: the corrected moments are g and g^2; decay is decoupled, and vectors have none."""
    grads = jax.tree.map(lambda p: 0.5 * p, PARAMS)
    got = updates(AdamWConfig(weight_decay=0.1, eps=1e-3), grads, 3)
    adam = jax.tree.map(lambda g: g / (np.abs(g) + 1e-3), grads)
    np.testing.assert_allclose(got["matrix"], adam["matrix"] + 0.1 * PARAMS["matrix"], rtol=1e-5)
    np.testing.assert_allclose(got["vector"], adam["vector"], rtol=1e-5)


def test_adams_two_moments():
    """Different gradients: b1 and b2 are where they belong."""
    config = AdamWConfig(b1=0.5, b2=0.75, eps=1e-12, weight_decay=0.0)
    chain = config.transform(config.scalars(10), GROUPS)
    state = chain.init(PARAMS)
    for g in (1.0, 3.0):
        out, state = chain.update(jax.tree.map(lambda p: jnp.full_like(p, g), PARAMS), state, PARAMS)  # noqa: B023
    first, second = (0.5 * 0.5 * 1 + 0.5 * 3) / (1 - 0.5**2), (0.75 * 0.25 * 1 + 0.25 * 9) / (1 - 0.75**2)
    np.testing.assert_allclose(out["matrix"], first / second**0.5, rtol=1e-5)


@pytest.mark.parametrize("momentum, nesterov, want", [(0.0, False, 1.0), (0.5, False, 1.75), (0.5, True, 1.875)])
def test_sgd_by_hand(momentum, nesterov, want):
    """1 + 1/2 + 1/4 after three steps; Nesterov looks one further."""
    grads = jax.tree.map(np.ones_like, PARAMS)
    got = updates(SGDConfig(momentum=momentum, nesterov=nesterov, weight_decay=0.25), grads, 3)
    np.testing.assert_allclose(got["vector"], want, rtol=1e-6)
    np.testing.assert_allclose(got["matrix"], want + 0.25 * PARAMS["matrix"], rtol=1e-6)


@pytest.mark.parametrize(
    "name, axes, group",
    [
        ("embedding.table", ("vocab", "embed"), "embedding"),
        ("head.kernel", ("embed", "vocab"), "head"),
        ("layers.attention.q", ("layers", "embed", "heads", "head_dim"), "matrix"),
        ("attention.q", ("embed", "heads", "head_dim"), "matrix"),
        ("layers.mlp.down", ("layers", "mlp", "embed"), "matrix"),
        ("layers.attention.q_bias", ("layers", "heads", "head_dim"), "vector"),
        ("layers.mlp.up_bias", ("layers", "mlp"), "vector"),
        ("layers.attention.q_norm.scale", ("layers", "head_dim"), "vector"),
        ("final_norm.scale", ("embed",), "vector"),
    ],
)
def test_groups(name, axes, group):
    """A stacked vector is a vector and a bias per head is one too: neither is decayed."""
    assert group_of(axes) == group


@pytest.mark.parametrize(
    "config, changes",
    [
        (AdamWConfig(), dict(learning_rate=-1.0)),
        (AdamWConfig(), dict(learning_rate=float("nan"))),
        (AdamWConfig(), dict(weight_decay=-0.1)),
        (AdamWConfig(), dict(max_grad_norm=0.0)),
        (AdamWConfig(), dict(b1=1.0)),
        (AdamWConfig(), dict(b2=-0.1)),
        (AdamWConfig(), dict(eps=0.0)),
        (SGDConfig(), dict(momentum=1.0)),
        (ScheduleConfig(), dict(warmup_steps=-1)),
        (ScheduleConfig(), dict(decay_steps=0)),
        (ScheduleConfig(), dict(final_ratio=1.5)),
    ],
)
def test_numbers_no_optimizer_takes(config, changes):
    """One line naming the field."""
    (field,) = changes
    with pytest.raises(ConfigError, match=rf"^optim\.(schedule\.)?{field}: {re.escape(str(changes[field]))} .*legal: "):
        dataclasses.replace(config, **changes).validate()


def test_scalars_are_all_a_sweep_changes():
    """Everything traced is in one dictionary of floats; no clipping is an infinite norm."""
    got = AdamWConfig(learning_rate=0.3, max_grad_norm=None).scalars(7)
    assert all(isinstance(v, float) for v in got.values())
    assert got["learning_rate"] == 0.3
    assert got["max_grad_norm"] == float("inf")
    assert got["total_steps"] == 7
