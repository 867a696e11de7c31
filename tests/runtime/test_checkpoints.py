"""Checkpoints: bitwise, on any mesh, strict, and never without a good one, whatever dies in between."""

import asyncio
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.errors import ConfigError, JaxparError, RunError
from jaxpar.runtime.checkpoints import MARKER, Checkpoints

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def on_mesh(mesh):
    """Shardings for a leaf by its number of dimensions: matrices over both axes, the rest replicated."""
    return lambda x: jax.NamedSharding(mesh, jax.P("data", "tensor") if x.ndim == 2 else jax.P())


def make_state(mesh, seed=0):
    """A train state with every kind of leaf and container that the library saves."""
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {
        "embed": jax.random.normal(keys[0], (16, 8)),
        "layers": {"q": jax.random.normal(keys[1], (8, 8)), "norm": {}},
        "scale": jax.random.normal(keys[2], (8,)).astype(jnp.bfloat16),
    }
    state = {
        "params": params,
        "opt_state": OPTIMIZER.init(params),
        "step": jnp.int32(0),
        "rng": jax.random.key_data(jax.random.key(7)),
        "loss_scale": jnp.float32(1 / 3),
    }
    sharding = on_mesh(mesh)
    return jax.tree.map(lambda x: jax.device_put(x, sharding(x)), state)


def abstract(state, mesh=None):
    sharding = on_mesh(mesh) if mesh is not None else lambda x: x.sharding
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x)), state)


def host(state):
    """A copy on the host that no device buffer backs."""
    return jax.tree.map(lambda x: np.array(x), state)


def assert_bitwise(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), jax.tree_util.keystr(path)


@jax.jit
def loss_of(params, step):
    x = jnp.sin(jnp.arange(16.0) + step.astype(jnp.float32))
    hidden = jnp.tanh(x @ params["embed"] @ params["layers"]["q"]) * params["scale"].astype(jnp.float32)
    return jnp.mean((hidden - 1.0) ** 2)


def _step(state):
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], state["step"])
    updates, opt_state = OPTIMIZER.update(gradients, state["opt_state"], state["params"])
    rng = jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(state["rng"]), 1))
    params = optax.apply_updates(state["params"], updates)
    return {**state, "params": params, "opt_state": opt_state, "step": state["step"] + 1, "rng": rng}, loss


donated_step = jax.jit(_step, donate_argnums=0)


@pytest.fixture(scope="module")
def grid():
    """Automatic axes, so that the little model above needs no layout of its own."""

    def make(data, tensor=1):
        devices = np.array(jax.devices()[: data * tensor]).reshape(data, tensor)
        return jax.sharding.Mesh(devices, ("data", "tensor"))

    return make


def line(error):
    """The message, which must be one line."""
    text = str(error.value)
    assert "\n" not in text and text
    return text


# Same state, any mesh


def test_restores_bitwise_on_other_meshes(tmp_path, grid, mesh8):
    state = make_state(grid(4, 2))
    Checkpoints(tmp_path, asynchronous=False).save(5, state, {"seed": 3, "mix": [0.25, 0.1]})
    for mesh in (grid(4, 2), grid(8, 1), grid(2, 2), grid(1), mesh8):
        saved = Checkpoints(tmp_path)
        target = abstract(state, mesh)
        got = saved.restore(saved.latest(), target)
        assert_bitwise(got, state)
        assert jax.tree.map(lambda x: x.sharding, got) == jax.tree.map(lambda x: x.sharding, target)
    assert saved.metadata(5) == {"seed": 3, "mix": [0.25, 0.1]}


def test_resumed_run_continues_bitwise(tmp_path, grid):
    """5 + save + restore + 5 steps equal 10 steps bit for bit, losses too."""
    state, losses = make_state(grid(4, 2)), []
    saved = Checkpoints(tmp_path)
    for step in range(10):
        if step == 5:
            saved.save(5, state, {})
        state, loss = donated_step(state)
        losses.append(loss)
    saved.wait()
    resumed, again = Checkpoints(tmp_path).restore(5, abstract(make_state(grid(4, 2)))), []
    for _ in range(5):
        resumed, loss = donated_step(resumed)
        again.append(loss)
    assert_bitwise(resumed, state)
    assert_bitwise(again, losses[5:])


