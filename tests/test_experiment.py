"""What does not fit is refused in one line, before anything is compiled, and the values called legal are legal."""

import dataclasses
import re

import jax
import oracle
import pytest

from jaxpar.errors import ConfigError
from jaxpar.experiment import Experiment, MeshConfig, SamplesConfig, ShardingRules, TrainConfig
from jaxpar.models.sampling import SamplingConfig
from jaxpar.program import Program

MODEL = dataclasses.replace(oracle.LLAMA, head_dim=4)


@pytest.fixture(autouse=True)
def no_compilation(monkeypatch):
    """Any compilation fails the test."""
    import jax._src.compiler as compiler

    def refuse(*args, **kwargs):
        raise AssertionError("something was compiled")

    monkeypatch.setattr(compiler, "compile_or_get_cached", refuse)
    monkeypatch.setattr(compiler, "backend_compile_and_load", refuse, raising=False)


def build(model=(), train=(), mesh=(), rules=()):
    """On eight devices."""
    train = {"global_batch": 16, "seq_len": 16, **dict(train)}
    experiment = Experiment(
        model=dataclasses.replace(MODEL, **dict(model)),
        train=TrainConfig(**train),
        mesh=MeshConfig(**dict(mesh)),
        rules=ShardingRules(**dict(rules)),
    )
    return Program(experiment, jax.devices())


def numbers(error):
    return [int(n) for n in re.findall(r"\b\d+\b", str(error.legal))]


def refused(start, **parts):
    """The error of a config that must not build."""
    with pytest.raises(ConfigError) as caught:
        build(**parts)
    message = str(caught.value)
    assert message.startswith(start), message
    assert "\n" not in message
    assert "(legal: " in message
    return caught.value


def test_the_plain_config_builds():
    """So that each refusal below has one reason; and nothing is compiled to find out."""
    for mesh in (dict(), dict(tensor=4), dict(context=2, tensor=2), dict(expert=8, fsdp=1)):
        build(mesh=mesh)


@pytest.mark.parametrize(
    "field, what, model, ways",
    [
        ("num_heads", "heads", dict(num_heads=6, num_kv_heads=6), 4),
        ("num_kv_heads", "kv_heads", dict(num_heads=8, num_kv_heads=2), 4),  # B8
        ("mlp_width", "mlp", dict(mlp_width=66), 4),
        ("vocab_size", "vocab", dict(vocab_size=17), 8),  # B9: raw JAX replicates this without a word
    ],
)
def test_tensor_parallelism_that_does_not_divide(field, what, model, ways):
    """The field, its value, the axis, its size; legal axis sizes build."""
    model = {"num_kv_heads": 8, **model}
    with pytest.raises(ConfigError, match=rf"^model\.{field}: \d+ is not divisible by mesh\.tensor {ways} ") as caught:
        build(model=model, mesh=dict(tensor=ways))
    assert "\n" not in str(caught.value)
    legal = [n for n in numbers(caught.value) if 8 % n == 0]
    assert legal
    for n in legal:
        build(model=model, mesh=dict(tensor=n))
    assert ways not in numbers(caught.value)
    if what in ("vocab", "mlp"):
        build(model=model, mesh=dict(tensor=ways), rules={what: ()})
    else:
        build(model=model, mesh=dict(tensor=ways), rules=dict(heads=()))


def test_a_width_that_zero_cannot_cut():
    """Nothing of 36, 50, 66, 6 divides by 8; 2 and 1 do, and so do other widths."""
    model = dict(embed=36, vocab_size=50, mlp_width=66, head_dim=6, num_heads=2, num_kv_heads=2)
    error = refused("embedding.table: 50x36 has no dimension that mesh.fsdp 8 divides", model=model)
    assert numbers(error) == [1, 2]
    for n in numbers(error):
        build(model=model, mesh=dict(fsdp=n, data=8 // n), train=dict(global_batch=8))
    build(model={**model, "embed": 40})
    build(model=model, rules=dict(zero=0))


@pytest.mark.parametrize(
    "train, mesh",
    [
        (dict(global_batch=12), dict(data=8, fsdp=1)),
        (dict(global_batch=16, microbatches=4), dict(expert=2)),
        (dict(global_batch=24, microbatches=2), dict(data=2)),
    ],
)
def test_batches_that_do_not_divide(train, mesh):
    """Each microbatch must divide over data, fsdp and expert together."""
    error = refused(f"train.global_batch: {train['global_batch']} ", train=train, mesh=mesh)
    (step,) = numbers(error)
    for factor in (1, 3):
        build(train={**train, "global_batch": factor * step}, mesh=mesh)


def test_microbatches_that_do_not_divide():
    """Eight sequences in three pieces (D7)."""
    error = refused(
        "train.microbatches: 3 does not divide train.global_batch 8", train=dict(global_batch=8, microbatches=3)
    )
    assert numbers(error) == [1, 2, 4, 8]
    for n in numbers(error):
        build(train=dict(global_batch=8, microbatches=n), mesh=dict(tensor=4, context=2))


@pytest.mark.parametrize("mesh", [dict(context=4), dict(tensor=4), dict(tensor=4, context=2)])
def test_sequences_that_do_not_divide(mesh):
    """Residuals are cut over context and tensor."""
    error = refused("train.seq_len: 18 is not divisible by mesh.", train=dict(seq_len=18), mesh=mesh)
    (step,) = numbers(error)
    build(train=dict(seq_len=3 * step), mesh=mesh)


def test_pipelines_are_refused():
    """Until there is a schedule for them."""
    error = refused("mesh.pipe: 2 ", mesh=dict(pipe=2))
    assert numbers(error) == [1]


def test_layers_that_the_scan_does_not_divide():
    """Two layers, three at a time."""
    error = refused("model.scan_unroll: 3 does not divide model.num_layers 2", model=dict(scan_unroll=3))
    for n in numbers(error):
        build(model=dict(scan_unroll=n))


@pytest.mark.parametrize(
    "field, value",
    [("steps", 0), ("global_batch", 0), ("microbatches", -1), ("seq_len", 0), ("seed", -1), ("log_every", 0)],
)
def test_counts_that_cannot_be(field, value):
    """One line naming the field."""
    refused(f"train.{field}: {value} ", train={field: value})


@pytest.mark.parametrize(
    "samples, message",
    [
        (SamplesConfig(every=0), "samples.every: 0"),
        (SamplesConfig(tokens=0), "samples.tokens: 0"),
        (SamplesConfig(prompts=()), "samples.prompts"),
        (SamplesConfig(sampling=SamplingConfig(top_k=0)), "samples.sampling.top_k: 0"),
    ],
)
def test_samples_that_cannot_be(samples, message):
    with pytest.raises(ConfigError, match=f"^{message}.*legal"):
        Experiment(samples=samples).validate()


def test_derived_numbers():
    """Tokens of a step, and the traced numbers of all parts together."""
    experiment = Experiment(train=TrainConfig(global_batch=6, seq_len=7))
    assert experiment.tokens_per_step == 42
    scalars = experiment.scalars()
    assert scalars["total_steps"] == experiment.train.steps
    assert {"learning_rate", "z_loss", "b1", "max_grad_norm"} <= set(scalars)


def test_compute_dtype():
    """bfloat16 on accelerators, fp32 on a CPU, unless it is said."""
    assert Experiment().compute_dtype("cpu") == jax.numpy.float32
    assert Experiment().compute_dtype("tpu") == Experiment().compute_dtype("gpu") == jax.numpy.bfloat16
    assert Experiment(train=TrainConfig(compute="bfloat16")).compute_dtype("cpu") == jax.numpy.bfloat16
