"""``jaxpar compile``: a step compiled for a machine that need not be there, and what it costs."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxpar.cli.arguments import CONFIG, experiment_of, parse, parser_of, split
from jaxpar.errors import ConfigError


def run(arguments: list[str]) -> int:
    if "--compare" in arguments:
        return _compare(arguments)
    name, rest = split("compile", arguments)
    about = "Compile a config's step for a target; exit code 2: it does not fit. --compare A B shows two side by side."
    parser = parser_of("compile CONFIG", about, smoke=True, target=True)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--hlo", type=Path, metavar="FILE", help="write the optimized HLO")
    parser.add_argument(
        "--save",
        type=Path,
        metavar="FILE",
        help="write the executable, for train --compiled; leaves out the largest buffers",
    )
    options, overrides = _parse(parser, name, rest)
    experiment = experiment_of(name, options.smoke, overrides)

    from jaxpar.cli import STARTED
    from jaxpar.report.compile import render
    from jaxpar.runtime.compile import compile_for

    with _ended_by_signals(options.target):
        result = compile_for(experiment, options.target, started=STARTED, hlo=options.hlo, save=options.save)
    print(json.dumps(result, indent=1) if options.json else render(result))
    if "flops" not in result:
        for field, file in (("--hlo", options.hlo), ("--save", options.save)):
            if file:
                print(f"jaxpar: {field}: {file} is not written: XLA refuses the step", file=sys.stderr)
    elif options.save and not options.json:
        print(f"\nsaved       for the same experiment on such devices: jaxpar train ... --compiled {options.save}")
    return 0 if result["fits"] else 2


def _compare(arguments: list[str]) -> int:
    """``--compare A B``: two configs, or one and its flags for each side."""
    about = "Compile two configs and show what they cost side by side."
    parser = parser_of("compile --compare A B", about, smoke=True, target=True)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument(
        "--compare", nargs=2, metavar=("A", "B"), help="configs; flags after CONFIG, in quotes, are its"
    )
    options, overrides = _parse(parser, "", arguments)

    from jaxpar.program import Program
    from jaxpar.report.compile import render_comparison
    from jaxpar.runtime.compile import compile_for

    for flag in ("--hlo", "--save"):
        if any(argument.partition("=")[0] == flag for argument in overrides):
            raise ConfigError(flag, "", "is for one config, and --compare has two", "jaxpar compile CONFIG without it")
    experiments = []
    for side in options.compare:
        try:
            name, *own = shlex.split(side) or [""]
        except ValueError:
            raise ConfigError("--compare", side, "has a quote that is not closed", CONFIG) from None
        if not name or name.startswith("-"):
            raise ConfigError("--compare", repr(side), "does not begin with a config", CONFIG)
        doubled = {flag.partition("=")[0] for flag in own} & {flag.partition("=")[0] for flag in overrides}
        both = [flag for flag in doubled if flag.startswith("--")]
        shared = [flag for flag in own if flag.partition("=")[0] in ("--target", "--smoke", "--json")]
        if shared:
            raise ConfigError("--compare", side, f"sets {shared[0]}, which is of both sides", "outside of the quotes")
        if both:
            raise ConfigError("--compare", side, f"sets {both[0]}, which is set for both sides too", "one of the two")
        experiments.append(experiment_of(name, options.smoke, [*own, *overrides]))
    devices, results = options.target.devices(), []
    for experiment in experiments:
        Program(experiment, devices)  # raises now, not after the other side was compiled
    for side, experiment in zip(options.compare, experiments, strict=True):
        print(f"compiling {side} for {options.target.text}", file=sys.stderr, flush=True)
        with _ended_by_signals(options.target):
            results.append({"config": side, **compile_for(experiment, options.target)})
    print(json.dumps(results, indent=1) if options.json else render_comparison(results))
    return 0 if all(result["fits"] for result in results) else 2


@contextlib.contextmanager
def _ended_by_signals(target: Any) -> Iterator[None]:
    """SIGINT and SIGTERM end the command at once, and leave nothing behind.

    XLA keeps the main thread, where Python's handlers would run, for minutes; libtpu's own print a trace.
    """
    target.devices()  # loads libtpu, which sets its handlers
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch(scratch: str) -> None:
        while number := reader.recv(1):
            if number[0] in (signal.SIGINT, signal.SIGTERM):
                shutil.rmtree(scratch, ignore_errors=True)
                print("jaxpar: interrupted", file=sys.stderr, flush=True)
                os._exit(128 + number[0])

    with reader, tempfile.TemporaryDirectory(prefix="jaxpar-") as scratch:
        before = tempfile.tempdir, signal.set_wakeup_fd(writer.fileno())
        handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
        tempfile.tempdir = scratch
        watcher = threading.Thread(target=watch, args=(scratch,), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler or signal.SIG_DFL)  # None: not set from Python
            tempfile.tempdir, _ = before[0], signal.set_wakeup_fd(before[1])
            writer.close()
            watcher.join()


def _parse(parser: Any, name: str, arguments: list[str]) -> tuple[Any, list[str]]:
    options, overrides = parse(parser, name, arguments)
    if any(argument.partition("=")[0] == "--devices" for argument in overrides):
        raise ConfigError("--devices", "", "is for commands that run; this one has --target", "such as --target cpu:8")
    return options, overrides
