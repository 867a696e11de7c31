"""One TCP connection from every host to host 0: who is there, what they agree on, and who has failed.

Beside JAX's own coordination service, for three things that it cannot do: say which host is missing or died, in a line
and not in a C++ stack trace; survive the death of host 0 long enough to say so; compare the hosts before JAX starts.

Everything runs in one background thread (asyncio). Every host sends a beat; host 0 watches all, the others watch host
0. A connection that ends without a goodbye is a death, noticed at once; silence for ``timeout`` seconds is one too.
Then host 0 passes the verdict on, and in every process this thread prints it and ends the process (exit code 1, or what
the culprit said): the main thread may be stuck in a collective for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from tqdm import tqdm

from jaxpar.errors import JaxparError, RunError

_PROTOCOL = "jaxpar hosts 1"
_LINE = 1 << 24  # bytes of a message at most


class HostsError(RunError):
    """The hosts of a run do not come together."""


class _Peer:
    """The other end of a connection."""

    def __init__(self, name: str, writer: asyncio.StreamWriter):
        self.name, self.writer = name, writer
        self.heard = time.monotonic()
        self.left = False  # it said goodbye


class Link:
    """Host ``index`` of ``count``, connected with the others.

    A single host has the watch over its data alone, and with an infinite ``timeout`` nothing at all.

    ``where`` gives the end of a verdict: where the run can be picked up.
    """

    def __init__(self, index: int, count: int, address: tuple[str, int] | None, timeout: float):
        self.index, self.count, self.timeout = index, count, timeout
        self.names = [""] * count
        self.names[index] = socket.gethostname().split(".")[0]
        self.where: Callable[[], str] = str
        self.waiting_since: float | None = None  # when the main thread began to wait for data
        self.address = address
        self._peers: dict[int, _Peer] = {}
        self._given: dict[int, Any] = {}  # on host 0: what has been given to the exchange under way
        self._result: asyncio.Future[list[Any]] | None = None
        self._ended = False
        self._steps = threading.Condition()  # guards the next three
        self._at = -1  # the last step after which this host went on
        self._holding = False
        self._stop: tuple[int, str] | None = None  # the step after which all stop, and why
        self._stops: dict[int, int] = {}  # on host 0: `_at` of each host that holds
        self._stop_why = ""
        self._loop = asyncio.new_event_loop()
        self._everyone = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hosts", daemon=True)
        if count == 1 and timeout == math.inf:
            self._loop.close()
            return
        self._thread.start()
        if count > 1:
            try:
                self._call(self._lead() if index == 0 else self._join())
            except BaseException:
                self.close()
                raise
        self._loop.call_soon_threadsafe(self._start, self._watch())

    def host(self, index: int) -> str:
        """``host 1 (node02)``."""
        return f"host {index}" + (f" ({self.names[index]})" if self.names[index] else "")

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run ``coroutine`` in the background thread and wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- coming together -----------------------------------------------------------------------------------------

    async def _lead(self) -> None:
        """On host 0: wait for the others. Raises HostsError that names those who did not come."""
        assert self.address is not None
        port = self.address[1]
        try:
            await asyncio.start_server(self._accept, port=port, limit=_LINE)
        except OSError as error:
            raise HostsError(f"--hosts: host 0 cannot listen on port {port}: {_reason(error)}") from None
        try:
            await asyncio.wait_for(self._everyone.wait(), self.timeout)
        except TimeoutError:
            missing = [f"host {i}" for i in range(1, self.count) if i not in self._peers]
            came = ", ".join(self.host(i) for i in sorted({0, *self._peers}))
            why = f"--hosts: {', '.join(missing)} of {self.count} did not come within {self.timeout:g} s (here: {came})"
            self._tell({"kind": "refused", "why": why})
            await asyncio.sleep(0.2)
            raise HostsError(why) from None
        self._tell({"kind": "names", "names": self.names})

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """On host 0: one connection, from its first message to its end."""
        try:
            hello = json.loads(await asyncio.wait_for(reader.readline(), 10))
            index, name, count = hello[_PROTOCOL]
        except (OSError, ValueError, KeyError, TypeError, TimeoutError):
            writer.close()  # no host of ours
            return
        peer = _Peer(name, writer)
        why = None
        if count != self.count:
            why = f"--hosts: host {index} ({name}) was started as one of {count} hosts, host 0 as one of {self.count}"
        elif index in (0, *self._peers):
            other = self.names[index]
            why = f"--hosts: two processes say that they are host {index} ({other} and {name})"
        if why:
            _send(peer, {"kind": "refused", "why": why})
            writer.close()
            if not self._everyone.is_set():
                self._tell({"kind": "refused", "why": why})
                await asyncio.sleep(0.2)
                await self._end(0, f"failed: {why}", 1, own=True, tail=False)
            return
        self._peers[index], self.names[index] = peer, name
        if len(self._peers) == self.count - 1:
            self._everyone.set()
        await self._listen(index, reader)

    async def _join(self) -> None:
        """On the others: find host 0, and wait until it has found all."""
        assert self.address is not None
        host, port = self.address
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port, limit=_LINE), 5)
                break
            except (OSError, TimeoutError) as error:
                if time.monotonic() > deadline:
                    where = f"{host}:{port} for {self.timeout:g} s"
                    raise HostsError(f"--hosts: host 0 cannot be reached at {where}: {_reason(error)}") from None
                await asyncio.sleep(0.2)
        self._peers[0] = _Peer("", writer)
        _send(self._peers[0], {_PROTOCOL: [self.index, self.names[self.index], self.count]})
        try:
            line = await asyncio.wait_for(reader.readline(), self.timeout + 10)
            if not line:
                raise HostsError(f"--hosts: host 0 at {host}:{port} ended before all hosts were there")
            first = json.loads(line)
        except (OSError, ValueError, TimeoutError):
            raise HostsError(f"--hosts: what answers at {host}:{port} is no host 0 of jaxpar") from None
        if first["kind"] == "refused":
            raise HostsError(first["why"])
        self.names = first["names"]
        self._start(self._listen(0, reader))

    # -- what hosts say ------------------------------------------------------------------------------------------

    def _tell(self, message: dict[str, Any]) -> None:
        """To every connection: from host 0 to all others, from the others to host 0."""
        for peer in self._peers.values():
            _send(peer, message)

    async def _listen(self, index: int, reader: asyncio.StreamReader) -> None:
        peer = self._peers[index]
        with contextlib.suppress(OSError, ValueError):
            while line := await reader.readline():
                peer.heard = time.monotonic()
                await self._hear(index, json.loads(line))
        expected, peer.left = peer.left, True
        if not expected:
            await self._end(index, "ended without a word: it was killed, or it crashed", 1)

    async def _hear(self, index: int, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "give":
            self._take(index, message["value"])
        elif kind == "all" and self._result is not None:
            self._result.set_result(message["values"])
        elif kind == "verdict":
            await self._end(message["host"], message["why"], message["code"], tail=False)
        elif kind == "goodbye":
            self._peers[index].left = True
        elif kind == "want stop":
            self._want_stop(message["why"])
        elif kind == "hold":
            self._tell({"kind": "held", "at": self._hold()})
        elif kind == "held":
            self._held(index, message["at"])
        elif kind == "stop":
            self._stop_at(message["step"], message["why"])

    # -- agreement -----------------------------------------------------------------------------------------------

    def exchange(self, value: Any) -> list[Any]:
        """What every host gives, in the order of hosts; JSON. All hosts call it; it waits for the last of them."""
        return [value] if self.count == 1 else self._call(self._exchange(value))

    async def _exchange(self, value: Any) -> list[Any]:
        self._result = self._loop.create_future()
        if self.index == 0:
            self._take(0, value)
        else:
            self._tell({"kind": "give", "value": value})
        return await self._result

    def _take(self, index: int, value: Any) -> None:
        self._given[index] = value
        if len(self._given) == self.count and self._result is not None:
            values = [self._given[i] for i in range(self.count)]
            self._given = {}
            self._tell({"kind": "all", "values": values})
            self._result.set_result(values)

    def stop_after(self, step: int, caught: str | None) -> str | None:
        """Whether all hosts stop after ``step``, and why; ``caught``: the signal that this host got, if any.

        Every host calls it once a step, in order, when ``step`` has been dispatched. When one has got a signal, all
        hold at their next call and say how far they are, and all stop after the furthest step plus one: the same on
        all, whenever the message arrives. A step costs nothing for it: no message, no collective.
        """
        if self.count == 1:
            return caught
        if caught and self._stop is None:
            why = f"{caught} to {self.host(self.index)}"
            if self.index == 0:
                self._loop.call_soon_threadsafe(self._want_stop, why)
            else:
                self._loop.call_soon_threadsafe(self._tell, {"kind": "want stop", "why": why})
        with self._steps:
            self._steps.wait_for(lambda: self._stop is not None or not self._holding)
            self._at = step
            return self._stop[1] if self._stop is not None and step >= self._stop[0] else None

    def _want_stop(self, why: str) -> None:
        """On host 0: somebody wants to stop; ask all how far they are, once."""
        if not self._stop_why:
            self._stop_why = why
            self._tell({"kind": "hold"})
            self._held(0, self._hold())

    def _hold(self) -> int:
        with self._steps:
            self._holding = True
            return self._at

    def _held(self, index: int, at: int) -> None:
        """On host 0: when all hold, decide."""
        self._stops[index] = at
        if len(self._stops) == self.count:
            step = max(self._stops.values()) + 1
            self._tell({"kind": "stop", "step": step, "why": self._stop_why})
            self._stop_at(step, self._stop_why)

    def _stop_at(self, step: int, why: str) -> None:
        with self._steps:
            self._stop = (step, why)
            self._steps.notify_all()

    # -- failure -------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Send beats; notice silence, and data that does not come."""
        interval = min(1.0, self.timeout / 5)
        while not self._ended:
            asleep = time.monotonic()
            await asyncio.sleep(interval)
            self._tell({"kind": "beat"})
            now = time.monotonic()
            since = self.waiting_since
            if now - asleep > 2 * interval + 1:  # it was this process that stood still: hear the others first
                for peer in self._peers.values():
                    peer.heard = now
                if since is not None:
                    self.waiting_since = now
                continue
            for index, peer in self._peers.items():
                if not peer.left and now - peer.heard > self.timeout:
                    why = f"has not been heard of for {self.timeout:g} s: it hangs, or its network is gone"
                    await self._end(index, why, 1)
            if since is not None and now - since > self.timeout:
                await self._end(self.index, f"has waited {self.timeout:g} s for its data", 1, own=True)

    def fail(self, why: str, code: int, tail: bool, maybe_consequence: bool) -> None:
        """End all hosts because this one failed; does not return.

        ``tail``: say where the run can be picked up. ``maybe_consequence``: another host's failure may be the cause,
        whose own word is waited for a while.
        """
        if maybe_consequence:
            time.sleep(min(self.timeout, 10))
        self._call(self._end(self.index, f"failed: {why}", code, own=True, tail=tail))

    async def _end(self, culprit: int, why: str, code: int, own: bool = False, tail: bool = True) -> None:
        """Say why all hosts end, to the others and to the user, and end this process."""
        if self._ended:
            await asyncio.sleep(60)  # the one that ends is under way
        self._ended = True
        last_resort = threading.Timer(15, os._exit, (code,))  # whatever blocks below
        last_resort.daemon = True
        last_resort.start()
        if tail:
            with contextlib.suppress(Exception):
                where = await asyncio.wait_for(self._loop.run_in_executor(None, self.where), 5)
                why += f"; {where}" if where else ""
        if self.index == 0 or own:
            self._tell({"kind": "verdict", "host": culprit, "why": why, "code": code})
        with contextlib.suppress(Exception):
            tqdm.write(f"jaxpar: {self._sentence(culprit, why, own)}", file=sys.stderr)
            sys.stderr.flush()
            sys.stdout.flush()
        for _ in range(30):  # the end of host 0 must not overtake the verdict
            if self.index or all(peer.left for peer in self._peers.values()):
                break
            await asyncio.sleep(0.1)
        if own and self.index:
            await asyncio.sleep(0.5)
        os._exit(code)

    def _sentence(self, culprit: int, why: str, own: bool) -> str:
        if self.count == 1:
            return f"the run {why}"
        if own:
            separator = ": " if why.startswith("failed: ") else " "
            return f"{self.host(culprit)}{separator}{why.removeprefix('failed: ')}"
        prefix = f"{self.host(self.index)}: " if self.index else ""
        return f"{prefix}{self.host(culprit)} {why}"

    def close(self) -> None:
        """Say goodbye; the others have ended their work too."""
        if not self._loop.is_closed():
            self._call(self._goodbye())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _goodbye(self) -> None:
        self._ended = True
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.wait(others, timeout=5) if others else None
        for peer in self._peers.values():
            peer.left = True
            _send(peer, {"kind": "goodbye"})
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(peer.writer.drain(), 5)
            peer.writer.close()


def _send(peer: _Peer, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError, RuntimeError):  # that it is gone is noticed where it is read
        peer.writer.write(json.dumps(message).encode() + b"\n")


def _reason(error: OSError | TimeoutError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, socket.gaierror) or not error.errno:
        return error.strerror or str(error)
    return os.strerror(error.errno)  # asyncio puts addresses in between


def one_line(error: BaseException) -> str:
    """An exception as the end of a message."""
    if isinstance(error, JaxparError):
        return str(error)
    first = (str(error).splitlines() or [""])[0]  # some libraries add paragraphs of advice
    return f"{type(error).__name__}: {first[:300]}".removesuffix(": ")
