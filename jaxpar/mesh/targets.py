"""What a Program is compiled for: the devices that are there, or a machine that is only described.

``parse_target("v5e:16x16").devices()`` are JAX devices that lower and compile, and run nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from jaxpar.errors import ConfigError

LEGAL = (
    "attached; cpu:N; v4, v5e, v5p, v6e or tpu7x:TOPOLOGY[*SLICES] such as v5e:16x16 or v5p:4x4x8*2; "
    "a100, h100, h200 or b200:NODESxGPUS such as h100:8x8"
)


@dataclasses.dataclass(frozen=True)
class Chip:
    """What one device can do. FLOP/s are dense peaks; bandwidths bytes/s, of a network in one direction."""

    name: str
    platform: str  # "tpu", "gpu" or "cpu"
    device_kind: str
    hbm_bytes: int  # that a program can use
    hbm: float  # bytes/s
    flops: dict[str, float]  # by dtype of a product's operands
    networks: dict[str, float]  # fastest first, see chips.toml
    dims: int = 0  # of a TPU slice's torus
    wraps: int = 1  # a torus dimension of a multiple of this many chips wraps around
    largest: int = 0  # chips of a slice
    devices_per_chip: int = 1
    xla: dict[str, Any] = dataclasses.field(default_factory=dict)  # what XLA must know of a GPU

    def peak(self, dtype: Any) -> float:
        """FLOP/s of matrix products in ``dtype``."""
        return self.flops.get(str(dtype), self.flops["bfloat16"])

    def closes(self, torus: tuple[int, ...]) -> tuple[bool, ...]:
        """Which dimensions of a TPU slice of this size are rings; of a 3-dimensional torus all are, or none."""
        rings = tuple(size % self.wraps == 0 for size in torus)
        return rings if self.dims == 2 or all(rings) else (False,) * len(torus)


@functools.cache
def chips() -> dict[str, Chip]:
    """The chips of ``chips.toml`` by name."""
    table = tomllib.loads((Path(__file__).parent / "chips.toml").read_text())
    return {
        name: Chip(name=name, hbm_bytes=int(entry.pop("hbm_gib") * 2**30), **entry) for name, entry in table.items()
    }


def chip_of(device: Any) -> Chip | None:
    """The chip of a JAX device; None for what chips.toml does not have (a CPU)."""
    kind = device.device_kind
    found = [chip for chip in chips().values() if chip.device_kind in kind]
    return max(found, key=lambda chip: len(chip.device_kind)) if found else None


@dataclasses.dataclass(frozen=True)
class Target:
    """A machine by name. ``shape``: a TPU slice's torus, (nodes, GPUs of a node), or (virtual CPU devices,)."""

    text: str
    chip: Chip | None  # None: attached devices, whatever they are, or a CPU
    shape: tuple[int, ...] = ()
    slices: int = 1

    @property
    def described(self) -> bool:
        """Whether it is compiled for only, and runs nothing."""
        return self.chip is not None

    def devices(self) -> list[Any]:
        """JAX devices, slice after slice or node after node.

        Raises ConfigError for a plugin that is not installed, with the command that installs it.
        """
        if self.chip is None:
            from jaxpar.mesh.devices import start_devices

            return start_devices(None if self.text == "attached" else self.text)
        from jax.experimental import topologies

        self._require_plugin()
        try:
            if self.chip.platform == "tpu":
                found = topologies.get_topology_desc(**self._tpu_arguments()).devices
            else:
                found = topologies.get_topology_desc("", "cuda", **self._gpu_arguments()).devices
        except Exception as error:  # of the plugin, of any kind
            raise ConfigError("--target", self.text, f"is refused by the compiler: {_one_line(error)}", LEGAL) from None
        return list(found)

    def _tpu_arguments(self) -> dict[str, Any]:
        assert self.chip is not None
        more: dict[str, Any] = {"num_slices": self.slices} if self.slices > 1 else {}
        if self.chip.name == "v4":
            more["chip_config_name"] = "megacore"
        shape = (*self.shape, 1, 1)[:3]
        small = [n for n in shape if n > 1]
        host = (1, 1, 1) if not small else (*(min(n, 2) for n in shape[:2]), 1)
        if math.prod(host) < 4:
            more["chips_per_host_bounds"] = host
        topology = "x".join(map(str, self.shape))
        return {"platform": "tpu", "topology_name": f"{self.chip.name}:{topology}", **more}

    def _gpu_arguments(self) -> dict[str, Any]:
        assert self.chip is not None
        nodes, gpus = self.shape
        return {"topology": f"1x{nodes}x{gpus}", "target_config": gpu_target_config(self.chip)}

    def _require_plugin(self) -> None:
        assert self.chip is not None
        module, what = {"tpu": ("libtpu", "libtpu"), "gpu": ("jax_plugins.xla_cuda13", "the CUDA plugin")}[
            self.chip.platform
        ]
        try:
            there = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # no jax_plugins at all
            there = False
        if not there:
            rule = f"needs {what}, which is not installed"
            raise ConfigError("--target", self.text, rule, 'pip install -e ".[aot]", then the same command')


