"""One host of a few runs, one after the other in one process: ``host_series.py HOSTS SERIES``.

SERIES: a pickle of (experiment, run, resume, step after which host 1 gets a SIGTERM, or None) for each run.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from pathlib import Path

import jax
from run_helpers import QuicklyCompiled

from jaxpar.runtime import loop
from jaxpar.runtime.hosts import start_hosts
from jaxpar.runtime.start import configure_jax


def main(wanted: str, series: Path) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    configure_jax()
    loop.Program = QuicklyCompiled
    loop.peak_flops = lambda devices: (1e12, "a test")
    record = loop._Training._record
    with start_hosts(wanted, 60.0, {}, quiet=True) as hosts:
        for experiment, run, resume, stop in pickle.loads(series.read_bytes()):

            def signalled(self, step, metrics, stop=stop):
                record(self, step, metrics)
                if step == stop and hosts.index == 1:
                    os.kill(os.getpid(), signal.SIGTERM)

            loop._Training._record = signalled
            summary = loop.train(experiment, run, None, resume, True, hosts)
            print(summary.step, summary.stopped_by, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
