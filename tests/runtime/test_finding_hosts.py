"""How a process learns which hosts take part: the flag, the environment, SLURM, Open MPI, the metadata of a TPU pod."""

from __future__ import annotations

import http.server
import socket
import threading
import time

import pytest

from jaxpar.errors import ConfigError
from jaxpar.runtime import hosts as hosts_module
from jaxpar.runtime.hosts import start_hosts


@pytest.mark.parametrize(
    ("wanted", "rule"),
    [
        ("two", "does not say which hosts"),
        ("node1,2,0", "has no ADDRESS:PORT in 'node1'"),
        ("node1:0,2,0", "has no ADDRESS:PORT"),
        (":80,2,0", "has no ADDRESS:PORT"),
        ("node1:80,0,0", "has no number of hosts in '0'"),
        ("node1:80,x,0", "has no number of hosts in 'x'"),
        ("node1:80,2,2", r"has no index of a host in '2' \(legal: INDEX from 0 to 1"),
        ("node1:80,2,-1", "has no index of a host"),
    ],
)
def test_flags_that_cannot_be(wanted, rule):
    with pytest.raises(ConfigError, match=f"^--hosts: {wanted} {rule}"):
        start_hosts(wanted, 1.0, {})


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan"), float("inf")])
def test_timeouts_that_cannot_be(timeout):
    with pytest.raises(ConfigError, match=r"^--host-timeout: "):
        start_hosts("none", timeout, {})


SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_NODELIST": "node[07-09]",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
EXPLICIT = {"JAX_COORDINATOR_ADDRESS": "node01:4000", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
OMPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}


