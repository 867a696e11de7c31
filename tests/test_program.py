"""One optimizer step on every layout: state, metrics, updates, and what the compiled step sends and holds."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.experiment import AdamWConfig, SGDConfig
from jaxpar.mesh.rules import ShardingRules
from jaxpar.optim.schedules import ScheduleConfig
from jaxpar.program import Program

CONSTANT = ScheduleConfig("constant")
ADAM = AdamWConfig(learning_rate=1e-2, schedule=ScheduleConfig("cosine", warmup_steps=2))
NOTHING_VALID = dict(empty_rows=range(4, 8))


def zero_program(stage):
    """Tied weights, two microbatches, AdamW, eight shards."""
    return oracle.program("gemma", microbatches=2, fsdp=8, optim=ADAM, rules=ShardingRules(zero=stage))


def numpy(tree):
    return jax.tree.map(np.asarray, tree)


# -- initial state ---------------------------------------------------------------------------------------------------


@functools.cache
def initial(**mesh):
    program = oracle.program(dataclasses.replace(oracle.RELU2, num_kv_heads=8), rows=8, **mesh)
    return numpy(program.init(7))


@pytest.mark.parametrize("mesh", [(8, 1), (4, 2), (2, 4), (1, 8)], ids="tensor {0[0]} fsdp {0[1]}".format)
def test_initial_state_is_bit_identical(mesh):
    """Leaf by leaf, optimizer state included (B1)."""
    tensor, fsdp = mesh
    jax.tree.map(np.testing.assert_array_equal, initial(tensor=tensor, fsdp=fsdp), initial())


def test_every_seed_has_its_weights():
    """The seed is an argument of the compiled initialisation, and it arrives."""
    other = oracle.program(dataclasses.replace(oracle.RELU2, num_kv_heads=8), rows=8).init(8)
    assert (initial()["params"]["layers"]["mlp"]["up"] != numpy(other)["params"]["layers"]["mlp"]["up"]).mean() > 0.9


# -- layouts ---------------------------------------------------------------------------------------------------------


def shards(leaf):
    """Into how many different parts an array is cut."""
    return leaf.size // leaf.addressable_shards[0].data.size


@pytest.mark.parametrize("stage", range(4))
def test_what_each_stage_keeps_sharded(stage):
    """Optimizer leaves from stage 1, matrices at stage 3; before and after a compiled step (B4)."""
    program = zero_program(stage)
    state = oracle.put_state(program, oracle.random_params(program))
    stepped, _ = oracle.compiled_step(program)(state, program.put(oracle.ragged_batch()), program.scalars())
    fresh = oracle.put_state(program, oracle.random_params(program))
    for state in (fresh, stepped):
        moments = [leaf for leaf in jax.tree.leaves(state["opt"]) if leaf.ndim]
        assert len(moments) == 2 * len(program.parameters)
        assert {shards(leaf) for leaf in moments} == {8 if stage >= 1 else 1}
        for p, leaf in zip(program.parameters, jax.tree.leaves(state["params"]), strict=True):
            assert shards(leaf) == (8 if stage == 3 and p.group != "vector" else 1), p.name
        held = sum(leaf.addressable_shards[0].data.nbytes for leaf in moments)
        assert held == sum(leaf.nbytes for leaf in moments) // (8 if stage >= 1 else 1)
    assert jax.tree.map(lambda x: x.sharding, fresh) == jax.tree.map(lambda x: x.sharding, stepped)


def test_only_what_does_not_divide_is_whole():
    """QK norms of four numbers and biases of 4 x 4 over eight shards; every other leaf is cut."""
    model = dataclasses.replace(
        oracle.LLAMA, num_heads=4, num_kv_heads=4, head_dim=4, qk_norm=True, qkv_bias=True, mlp_bias=True
    )
    program = oracle.program(model, fsdp=8)
    whole = {p.name.removeprefix("layers.attention.") for p in program.parameters if p.layout.zero_dim is None}
    assert whole == {"q_norm.scale", "k_norm.scale", "q_bias", "k_bias", "v_bias"}
    for p, leaf in zip(program.parameters, jax.tree.leaves(program.abstract_state["params"]), strict=True):
        assert leaf.sharding.is_fully_replicated == (p.group == "vector")  # stored whole, updated in shards
    flat = jax.tree_util.tree_leaves_with_path(program.abstract_state["opt"])
    replicated = [jax.tree_util.keystr(path) for path, leaf in flat if leaf.sharding.is_fully_replicated and leaf.shape]
    assert len(replicated) == 2 * 5


def test_groups_are_the_same_on_every_mesh():
    """And scanned in one piece or two."""
    tables = set()
    for kind in (dict(), dict(fsdp=8), dict(tensor=4, fsdp=2), dict(context=2, expert=2)):
        for unroll in (1, 2):
            program = oracle.program(dataclasses.replace(oracle.RELU2, scan_unroll=unroll), **kind)
            tables.add(tuple((p.name, p.group) for p in program.parameters))
    (table,) = tables
    groups = collections.Counter(group for _, group in table)
    assert groups == {"matrix": 6, "vector": 3 + 2 + 3, "embedding": 1, "head": 1}


# -- steps -----------------------------------------------------------------------------------------------------------


def three_steps(program):
    state = oracle.put_state(program, oracle.random_params(program))
    for seed in range(3):
        batch = program.put(oracle.ragged_batch(seed=seed, **NOTHING_VALID))
        state, metrics = oracle.compiled_step(program)(state, batch, program.scalars())
    return numpy(state), numpy(metrics)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages_agree_after_three_steps(stage):
    """AdamW, two microbatches, tied weights: the same parameters and moments as with nothing sharded (B3)."""
    got, metrics = three_steps(zero_program(stage))
    want, want_metrics = three_steps(zero_program(0))
    assert got["step"] == 3
    assert got["skipped"] == 0
    oracle.assert_leaves_close(got["params"], want["params"], 2e-6)
    oracle.assert_leaves_close(jax.tree.leaves(got["opt"]), jax.tree.leaves(want["opt"]), 1e-5)
    assert metrics["learning_rate"] == np.float32(1e-2)  # steps 0 and 1 were the warmup
    for key in ("loss", "grad_norm", "tokens"):
        np.testing.assert_allclose(metrics[key], want_metrics[key], rtol=2e-6)


MESHES = [dict(), dict(tensor=2, context=2), dict(data=2, tensor=2), dict(data=2, context=2), dict(fsdp=2, tensor=2)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_reported_metrics_and_clipped_update(mesh):
    """Loss, norm and tokens are the oracle's on every mesh (B2); the step is -rate x gradient x limit / norm."""
    sgd = SGDConfig(learning_rate=0.5, schedule=CONSTANT, max_grad_norm=0.25)
    program = oracle.program("relu2", microbatches=2, optim=sgd, **mesh)
    params = oracle.random_params(program)
    batch = oracle.ragged_batch(**NOTHING_VALID)
    grads, loss = oracle.expected_gradients(oracle.program("relu2"), **NOTHING_VALID)
    norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
    assert norm > 0.25

    for limit, clip in ((0.25, 0.25 / norm), (2 * norm, 1.0), (np.inf, 1.0)):
        state = oracle.put_state(program, params)
        scalars = {**program.scalars(), "max_grad_norm": np.float32(limit)}
        state, metrics = oracle.compiled_step(program)(state, program.put(batch), scalars)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-6)
        assert metrics["tokens"] == batch["mask"].sum()
        update = jax.tree.map(lambda new, old: np.asarray(new, np.float64) - old, state["params"], params)
        oracle.assert_leaves_close(update, jax.tree.map(lambda g: -0.5 * clip * g, grads), 5e-5)  # noqa: B023


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_step_that_is_not_finite_is_skipped_whole(stage, poison):
    """One bad number anywhere: parameters and moments stay bit for bit, and the step is counted."""
    program = zero_program(stage)
    params = oracle.random_params(program)
    params["layers"]["mlp"]["down"][1, 3, 5] = poison
    state = oracle.put_state(program, params)
    state["opt"] = jax.tree.map(lambda x: x + 2 if x.ndim else x, state["opt"])
    before = numpy(state)
    batch = program.put(oracle.ragged_batch())
    after, metrics = oracle.compiled_step(program)(state, batch, program.scalars())
    after = numpy(after)
    jax.tree.map(np.testing.assert_array_equal, after["params"], before["params"])
    jax.tree.map(np.testing.assert_array_equal, after["opt"], before["opt"])
    assert (after["step"], after["skipped"], metrics["skipped"]) == (1, 1, 1)