def parse_target(text: str) -> Target:
    """The target that ``text`` names. Raises ConfigError; starts nothing."""

    def refuse(rule: str, legal: str = LEGAL) -> ConfigError:
        return ConfigError("--target", text, rule, legal)

    if text == "attached":
        return Target(text, None)
    name, _, rest = text.partition(":")
    if name == "cpu":
        if not rest.isdecimal() or not 1 <= int(rest) <= 4096:
            raise refuse("is not a number of virtual devices", "cpu:N, N from 1 to 4096")
        return Target(text, None, (int(rest),))
    chip = chips().get(name)
    if chip is None:
        raise refuse("is not a target")
    found = re.fullmatch(r"([1-9]\d*(?:x[1-9]\d*)*)(?:\*([1-9]\d*))?", rest)
    if found is None:
        raise refuse("is not a target")
    shape, slices = tuple(map(int, found[1].split("x"))), int(found[2] or 1)
    if chip.platform == "gpu":
        if len(shape) != 2 or found[2]:
            raise refuse(f"is not {name}:NODESxGPUS", f"such as {name}:8x8: 8 nodes of 8 GPUs")
        if shape[1] > 8 or math.prod(shape) > 16384:
            raise refuse("has more GPUs than such machines do", "up to 8 GPUs a node, 16384 in all")
        return Target(text, chip, shape)
    if len(shape) != chip.dims:
        example = "16x16" if chip.dims == 2 else "4x4x8"
        raise refuse(f"is not a {chip.dims}-dimensional topology, which {name} slices are", f"such as {name}:{example}")
    if math.prod(shape) > chip.largest:
        raise refuse(f"has {math.prod(shape)} chips", f"up to {chip.largest} in a slice of {name}; *SLICES for more")
    if any(size > 1 and size % 2 for size in shape):
        raise refuse("has an odd dimension", "1 or even numbers of chips along each")
    if slices > 256:
        raise refuse(f"has {slices} slices", "1 to 256")
    return Target(text, chip, shape, slices)


def gpu_target_config(chip: Chip) -> str:
    """XLA's GpuTargetConfigProto of a GPU, as text."""
    x = chip.xla
    major, minor = x["compute_capability"]
    info = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": x["shared_memory_per_core"],
        "threads_per_core_limit": 2048,
        "core_count": x["cores"],
        "fpus_per_core": x["fpus_per_core"],
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": int(chip.hbm),
        "l2_cache_size": x["l2_cache"],
        "clock_rate_ghz": x["clock_ghz"],
        "device_memory_size": chip.hbm_bytes,
        "shared_memory_per_block_optin": x["shared_memory_optin"],
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    fields = "\n".join(f"  {name}: {value}" for name, value in info.items())
    capability = f"  cuda_compute_capability {{ major: {major} minor: {minor} }}"
    return (
        f"gpu_device_info {{\n{fields}\n{capability}\n}}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 8 patch: 0 }\n"
        f'device_description_str: "{x["description"]}"\n'
    )


def prepare_to_describe() -> None:
    """Set what the compilers' plugins read when they load, so that they look for no hardware and say nothing.

    Before JAX starts a backend; a process that has done this computes on the CPU.
    """
    quiet = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOG_DIR": "disabled",
        "TPU_STDERR_LOG_LEVEL": "3",
        "TPU_MIN_LOG_LEVEL": "3",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    os.environ.update(
        {name: value for name, value in quiet.items() if name not in os.environ or name == "JAX_PLATFORMS"}
    )
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_platforms", "cpu")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
