"""How hosts meet, agree and part, without JAX: links in threads of this process, or in processes that start at once."""

from __future__ import annotations

import contextlib
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
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "what answers at {} is no host 0"),
        (b"", "host 0 at {} ended before all hosts"),
    ],
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
