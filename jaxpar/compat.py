"""What differs between the oldest and the newest supported JAX, and what is private in it, in one place."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from typing import Any

import jax


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which ``x`` differs between devices inside a type-checked ``shard_map``."""
    kind = jax.typeof(x)
    manual = getattr(kind, "manual_axis_type", None)
    return frozenset(manual.varying if manual is not None else getattr(kind, "vma", ()))


def as_varying(tree: Any, axes: Iterable[str]) -> Any:
    """Mark every leaf as differing over ``axes`` (no data moves), so that its gradient stays per device."""
    axes = tuple(axes)

    def cast(x: Any) -> Any:
        missing = tuple(a for a in axes if a not in varying_axes(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """What JAX found in the environment about the processes of a job."""

    kind: str
    coordinator: str  # "address:port", the same in all processes
    count: int
    index: int
    local_index: int | None  # among the processes of this machine, where the launcher says so


class ClusterError(Exception):
    """A launcher of this ``kind`` is there, and does not say which hosts."""

    def __init__(self, kind: str):
        self.kind = kind  # as in Cluster; the error itself is the cause
        super().__init__(kind)


def detect_cluster(timeout: float) -> Cluster | None:
    """The launcher that started this process as one of several, by JAX's own detection; None for a plain process.

    SLURM (``srun``), Cloud TPU (GCE and GKE), Open MPI, and indexed Kubernetes jobs. Raises ClusterError.
    """
    from jax._src import clusters

    for env in clusters.ClusterEnv._cluster_types:
        in_kubernetes = env.__name__ == "K8sCluster"
        if env.opt_in_only_method or (in_kubernetes and "JOB_COMPLETION_INDEX" not in os.environ):
            continue
        kind = {"slurm": "SLURM", "ompi": "Open MPI"}.get(env.name, "Kubernetes" if in_kubernetes else "Cloud TPU")
        try:
            present = _in_pod() if env.__name__ == "GceTpuCluster" else env.is_env_present()
            if present and env.get_process_count() > 1:
                port = os.environ.get("JAX_COORDINATOR_PORT")
                address = env.get_coordinator_address(int(timeout), port)
                return Cluster(kind, address, env.get_process_count(), env.get_process_id(), env.get_local_process_id())
        except Exception as error:
            raise ClusterError(kind) from error
    return None


def hlo_text(compiled: jax.stages.Compiled) -> str:
    """The optimized HLO of ``compiled``; with its constants written out where it holds a TPU kernel.

    ``as_text`` leaves constants of more than ten elements away, the block masks of splash attention among them.
    """
    text = compiled.as_text()
    if text is None or "tpu_custom_call" not in text:
        return text or ""
    try:
        from jax._src.lib import hlo  # jax 0.12
    except ImportError:
        from jax._src.lib import _jax as hlo

    options = hlo.HloPrintOptions()
    options.print_large_constants = True
    executable: Any = compiled.runtime_executable()
    return executable.hlo_modules()[0].to_string(options)


def _in_pod() -> bool:
    """Whether this machine is a worker of Cloud TPU. JAX takes an error page of its metadata server for an answer."""
    from jax._src.clusters import cloud_tpu_cluster

    if not cloud_tpu_cluster.running_in_cloud_tpu_vm or "TPU_SKIP_MDS_QUERY" in os.environ:
        return False
    for key in ("agent-worker-number", "worker-network-endpoints"):
        _, status = cloud_tpu_cluster.get_metadata(key)
        if status == 404 and key == "agent-worker-number":
            return False
        if status != 200:
            raise OSError(f"{key}: HTTP status {status}")
    return True