def test_an_update_that_is_not_finite_is_skipped_whole():
    """Gradients are finite, the optimizer's own arithmetic is not: 0 / 0 where b2 is 1."""
    program = zero_program(3)
    before = oracle.put_state(program, oracle.random_params(program))
    kept = numpy(before["params"])
    scalars = {**program.scalars(), "b2": np.float32(1)}
    after, metrics = oracle.compiled_step(program)(before, program.put(oracle.ragged_batch()), scalars)
    assert np.isfinite(metrics["grad_norm"]) and (after["step"], after["skipped"]) == (1, 1)
    jax.tree.map(np.testing.assert_array_equal, numpy(after["params"]), kept)


@pytest.mark.parametrize("mesh", [dict(tensor=2, context=2, fsdp=2)], ids=str)
def test_evaluation(mesh):
    """A sum in nats without z-loss, and the number of valid tokens."""
    program = oracle.program("gemma", **mesh)
    batch = oracle.ragged_batch(seed=3)
    params = oracle.put_params(program, oracle.random_params(program))
    total, tokens = program.evaluate(params, program.put(batch, microbatches=0), program.scalars())
    _, loss = oracle.expected_gradients(oracle.program("gemma"), seed=3)
    assert tokens == batch["mask"].sum()
    np.testing.assert_allclose(total / tokens, loss, rtol=1e-6)


