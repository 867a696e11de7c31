"""`jaxpar compile` on eight CPU devices: the keys of its JSON, sums that add up, and what it refuses."""

import contextlib
import io
import json
import os
import subprocess
import sys

import jax
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jaxpar.audit import audit as auditing
from jaxpar.audit.hlo import parse
from jaxpar.cli import main
from jaxpar.experiment import MeshConfig
from jaxpar.program import Program
from jaxpar.runtime import compile as compiling

FAST = "xla_backend_optimization_level=0"


@pytest.fixture(scope="module")
def config(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("config") / "tiny.py"
    path.write_text(
        '"""Tiny."""\nfrom run_helpers import tiny_experiment\nfrom jaxpar.experiment import MeshConfig\n\n\n'
        f"def config():\n    return tiny_experiment({str(text)!r}, compiler_options=({FAST!r},))\n"
    )
    return str(path)


def command(*arguments):
    """Exit code and output of ``jaxpar compile ... --target cpu:8``."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(["compile", *map(str, arguments), "--target", "cpu:8"])
    return code, out.getvalue()


@pytest.fixture(scope="module")
def compared(config):
    """(the JSON of both, the executables) of ``--compare``: fsdp 8, and data 2 x fsdp 2 x tensor 2."""
    seen = []
    audit = compiling.audit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "audit", lambda program, step, *more: seen.append(step) or audit(program, step, *more))
        sides = (config, f"{config} --mesh.tensor 2 --mesh.data 2")
        code, out = command("--compare", *sides, "--json", "--train.remat", "full")
    assert code == 0
    return json.loads(out), seen


@pytest.fixture(scope="module")
def found(compared):
    """The JSON and the executable of the second."""
    (_, result), (_, compiled) = compared
    return result, compiled


def test_every_key_is_there(found):
    """What scripts read."""
    result, _ = found
    assert {"total", "peak", "parameters", "optimizer", "gradients", "activations"} <= set(result["hbm_bytes"])
    assert {"hlo", "analytic", "model"} <= set(result["flops"])
    assert {"total", "by_kind", "by_axis", "by_axis_and_kind", "asynchronous"} == set(result["wire_bytes"])
    assert {"import", "lower", "compile", "audit", "processor", "roofline"} == set(result["seconds"])
    assert result["fits"] is True and result["target"] == "cpu:8" and result["devices"] == 8
    assert result["seconds"]["roofline"] is None and result["mfu"] is None
    assert result["versions"]["jax"] == jax.__version__ and "libtpu" not in result["versions"]


def test_memory_adds_up(found, tiny):
    """Classes are the total, the total is XLA's; what lies there between steps is what really lies there."""
    result, compiled = found
    of, memory = dict(result["hbm_bytes"]), compiled.memory_analysis()
    total, _ = of.pop("total"), of.pop("peak")
    own = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert sum(of.values()) == total == own + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    assert min(of.values()) >= 0
    state = Program(tiny(MeshConfig(data=2, fsdp=2, tensor=2)), jax.devices()).init()
    held = {
        name: sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(part)) for name, part in state.items()
    }
    assert of["parameters"] == held.pop("params")
    assert of["optimizer"] == sum(held.values())


def test_wire_and_work_add_up(found):
    result, _ = found
    wire, flops = result["wire_bytes"], result["flops"]
    assert wire["total"] > 0 and set(wire["by_axis"]) >= {"fsdp", "tensor"}
    for table in (
        wire["by_kind"],
        wire["by_axis"],
        *[{a: sum(k.values()) for a, k in wire["by_axis_and_kind"].items()}],
    ):
        assert sum(table.values()) == pytest.approx(wire["total"], rel=1e-12)
    assert flops["hlo"] == pytest.approx(flops["analytic"], rel=0.01)
    assert result["unrequested"] == []


