"""Steps compiled for accelerators that are not there, in this CPU process, and what the audit says of them."""

import dataclasses
import functools
import math
import os
import subprocess
import sys
from typing import Any

import pytest

from jaxpar.audit import collectives as wire
from jaxpar.audit import hlo
from jaxpar.audit.audit import audit
from jaxpar.compat import hlo_text
from jaxpar.experiment import DecoderConfig, Experiment, MeshConfig, TrainConfig
from jaxpar.mesh.targets import parse_target, prepare_to_describe
from jaxpar.program import Program
from jaxpar.runtime.compile import OPTIONS, _no_cache

MODEL = DecoderConfig(vocab_size=512, num_layers=2, embed=256, num_heads=2, num_kv_heads=2, mlp_width=512)
LAYER = {"q": 256 * 256, "k": 256 * 256, "v": 256 * 256, "o": 256 * 256} | dict.fromkeys(
    ("gate", "up", "down"), 256 * 512
)
LAYERS, TABLE = 2 * sum(LAYER.values()), 512 * 256  # weights of the layers; of the embedding, and as many of the head
VECTORS = (2 * 2 + 1) * 256
WEIGHTS = LAYERS + 2 * TABLE


@dataclasses.dataclass(frozen=True)
class Compiled:
    program: Program
    executable: Any
    result: dict[str, Any]
    records: list[wire.Collective]


@functools.cache
def compile_for(target, heads=2, reduce_dtype="float32", **mesh):
    prepare_to_describe()
    experiment = Experiment(
        model=dataclasses.replace(MODEL, num_heads=heads, head_dim=128),
        train=TrainConfig(global_batch=32, seq_len=256, remat="full", reduce_dtype=reduce_dtype),
        mesh=MeshConfig(**mesh),
    )
    program = Program(experiment, parse_target(target).devices())
    with _no_cache():  # which cannot load what was compiled for a machine that is not there
        executable = program.lower_step().compile({**program.compiler_options, **OPTIONS.get(program.platform, {})})
    records = wire.collectives(hlo.parse(hlo_text(executable)), program.sizes)
    return Compiled(program, executable, audit(program, executable), records)


TPU, GPU = dict(target="v5e:4x8", fsdp=32), dict(target="h100:1x8", fsdp=8)
SLICES = dict(target="v5e:2x4*2", data=2, fsdp=8, reduce_dtype="bfloat16")
NODES = dict(target="h100:2x4", data=2, fsdp=4, reduce_dtype="bfloat16")
TENSOR = dict(target="v5e:4x4", heads=4, fsdp=8, tensor=2)  # and one key/value head on each device
EVERY_RUN = [pytest.param(TPU, id="v5e"), pytest.param(GPU, id="h100")]
SLOW = [
    pytest.param(case, id=name, marks=pytest.mark.slow)
    for name, case in {"two slices": SLICES, "two nodes": NODES, "tensor": TENSOR}.items()
]


@pytest.mark.parametrize("case", EVERY_RUN + SLOW)
def test_flops(case):
    """What the compiled step holds is the formula, the kernels of attention included; *wrong*: loops counted once."""
    got = compile_for(**case)
    flops = got.result["flops"]
    assert flops["hlo"] == pytest.approx(flops["analytic"], rel=0.01)
    assert flops["unknown"] == flops["unknown_loops"] == []
    splash = got.program.platform == "tpu"
    assert (got.result["kernel"] == "splash") == splash
    assert {name.split("_")[2] for name in flops["kernels"]} == ({"fwd", "dq", "dkv"} if splash else set())
    tokens = 32 * 256 / got.program.mesh.devices.size
    assert flops["matmul"] > 6 * tokens * WEIGHTS


