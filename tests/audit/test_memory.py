"""Bytes by class, and the largest buffers of XLA's assignment by name."""

import types

import jax
import numpy as np
import oracle
import pytest

from jaxpar.audit.memory import hbm_bytes, hbm_bytes_resident, largest_buffers, shard_bytes
from jaxpar.mesh.rules import ShardingRules


@pytest.mark.parametrize("stage", range(4))
def test_resident_bytes_are_those_of_real_shards(stage):
    """Of every ZeRO stage, of arrays that exist. *Wrong*: global sizes, or those of stage 3 for all."""
    program = oracle.program("gemma", fsdp=8, rules=ShardingRules(zero=stage))
    state = oracle.put_state(program, oracle.random_params(program))
    held = hbm_bytes_resident(program)

    def on_one_device(tree):
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))

    assert held["parameters"] == shard_bytes(state["params"]) == on_one_device(state["params"])
    assert held["optimizer"] == on_one_device({k: v for k, v in state.items() if k != "params"})
    assert held["batch"] == on_one_device(program.put(oracle.ragged_batch()))


def test_classes_add_up_to_what_xla_says():
    """With gradients in fp32, as the optimizer has them; on a CPU the peak is the total."""
    program = oracle.program("gemma", microbatches=2, fsdp=8)
    compiled = oracle.compiled_step(program)
    memory, found = compiled.memory_analysis(), hbm_bytes(program, compiled)
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    total += memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    assert found["total"] == found["peak"] == total
    assert sum(size for name, size in found.items() if name not in ("total", "peak")) == total
    assert found["gradients"] + found["activations"] == memory.temp_size_in_bytes
    assert found["gradients"] == sum(4 * np.prod(p.shape) // 8 for p in program.parameters)
    assert 0 <= found["padding"] < 4096


def test_no_more_is_live_at_once_than_there_is(monkeypatch):
    """libtpu's peak counts VMEM too. *Wrong*: 15.2 MB live at once of 8.4, and a step that fits refused."""
    program = oracle.program("gemma", fsdp=8)
    monkeypatch.setattr(program, "platform", "tpu")
    sizes = {"argument": 1000, "output": 900, "alias": 900, "temp": 50_000, "generated_code": 10}
    memory = types.SimpleNamespace(**{f"{name}_size_in_bytes": size for name, size in sizes.items()})
    for peak, live in ((90_000, 51_010), (40_000, 40_000)):
        memory.peak_memory_in_bytes = peak
        assert hbm_bytes(program, types.SimpleNamespace(memory_analysis=lambda: memory))["peak"] == live


ASSIGNMENT = """BufferAssignment:
allocation 0: size 4096, parameter 0, shape |f32[1024]| at ShapeIndex {}:
 value: <1 p0 @0> (size=4096,offset=0): f32[1024]{0}
allocation 1: size 9216, preallocated-temp:
 value: <2 small @0> (size=1024,offset=8192): f32[256]{0}
 value: <3 first{0} @0> (size=8192,offset=0): bf16[8,512]{1,0:T(8,128)}
 value: <4 second @0> (size=8192,offset=0): bf16[4096]{0}
allocation 2: size 999999, color 1, preallocated-temp:
 value: <5 fast @0> (size=999999,offset=0): f32[8]{0:S(1)}
allocation 3: size 16, constant:
 value: <6 c @0> (size=16,offset=0): f32[4]{0}
Total bytes used: 12345
"""


def test_largest_buffers(tmp_path):
    """One buffer for each place; what shares it goes by the name that says most; a core's own memory is not in it."""
    (tmp_path / "module_0001.jit_tiny.cpu-buffer-assignment.txt").write_text("allocation 0: size 1, x\n")
    (tmp_path / "module_0002.jit_step.tpu-buffer-assignment.txt").write_text(ASSIGNMENT)
    names = {
        "p0": "state['params']['head']['kernel']",
        "first": "jit(_step)/shard_map/jvp()/while/body/closed_call/layers/mlp/up/bsd,df->bsf/dot_general",
        "second": "jit(_step)/mul",
    }
    first, second, third, fourth = largest_buffers(tmp_path, names)
    assert (first.bytes, first.shape) == (8192, "bf16[8,512]") and "mlp" in first.name
    assert (second.bytes, second.shape, second.name) == (4096, "f32[1024]", "parameter head.kernel")
    assert (third.bytes, third.shape) == (1024, "f32[256]")
    assert (fourth.bytes, fourth.shape) == (16, "f32[4]")
    assert len(largest_buffers(tmp_path, names, most=2)) == 2


def test_no_assignment_no_buffers(tmp_path):
    """A step that came from a cache was not assigned here."""
    assert largest_buffers(tmp_path, {}) == []
