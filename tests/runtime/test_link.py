"""How hosts meet, agree and part, without JAX: links in threads of this process, or in processes that start at once."""

from __future__ import annotations

import contextlib
import http.server
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxpar.errors import ConfigError
from jaxpar.runtime import hosts as hosts_module
from jaxpar.runtime.hosts import Hosts, start_hosts
from jaxpar.runtime.link import HostsError, Link

NAME = socket.gethostname().split(".")[0]


def free_port():
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def linked(count, timeout=30.0):
    """``on_all(function)`` calls ``function(link)`` for every host at once and gives the results."""
    port = free_port()
    with ThreadPoolExecutor(count) as pool:

        def on_all(function, arguments):
            return [future.result(60) for future in [pool.submit(function, argument) for argument in arguments]]

        links = on_all(lambda i: Link(i, count, ("127.0.0.1", port), timeout), range(count))
        yield lambda function: on_all(function, links)
        on_all(lambda link: link.close(), links)


def test_what_hosts_exchange():
    with linked(3) as on_all:
        assert on_all(lambda link: link.names) == [[NAME] * 3] * 3
        for turn in range(5):
            assert (
                on_all(lambda link, turn=turn: link.exchange([link.index, turn]))
                == [[[0, turn], [1, turn], [2, turn]]] * 3
            )
        assert on_all(lambda link: Hosts(link).from_first(lambda: f"of {link.index}")) == ["of 0"] * 3


@pytest.mark.parametrize("seed", range(10))
def test_all_stop_after_one_step(seed):
    """Hosts that run up to two steps ahead of each other, as collectives allow, all stop after the same step.

    Told apart: each stops when the message arrives, which is not the same step on all.
    """
    count, steps = 3, 60
    rng = random.Random(seed)
    who, when = rng.randrange(count), rng.randrange(1, 20)
    done = [0] * count

    def run(link):
        pace = random.Random(seed * 10 + link.index)
        for step in range(1, steps + 1):
            while step > min(done) + 2:
                time.sleep(0.0002)
            done[link.index] = step
            time.sleep(pace.random() * 0.003)
            if why := link.stop_after(step, "SIGINT" if link.index == who and step >= when else None):
                return step, why
        return steps, None

    with linked(count) as on_all:
        ends = on_all(run)
    assert len(set(ends)) == 1, ends
    assert ends[0][1] == f"SIGINT to host {who} ({NAME})"
    assert when < ends[0][0] < steps


def test_two_signals_are_one_stop():
    with linked(2) as on_all:
        barrier = threading.Barrier(2)

        def run(link):
            for step in range(1, 30):
                barrier.wait(30)
                if why := link.stop_after(step, "SIGTERM" if step > 2 else None):
                    return step, why
            return None

        first, second = on_all(run)
    assert first == second
    assert re.fullmatch(rf"SIGTERM to host [01] \({NAME}\)", first[1])


def test_facts_that_differ():
    def check(link):
        with pytest.raises(ConfigError) as caught:
            Hosts(link).check_same({"same": 1, "train.seed": link.index, "jax": "0.1"})
        return str(caught.value)

    with linked(2) as on_all:
        [message, other] = on_all(check)
    assert message == other
    assert message.startswith(f"train.seed: 1 on host 1 ({NAME}) is not 0, as on host 0 ({NAME})")


def test_a_folder_that_is_shared_and_one_that_is_not(tmp_path, monkeypatch):
    with linked(2) as on_all:
        on_all(lambda link: Hosts(link).check_shared(tmp_path))
        assert list(tmp_path.iterdir()) == []

        def check(link):
            elsewhere = tmp_path if link.index == 0 else tmp_path / "mounted"
            elsewhere.mkdir(exist_ok=True)
            with pytest.raises(ConfigError, match=rf"^--run: .* share: host 1 \({NAME}\) do not see what host 0"):
                Hosts(link).check_shared(elsewhere)

        monkeypatch.setattr(hosts_module, "_appears", lambda path, timeout: path.exists())
        on_all(check)


