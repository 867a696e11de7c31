"""Several hosts: how they find each other, and what the loop asks of them.

::

    with start_hosts("auto", 120.0, facts) as hosts:  # before anything starts JAX's backend
        train(experiment, run, hosts=hosts)

A *host* is one process of the run; its devices are the ones that it can address.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import socket
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jaxpar
from jaxpar.errors import ConfigError, JaxparError
from jaxpar.runtime import tunnel
from jaxpar.runtime.link import HostsError, Link, one_line

_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_LEGAL = "auto, none, or ADDRESS:PORT,COUNT,INDEX"
_SAID_BY = {  # what a launcher tells its processes with
    "SLURM": "SLURM_JOB_ID, SLURM_STEP_NODELIST, SLURM_NTASKS, SLURM_PROCID",
    "Cloud TPU": "the metadata of this TPU worker",
    "Open MPI": "OMPI_MCA_orte_hnp_uri, OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_RANK",
    "Kubernetes": "the job of this pod",
}
_NEVER = 10**6  # seconds; of JAX's own heartbeat, since the link watches


class Hosts:
    """The hosts of this run, of which this process is number ``index``; made by ``start_hosts``.

    In a ``with`` block of several hosts, an exception ends all of them with a line that names this one.
    """

    def __init__(self, link: Link):
        self._link = link
        self.index, self.count = link.index, link.count
        self._tunnel: subprocess.Popen[str] | None = None

    # -- what the loop asks ----------------------------------------------------------------------------------------

    def from_first(self, decide: Callable[[], Any]) -> Any:
        """What ``decide()`` gives on host 0 (JSON), on every host."""
        return self._link.exchange(decide() if self.index == 0 else None)[0]

    def watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches; when one does not come within the timeout, all hosts end."""
        while True:
            self._link.waiting_since = time.monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._link.waiting_since = None
            yield batch

    def stop_after(self, step: int, caught: str | None) -> str | None:
        """See ``Link.stop_after``."""
        return self._link.stop_after(step, caught)

    def say_where(self, where: Callable[[], str]) -> None:
        """``where()``: the end of a message about a failure, where the run can be picked up."""
        self._link.where = where

    def check_shared(self, folder: Path) -> None:
        """Raise ConfigError unless all hosts see what host 0 writes in ``folder``."""
        if self.count == 1:
            return
        name = self.from_first(lambda: f".seen-by-all-{uuid.uuid4().hex}")
        if self.index == 0:
            (folder / name).touch()
        self._link.exchange(None)
        seen = _appears(folder / name, min(self._link.timeout, 60))
        blind = [self._link.host(i) for i, saw in enumerate(self._link.exchange(seen)) if not saw]
        if self.index == 0:
            (folder / name).unlink()
        if blind:
            rule = f"is not on a file system that all hosts share: {', '.join(blind)} do not see what host 0 wrote"
            raise ConfigError("--run", str(folder), rule, "a folder on a shared file system")

    # -- start and end ---------------------------------------------------------------------------------------------

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """Raise ConfigError for the first of ``facts`` that is not the same on all hosts."""
        facts = {name: repr(value) for name, value in facts.items()}
        everyone = self._link.exchange(facts)
        ours = everyone[0]
        for i, theirs in enumerate(everyone):
            for name in {**ours, **theirs}:
                one, other = (each.get(name, "nothing") for each in (ours, theirs))
                if one != other:
                    rule = f"on {self._link.host(i)} is not {one}, as on {self._link.host(0)}"
                    raise ConfigError(name, other, rule, "the same command on all hosts")

    def start_jax(self, local_devices: list[int] | None) -> None:
        """``jax.distributed.initialize``, through the tunnel; on a CPU with gloo's collectives."""
        import jax

        _mute_native_output()
        port = self.from_first(_free_port)
        address = f"127.0.0.1:{port}"
        if self.index:
            assert self._link.address is not None
            command = [sys.executable, "-S", tunnel.__file__, self._link.address[0], str(port)]
            self._tunnel = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert self._tunnel.stdout is not None
            address = f"127.0.0.1:{int(self._tunnel.stdout.readline())}"
        os.environ["no_grpc_proxy"] = "127.0.0.1"  # noqa: SIM112  gRPC reads it like this
        jax.config.update("jax_check_proxy_envs", False)
        jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        seconds = max(1, int(self._link.timeout))
        try:
            jax.distributed.initialize(
                address,
                self.count,
                self.index,
                local_devices,
                cluster_detection_method="deactivate",
                initialization_timeout=seconds,
                heartbeat_timeout_seconds=_NEVER,
                shutdown_timeout_seconds=seconds,
            )
        except Exception as error:
            raise HostsError(f"--hosts: JAX could not start its service at port {port}: {one_line(error)}") from error

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self.count == 1:
            self._link.close()
        elif error is None:
            import jax

            self._link.exchange("end")
            with contextlib.suppress(Exception):
                jax.distributed.shutdown()
            self._link.close()
            if self._tunnel is not None:
                self._tunnel.communicate()
        else:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End all hosts with one line; a traceback before it where this host is to blame and it is no plain error."""
        if isinstance(error, KeyboardInterrupt):
            self._link.fail("interrupted", 130, tail=True, maybe_consequence=False)
        expected = isinstance(error, JaxparError)
        from jax.errors import JaxRuntimeError

        in_jax = isinstance(error, JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error)
        if not (expected or in_jax or isinstance(error, OSError)):
            traceback.print_exception(error)
        # an error of the input is found by all hosts at once: host 0 says it
        code = getattr(error, "exit_code", 2) if expected else 1
        self._link.fail(
            one_line(error), code, tail=not expected, maybe_consequence=in_jax or (expected and self.index > 0)
        )


def one_host() -> Hosts:
    """A process by itself, whose data nobody watches."""
    return Hosts(Link(0, 1, None, math.inf))


def start_hosts(wanted: str, timeout: float, facts: Mapping[str, Any], quiet: bool = False) -> Hosts:
    """Find the other hosts, check that ``facts`` and versions are the same on all, and start JAX's distributed runtime.

    ``wanted``: ``auto`` (several hosts where the environment says so), ``none``, or ``ADDRESS:PORT,COUNT,INDEX``.
    ``timeout``: seconds to wait for hosts to come, for a sign of life, and for a batch.

    A plain process starts no service. Raises ConfigError for values that cannot be, HostsError (a line that says who
    is missing) when the hosts do not come together.
    """
    if not 1 <= timeout < float("inf"):
        raise ConfigError("--host-timeout", timeout, "is no number of seconds to wait", "1 or more")
    import jax

    found = _find(wanted, timeout)
    if found is None:
        return Hosts(Link(0, 1, None, timeout))
    how, coordinator, count, index, local_index = found
    link = Link(index, count, _address(coordinator), timeout)
    hosts = Hosts(link)
    with _failing_together(hosts):
        hosts.check_same({"jaxpar": jaxpar.__version__, "jax": jax.__version__, **facts})
        together = link.names.count(link.names[index]) > 1  # processes of one machine share out its devices
        hosts.start_jax([local_index] if together and local_index is not None else None)
    if index == 0 and not quiet:
        print(f"hosts    {count}: {_some(link.names)} ({how}, coordinator {coordinator})")
    return hosts


@contextlib.contextmanager
def _failing_together(hosts: Hosts) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        hosts._fail(error)
        raise


def _some(names: list[str]) -> str:
    return ", ".join(names if len(names) <= 8 else [*names[:4], "...", names[-1]])


def _find(wanted: str, timeout: float) -> tuple[str, str, int, int, int | None] | None:
    """How hosts were found, coordinator, count, index, index on this machine; None for a plain process."""
    if wanted == "none":
        return None
    if wanted != "auto":
        parts = wanted.split(",")
        if len(parts) != 3:
            raise ConfigError("--hosts", wanted, "does not say which hosts", _LEGAL)
        return _checked("--hosts", wanted, "--hosts", *parts)
    given = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    if len(given) == len(_VARIABLES):
        what = ",".join(given.values())
        return _checked(", ".join(_VARIABLES), what, "environment", *given.values())
    if "JAX_NUM_PROCESSES" in given or "JAX_PROCESS_ID" in given:
        missing = [name for name in _VARIABLES if name not in given]
        raise ConfigError("--hosts", "auto", f"finds {', '.join(given)} set but not {', '.join(missing)}", _LEGAL)
    from jaxpar.compat import ClusterError, detect_cluster

    try:
        cluster = detect_cluster(timeout)
    except ClusterError as error:
        assert error.__cause__ is not None
        rule = f"finds {error.kind}, but not its hosts: {_SAID_BY[error.kind]}: {one_line(error.__cause__)}"
        raise ConfigError("--hosts", "auto", rule, "none, or ADDRESS:PORT,COUNT,INDEX") from error
    if cluster is None or cluster.kind == "SLURM":  # mpirun in a job of SLURM is none of srun's business
        _check_slurm()
    if cluster is None:
        return None
    coordinator = os.environ.get("JAX_COORDINATOR_ADDRESS", cluster.coordinator)
    said = (coordinator, str(cluster.count), str(cluster.index))
    checked = _checked(_SAID_BY[cluster.kind], ",".join(said), cluster.kind, *said)
    return checked and (*checked[:-1], cluster.local_index)


def _check_slurm() -> None:
    """Raise ConfigError where SLURM's variables say that not all of the job takes part."""
    nodes, tasks = os.environ.get("SLURM_JOB_NUM_NODES", "1"), os.environ.get("SLURM_NTASKS")
    if nodes != "1" and "SLURM_STEP_NODELIST" not in os.environ:
        rule = f"finds a SLURM job of {nodes} nodes, and no srun that starts a process on each"
        raise ConfigError("--hosts", "auto", rule, "srun jaxpar train ..., or --hosts none: this node alone")
    if tasks is not None and (of_step := os.environ.get("SLURM_STEP_NUM_TASKS", tasks)) != tasks:
        raise ConfigError("SLURM_NTASKS", tasks, f"is not SLURM_STEP_NUM_TASKS, {of_step}", "both as srun sets them")


