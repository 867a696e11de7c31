"""The devices that are there: attached accelerators, or this CPU cut into virtual devices.

``start_devices`` must run before anything else starts JAX's backend.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from typing import Any

from jaxpar.errors import ConfigError, JaxparError
from jaxpar.mesh.targets import chip_of


def start_devices(wanted: str | None = None) -> list[Any]:
    """Start JAX and return its devices.

    ``wanted``: ``"8"`` for eight of the devices that are attached, or of virtual ones where only a CPU is;
    ``"cpu:8"`` for eight virtual ones in any case; None for all that are attached. Of several hosts, each gives that
    many. Raises ConfigError when there are fewer.
    """
    platform, _, number = (wanted or "").rpartition(":")
    if wanted is not None and (platform not in ("", "cpu") or not number.isdecimal() or not 1 <= int(number) <= 4096):
        raise ConfigError("--devices", wanted, "is not a number of devices", "N or cpu:N, from 1 to 4096")
    count = int(number) if number else None
    quiet_plugins()
    import contextlib

    import jax

    if count:
        with contextlib.suppress(RuntimeError):  # the backend has started already, with as many as it has
            jax.config.update("jax_num_cpu_devices", count)
    try:
        devices = jax.devices(platform or None)
    except RuntimeError as error:
        raise JaxparError(f"no usable device: {' '.join(str(error).split())}") from None
    by_host: dict[int, list[Any]] = {}
    for device in devices:
        by_host.setdefault(device.process_index, []).append(device)
    fewest = min(map(len, by_host.values()))
    if count and fewest < count:
        raise ConfigError("--devices", count, "devices are not there", f"1 to {fewest} ({devices[0].platform})")
    return [device for host in by_host.values() for device in host[:count]]


def quiet_plugins() -> None:
    """Without an accelerator in sight, keep installed accelerator plugins from probing for one (and complaining)."""
    if "JAX_PLATFORMS" in os.environ:
        return
    seen = any(os.path.exists(p) for p in ("/dev/nvidia0", "/dev/accel0", "/dev/vfio/0", "/dev/kfd", "/dev/dxg"))
    plugins = any(importlib.util.find_spec(name) for name in ("libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin"))
    if plugins and not seen and "TPU_NAME" not in os.environ and "COLAB_TPU_ADDR" not in os.environ:
        os.environ["JAX_PLATFORMS"] = "cpu"
        import sys

        if "jax" in sys.modules:
            sys.modules["jax"].config.update("jax_platforms", "cpu")


def device_memory(devices: Iterable[Any]) -> int:
    """Bytes that one of these devices can hold; virtual ones share the host's memory. 0: not known."""
    import jax

    local = [device for device in devices if device.process_index == jax.process_index()]
    if local[0].platform == "cpu":
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(local)
        except (OSError, ValueError):
            return 0
    return (local[0].memory_stats() or {}).get("bytes_limit", 0)


def peak_flops(devices: list[Any]) -> tuple[float, str]:
    """Peak FLOP/s of all ``devices`` together, and where the figure comes from ("" when there is none)."""
    kind, platform = devices[0].device_kind, devices[0].platform
    if platform == "cpu":
        hosts = len({device.process_index for device in devices})
        return hosts * measured_matmul_flops(), "this CPU's own fp32 matrix product, measured at start"
    chip = chip_of(devices[0])
    return (chip.peak("bfloat16") * len(devices), f"{kind} bf16 peak") if chip else (0.0, "")


def measured_matmul_flops(size: int = 1024, repeats: int = 5) -> float:
    """FLOP/s of an fp32 ``size`` x ``size`` matrix product on all cores of this CPU (the best of ``repeats``)."""
    import time

    import jax
    import jax.numpy as jnp

    cpu = jax.local_devices(backend="cpu")[0]
    x = jax.device_put(jnp.ones((size, size), jnp.float32), cpu)
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        product(x, x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
