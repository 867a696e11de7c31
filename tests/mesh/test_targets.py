"""Targets by name, the chips they are made of, and the devices they describe."""

import dataclasses
import importlib.util
import re

import pytest

from jaxpar.errors import ConfigError
from jaxpar.mesh.targets import Chip, chip_of, chips, gpu_target_config, parse_target, prepare_to_describe

TPUS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
GPUS = ("a100", "h100", "h200", "b200")


@pytest.mark.parametrize(
    "text, chip, shape, slices",
    [
        ("attached", None, (), 1),
        ("cpu:1", None, (1,), 1),
        ("cpu:4096", None, (4096,), 1),
        ("v4:2x2x4", "v4", (2, 2, 4), 1),
        ("v5e:16x16", "v5e", (16, 16), 1),
        ("v5e:1x1", "v5e", (1, 1), 1),
        ("v5p:4x4x8*2", "v5p", (4, 4, 8), 2),
        ("v6e:16x16*256", "v6e", (16, 16), 256),
        ("tpu7x:2x2x1", "tpu7x", (2, 2, 1), 1),
        ("a100:1x1", "a100", (1, 1), 1),
        ("h100:8x8", "h100", (8, 8), 1),
        ("h200:2048x8", "h200", (2048, 8), 1),
        ("b200:3x5", "b200", (3, 5), 1),
    ],
)
def test_what_can_be_named(text, chip, shape, slices):
    """Nothing is started by it."""
    target = parse_target(text)
    assert (target.text, target.shape, target.slices) == (text, shape, slices)
    assert (target.chip.name if target.chip else None) == chip
    assert target.described == (chip is not None)


@pytest.mark.parametrize(
    "text, rule, legal",
    [
        ("", "is not a target", "attached; cpu:N"),
        ("v5e", "is not a target", "v5e:16x16"),
        ("v7x:2x2x1", "is not a target", "tpu7x:TOPOLOGY"),
        ("v5e:16*16", "is not a 2-dimensional topology", "such as v5e:16x16"),
        ("v5e:16x", "is not a target", "v5e:16x16"),
        ("v5e:0x4", "is not a target", "v5e:16x16"),
        ("v5e:4x4*0", "is not a target", "SLICES"),
        ("v5e:4x4x4", "is not a 2-dimensional topology, which v5e slices are", "such as v5e:16x16"),
        ("v5p:4x4", "is not a 3-dimensional topology, which v5p slices are", "such as v5p:4x4x8"),
        ("v5e:32x32", "has 1024 chips", "up to 256 in a slice of v5e; *SLICES for more"),
        ("v5p:4x4x3", "has an odd dimension", "1 or even"),
        ("v5e:4x4*257", "has 257 slices", "1 to 256"),
        ("h100:8", "is not h100:NODESxGPUS", "such as h100:8x8"),
        ("h100:2x8x8", "is not h100:NODESxGPUS", "such as h100:8x8"),
        ("h100:8x8*2", "is not h100:NODESxGPUS", "such as h100:8x8"),
        ("h100:1x16", "has more GPUs than such machines do", "up to 8 GPUs a node"),
        ("h100:4096x8", "has more GPUs than such machines do", "16384 in all"),
        ("cpu", "is not a number of virtual devices", "cpu:N, N from 1 to 4096"),
        ("cpu:0", "is not a number of virtual devices", "cpu:N, N from 1 to 4096"),
        ("cpu:4097", "is not a number of virtual devices", "cpu:N, N from 1 to 4096"),
        ("cpu:²", "is not a number of virtual devices", "cpu:N, N from 1 to 4096"),
        ("gpu:8", "is not a target", "h200 or b200:NODESxGPUS"),
    ],
)
def test_what_cannot(text, rule, legal):
    """One line: the target, what is wrong with it, what is legal."""
    with pytest.raises(ConfigError) as error:
        parse_target(text)
    message = str(error.value)
    assert message.startswith(f"--target: {text} ") and "\n" not in message
    assert rule in error.value.rule and legal in error.value.legal


def test_every_chip_has_all_its_figures():
    """A key left out would show only when that chip is asked for."""
    assert set(chips()) == {*TPUS, *GPUS}
    for name, chip in chips().items():
        assert chip.platform == ("tpu" if name in TPUS else "gpu")
        assert chip.device_kind and chip.hbm_bytes > 2**33 and chip.hbm > 1e11
        assert {"bfloat16", "float32"} <= set(chip.flops) and min(chip.flops.values()) > 1e14
        assert chip.flops["float32"] <= chip.flops["bfloat16"]
        fast, slow = chip.networks.values()
        assert list(chip.networks) == (["ici", "dcn"] if chip.platform == "tpu" else ["nvlink", "network"])
        assert chip.hbm > fast > slow > 1e9
        if chip.platform == "tpu":
            assert chip.dims in (2, 3) and chip.largest >= 256 and chip.wraps in (4, 16) and not chip.xla
        else:
            assert not chip.dims and chip.hbm_bytes < 2**38


