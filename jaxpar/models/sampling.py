"""From logits to the next token."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxpar.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How a token is drawn. All three are traced: changing them compiles nothing."""

    temperature: float = 0.8  # divides the logits; 0: always the likeliest token
    top_k: int | None = None  # only the so many likeliest tokens; none: all
    top_p: float = 1.0  # of those, the fewest that hold this share of the probability (Holtzman et al. 2020)

    def validate(self, field: str) -> None:
        """Raise ConfigError naming ``field`` for numbers that cannot be."""
        if not 0 <= self.temperature <= 1e30:
            raise ConfigError(f"{field}.temperature", self.temperature, "is no temperature", "0 or more, up to 1e30")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"{field}.top_k", self.top_k, "leaves no token", "1 or more, or none")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"{field}.top_p", self.top_p, "is no share of the probability", "above 0, up to 1")

    def scalars(self, vocab_size: int) -> dict[str, float]:
        """The traced numbers of ``sample``, for tokens 0 .. ``vocab_size`` - 1."""
        top_k = min(self.top_k or vocab_size, vocab_size)
        return {"temperature": self.temperature, "top_k": top_k, "top_p": self.top_p, "vocab_size": vocab_size}


def check_texts(field: str, texts: Sequence[str]) -> None:
    """Raise ConfigError naming ``field`` for the first text that is not Unicode, such as half a surrogate pair."""
    for number, text in enumerate(texts):
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ConfigError(f"{field}.{number}", ascii(text), "is not Unicode", "a text in UTF-8")


def sample(logits_BV: jax.Array, keys_B: jax.Array, scalars: dict[str, jax.Array]) -> jax.Array:
    """A token for each row, int32 [B], by its own key (Gumbel-max); ``scalars`` as of ``SamplingConfig``.

    Tokens from ``vocab_size`` on, which a padded embedding has, are never drawn; the likeliest always can be. Tokens as
    likely as the last one that ``top_k`` or ``top_p`` admits are admitted too.
    """
    V = logits_BV.shape[-1]
    logits_BV = jnp.where(jnp.arange(V) < scalars["vocab_size"], logits_BV, -jnp.inf)

    def draw() -> jax.Array:
        # The largest becomes 0: what is near it stays finite, however low the temperature.
        warm_BV = (logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)) / scalars["temperature"]
        ranked_BV = jnp.flip(jnp.sort(warm_BV, axis=-1), axis=-1)
        share_BV = jax.nn.softmax(ranked_BV, axis=-1)
        likelier_BV = jnp.cumsum(share_BV, axis=-1) - share_BV  # the probability of all that rank before
        admitted_BV = (jnp.arange(V) < scalars["top_k"]) & ((likelier_BV < scalars["top_p"]) | (jnp.arange(V) == 0))
        least_B = jnp.min(jnp.where(admitted_BV, ranked_BV, jnp.inf), axis=-1, keepdims=True)
        noise_BV = jax.vmap(lambda key: jax.random.gumbel(key, (V,)))(keys_B)
        return jnp.argmax(jnp.where(warm_BV >= least_B, warm_BV + noise_BV, -jnp.inf), axis=-1)

    choice_B = jax.lax.cond(scalars["temperature"] > 0, draw, lambda: jnp.argmax(logits_BV, axis=-1))
    return choice_B.astype(jnp.int32)