@pytest.mark.parametrize("case", EVERY_RUN + SLOW)
def test_memory(case):
    """What lies there between steps is the sum of the shards, by hand; classes add up to XLA's own total."""
    got = compile_for(**case)
    hbm, sizes = got.result["hbm_bytes"], got.program.sizes
    weights = WEIGHTS if got.program.experiment.model.num_heads == 2 else WEIGHTS + 2 * 2 * 256 * 256
    if case is not TENSOR:  # there vectors and matrices are cut over different axes
        assert hbm["parameters"] == 4 * (weights // sizes["fsdp"] + VECTORS)
        counters = hbm["optimizer"] - 8 * (weights + VECTORS) // sizes["fsdp"]
        assert 0 < counters <= 16 and counters % 4 == 0
        assert hbm["gradients"] == 4 * (weights + VECTORS) // sizes["fsdp"]
    rows = 32 // (sizes["data"] * sizes["fsdp"])
    assert hbm["batch"] == rows * 256 * (4 * 4 + 1)  # tokens, targets, positions, segments and a mask; tensor shares
    memory = got.executable.memory_analysis()
    fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
    total = memory.argument_size_in_bytes + fresh + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    classes = {name: size for name, size in hbm.items() if name not in ("total", "peak")}
    assert sum(classes.values()) == hbm["total"] == total
    assert min(classes.values()) >= 0 and hbm["padding"] < 0.05 * total
    assert hbm["parameters"] + hbm["optimizer"] < hbm["peak"] <= total
    assert got.result["fits"] and got.result["hbm_limit"] > 15 * 2**30


@pytest.mark.parametrize("case, stages", [pytest.param(TPU, 2, id="v5e"), pytest.param(GPU, 1, id="h100")])
def test_wire(case, stages):
    """Layers are gathered twice in bf16 (full recomputation), table and head once, and all gradients scattered in fp32.

    XLA:TPU all-reduces the table's gradient whole: its shards are narrower than the 128 lanes of a tile.
    """
    got = compile_for(**case)
    bytes_ = got.result["wire_bytes"]
    g = got.program.sizes["fsdp"]
    gathered, scattered = 2 * (2 * LAYERS + 2 * TABLE) + 4 * VECTORS, 4 * (WEIGHTS + VECTORS)
    extra = 4 * TABLE if got.program.platform == "tpu" else 0
    assert bytes_["total"] == pytest.approx((g - 1) / g * (gathered + scattered + extra), rel=0.02)
    axes = {"fsdp", "fsdp(4 of 32)", "fsdp(8 of 32)"} if stages == 2 else {"fsdp"}
    assert set(bytes_["by_axis"]) == axes
    if stages == 2:
        assert bytes_["by_axis"]["fsdp"] < 100  # loss, tokens and norms
    assert 0 < bytes_["asynchronous"] <= bytes_["total"]
    assert bytes_["total"] == sum(bytes_["by_kind"].values()) == sum(bytes_["by_axis"].values())


def test_gradients_leave_as_reduce_scatters_in_stages():
    """Of every matrix of a layer whole over 4 devices, then a quarter over 8; *wrong*: an all-reduce of the whole."""
    records = compile_for(**TPU).records
    for stage, group in ((1, 4), (4, 8)):
        scattered = [
            r for r in records if r.kind == "reduce-scatter" and r.group_size == group and "/layers/" in r.op_name
        ]
        for name, size in LAYER.items():
            (record,) = [r for r in scattered if r.op_name.split("/")[-2].endswith(f".{name}")]
            assert (math.prod(record.dims), record.executions, record.dtype) == (size // stage, 2, "f32"), name
    whole = {r.op_name.split("/")[-2] for r in records if r.kind == "all-reduce" and math.prod(r.dims) > VECTORS}
    assert whole == {"transpose(jvp(table))"}


def test_gradients_leave_as_reduce_scatters_on_gpus():
    """All of them, and nothing but the two scalars of loss and norm is all-reduced."""
    records = compile_for(**GPU).records
    assert sum(math.prod(r.dims) * r.executions for r in records if r.kind == "reduce-scatter") == WEIGHTS + VECTORS
    assert max(math.prod(r.dims) for r in records if r.kind == "all-reduce") <= 2  # merged


@pytest.mark.parametrize("case", EVERY_RUN + SLOW)
def test_nothing_moves_unasked(case):
    """No collective of more than a few numbers that no line of the program names."""
    got = compile_for(**case)
    assert got.result["unrequested"] == []
    assert all(r.operand_bytes <= 1024 for r in wire.unrequested(got.records).reductions)
    assert (got.result["unnamed_bytes"] > 0) == (case is SLICES)  # there XLA leaves names away, and we say so


@pytest.mark.parametrize("case", EVERY_RUN)
def test_roofline(case):
    """Every level has its time, none is longer than the whole."""
    result = compile_for(**case).result
    times = result["seconds"]["roofline"]
    levels = {name: time for name, time in times.items() if name not in ("overlapped", "serial")}
    assert min(levels[name] for name in ("compute", "hbm")) > 0
    assert times["overlapped"] == max(levels.values()) <= times["serial"] <= sum(levels.values())
    fast, slow = ("ici", "dcn") if case is TPU else ("nvlink", "network")
    assert times[fast] > 0 and times[slow] == 0
    assert 0 < result["mfu"]["serial"] <= result["mfu"]["overlapped"] < 1
    assert (result["estimated_cycles"] is not None) == (case is TPU)


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(SLICES, id="slices"), pytest.param(NODES, id="nodes")])
def test_only_gradients_cross_the_slow_network(case):
    """One all-reduce of each device's shards over data, matrices in ``reduce_dtype``, vectors in fp32; and scalars."""
    got = compile_for(**case)
    shards = got.program.sizes["fsdp"]
    if case is SLICES:
        crossing = [r for r in got.records if r.between_slices]
        assert all(r.axis.startswith("fsdp") for r in got.records if not r.between_slices)
        assert {r.axis for r in crossing} == {"data"}
    else:
        crossing = [r for r in got.records if r.axis != "fsdp"]
        assert {r.axis for r in crossing if math.prod(r.dims) > 1} == {"data"}
    assert {r.kind for r in crossing} == {"all-reduce"}
    sent = {dtype: sum(math.prod(r.dims) for r in crossing if r.dtype == dtype) for dtype in ("bf16", "f32")}
    padding = 4 if case is SLICES else 1  # rows of fewer than 128 numbers are sent as 128
    assert WEIGHTS // shards <= sent["bf16"] <= padding * WEIGHTS // shards
    assert VECTORS // shards <= sent["f32"] <= padding * 2 * VECTORS
    assert all(r.executions == 1 for r in crossing)
    slow = got.result["seconds"]["roofline"]["dcn" if case is SLICES else "network"]
    assert slow > 0