@pytest.fixture
def set_variables(monkeypatch):
    """``set_variables({name: value})``, and no others that a launcher would set."""

    def set_them(environment):
        more = ("JAX_COORDINATOR_PORT", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_NUM_NODES")
        for name in {**SLURM, **EXPLICIT, **OMPI, **dict.fromkeys(more)}:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return set_them


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        (SLURM, ("SLURM", "node07:61457", 3, 2, 0)),
        ({**SLURM, "JAX_COORDINATOR_PORT": "5000"}, ("SLURM", "node07:5000", 3, 2, 0)),
        ({**SLURM, "JAX_COORDINATOR_ADDRESS": "ib07:5000"}, ("SLURM", "ib07:5000", 3, 2, 0)),
        ({**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),  # one task is a plain process
        (
            {**SLURM, "SLURM_NTASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1"},
            ("SLURM", "node07:61457", 16, 9, 1),
        ),
        ({"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "8"}, None),  # a job script, no srun
        (EXPLICIT, ("environment", "node01:4000", 2, 1, None)),
        ({**EXPLICIT, "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, None),
        ({**OMPI, "SLURM_JOB_NUM_NODES": "4"}, ("Open MPI", "10.96.0.1:62624", 4, 3, 1)),  # mpirun in a job
        (OMPI, ("Open MPI", "10.96.0.1:62624", 4, 3, 1)),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # any pod has it
    ],
)
def test_what_the_environment_says(set_variables, environment, found):
    set_variables(environment)
    assert hosts_module._find("auto", 1.0) == found
    assert hosts_module._find("none", 1.0) is None


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({**SLURM, "SLURM_PROCID": "3"}, "SLURM_JOB_ID, .*: node07:61457,3,3 has no index of a host in '3'"),
        ({**SLURM, "SLURM_PROCID": "-1"}, "SLURM_JOB_ID, .*: node07:61457,3,-1 has no index of a host in '-1'"),
        ({**SLURM, "SLURM_NTASKS": "three"}, "--hosts: auto finds SLURM, but not its hosts: SLURM_JOB_ID, .*'three'"),
        ({**SLURM, "SLURM_JOB_ID": ""}, "--hosts: auto finds SLURM, but not its hosts: SLURM_JOB_ID, .*: ValueError"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "2"}, "SLURM_NTASKS: 3 is not SLURM_STEP_NUM_TASKS, 2 "),
        ({**SLURM, "JAX_COORDINATOR_PORT": "high"}, "SLURM_JOB_ID, .* has no ADDRESS:PORT in 'node07:high'"),
        ({**SLURM, "JAX_COORDINATOR_ADDRESS": "node07"}, "SLURM_JOB_ID, .* has no ADDRESS:PORT in 'node07'"),
        (
            {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "4", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
            r"--hosts: auto finds a SLURM job of 4 nodes, and no srun .*\(legal: srun jaxpar train ..., or --hosts",
        ),
        ({**OMPI, "OMPI_COMM_WORLD_RANK": "4"}, "OMPI_MCA_orte_hnp_uri, .* has no index of a host in '4'"),
    ],
)
def test_launchers_that_contradict_themselves(set_variables, environment, line):
    """A line that names the variables; not a traceback, a host that trains alone, or a wait for who never comes."""
    set_variables(environment)
    with pytest.raises(ConfigError, match=f"^{line}") as caught:
        start_hosts("auto", 1.0, {})
    assert "\n" not in str(caught.value)
    assert hosts_module._find("none", 1.0) is None


METADATA = {"agent-worker-number": "1", "worker-network-endpoints": "a:1:10.0.0.1,b:2:10.0.0.2", "tpu-env": "A: 'b'"}
SLICES = "MEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\nMEGASCALE_COORDINATOR_ADDRESS: '10.0.0.1:8080'"


@pytest.fixture
def pod(set_variables, monkeypatch):
    """``pod(answers, status)``: this is a TPU worker; its metadata server gives these answers, and else this status."""
    from jax._src.clusters import cloud_tpu_cluster

    servers = []

    def start(answers, status=404):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                answer = answers.get(self.path.rpartition("/")[2])
                self.send_response(status if answer is None else 200)
                self.end_headers()
                self.wfile.write((answer or "<html>: no, no").encode())

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        set_variables({"GCE_METADATA_IP": f"127.0.0.1:{server.server_port}"})

    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the tries
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        (METADATA, ("Cloud TPU", "10.0.0.1:8482", 2, 1, None)),
        ({**METADATA, "tpu-env": SLICES}, ("Cloud TPU", "10.0.0.1:8482", 4, 3, None)),
        ({**METADATA, "agent-worker-number": "0", "worker-network-endpoints": "host"}, None),
        ({}, None),
    ],
    ids=["slice", "two slices", "one host", "no pod"],
)
def test_what_a_pod_says(pod, answers, found):
    pod(answers)
    assert hosts_module._find("auto", 1.0) == found


@pytest.mark.parametrize(
    ("answers", "status", "line"),
    [
        ({}, 503, "agent-worker-number: HTTP status 503"),
        ({"agent-worker-number": "0"}, 404, "worker-network-endpoints: HTTP status 404"),
        ({**METADATA, "worker-network-endpoints": "a:b"}, 404, "ValueError: unsupported worker-network-endpoints"),
        ({**METADATA, "agent-worker-number": "one"}, 404, "ValueError: invalid literal for int"),
    ],
)
def test_a_pod_that_cannot_be_read(pod, answers, status, line):
    """JAX takes an error page for the list of hosts: this host would train alone."""
    pod(answers, status)
    rule = "--hosts: auto finds Cloud TPU, but not its hosts: the metadata of this TPU worker"
    with pytest.raises(ConfigError, match=f"^{rule}: .*{line}"):
        start_hosts("auto", 1.0, {})


def test_a_pod_whose_metadata_server_is_not_there(pod, set_variables):
    pod(METADATA)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    set_variables({"GCE_METADATA_IP": f"127.0.0.1:{port}"})
    line = r"^--hosts: auto finds Cloud TPU, .* of this TPU worker: ConnectionError: "
    with pytest.raises(ConfigError, match=line) as caught:
        start_hosts("auto", 1.0, {})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_half_an_environment(monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    with pytest.raises(ConfigError, match="finds JAX_NUM_PROCESSES set but not JAX_COORDINATOR_ADDRESS, JAX_PROCESS_"):
        start_hosts("auto", 1.0, {})
