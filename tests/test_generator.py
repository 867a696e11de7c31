"""Generation with a cache against recomputing the whole prefix with a plain single-device model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx

from jaxpar.errors import ConfigError
from jaxpar.generator import Generator
from jaxpar.models.decoder import Decoder
from jaxpar.models.sampling import SamplingConfig, sample

GREEDY = SamplingConfig(temperature=0.0)
PROMPTS = [[5], [7, 1, 30], [2, 9, 4, 11, 40, 3, 8], list(range(1, 38))]  # the last one crosses a compiled length


@functools.cache
def written(model="llama", **mesh):
    """``Generator.generate`` with the oracle's random weights."""
    program = oracle.program(model, rows=8, **mesh)
    generator = Generator(program)
    weights = generator.ready(oracle.put_params(program, oracle.random_params(program)))
    return functools.partial(generator.generate, weights)


@functools.cache
def plain(model):
    """Greedy logits of a whole row on one device, without any cache: [S] tokens -> [S, V]."""
    config = oracle.MODELS[model]
    graph, template = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(params=0))))
    nnx.replace_by_pure_dict(template, jax.tree.map(jnp.asarray, oracle.random_params(oracle.program(model))))
    return jax.jit(lambda *batch: nnx.merge(graph, template)(*batch), compiler_options=oracle.FAST_COMPILE)


def recomputed(model, prompt, tokens):
    """Greedy decoding that reads the whole prefix again for every token."""
    row = np.zeros((1, 64), np.int32)
    row[0, : len(prompt)] = prompt
    for end in range(len(prompt), len(prompt) + tokens):
        row[0, end] = int(np.asarray(plain(model)(row))[0, end - 1].argmax())
    return row[0, len(prompt) : len(prompt) + tokens]


@functools.cache
def expected(model, tokens=12):
    return [recomputed(model, prompt, tokens).tolist() for prompt in PROMPTS]


@pytest.mark.parametrize(
    "model, mesh",
    [
        ("llama", {}),
        ("llama", dict(tensor=2, fsdp=4)),
        ("gemma3", {}),
        ("gemma3", dict(tensor=2, context=2, data=2)),
        ("gpt", dict(tensor=4, expert=2)),
        ("relu2", dict(fsdp=8)),
    ],
)
def test_greedy_tokens_are_those_of_the_whole_prefix(model, mesh):
    """Prompts of unequal lengths in one padded batch; windows, softcaps and two kinds of layers among them."""
    got = written(model, **mesh)(PROMPTS, 12, GREEDY)
    assert [row.tolist() for row in got] == expected(model)