def replaced(program, **train):
    """A fresh Program with other training options."""
    experiment = program.experiment
    experiment = dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, **train))
    return Program(experiment, list(program.mesh.devices.flat))


@pytest.mark.parametrize("remat", ["dots", "qkv", "attention", "full", "offload"])
def test_recomputation_changes_no_gradient(remat):
    """Whatever is kept."""
    program = replaced(oracle.program("gemma", tensor=2, fsdp=2), remat=remat)
    want, _ = oracle.expected_gradients(oracle.program("gemma"), **NOTHING_VALID)
    got, _ = oracle.program_gradients(program, oracle.ragged_batch(**NOTHING_VALID))
    oracle.assert_leaves_close(got, want)


def test_sixteen_bit_compute():
    """Gradients are fp32, near the exact ones, and of the right size: biases and embeddings are summed in fp32."""
    program = replaced(oracle.program("gpt", tensor=2, fsdp=2, microbatches=2), compute="bfloat16")
    want, loss = oracle.expected_gradients(oracle.program("gpt"), **NOTHING_VALID)
    got, metrics = oracle.program_gradients(program, oracle.ragged_batch(**NOTHING_VALID))
    np.testing.assert_allclose(metrics["loss"], loss, rtol=5e-3)
    for (path, w), g in zip(jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), strict=True):
        assert g.dtype == np.float32
        np.testing.assert_allclose(np.vdot(g, w) / np.vdot(w, w), 1, atol=0.02, err_msg=jax.tree_util.keystr(path))
    oracle.assert_leaves_close(got, want, 0.05)


# -- what is compiled ------------------------------------------------------------------------------------------------