QUIET = """
import jax
jax.devices()
from jaxpar.mesh.targets import parse_target, prepare_to_describe
prepare_to_describe()
for target in ("v5e:2x2", "h100:1x2"):
    device = parse_target(target).devices()[0]
    x = jax.ShapeDtypeStruct((128, 128), "bfloat16", sharding=jax.sharding.SingleDeviceSharding(device))
    jax.jit(lambda x: x @ x).lower(x).compile({"xla_gpu_autotune_level": 0} if "h100" in target else None)
print("compiled")
"""


def run(*command):
    hidden = (
        "JAX_PLATFORMS",
        "TPU_SKIP_MDS_QUERY",
        "TF_CPP_MIN_LOG_LEVEL",
        "TPU_STDERR_LOG_LEVEL",
        "TPU_MIN_LOG_LEVEL",
    )
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment["JAX_PLATFORMS"] = "cpu"
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300)


def test_the_plugins_say_nothing():
    """Neither libtpu, which looks for its metadata server, nor the CUDA plugin, which looks for a driver and cuDNN."""
    done = run("-c", QUIET)
    assert (done.returncode, done.stdout, done.stderr) == (0, "compiled\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e:2x2", "h100:1x4"])
def test_the_command_says_what_it_costs_and_no_more(target):
    """Nothing on stderr, and no line of a plugin's on stdout."""
    done = run("-m", "jaxpar.cli", "compile", "quickstart", "--smoke", "--target", target)
    assert (done.returncode, done.stderr) == (0, "")
    assert target in done.stdout and "fits" in done.stdout
    assert not any(word in done.stdout for word in ("WARNING", "libtpu", "cuInit", "plugin"))