def test_structure_has_readable_names_and_needs_no_devices_of_the_run(tmp_path, grid):
    Checkpoints(tmp_path, asynchronous=False).save(1, make_state(grid(4, 2)), {})
    code = """if True:
        import sys, jax
        from jaxpar.runtime.checkpoints import Checkpoints
        assert "orbax" not in sys.modules
        assert jax.device_count() == 1
        for name, leaf in Checkpoints(sys.argv[1]).structure(1).items():
            print(name, leaf.dtype, leaf.shape)
        assert "orbax" not in sys.modules
    """
    lines = run_python(code, tmp_path, devices=1).splitlines()
    assert "params.layers.q float32 (8, 8)" in lines
    assert "params.scale bfloat16 (8,)" in lines
    assert "opt_state.1.0.mu.layers.q float32 (8, 8)" in lines
    assert "opt_state.1.0.count int32 ()" in lines
    assert "loss_scale float32 ()" in lines
    assert len(lines) == len(jax.tree.leaves(make_state(grid(1))))


# A part of the state


def test_a_subtree_is_restored_alone(tmp_path, grid, mesh8):
    """Bitwise and on another mesh, strict within it, whatever else the checkpoint holds; and it stays replaceable."""
    state = make_state(grid(4, 2))
    saved = Checkpoints(tmp_path, asynchronous=False)
    saved.save(1, state, {})
    params = abstract(state["params"], mesh8)
    again = Checkpoints(tmp_path, asynchronous=False)
    got = again.restore(1, params, only="params")
    assert_bitwise(got, state["params"])
    assert got["embed"].sharding == params["embed"].sharding
    del params["scale"]
    for call in (again.restore, again.check_fit):
        with pytest.raises(JaxparError) as error:
            call(1, params, only="params")
        assert line(error).startswith("params.scale: saved bfloat16[8], the config has no such leaf")
    with pytest.raises(JaxparError, match=r"^model\.embed: not saved"):
        again.restore(1, params, only="model")
    again.save(1, {"params": state["params"]}, {})  # it has not restored step 1, so this replaces it
    assert all(name.startswith("params.") for name in saved.structure(1))


# Strict


@pytest.mark.parametrize(
    ("name", "leaf", "message"),
    [
        ("params", {"w": jnp.zeros((8, 9))}, "params.w: saved float32[8,8], the config wants float32[8,9]"),
        ("step", jnp.float32(0), "step: saved int32[], the config wants float32[]"),
        ("ema", jnp.zeros(3), "ema: not saved, the config wants float32[3]"),
        ("rng", {}, "rng: saved uint32[2], the config has no such leaf"),
        ("params", [jnp.zeros(1)], "params.0: not saved, the config wants float32[1]; 1 more differ"),
    ],
)
def test_a_leaf_that_differs_is_named_before_arrays_are_read(tmp_path, grid, name, leaf, message):
    state = {"params": {"w": jnp.zeros((8, 8))}, "step": jnp.int32(4), "rng": jnp.zeros(2, jnp.uint32)}
    saved = Checkpoints(tmp_path, asynchronous=False)
    saved.save(2, state, {})
    for data in (tmp_path / "step_2" / "state").rglob("d/*"):  # reading an array would fail
        data.write_bytes(b"x" * data.stat().st_size)
    with pytest.raises(JaxparError) as error:
        saved.restore(2, abstract({**state, name: leaf}, grid(1)))
    assert line(error) == f"{message} (checkpoint {tmp_path / 'step_2'})"


def test_what_is_not_a_checkpoint(tmp_path, grid):
    state = make_state(grid(1))
    saved = Checkpoints(tmp_path, asynchronous=False)
    assert saved.steps() == [] and saved.latest() is None and Checkpoints(tmp_path / "none").latest() is None
    (tmp_path / "step_7").mkdir()
    (tmp_path / "step_7" / "notes.txt").write_text("mine")
    (tmp_path / "step_08").mkdir()
    assert saved.steps() == []
    saved.save(3, state, {})
    for step in (7, 9):
        with pytest.raises(JaxparError) as error:
            saved.restore(step, abstract(state))
        assert not isinstance(error.value, RunError)  # a name that was given wrong
        assert f"{tmp_path}/step_{step} is not a complete checkpoint" in line(error)
        assert line(error).endswith("(complete steps: 3)")
    (tmp_path / "file").write_text("")
    with pytest.raises(JaxparError) as error:
        Checkpoints(tmp_path / "file").latest()
    assert "Not a directory" in line(error)
    with pytest.raises(ConfigError, match=r"checkpoints\.keep: 0 must be at least 1"):
        Checkpoints(tmp_path, keep=0)


