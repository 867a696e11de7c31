"""Rotary frequencies against the formulas as their papers and reference codes write them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jaxpar.errors import ConfigError
from jaxpar.models.rope import RopeConfig, frequencies, rotate, tables

K = 16
PLAIN = np.array([10_000.0 ** (-2 * i / K) for i in range(K // 2)])


def test_plain():
    """theta^(-2i/K)."""
    got, scale = frequencies(RopeConfig(), K)
    np.testing.assert_allclose(got, PLAIN, rtol=1e-12)
    assert scale == 1


def test_linear():
    """Position interpolation (arXiv:2306.15595): every position divided by the factor."""
    got, scale = frequencies(RopeConfig(scaling="linear", factor=4.0), K)
    np.testing.assert_allclose(got, PLAIN / 4, rtol=1e-12)
    assert scale == 1


def test_ntk():
    """The highest frequency stays, the lowest is divided by the factor, between them a geometric sequence."""
    got, scale = frequencies(RopeConfig(scaling="ntk", factor=4.0), K)
    np.testing.assert_allclose(got, PLAIN * 4.0 ** (-np.arange(K // 2) / (K // 2 - 1)), rtol=1e-12)
    np.testing.assert_allclose(got[[0, -1]], [1, PLAIN[-1] / 4], rtol=1e-12)
    assert scale == 1


def test_llama3():
    """Llama 3.1's ``apply_scaling``: three cases by wavelength."""
    config = RopeConfig(theta=500_000.0, scaling="llama3", factor=8.0, original_length=8192)
    got, scale = frequencies(config, 128)
    cases = set()
    for i, value in enumerate(got):
        freq = 500_000.0 ** (-2 * i / 128)
        wavelength = 2 * math.pi / freq
        if wavelength < 8192 / 4:
            cases.add("kept")
            want = freq
        elif wavelength > 8192 / 1:
            cases.add("scaled")
            want = freq / 8
        else:
            cases.add("between")
            smooth = (8192 / wavelength - 1) / (4 - 1)
            want = (1 - smooth) * freq / 8 + smooth * freq
        assert math.isclose(value, want, rel_tol=1e-12)
    assert cases == {"kept", "scaled", "between"}
    assert scale == 1


def test_yarn():
    """YaRN's ramp over dimensions, whole numbers of them, and cos and sin times 0.1 ln(factor) + 1."""
    got, scale = frequencies(RopeConfig(scaling="yarn", factor=16.0, original_length=4096), 128)
    low = math.floor(128 * math.log(4096 / (32 * 2 * math.pi)) / (2 * math.log(10_000)))
    high = math.ceil(128 * math.log(4096 / (1 * 2 * math.pi)) / (2 * math.log(10_000)))
    assert (low, high) == (20, 46)
    for i, value in enumerate(got):
        freq = 10_000.0 ** (-2 * i / 128)
        share = min(max((i - low) / (high - low), 0), 1)  # of interpolation
        assert math.isclose(value, freq / 16 * share + freq * (1 - share), rel_tol=1e-12)
    assert math.isclose(scale, 0.1 * math.log(16) + 1)


@pytest.mark.parametrize("scaling", ["linear", "ntk", "llama3", "yarn"])
def test_factor_one_changes_nothing(scaling):
    """Whatever the scaling."""
    got, scale = frequencies(RopeConfig(scaling=scaling), K)
    np.testing.assert_allclose(got, PLAIN, rtol=1e-12)
    assert scale == 1


def test_yarn_never_shrinks_attention():
    """A factor below one leaves cos and sin as they are (Hugging Face's ``get_mscale``); *wrong* 0.93."""
    assert frequencies(RopeConfig(scaling="yarn", factor=0.5), K)[1] == 1


def test_rotation_is_a_complex_product():
    """Also at positions of a long context."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 5, 3, K)).astype(np.float32)
    at = rng.integers(0, 8192, (2, 5))
    got = rotate(x, *tables(RopeConfig(), K, jnp.asarray(at)))
    with jax.enable_x64(True):
        want = np.asarray(oracle.turn(jnp.asarray(x, jnp.float64), at, RopeConfig()))
    np.testing.assert_allclose(got, want, atol=3e-3)
    np.testing.assert_allclose(got[..., K // 4 : K // 2], want[..., K // 4 : K // 2], atol=1e-4)


def test_scores_depend_on_the_distance_alone():
    """Moving both query and key by 100 positions changes no score."""
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 4, 1, K)), jnp.float32) for _ in range(2))

    def scores(start):
        cos, sin = tables(RopeConfig(), K, start + jnp.arange(4)[None])
        return jnp.einsum("bshk,bthk->st", rotate(q, cos, sin), rotate(k, cos, sin))

    np.testing.assert_allclose(scores(0), scores(100), atol=2e-4)


@pytest.mark.parametrize(
    "config",
    [
        RopeConfig(theta=0),
        RopeConfig(factor=-1.0),
        RopeConfig(original_length=0),
        RopeConfig(low_frequency_factor=4.0, high_frequency_factor=4.0),
    ],
)
def test_frequencies_that_cannot_be(config):
    """One line naming the field."""
    with pytest.raises(ConfigError, match=r"^model\.rope\.\w+: .*legal: "):
        config.validate(64)
