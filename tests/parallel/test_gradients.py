"""A Program's loss and gradients against the oracle, leaf by leaf, on every kind of mesh (A1, B3, B6, B8)."""

import jax
import numpy as np
import oracle
import pytest

from jaxpar.mesh.rules import ShardingRules

NOTHING_VALID = dict(empty_rows=range(4, 8))  # the second of four microbatches has no valid token

CASES = {
    "one device llama": dict(model="llama"),
    "one device gemma": dict(model="gemma"),
    "one device gpt": dict(model="gpt"),
    "one device relu2": dict(model="relu2"),
    "one device gemma3": dict(model="gemma3"),
    "gemma3 tensor 2 context 2 fsdp 2": dict(model="gemma3", tensor=2, context=2, fsdp=2, microbatches=2),
    "data 8": dict(model="llama", data=8, microbatches=2),
    **{f"fsdp 8 zero {z}": dict(model="gemma", fsdp=8, microbatches=2, rules=ShardingRules(zero=z)) for z in range(4)},
    **{
        f"tensor 4 fsdp 2 zero {z}": dict(model="relu2", tensor=4, fsdp=2, microbatches=4, rules=ShardingRules(zero=z))
        for z in range(4)
    },
    "context 2 tensor 2 data 2": dict(model="gemma", context=2, tensor=2, data=2, microbatches=4),
    "context 4 fsdp 2": dict(model="llama", context=4, fsdp=2, microbatches=1),
    "expert 4 data 2": dict(model="gpt", expert=4, data=2, microbatches=2),
    "biases over tensor": dict(model="gpt", tensor=4, fsdp=2),
    "heads whole": dict(model="gpt", tensor=2, fsdp=4, rules=ShardingRules(heads=())),
    "mlp whole": dict(model="gpt", tensor=2, fsdp=4, rules=ShardingRules(mlp=(), zero=2)),
    "vocab whole": dict(model="gemma", tensor=2, context=2, fsdp=2, rules=ShardingRules(vocab=(), zero=1)),
    "all whole": dict(model="relu2", tensor=4, fsdp=2, rules=ShardingRules(heads=(), mlp=(), vocab=())),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_oracles(case):
    """Wrong by the size of an axis (8, 4, 2) or by the number of microbatches where a reduction is doubled or lost."""
    program = oracle.program(**CASES[case])
    want, want_loss = oracle.expected_gradients(oracle.program(CASES[case]["model"]), **NOTHING_VALID)
    batch = oracle.ragged_batch(**NOTHING_VALID)
    got, metrics = oracle.program_gradients(program, batch)
    oracle.assert_leaves_close(got, want)
    assert metrics["tokens"] == batch["mask"].sum()
    np.testing.assert_allclose(metrics["loss"], want_loss, rtol=1e-6)
    assert all(g.dtype == np.float32 for g in jax.tree.leaves(got))


@pytest.mark.parametrize("microbatches", [1, 4])
def test_any_partition_of_any_order_gives_the_same_gradients(microbatches):
    """The mean of microbatch means would depend on which rows meet in a microbatch."""
    program = oracle.program(model="llama", data=2, fsdp=2, microbatches=microbatches)
    want, want_loss = oracle.expected_gradients(oracle.program("llama"), **NOTHING_VALID)
    batch = oracle.ragged_batch(**NOTHING_VALID)
    order = np.random.default_rng(microbatches).permutation(16)
    for rows in (batch, {k: v[order] for k, v in batch.items()}):
        got, metrics = oracle.program_gradients(program, rows)
        oracle.assert_leaves_close(got, want)
        np.testing.assert_allclose(metrics["loss"], want_loss, rtol=1e-6)


def test_a_batch_without_valid_tokens_has_zero_gradients():
    """And not NaN, which 0 / 0 would be."""
    program = oracle.program(model="llama", data=2, fsdp=2, microbatches=4)
    got, metrics = oracle.program_gradients(program, oracle.ragged_batch(empty_rows=range(16)))
    assert metrics["loss"] == metrics["tokens"] == 0
    assert not any(g.any() for g in jax.tree.leaves(got))


def test_gradients_without_typed_collectives():
    """The map of the TPU and GPU kernels is not type-checked (check_vma False): the same gradients must come out."""
    kind = dict(model="gemma", tensor=2, context=2, fsdp=2)
    program = oracle.Program(oracle.program(**kind).experiment, jax.devices())
    program.kernel = "splash"  # turns the check off; the layout's own kernel stays
    want, _ = oracle.expected_gradients(oracle.program("gemma"), **NOTHING_VALID)
    got, _ = oracle.program_gradients(program, oracle.ragged_batch(**NOTHING_VALID))
    oracle.assert_leaves_close(got, want)


def test_gradients_in_blocks(monkeypatch):
    """Attention in blocks of 3 and cross-entropy in chunks of 5, neither of which divides its length."""
    import functools

    from jaxpar.models.attention import attention

    for home in ("jaxpar.parallel.layout", "jaxpar.parallel.attention"):
        monkeypatch.setattr(f"{home}.attention", functools.partial(attention, chunk=3))
    monkeypatch.setattr("jaxpar.parallel.layout.default_chunk", lambda tokens, vocab: 5)
    want, _ = oracle.expected_gradients(oracle.program("gemma"), **NOTHING_VALID)
    kind = dict(model="gemma", tensor=2, context=2, fsdp=2)
    program = oracle.Program(oracle.program(**kind).experiment, jax.devices())
    got, _ = oracle.program_gradients(program, oracle.ragged_batch(**NOTHING_VALID))
    oracle.assert_leaves_close(got, want)


# -- packed documents (E7), over context 4: documents cross the borders of shards ------------------------------------


def document(length, vocab, seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(*vocab, length + 1)
    mask = np.arange(length) < length - 1
    return {"tokens": tokens[:-1], "targets": tokens[1:], "mask": mask, "positions": np.arange(length)}


def packed(*rows):
    """Each row the documents in it, the rest of 16 x 16 padding."""
    kinds = dict(tokens=np.int32, targets=np.int32, mask=bool, positions=np.int32, segments=np.int32)
    batch = {k: np.zeros((16, 16), kind) for k, kind in kinds.items()}
    for row, documents in enumerate(rows):
        at = 0
        for number, doc in enumerate(documents):
            span = np.s_[row, at : at + len(doc["tokens"])]
            batch["segments"][span] = number + 1
            for key in doc:
                batch[key][span] = doc[key]
            at += len(doc["tokens"])
    return batch


def test_packed_documents_do_not_meet():
    """The pair's gradients are the sum of the two alone; positions that restart are not enough for that."""
    program = oracle.program("llama", context=4, fsdp=2)
    first, second = document(7, (0, 20), 0), document(9, (20, 40), 1)
    together, _ = oracle.program_gradients(program, packed([first, second]))
    apart, _ = oracle.program_gradients(program, packed([first], [second]))
    oracle.assert_leaves_close(together, apart)

    leaking = packed([first, second])
    leaking["segments"][0] = 1
    mixed, _ = oracle.program_gradients(program, leaking)
    with pytest.raises(AssertionError, match="leaves that differ"):
        oracle.assert_leaves_close(mixed, apart)


def test_another_document_changes_nothing():
    """Replacing document 0 changes document 1's loss by exactly 0, and its tokens get a gradient of exactly 0."""
    program = oracle.program("llama", context=4, fsdp=2)
    second = document(9, (20, 40), 1)
    results = []
    for seed in (0, 5):
        first = document(7, (0, 20), seed)
        first["mask"] = np.zeros(7, bool)
        results.append(oracle.program_gradients(program, packed([first, second])))
    (one, one_metrics), (other, other_metrics) = results
    assert one_metrics["loss"] == other_metrics["loss"]
    assert not one["embedding"]["table"][:20].any()
    assert one["embedding"]["table"][20:40].any()
    jax.tree.map(np.testing.assert_array_equal, one, other)


# -- the reductions alone --------------------------------------------------------------------------------------------


def reduce_toy(weight, values, mask, zero, axis_type, check_vma, **mesh):
    """Gradient and loss of w * values averaged over the valid ones: [A, B, S] microbatches over a mesh."""
    from jax.sharding import AxisType, PartitionSpec

    from jaxpar.mesh.axes import MESH_AXES
    from jaxpar.mesh.rules import place, spec
    from jaxpar.parallel.collectives import ZeroCollectives
    from jaxpar.parallel.gradients import Reducer

    sizes = {a: mesh.get(a, 1) for a in MESH_AXES}
    devices = np.array(jax.devices()[: int(np.prod(list(sizes.values())))])
    kind = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[axis_type]
    made = jax.sharding.Mesh(devices.reshape(list(sizes.values())), MESH_AXES, axis_types=(kind,) * 6)
    layout = place("w", ("embed",), np.shape(weight), sizes, ShardingRules(zero=zero))
    reducer = Reducer({"w": layout}, sizes, ZeroCollectives((sizes["fsdp"],)))

    def objective(params, batch):
        share = (params["w"] * batch["values"] * batch["mask"]).sum()
        share = share / (sizes["tensor"] * sizes["pipe"])  # its share of what those axes hold alike
        return share, share

    rows = spec(sizes, (), ("data", "fsdp", "expert"), ("context",))
    batch = {"tokens": values, "values": values, "mask": mask}
    with jax.set_mesh(made):
        mapped = jax.shard_map(
            lambda p, b: reducer.gradients(objective, p, b),
            in_specs=({"w": layout.used}, rows),
            out_specs=({"w": layout.sharded if zero else layout.used}, PartitionSpec()),
            check_vma=check_vma,
        )
        laid = {k: jax.device_put(v, jax.NamedSharding(made, rows)) for k, v in batch.items()}
        params = {"w": jax.device_put(weight, jax.NamedSharding(made, layout.used))}
        grads, metrics = jax.jit(mapped, compiler_options=oracle.FAST_COMPILE)(params, laid)
    return np.asarray(grads["w"]), float(metrics["loss"])


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
@pytest.mark.parametrize("mesh", [dict(data=8), dict(fsdp=2, tensor=2, context=2)])
def test_gradient_of_a_replicated_weight(mesh, axis_type, check_vma):
    """28 (mean 3.5). 224: reduced twice; 0..7: not reduced; 0..56: a transposed psum (B6)."""
    values = np.arange(8, dtype=np.float32).reshape(1, 4, 2) if "context" in mesh else None
    values = np.arange(8, dtype=np.float32).reshape(1, 8, 1) if values is None else values
    weight = np.float32([3])
    grad, loss = reduce_toy(weight, values, np.ones(values.shape, bool), 0, axis_type, check_vma, **mesh)
    assert grad.tolist() == [28 / 8]
    assert loss == 3 * 28 / 8


@pytest.mark.parametrize("mesh", [dict(), dict(data=2), dict(fsdp=2), dict(context=2)])
@pytest.mark.parametrize("zero", [0, 1])
def test_mean_over_all_valid_tokens(mesh, zero):
    """Counts 100 and 900 of means 0.5 and 0.3: 0.32, not 0.40 (A1); as microbatches, as devices, and as both."""
    values = np.zeros((2, 900), np.float32)
    mask = np.arange(900) < np.array([[100], [900]])
    values[0, :100], values[1, :900] = 0.5, 0.3
    values, mask = values[None], mask[None]
    if mesh in (dict(), dict(context=2)):  # the two rows are two microbatches
        values, mask = values.transpose(1, 0, 2), mask.transpose(1, 0, 2)
    grad, loss = reduce_toy(np.ones(1, np.float32), values, mask, zero, "explicit", True, **mesh)
    np.testing.assert_allclose(grad, 0.32, rtol=1e-6)
    np.testing.assert_allclose(loss, 0.32, rtol=1e-6)