# Damage


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_damage_to_each_file_in_turn(tmp_path, grid, damage):
    """`latest` goes back when a file is missing or short; no damage is ever restored in silence."""
    state = make_state(grid(4, 2))
    saved = Checkpoints(tmp_path / "saved", asynchronous=False)
    saved.save(1, state, {})
    saved.save(2, jax.tree.map(lambda x: x + 1, state), {})
    files = [path for path in (tmp_path / "saved" / "step_2").rglob("*") if path.is_file() and path.stat().st_size]
    assert len(files) > 5
    for number, file in enumerate(files):
        copy = tmp_path / str(number)
        shutil.copytree(tmp_path / "saved", copy)
        victim = copy / file.relative_to(tmp_path / "saved")
        content = victim.read_bytes()
        if damage == "missing":
            victim.unlink()
        elif damage == "truncated":
            victim.write_bytes(content[: len(content) // 2])
        else:
            middle = len(content) // 2
            victim.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        with pytest.raises(JaxparError) as error:
            Checkpoints(copy).restore(2, abstract(state))
        no_marker = damage == "missing" and victim.name == MARKER  # then it is none
        assert isinstance(error.value, RunError) != no_marker
        assert str(victim.name) in line(error) and "(complete steps: 1)" in line(error)
        if damage != "flipped" or victim.name == MARKER:
            assert Checkpoints(copy).latest() == 1
        assert_bitwise(Checkpoints(copy).restore(1, abstract(state)), state)


def test_a_copied_directory_is_a_checkpoint(tmp_path, grid):
    state = make_state(grid(4, 2))
    Checkpoints(tmp_path / "a", asynchronous=False).save(4, state, {"k": 1})
    shutil.copytree(tmp_path / "a" / "step_4", tmp_path / "b" / "step_4")
    shutil.rmtree(tmp_path / "a")
    saved = Checkpoints(tmp_path / "b")
    assert saved.steps() == [4] and saved.metadata(4) == {"k": 1}
    assert_bitwise(saved.restore(4, abstract(state)), state)


# Retention


def test_retention(tmp_path, grid):
    state = {"x": jax.device_put(jnp.arange(8.0), jax.NamedSharding(grid(8), jax.P()))}
    saved = Checkpoints(tmp_path, keep=2, keep_every=4)
    for step in range(1, 11):
        saved.save(step, state, {})
    saved.wait()
    assert saved.steps() == [4, 8, 9, 10]
    (tmp_path / "step_9" / MARKER).unlink()
    (tmp_path / "step_10" / MARKER).unlink()
    saved.save(11, state, {})
    saved.wait()
    assert saved.steps() == [4, 8, 11]  # damaged ones do not count towards `keep`
    assert (tmp_path / "step_10").exists()  # nor are they deleted


def test_going_back_replaces_the_steps_that_follow(tmp_path, grid):
    """A run that restarts at step 1 and takes another path overwrites step 2; saving one step twice does nothing."""
    state = {"x": jax.device_put(jnp.zeros(8), jax.NamedSharding(grid(8), jax.P()))}
    saved = Checkpoints(tmp_path, keep=1, asynchronous=False)
    saved.save(1, state, {})
    Checkpoints(tmp_path, keep=2, asynchronous=False).save(2, state, {"path": "old"})
    saved.restore(1, abstract(state))
    saved.save(1, jax.tree.map(lambda x: x + 5, state), {"ignored": True})
    assert saved.metadata(1) == {}
    changed = jax.tree.map(lambda x: x + 1, state)
    saved.save(2, changed, {"path": "new"})
    assert saved.metadata(2) == {"path": "new"} and saved.steps() == [2]
    assert_bitwise(saved.restore(2, abstract(state)), changed)
    assert os.listdir(tmp_path) == ["step_2"]


# Asynchrony


@pytest.fixture
def gate(monkeypatch):
    """An event: array writes wait until it is set."""
    from orbax.checkpoint._src.serialization import serialization

    opened, write = threading.Event(), serialization.async_serialize_from_host

    async def slow(*args, **kwargs):
        while not opened.is_set():
            await asyncio.sleep(0.01)
        return await write(*args, **kwargs)

    monkeypatch.setattr(serialization, "async_serialize_from_host", slow)
    yield opened
    opened.set()


def test_donated_steps_during_a_slow_save_do_not_touch_the_snapshot(tmp_path, grid, gate):
    state = make_state(grid(4, 2))
    for _ in range(5):
        before = state["params"]["embed"]
        state, _ = donated_step(state)
    assert before.is_deleted()  # the step does donate; on the CPU, not the buffers that the save still views
    snapshot = host(state)
    saved = Checkpoints(tmp_path)
    saved.save(5, state, {"step": 5})
    for _ in range(3):
        state, _ = donated_step(state)
    jax.block_until_ready(state)
    assert saved.steps() == []
    gate.set()
    saved.wait()
    got = saved.restore(5, abstract(state))
    assert_bitwise(got, snapshot)
    assert int(got["step"]) == 5 and saved.metadata(5) == {"step": 5}


@pytest.mark.parametrize("call", ["wait", "save"])
def test_a_failed_save_is_raised_later_and_the_last_good_checkpoint_stays(tmp_path, grid, monkeypatch, call):
    state = make_state(grid(4, 2))
    saved = Checkpoints(tmp_path, keep=1)
    saved.save(1, state, {})
    saved.wait()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_with(errno.ENOSPC))
        saved.save(2, state, {})
        with pytest.raises(RunError) as error:
            saved.wait() if call == "wait" else saved.save(3, state, {})
    assert line(error) == f"checkpoint at step 2 could not be written to {tmp_path}: No space left on device"
    assert saved.steps() == [1] and os.listdir(tmp_path) == ["step_1"]
    saved.save(2, state, {})
    saved.wait()
    assert saved.steps() == [2]


def test_a_folder_that_cannot_be_made_is_an_error_at_once(tmp_path, grid):
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "file" / "checkpoints"
    with pytest.raises(RunError) as error:
        Checkpoints(folder).save(1, make_state(grid(4, 2)), {})
    assert line(error) == f"checkpoint at step 1 could not be written to {folder}: Not a directory"


def test_a_full_disk_leaves_one_line_and_the_last_good_checkpoint(tmp_path):
    """The operating system refuses the array file itself; orbax's tracebacks stay off the terminal."""
    code = """if True:
        import resource, sys, jax, jax.numpy as jnp
        from jaxpar.errors import RunError
        from jaxpar.runtime.checkpoints import Checkpoints
        saved, state = Checkpoints(sys.argv[1]), {"x": jax.random.normal(jax.random.key(0), (64, 64))}
        saved.save(1, state, {})
        saved.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        saved.save(2, state, {})
        try:
            saved.wait()
        except RunError as error:
            print(error)
        print(saved.steps())
    """
    assert run_python(code, tmp_path).splitlines() == [
        f"checkpoint at step 2 could not be written to {tmp_path}: File too large",
        "[1]",
    ]
    assert os.listdir(tmp_path) == ["step_1"]


def fail_with(code):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    return fail


# Death

SAVER = """if True:
    import sys, jax, jax.numpy as jnp
    from jaxpar.runtime.checkpoints import Checkpoints
    saved = Checkpoints(sys.argv[1], keep=2)
    start = saved.latest() or 0
    sharding = jax.NamedSharding(jax.make_mesh((8,), ("data",)), jax.P("data"))
    for step in range(start + 1, start + 10_000):
        state = {"x": jax.device_put(jnp.full((64, 1024), step, jnp.float32), sharding), "step": jnp.int32(step)}
        saved.save(step, state, {"step": step})
        print(step, flush=True)
"""


def python(code, folder, devices=8):
    root = Path(__file__).parents[2]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", code, str(folder)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_python(code, folder, devices=8):
    """Its output, if it succeeds and writes nothing to stderr."""
    process = python(code, folder, devices)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    return out


@pytest.mark.slow
def test_a_killed_saver_always_leaves_a_complete_checkpoint(tmp_path):
    """SIGKILL at random moments of a stream of saves, each process going on from what the one before it left."""
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    sharding = jax.NamedSharding(mesh, jax.P())
    target = {
        "x": jax.ShapeDtypeStruct((64, 1024), jnp.float32, sharding=sharding),
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding),
    }
    chance, before = random.Random(0), 0
    for _ in range(4):
        saver = python(SAVER, tmp_path)
        started = [int(saver.stdout.readline()) for _ in range(4)]
        time.sleep(chance.uniform(0, 0.15))
        saver.send_signal(signal.SIGKILL)
        rest = [int(word) for word in saver.communicate()[0].split()]
        saved = Checkpoints(tmp_path)
        latest = saved.latest()
        assert started[0] == before + 1
        assert started[-1] - 1 <= latest <= ([*started, *rest])[-1] + 1
        for step in saved.steps():
            got = saved.restore(step, target)
            assert int(got["step"]) == step == saved.metadata(step)["step"] and (np.asarray(got["x"]) == step).all()
        before = latest
    Checkpoints(tmp_path, keep=2, asynchronous=False).save(before + 1, got, {})
    assert all(name.startswith("step_") for name in os.listdir(tmp_path))
    assert all(json.loads((path / MARKER).read_text()) for path in tmp_path.iterdir())