def collectives(text):
    """(kind, in the entry computation or in a loop, shapes of the result) of every collective in compiled HLO."""
    found, entry = [], False
    for line in text.splitlines():
        if line and not line[0].isspace():
            entry = line.startswith("ENTRY")
        match = re.search(r"= (.*?) (all-reduce|reduce-scatter|all-gather)(?:-start)?\(", line)
        if match:
            shapes = [
                tuple(map(int, dims.split(","))) if dims else () for dims in re.findall(r"\[([\d,]*)\]", match[1])
            ]
            found.append((match[2], entry, shapes))
    return found


def scatters(program):
    """(after the microbatches, shape of the shard) of each gradient: of one layer where it is made layer by layer."""
    out = []
    for p in program.parameters:
        shape, after = list(p.shape), p.layout.stage == 1
        shape[p.layout.zero_dim] //= 8
        out.append((after, tuple(shape[1:] if not after and p.axes[0] == "layers" else shape)))
    return sorted(out)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_scattered_and_never_all_reduced(stage):
    """Each gradient leaves once, as a reduce-scatter: in the layers, but vectors, and all at stage 1, at the end."""
    program = zero_program(stage)
    found = collectives(oracle.compiled_step(program).as_text())
    for kind, _, shapes in found:
        if kind == "all-reduce":
            assert all(np.prod(shape, initial=1) == 1 for shape in shapes), f"a gradient is all-reduced: {shapes}"
    scattered = [(entry, shape) for kind, entry, shapes in found if kind == "reduce-scatter" for shape in shapes]
    assert sorted(scattered) == scatters(program)
    assert {p.layout.stage for p in program.parameters if p.group != "vector"} == {stage}


def test_stage_0_all_reduces_whole_gradients():
    """The other end of the scale, so that the parser above is known to see an all-reduce."""
    found = collectives(oracle.compiled_step(zero_program(0)).as_text())
    reduced = [shape for kind, _, shapes in found if kind == "all-reduce" for shape in shapes]
    assert {p.shape for p in zero_program(0).parameters} <= set(reduced)
    assert not any(kind == "reduce-scatter" for kind, _, _ in found)


def test_stage_3_never_holds_all_layers_whole():
    """Weights are gathered a layer at a time, again for the backward pass: no buffer of [layers, whole weight].

    *Wrong*: every layer's gathered weights kept for the backward pass, as large as stage 0's parameters.
    """
    program = zero_program(3)
    text = oracle.compiled_step(program).as_text()
    for p in program.parameters:
        if p.name.startswith("layers") and len(p.shape) > 2:
            assert f"[{','.join(map(str, p.shape))}]" not in text, p.name
    gathered = [shape for kind, _, shapes in collectives(text) if kind == "all-gather" for shape in shapes]
    assert gathered.count((32, 64)) == 2 * 2  # gate and up, forward and backward


@pytest.mark.parametrize("unroll", [1, 2])
def test_unrolled_layers_gather_again_too(unroll):
    """Where there is no loop, only a barrier keeps the compiler from merging the second gather with the first."""
    program = oracle.program(dataclasses.replace(oracle.RELU2, scan_unroll=unroll), fsdp=8)
    with jax.set_mesh(program.mesh):
        traced = jax.jit(program.gradients).trace(
            program.abstract_state["params"], program.abstract_batch, program.scalars()
        )
    text = traced.lower().as_text()
    assert ("stablehlo.while" in text) == (unroll == 1)
    assert (text.count("stablehlo.optimization_barrier") > 1) == (unroll == 2)  # one is that of the head's gradient


def test_a_sweep_compiles_once():
    """Experiments that differ in traced numbers alone lower to the same text, byte for byte (F11)."""
    base = oracle.program("llama", fsdp=2)
    other = AdamWConfig(
        learning_rate=0.5, weight_decay=0.3, b1=0.5, b2=0.6, eps=1e-3, max_grad_norm=None,
        schedule=ScheduleConfig(warmup_steps=7, final_ratio=0.5),
    )  # fmt: skip
    experiment = dataclasses.replace(
        base.experiment,
        optim=other,
        train=dataclasses.replace(base.experiment.train, steps=77, seed=5),
        task=dataclasses.replace(base.experiment.task, z_loss=0.5),
    )
    changed = Program(experiment, list(base.mesh.devices.flat))
    assert base.scalars() != changed.scalars()
    assert base.lower_step().as_text() == changed.lower_step().as_text()
    momentum = dataclasses.replace(base.experiment, optim=SGDConfig(momentum=0.5))
    heavier = dataclasses.replace(base.experiment, optim=SGDConfig(momentum=0.9, learning_rate=0.3))
    texts = {Program(e, list(base.mesh.devices.flat)).lower_step().as_text() for e in (momentum, heavier)}
    assert len(texts) == 1