# Those who do not come


def test_a_host_that_does_not_come():
    with pytest.raises(
        HostsError, match=rf"^--hosts: host 1 of 2 did not come within 1 s \(here: host 0 \({NAME}\)\)$"
    ):
        start_hosts(f"127.0.0.1:{free_port()},2,0", 1.0, {})


def test_all_who_came_hear_who_is_missing():
    port = free_port()

    def join(i):
        with pytest.raises(HostsError) as caught:
            Link(i, 4, ("127.0.0.1", port), 2.0)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        messages = list(pool.map(join, (0, 2)))
    assert len(set(messages)) == 1
    assert messages[0].startswith("--hosts: host 1, host 3 of 4 did not come within 2 s (here: host 0")


def test_nobody_to_join():
    port = free_port()
    with pytest.raises(HostsError, match=rf"^--hosts: host 0 cannot be reached at 127.0.0.1:{port} for 1 s: .*refused"):
        start_hosts(f"127.0.0.1:{port},2,1", 1.0, {})


def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(HostsError, match=f"^--hosts: host 0 cannot listen on port {port}: .*in use"):
            start_hosts(f"127.0.0.1:{port},2,0", 1.0, {})


@pytest.mark.parametrize(
    ("answer", "line"),
    [(b"HTTP/1.1 400 Bad Request\r\n", "what answers at {} is no host 0"), (b"", "host 0 at {} ended before all hosts")],
)
def test_who_answers_is_not_host_0(answer, line):
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def serve():
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        port = server.getsockname()[1]
        pool.submit(serve)
        with pytest.raises(HostsError, match=rf"^--hosts: {line.format(f'127.0.0.1:{port}')}"):
            start_hosts(f"127.0.0.1:{port},2,1", 5.0, {})