def _checked(
    field: str, what: str, how: str, address: str, count: str, index: str
) -> tuple[str, str, int, int, None] | None:
    host, _, port = address.strip().rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) < 65536:
        raise ConfigError(field, what, f"has no ADDRESS:PORT in {address!r}", _LEGAL)
    if not count.strip().isdecimal() or int(count) < 1:
        raise ConfigError(field, what, f"has no number of hosts in {count!r}", _LEGAL)
    if not index.strip().isdecimal() or int(index) >= int(count):
        raise ConfigError(field, what, f"has no index of a host in {index!r}", f"INDEX from 0 to {int(count) - 1}")
    return (how, address.strip(), int(count), int(index), None) if int(count) > 1 else None


def _address(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    return host.strip("[]"), int(port)


def _mute_native_output() -> None:
    """Leave stdout to Python: gloo prints a line for every group of devices that it connects."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.fileno() == 1:
        sys.stdout.flush()
        sys.stdout = os.fdopen(os.dup(1), "w", buffering=1, encoding=sys.stdout.encoding, errors="replace")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def _appears(path: Path, timeout: float) -> bool:
    """Whether ``path`` comes to exist; a network file system may show it late."""
    deadline = time.monotonic() + timeout
    while True:
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # makes NFS look again
            if path.exists():
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