def test_the_largest_buffers(found):
    """By names that the model has, the largest first."""
    result, _ = found
    names, sizes = zip(*[(buffer["name"], buffer["bytes"]) for buffer in result["largest_buffers"]], strict=True)
    assert len(sizes) == 12 and list(sizes) == sorted(sizes, reverse=True)
    assert any(word in name for name in names for word in ("layers.", "embedding", "head")), names
    assert not any(word in name for name in names for word in ("jit(", "jvp(", "while")), names


def test_it_does_not_fit(config, tmp_path, monkeypatch):
    """Exit code 2, by how much, and no entry in the compile cache, whose executables dump and save wrongly."""
    monkeypatch.setattr(auditing, "device_memory", lambda devices: 100_000)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    reset_cache()
    jax.jit(lambda x: x + 41)(1.0)  # JAX has asked whether there is a cache
    try:
        code, out = command(config, "--save", tmp_path / "tiny.step", "--hlo", tmp_path / "tiny.txt")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        reset_cache()
    assert code == 2
    assert " of 100 kB on each device: does not fit by " in out
    assert parse((tmp_path / "tiny.txt").read_text()).num_partitions == 8
    assert not list(tmp_path.glob("*step-*")) and (tmp_path / "tiny.step").stat().st_size > 10_000
    assert out.endswith(f"jaxpar train ... --compiled {tmp_path / 'tiny.step'}\n")


RESOURCES = {
    "in all": (
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.33G of 15.75G hbm. Exceeded hbm by "
        "4.58G.\n\n  Largest program allocations in hbm:\n\n  1. Size: 2.00G\n     Operator: "
        'op_name="jit(_step)/shard_map/jvp()/while/body/dynamic_update_slice" source_file="x.py"\n'
        "     Shape: bf16[32,4,2048,4096]{3,2,1,0:T(8,128)(2,1)}\n     Unpadded size: 2.00G\n",
        20.33,
        [{"bytes": 2 << 30, "name": "forward: stacked over a loop (dynamic_update_slice)"}],
    ),
    "temporaries": (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (31.42G) exceeds "
        "available HBM (15.75G).",
        31.42,
        [],
    ),
}


@pytest.mark.parametrize(("message", "needed", "buffers"), RESOURCES.values(), ids=RESOURCES)
def test_xla_finds_no_room(config, monkeypatch, message, needed, buffers):
    """What XLA says becomes the same keys, in both of its ways."""

    class Lowered:
        def compile(self, options):
            raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(Program, "lower_step", lambda self: Lowered())
    code, out = command(config, "--json")
    result = json.loads(out)
    of = result["hbm_bytes"]
    assert (code, result["fits"], result["hbm_limit"]) == (2, False, int(15.75 * 2**30))
    assert of["total"] == pytest.approx(needed * 2**30, rel=1e-4) and of["peak"] == of["total"]
    assert of["total"] == of["parameters"] + of["optimizer"] + of["batch"] + of["activations"]
    assert [{k: b[k] for k in ("bytes", "name")} for b in result["largest_buffers"]] == buffers
    assert command(config)[0] == 2


def test_the_largest_buffers_of_what_does_not_fit(config, monkeypatch, tmp_path, capfd):
    """XLA names none where it gives up on temporaries, after it has written where all would lie."""
    lower = Program.lower_step

    class Lowered:
        def __init__(self, program):
            self.lowered = lower(program)

        def compile(self, options):
            self.lowered.compile(options)
            raise jax.errors.JaxRuntimeError(RESOURCES["temporaries"][0])

    monkeypatch.setattr(Program, "lower_step", lambda self: Lowered(self))
    code, out = command(config, "--json", "--hlo", tmp_path / "step.txt")
    names = [buffer["name"] for buffer in json.loads(out)["largest_buffers"]]
    assert code == 2 and len(names) == 12 and any("layers." in name for name in names), names
    assert not (tmp_path / "step.txt").exists()
    said = f"jaxpar: --hlo: {tmp_path / 'step.txt'} is not written: XLA refuses the step\n"
    assert capfd.readouterr().err.endswith(said)


