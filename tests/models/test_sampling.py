"""Drawing a token: frequencies against the softmax, and what top-k and top-p leave."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.errors import ConfigError
from jaxpar.models.sampling import SamplingConfig, sample

LOGITS = np.array([1.0, 3.0, 2.0, 0.0, 2.5, 9.0], np.float32)  # the last one is past the vocabulary
DRAWS = 20_000


@jax.jit
def _draw(scalars):
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(jnp.arange(DRAWS))
    return sample(jnp.broadcast_to(LOGITS, (DRAWS, 6)), keys, scalars)


def frequencies(**fields):
    scalars = {k: np.float32(v) for k, v in SamplingConfig(**fields).scalars(5).items()}
    return np.bincount(np.asarray(_draw(scalars)), minlength=6) / DRAWS


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_softmax(temperature):
    want = np.append(softmax(LOGITS[:5] / temperature), 0)
    np.testing.assert_allclose(frequencies(temperature=temperature), want, atol=4 * (0.25 / DRAWS) ** 0.5)


@pytest.mark.parametrize(
    "fields, kept",
    [
        (dict(temperature=0.0), [1]),
        (dict(temperature=1.0, top_k=1), [1]),
        (dict(temperature=1.0, top_k=3), [1, 4, 2]),
        (dict(temperature=1.0, top_k=99), [0, 1, 2, 3, 4]),
        (dict(temperature=1.0, top_p=0.4), [1]),  # the likeliest has 0.45
        (dict(temperature=1.0, top_p=0.5), [1, 4]),
        (dict(temperature=1.0, top_p=1e-6), [1]),
        (dict(temperature=1.0, top_p=1e-60), [1]),  # 0 in fp32
        (dict(temperature=1e-37), [1]),  # logits divided by it are not finite in fp32
        (dict(temperature=1.0, top_k=2, top_p=0.99), [1, 4]),
    ],
)
def test_what_is_left_keeps_its_proportions(fields, kept):
    want = np.zeros(6)
    want[kept] = softmax(LOGITS[kept])
    np.testing.assert_allclose(frequencies(**fields), want, atol=4 * (0.25 / DRAWS) ** 0.5)


@pytest.mark.parametrize(
    "config, message",
    [
        (SamplingConfig(temperature=-1.0), "sampling.temperature: -1.0"),
        (SamplingConfig(temperature=float("inf")), "sampling.temperature: inf"),
        (SamplingConfig(top_k=0), "sampling.top_k: 0"),
        (SamplingConfig(top_p=0.0), "sampling.top_p: 0.0"),
        (SamplingConfig(top_p=1.5), "sampling.top_p: 1.5"),
    ],
)
def test_numbers_that_cannot_be(config, message):
    with pytest.raises(ConfigError, match=f"^{message}.*legal"):
        config.validate("sampling")
