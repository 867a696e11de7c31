"""Generation with a cache against recomputing the whole prefix with a plain single-device model."""

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
from jaxpar.models.sampling import SamplingConfig

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


def test_greedy_tokens_are_not_all_the_same():
    """The comparison above would say little of a model that repeats one token whatever it reads."""
    rows = expected("llama") + expected("gemma3")
    assert len({tuple(row) for row in rows}) == len(rows)
    assert np.mean([len(set(row)) for row in rows]) > 4


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_greedy_tokens_are_those_of_packed_documents(model):
    """The same texts laid end to end in one row, kept apart by segments and positions that start again."""
    texts = [prompt + new for prompt, new in zip(PROMPTS[:3], expected(model), strict=False)]
    row = {name: np.zeros((1, 64), np.int32) for name in ("tokens", "positions", "segments")}
    begin = 0
    for number, text in enumerate(texts):
        place = slice(begin, begin + len(text))
        row["tokens"][0, place], row["positions"][0, place] = text, range(len(text))
        row["segments"][0, place] = number + 1
        begin += len(text)
    best = np.asarray(plain(model)(row["tokens"], row["positions"], row["segments"]))[0].argmax(-1)
    begin = 0
    for prompt, text in zip(PROMPTS, texts, strict=False):
        assert best[begin + len(prompt) - 1 : begin + len(text) - 1].tolist() == text[len(prompt) :]
        begin += len(text)


def test_a_row_ends_with_its_stop_token_and_no_other_row_does():
    row = expected("llama")[1]
    stop = row[3]
    got = written()(PROMPTS, 12, GREEDY, stop=[stop])
    for new, whole in zip(got, expected("llama"), strict=True):
        assert new.tolist() == whole[: whole.index(stop) + 1 if stop in whole else 12]
    assert len(got[1]) == row.index(stop) + 1


def test_who_watches_can_end_a_row():
    """After each chunk of 16 tokens; the other rows go on."""
    seen = []

    def watch(rows):
        seen.append([len(row) for row in rows])
        return [len(rows[0]) >= 10, False]

    got = written()(PROMPTS[:2], 40, GREEDY, watch=watch)
    assert [len(row) for row in got] == [16, 40]
    assert seen == [[16, 16], [16, 32], [16, 40]]
    assert got[1].tolist() == written()(PROMPTS[:2], 40, GREEDY)[1].tolist()


def test_drawn_tokens_depend_on_prompt_number_and_seed_alone():
    """Whatever the other rows, the mesh and the length that is asked for; another seed, other tokens."""
    drawn = written()(PROMPTS, 12, SamplingConfig(1.0), seed=3)
    mesh = written("llama", tensor=2, fsdp=4)
    assert [row.tolist() for row in mesh(PROMPTS, 12, SamplingConfig(1.0), seed=3)] == [row.tolist() for row in drawn]
    assert written()(PROMPTS[:1], 20, SamplingConfig(1.0), seed=3)[0][:12].tolist() == drawn[0].tolist()
    assert written()(PROMPTS, 12, SamplingConfig(1.0), seed=4)[3].tolist() != drawn[3].tolist()
    twice = written()([PROMPTS[0]] * 2, 12, SamplingConfig(1.0), seed=3)
    assert twice[0].tolist() != twice[1].tolist()


def test_tokens_beyond_the_tokenizer_are_not_written():
    """The rows of a padded embedding."""
    got = written()(PROMPTS, 40, SamplingConfig(5.0), vocab_size=7)
    assert set(np.concatenate(got).tolist()) == set(range(7))


@pytest.mark.parametrize(
    "prompts, tokens, message",
    [
        ([], 4, "prompts: .* holds no prompt"),
        ([[1], []], 4, "prompts.1: .* has no token"),
        ([[1, 48]], 4, "prompts.0: 48 is no token of the model .legal: 0 to 47"),
        ([[-1]], 4, "prompts.0: -1 is no token"),
        ([[1]], 0, "tokens: 0 is too small"),
    ],
)
def test_what_cannot_be_continued(prompts, tokens, message):
    with pytest.raises(ConfigError, match=message):
        written()(prompts, tokens, GREEDY)