def test_long_sequences_and_large_vocabularies_stay_in_pieces():
    """1024 positions and 40,000 words in 4 sequences: no S x S scores and no N x V logits in the compiled step."""
    model = dataclasses.replace(oracle.LLAMA, vocab_size=40_000, num_heads=2, num_kv_heads=2, embed=8)
    program = oracle.program(model, rows=4, length=1024)
    shapes = oracle.shapes(oracle.compiled_step(program).as_text())
    assert any(shape.count(512) == 2 for shape in shapes)
    assert not any(shape.count(1024) > 1 for shape in shapes)
    logits = {np.prod(shape) // 40_000 for shape in shapes if 40_000 in shape}  # rows of them
    assert max(logits) == 1024  # of 4096 tokens


def test_batches_as_the_step_takes_them():
    """[A, B / A, S], rows in order, over the batch and sequence axes."""
    program = oracle.program("relu2", microbatches=2, tensor=2, context=2)
    batch = oracle.ragged_batch()
    laid = program.put(batch)
    assert program.batch_spec == PartitionSpec(None, None, "context")
    for key, leaf in laid.items():
        np.testing.assert_array_equal(leaf, batch[key].reshape(2, 8, 16))
        assert leaf.dtype == (jnp.bool_ if key == "mask" else jnp.int32)
        assert leaf.sharding.spec == program.abstract_batch[key].sharding.spec


@pytest.mark.parametrize("hosts", [1, 2, 4])
@pytest.mark.parametrize(
    "mesh", [dict(data=2, fsdp=4), dict(data=2, tensor=4), dict(fsdp=2, context=4), dict(context=2, tensor=4)], ids=str
)
def test_the_rows_of_a_host(monkeypatch, mesh, hosts):
    """Check G9: together all rows, hosts of one batch shard the same ones, and every row where one host would put it.

    Told apart: hosts / 1 of the rows for each, whatever the mesh (peers across tensor 4 would read different rows), and
    a host's rows as one contiguous part (with microbatches they are not).
    """
    program = oracle.program("relu2", microbatches=2, **mesh)
    piece, indices = 8, NamedSharding.devices_indices_map
    everything = np.arange(16)
    of_hosts = []
    for host in range(hosts):
        mine = set(jax.devices()[8 // hosts * host : 8 // hosts * (host + 1)])
        monkeypatch.setattr(
            NamedSharding,
            "addressable_devices_indices_map",
            lambda self, shape, mine=mine: {d: i for d, i in indices(self, shape).items() if d in mine},
        )
        program.__dict__.pop("_piece_rows", None)
        of_hosts.append(program.host_rows())
        held = program.abstract_batch["tokens"].sharding.addressable_devices_indices_map((2, piece, 16))
        needed = {number for a, rows, _ in held.values() for number in everything.reshape(2, piece)[a, rows].flat}
        assert of_hosts[-1].tolist() == sorted(needed)
        assert program.host_rows(0).tolist() == [row for row in of_hosts[-1] if row < piece]
    assert set(np.concatenate(of_hosts)) == set(everything)
    shards = min(hosts, mesh.get("data", 1) * mesh.get("fsdp", 1))
    assert len({tuple(rows) for rows in of_hosts}) == shards
    assert {len(rows) for rows in of_hosts} == {16 // shards}
    program.__dict__.pop("_piece_rows", None)