def test_a_host_whose_name_nobody_knows(monkeypatch):
    async def connect(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr("asyncio.open_connection", connect)
    with pytest.raises(HostsError, match=r"^--hosts: host 0 cannot be reached at node01:80 for 1 s: Name or service"):
        start_hosts("node01:80,2,1", 1.0, {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "line"),
    [
        (((0, 2), (1, 3)), rf"host 1 \({NAME}\) was started as one of 3 hosts, host 0 as one of 2"),
        (((0, 3), (1, 3), (1, 3)), rf"two processes say that they are host 1 \({NAME} and {NAME}\)"),
    ],
    ids=["other counts", "one index twice"],
)
def test_hosts_that_do_not_count_alike(who, line):
    """All end at once and say so, though each would wait for the others for a minute."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", MEETING, str(index), str(count), str(port)],
            env={"PYTHONPATH": ":".join(sys.path)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for index, count in who
    ]
    try:
        for process in processes:
            error = process.communicate(timeout=30)[1]
            assert re.fullmatch(rf"jaxpar: .*--hosts: {line}\n", error), error
            assert process.returncode == 1
    finally:
        for process in processes:
            process.kill()
            process.communicate()


MEETING = """
import sys
from jaxpar.runtime.link import HostsError, Link
try:
    Link(int(sys.argv[1]), int(sys.argv[2]), ("127.0.0.1", int(sys.argv[3])), 60.0)
except HostsError as error:
    sys.exit(f"jaxpar: {error}")
"""


def test_strangers_are_ignored():
    """A port scanner, or a browser."""
    port = free_port()

    def knock():
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"", b'{"a": 1}\n'):
            with socket.create_connection(("127.0.0.1", port), 10) as stranger:
                stranger.sendall(words)

    with ThreadPoolExecutor(3) as pool:
        zero = pool.submit(Link, 0, 2, ("127.0.0.1", port), 20.0)
        time.sleep(0.3)
        pool.submit(knock).result(20)
        one = pool.submit(Link, 1, 2, ("127.0.0.1", port), 20.0)
        links = [zero.result(30), one.result(30)]
        list(pool.map(lambda link: link.close(), links))


# What the flag and the environment say


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
        ({**SLURM, "SLURM_NTASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1"}, ("SLURM", "node07:61457", 16, 9, 1)),
        ({"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "8"}, None),  # a job script, no srun
        (EXPLICIT, ("environment", "node01:4000", 2, 1, None)),
        ({**EXPLICIT, "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, None),
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
            r"--hosts: auto finds a SLURM job of 4 nodes, and no srun .*\(legal: srun jaxpar train ..., or --hosts none",
        ),
        ({**OMPI, "OMPI_COMM_WORLD_RANK": "4"}, "OMPI_MCA_orte_hnp_uri, .* has no index of a host in '4'"),
    ],
)
def test_launchers_that_contradict_themselves(set_variables, environment, line):
    """A line that names the variables; not a traceback, not a host that trains alone, not a wait for who never comes."""
    set_variables(environment)
    with pytest.raises(ConfigError, match=f"^{line}") as caught:
        start_hosts("auto", 1.0, {})
    assert "\n" not in str(caught.value)
    assert hosts_module._find("none", 1.0) is None


METADATA = {"agent-worker-number": "1", "worker-network-endpoints": "a:1:10.0.0.1,b:2:10.0.0.2", "tpu-env": "A: 'b'"}
SLICES = "MEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\nMEGASCALE_COORDINATOR_ADDRESS: '10.0.0.1:8080'"


@pytest.fixture
def pod(set_variables, monkeypatch):
    """``pod(answers, status)``: this is a TPU worker, whose metadata server gives these answers, and this for others."""
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
    set_variables({"GCE_METADATA_IP": f"127.0.0.1:{free_port()}"})
    with pytest.raises(ConfigError, match="^--hosts: auto finds Cloud TPU, .* of this TPU worker: ConnectionError: ") as caught:
        start_hosts("auto", 1.0, {})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_half_an_environment(monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    with pytest.raises(ConfigError, match="finds JAX_NUM_PROCESSES set but not JAX_COORDINATOR_ADDRESS, JAX_PROCESS_"):
        start_hosts("auto", 1.0, {})


def test_a_plain_process_opens_no_connection(monkeypatch):
    monkeypatch.setattr(Link, "_lead", None)
    monkeypatch.setattr(Link, "_join", None)
    with start_hosts("auto", 5.0, {}) as hosts:
        assert (hosts.index, hosts.count) == (0, 1)
        assert list(hosts.watched(iter([1, 2]))) == [1, 2]
        assert hosts.from_first(lambda: "here") == "here"
        assert [hosts.stop_after(step, caught) for step, caught in ((1, None), (2, "SIGINT"))] == [None, "SIGINT"]


# Those who go away

SCRIPT = """
import os, signal, sys, time
from jaxpar.runtime.link import Link
index, count, port, fault = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
link = Link(index, count, ("127.0.0.1", port), 2.0)
link.where = lambda: "where"
link.exchange("met")
if fault == "fail":
    link.fail("it broke", 1, True, False)
elif fault == "wait":
    link.waiting_since = time.monotonic()
elif fault:
    os.kill(os.getpid(), getattr(signal, fault))
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("SIGKILL", "ended without a word: it was killed, or it crashed; where"),
        ("SIGSTOP", "has not been heard of for 2 s: it hangs, or its network is gone; where"),
        ("fail", "failed: it broke; where"),
        ("wait", "has waited 2 s for its data; where"),
    ],
)
def test_all_hear_who_failed(fault, said, culprit):
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(i), "3", str(port), fault if i == culprit else ""],
            env={"PYTHONPATH": ":".join(sys.path)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(3)
    ]
    try:
        for i, process in enumerate(processes):
            if i == culprit and fault in ("SIGKILL", "SIGSTOP"):
                continue
            error = process.communicate(timeout=60)[1]
            prefix = f"host {i} ({NAME}): " if i and i != culprit else ""
            own = i == culprit and fault == "fail"
            assert error == f"jaxpar: {prefix}host {culprit} ({NAME}){': it broke; where' if own else ' ' + said}\n"
            assert process.returncode == 1
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.communicate()
