"""One host of a run, as a process: ``host_process.py FAULT ARGUMENT...`` is ``jaxpar ARGUMENT...`` with a fault in it.

FAULT: ``none``, or ``NAME:STEP``, which strikes when this host reads the batch of that step (0 is the first).
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time

from run_helpers import QuicklyCompiled

from jaxpar import cli
from jaxpar.data.stream import Stream
from jaxpar.runtime import hosts, loop

FAULTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "freeze": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "stall": lambda: time.sleep(1000),
    "full": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY)),
    "error": lambda: (_ for _ in ()).throw(OSError("the disk is gone")),
}


def strike_at(step: int, fault) -> None:
    read = Stream.batch

    def batch(self, first, count, rows=None):
        if first // count == step:
            fault()
        return read(self, first, count, rows)

    Stream.batch = batch


if __name__ == "__main__":
    name, _, step = sys.argv[1].partition(":")
    loop.Program = QuicklyCompiled
    loop.peak_flops = lambda devices: (1e12, "a test")
    if name == "blind":
        hosts._appears = lambda path, timeout: False
    elif name != "none":
        strike_at(int(step), FAULTS[name])
    sys.exit(cli.main(sys.argv[2:]))