INTERRUPTED = """
import os, signal, sys, tempfile, time
from jaxpar.cli import main
from jaxpar.runtime import compile as compiling

def compile_for(*_, **__):
    tempfile.mkdtemp()
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    time.sleep(60)  # goes on after a Python handler, as XLA does

compiling.compile_for = compile_for
main(["compile", sys.argv[2], "--target", "cpu:1"])
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_ends_it_at_once_and_leaves_nothing(config, tmp_path, name, code):
    """While XLA has the main thread, in which Python's handlers would wait for it."""
    surroundings = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [sys.executable, "-c", INTERRUPTED, name, config]
    ended = subprocess.run(arguments, env=surroundings, capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stderr) == (code, "jaxpar: interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_another_failure_of_xla(config, monkeypatch, capfd):
    class Lowered:
        def compile(self, options):
            raise jax.errors.JaxRuntimeError("INTERNAL: Mosaic failed\nto compile")

    monkeypatch.setattr(Program, "lower_step", lambda self: Lowered())
    assert main(["compile", config, "--target", "cpu:8"]) == 1
    assert capfd.readouterr().err == "jaxpar: XLA does not compile the step: INTERNAL: Mosaic failed to compile\n"


def test_wrong_arguments_are_one_line(config, tmp_path, capfd, monkeypatch):
    """Before anything is compiled."""
    monkeypatch.setattr(Program, "lower_step", None)
    two = ("--compare", config, f"{config} --mesh.tensor 2")
    for arguments, said in (
        ((config, "--target", "v9:3"), "--target: v9:3 is not a target"),
        ((config, "--target", "cpu:0"), "--target: cpu:0 is not a number of virtual devices"),
        ((config, "--model.embedd", "3"), "model.embedd: 3 sets an unknown field"),
        ((config, "--mesh.tensor", "3"), "mesh: "),
        ((config, "--save", tmp_path / "no" / "x"), "--save: "),
        ((config, "--hlo", tmp_path / "no" / "x"), "--hlo: "),
        ((config, "--save", tmp_path), "--save: "),
        ((config, "--save", tmp_path / "x", "--hlo", tmp_path / "x"), "--save: "),
        ((config, "--target", "cpu:8", "--target=cpu:4"), "target: --target is given twice"),
        ((config, "--devices", "cpu:8"), "--devices: "),
        (("--compare", config), "compile --compare A B: argument --compare: expected 2 arguments"),
        (("--compare", config, ""), "--compare: '' does not begin with a config"),
        (("--compare", config, "--mesh.tensor 2"), "--compare: '--mesh.tensor 2' does not begin with a config"),
        (("--compare", config, f"{config} 'a"), "--compare: "),
        (("--compare", config, f"{config} --smoke"), "--compare: "),
        (("--compare", config, f"{config} --mesh.tensor 3"), "mesh: tensor 3 needs a multiple of 3 devices"),
        ((*two, "--mesh.tensor=4"), "--compare: "),
        ((*two, "--save", "x"), "--save: "),
    ):
        target = () if "--target" in arguments else ("--target", "cpu:8")
        assert main(["compile", *map(str, arguments), *target]) == 2, arguments
        out, err = capfd.readouterr()
        assert out == "" and err.startswith(f"jaxpar: {said}") and err.count("\n") == 1, err


def test_one_config_under_two_layouts(compared, config):
    """Flags of one side, in quotes, and of both."""
    (one, two), _ = compared
    assert (one["config"], two["config"]) == (config, f"{config} --mesh.tensor 2 --mesh.data 2")
    assert one["mesh"]["fsdp"] == 8 and two["mesh"] == {**one["mesh"], "data": 2, "fsdp": 2, "tensor": 2}
    assert min(side["flops"]["hlo"] - side["flops"]["model"] for side in (one, two)) > 0  # both recompute
