"""Rotary position embeddings (Su et al., arXiv:2104.09864) with the common context extensions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Frequencies of the rotation; scalings as in Hugging Face's ``rope_scaling``, and ``ntk``, a scaled base."""

    theta: float = 10_000.0
    scaling: Literal["none", "linear", "ntk", "llama3", "yarn"] = "none"
    factor: float = 1.0  # how many times longer than original_length
    original_length: int = 8192  # tokens the model was first trained at (llama3, yarn)
    low_frequency_factor: float = 1.0  # llama3: wavelengths above original_length / this are scaled whole
    high_frequency_factor: float = 4.0  # llama3: those below original_length / this are left alone
    beta_fast: float = 32.0  # yarn: rotations over original_length above which a frequency is left alone
    beta_slow: float = 1.0  # yarn: and below which it is scaled whole

    def validate(self, head_dim: int, field: str = "model.rope") -> None:
        """Raise ConfigError for frequencies that cannot be, or not of heads of this width."""
        for name in ("theta", "factor", "original_length"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{field}.{name}", getattr(self, name), "is not positive", "a positive number")
        if self.high_frequency_factor <= self.low_frequency_factor:
            raise ConfigError(
                f"{field}.high_frequency_factor",
                self.high_frequency_factor,
                "is not above low_frequency_factor",
                f"more than {self.low_frequency_factor}",
            )
        try:
            freq, scale = frequencies(self, head_dim)
            legal = bool(np.isfinite(freq).all() and np.isfinite(scale))
        except (ValueError, ArithmeticError):
            legal = False
        if not legal:
            rule = f"has no finite frequencies for heads of width {head_dim} with these numbers"
            raise ConfigError(
                f"{field}.scaling", self.scaling, rule, "theta above 1, positive betas, a factor of 1 to 100"
            )


def frequencies(config: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Angular frequencies [head_dim / 2] in radians per position, and the factor on cos and sin (yarn; else 1)."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    theta = config.theta
    if config.scaling == "ntk":  # one base for all, so that the lowest frequency is divided by the factor
        theta *= config.factor ** (head_dim / (head_dim - 2))
    plain = theta**-exponents
    if config.scaling in ("none", "ntk"):
        return plain, 1.0
    if config.scaling == "linear":
        return plain / config.factor, 1.0
    if config.scaling == "llama3":  # Llama 3.1: smooth between the two wavelengths
        rotations = config.original_length * plain / (2 * math.pi)
        low, high = config.low_frequency_factor, config.high_frequency_factor
        keep = np.clip((rotations - low) / (high - low), 0.0, 1.0)
        return keep * plain + (1 - keep) * plain / config.factor, 1.0

    # YaRN (arXiv:2309.00071): a linear ramp over dimensions between the two numbers of rotations.
    def dimension(rotations: float) -> float:
        return head_dim * math.log(config.original_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(dimension(config.beta_fast)), 0)
    last = min(math.ceil(dimension(config.beta_slow)), head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - first) / max(last - first, 1e-3), 0.0, 1.0)
    return plain * (1 - ramp) + plain / config.factor * ramp, 0.1 * math.log(max(config.factor, 1.0)) + 1.0


def tables(config: RopeConfig, head_dim: int, positions_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [B, S, K / 2] in fp32 of each position's angles."""
    freq, scale = frequencies(config, head_dim)
    angles = positions_BS[..., None].astype(jnp.float32) * jnp.asarray(freq, jnp.float32)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


Swap = Callable[[jax.Array], jax.Array]
"""x [..., K] -> x with the halves of its last dimension exchanged."""


def roll(x: jax.Array) -> jax.Array:
    """Exchange the halves by moving data."""
    return jnp.roll(x, x.shape[-1] // 2, axis=-1)


def multiply(x: jax.Array) -> jax.Array:
    """Exchange the halves by a product with a permutation, which is exact: cheaper where lanes do not move."""
    K = x.shape[-1]
    return jnp.einsum("...k,kj->...j", x, jnp.roll(jnp.eye(K, dtype=x.dtype), K // 2, axis=0))


def rotate(x_BSHK: jax.Array, cos: jax.Array, sin: jax.Array, swap_halves: Swap = roll) -> jax.Array:
    """Rotate the two halves of each head, in fp32, back to the dtype of ``x``."""
    cos = jnp.concatenate([cos, cos], axis=-1)[:, :, None]
    sin = jnp.concatenate([-sin, sin], axis=-1)[:, :, None]
    x, swapped = x_BSHK.astype(jnp.float32), swap_halves(x_BSHK).astype(jnp.float32)
    return (x * cos + swapped * sin).astype(x_BSHK.dtype)