@pytest.mark.parametrize("dtype, key", [("bfloat16", "bfloat16"), ("float32", "float32"), ("float64", "bfloat16")])
def test_peaks(dtype, key):
    """A dtype that the table does not have: the bf16 peak."""
    import jax.numpy as jnp

    assert chips()["h100"].peak(jnp.dtype(dtype)) == chips()["h100"].flops[key]


def device(kind):
    return type("Device", (), {"device_kind": kind, "platform": "other"})()


@pytest.mark.parametrize(
    "kind, name",
    [
        ("TPU v4", "v4"), ("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v6 lite", "v6e"), ("TPU7x", "tpu7x"),
        ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
    ],
)  # fmt: skip
def test_the_chip_of_a_device(kind, name):
    """By the longest name that fits: *wrong* for v5e: v5p, whose name it begins with."""
    assert chip_of(device(kind)) is chips()[name]


def test_a_device_that_is_no_known_chip():
    """No figures rather than wrong ones."""
    assert chip_of(device("cpu")) is chip_of(device("abacus")) is None


@pytest.mark.parametrize(
    "chip, torus, rings",
    [
        ("v5e", (16, 16), (True, True)),
        ("v5e", (8, 16), (False, True)),
        ("v5e", (4, 4), (False, False)),
        ("v5p", (4, 4, 4), (True, True, True)),
        ("v5p", (4, 4, 8), (True, True, True)),
        ("v5p", (2, 4, 4), (False, False, False)),
        ("v4", (4, 4, 2), (False, False, False)),
    ],
)
def test_which_dimensions_are_rings(chip, torus, rings):
    """Two-dimensional slices close where a side is whole (16); of a cube's multiple all sides do, else none."""
    assert chips()[chip].closes(torus) == rings


def test_the_configuration_of_a_gpu():
    """XLA's text format: every field has a number, braces close."""
    for name in GPUS:
        text = gpu_target_config(chips()[name])
        assert text.count("{") == text.count("}") == 3
        fields = dict(re.findall(r"^  (\w+): ([\d.]+)$", text, re.MULTILINE))
        assert int(fields["device_memory_size"]) == chips()[name].hbm_bytes
        assert int(fields["memory_bandwidth"]) == chips()[name].hbm
        assert int(fields["shared_memory_per_block_optin"]) < int(fields["shared_memory_per_core"])
        assert len(fields) == 17 and all(float(value) > 0 for value in fields.values())
    assert "cuda_compute_capability { major: 9 minor: 0 }" in gpu_target_config(chips()["h100"])
    assert 'device_description_str: "NVIDIA H100 80GB HBM3"' in gpu_target_config(chips()["h100"])


@pytest.mark.parametrize(
    "text, count",
    [
        ("v4:2x2x1", 4), ("v5e:1x1", 1), ("v5e:2x2", 4), ("v5e:2x4*2", 16), ("v5p:2x2x2", 8), ("v6e:4x4", 16),
        ("tpu7x:2x2x1", 8), *((f"{name}:2x4", 8) for name in GPUS),
    ],
)  # fmt: skip
def test_described_devices(text, count):
    """Every kind of chip is one that the compilers know under its name, in the number asked for."""
    prepare_to_describe()
    target = parse_target(text)
    devices = target.devices()
    assert len(devices) == count == target.slices * _product(target.shape) * target.chip.devices_per_chip
    assert {chip_of(d).name for d in devices} == {target.chip.name}
    if target.chip.platform == "gpu":
        assert [d.process_index for d in devices] == [0] * 4 + [1] * 4
    else:
        slices = [getattr(d, "slice_index", 0) or 0 for d in devices]
        assert slices == sorted(slices) and len(set(slices)) == target.slices


def _product(shape):
    out = 1
    for size in shape:
        out *= size
    return out


@pytest.mark.parametrize("text, plugin", [("v5e:2x2", "libtpu"), ("h100:1x2", "the CUDA plugin")])
@pytest.mark.parametrize("how", ["absent", "no namespace"])
def test_a_plugin_that_is_missing(monkeypatch, text, plugin, how):
    """One line with the command; not jax's own report of a platform it does not know."""

    def find_spec(name):
        if how == "no namespace":
            raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(ConfigError, match=rf'^--target: {text} needs {plugin}, .* \(legal: pip install -e "\.\[aot\]"'):
        parse_target(text).devices()


def test_what_the_compiler_refuses(monkeypatch):
    """Its reason, as one line."""
    prepare_to_describe()
    target = parse_target("v5e:2x2")
    monkeypatch.setattr(type(target), "_tpu_arguments", lambda self: {"platform": "tpu", "topology_name": "v5e:3x5x7"})
    with pytest.raises(ConfigError, match=r"^--target: v5e:2x2 is refused by the compiler: .*legal") as error:
        target.devices()
    assert "\n" not in str(error.value)


def test_a_chip_is_data():
    """Frozen, so that no audit changes another's."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        chips()["v5e"].hbm = 0
    assert isinstance(chips()["v5e"], Chip)
