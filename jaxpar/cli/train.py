"""``jaxpar train``: train an experiment."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import signal
from pathlib import Path
from typing import Any

from jaxpar.cli.arguments import experiment_of, folder_of, parse, parser_of, split
from jaxpar.errors import ConfigError, JaxparError, RunError
from jaxpar.serialize import flatten


def run(arguments: list[str]) -> int:
    name, rest = split("train", arguments)
    about = "Train the experiment of a config file or run folder."
    parser = parser_of("train CONFIG", about, devices=True, smoke=True)
    parser.add_argument("--run", type=folder_of, help="run folder; default: a new one under runs/")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --run, or start it")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.add_argument("--hosts", default="auto", help="ADDRESS:PORT,COUNT,INDEX; none; or auto: ask the environment")
    timeout = "seconds to wait for hosts, for their signs of life, and for a batch of data; default 120"
    parser.add_argument("--host-timeout", type=float, default=120.0, help=timeout)
    parser.add_argument("--compiled", type=Path, metavar="FILE", help="load the step that jaxpar compile --save wrote")
    options, overrides = parse(parser, name, rest)
    experiment = experiment_of(name, options.smoke, overrides)

    from jaxpar.runtime.hosts import start_hosts

    folder = options.run and str(options.run.absolute())
    own = {"--run": folder, "--resume": options.resume, "--devices": options.devices}
    facts = {**own, "--compiled": options.compiled and _contents(options.compiled), **flatten(experiment)}
    with start_hosts(options.hosts, options.host_timeout, facts, options.quiet) as hosts:
        return _train_on(hosts, experiment, name, options)


def _contents(file: Path) -> str:
    """Which file, and what is in it: all hosts must load the same step."""
    try:
        return f"{file.absolute()} with SHA-256 {hashlib.sha256(file.read_bytes()).hexdigest()[:16]}"
    except OSError as error:
        return f"{file.absolute()}, which cannot be read: {error.strerror}"


def _train_on(hosts: Any, experiment: Any, name: str, options: argparse.Namespace) -> int:
    from jaxpar.mesh.devices import start_devices
    from jaxpar.runtime.loop import TrainingStopped, train

    def choose() -> str:
        here = Path(name).is_dir() and options.resume
        return str((options.run or (Path(name) if here else new_run(name, options.resume))).absolute())

    run = Path(hosts.from_first(choose))
    devices = start_devices(options.devices)
    from jaxpar.report.page import draw_loss

    try:
        summary = train(experiment, run, devices, options.resume, options.quiet, hosts, options.compiled)
    except TrainingStopped:
        with contextlib.suppress(JaxparError, OSError):  # the message is what matters
            if hosts.index == 0:
                draw_loss(run)
        raise
    # "SIGTERM to host 1 (node02)": whoever started the run can tell that it is not finished
    code = 128 + signal.Signals[summary.stopped_by.split()[0]] if summary.stopped_by else 0
    if hosts.index:
        return code
    try:
        figure = draw_loss(run)
    except OSError as error:
        raise RunError(f"the curve could not be drawn: {error.strerror}; the run itself is whole") from error
    if figure and not options.quiet:
        print(f"curve    {figure}")
    return code


def new_run(name: str, resume: bool) -> Path:
    """``runs/NAME``, or the first of ``runs/NAME-2``, ``-3``, ... that is not there yet."""
    stem = Path(name).stem
    if resume:
        raise ConfigError("--resume", "", "does not say which run goes on", "--run FOLDER, or a run folder as CONFIG")
    number, run = 1, Path("runs") / stem
    while run.exists():
        number += 1
        run = Path("runs") / f"{stem}-{number}"
    return run
