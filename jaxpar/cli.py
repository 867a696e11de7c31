"""The ``jaxpar`` command.

    jaxpar train CONFIG     train, in a new run folder
    jaxpar show CONFIG      the resolved config, parameters, batch, optimizer routing and shardings
    jaxpar parity [CONFIG]  every layout against one device, on eight virtual devices
    jaxpar bench NAME       measurements, as ratios of two things run alternately

CONFIG is a file, the name of one in ``configs/``, or a run folder. Any field of it can be set by a dotted flag:
``--optim.learning_rate 1e-3 --mesh.tensor 2``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

from jaxpar.errors import ConfigError, JaxparError, did_you_mean
from jaxpar.overrides import apply_overrides, describe, load_config
from jaxpar.serialize import flatten, from_json, type_check

CONFIG = "a config file, its name, or a run folder"


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit code is 0, 1 (the run or the comparison failed) or 2 (the input is wrong)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    commands = {"train": _train, "show": _show, "parity": _parity, "bench": _bench}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__.strip().replace("``", ""))
        return 0
    try:
        if arguments[0] == "--version":
            from jaxpar import __version__

            print(__version__)
            return 0
        if arguments[0] not in commands:
            raise ConfigError(
                "command", arguments[0], f"is not a command.{did_you_mean(arguments[0], commands)}", ", ".join(commands)
            )
        code = commands[arguments[0]](arguments[1:])
        sys.stdout.flush()
        return code
    except JaxparError as error:
        print(f"jaxpar: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 2)
    except KeyboardInterrupt:
        print("jaxpar: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # who read the output has gone, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except OSError as error:  # a path that cannot be looked at
        print(f"jaxpar: {error.filename or 'output'}: {error.strerror or error}", file=sys.stderr)
        return 2


# -- arguments ---------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are ours: one line, exit code 2."""

    def error(self, message: str) -> Any:
        raise JaxparError(f"{self.prog.removeprefix('jaxpar ')}: {message}")


def _parser(command: str, description: str) -> _Parser:
    parser = _Parser(prog=f"jaxpar {command}", description=description, allow_abbrev=False)
    parser.add_argument("--devices", help="N devices to use, a CPU cut into as many virtual ones; or cpu:N")
    parser.add_argument("--smoke", action="store_true", help="the config's smoke(): the same experiment, tiny")
    return parser


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("a folder without a name")
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text} is not a folder of this machine's file systems")
    return Path(text)


def _experiment(name: str, smoke: bool, overrides: list[str]) -> Any:
    """The experiment of a config file or of a run folder, with overrides."""
    from jaxpar.experiment import Experiment

    folder = Path(name)
    if folder.is_dir():
        if smoke:
            raise ConfigError("--smoke", name, "is a run folder, which has one config", "a config file or its name")
        from jaxpar.runtime.run_folder import RunFolder

        experiment: Any = from_json(Experiment, RunFolder(folder).read_config())
    else:
        experiment = load_config(name, "smoke" if smoke else "config")
    if not isinstance(experiment, Experiment):
        raise ConfigError("config", name, f"gives a {type(experiment).__name__}", "a jaxpar.Experiment")
    experiment = apply_overrides(experiment, overrides)
    type_check(experiment)
    return experiment


def _split(command: str, arguments: list[str], default: str | None = None) -> tuple[str, list[str]]:
    """The CONFIG argument and what follows it."""
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], arguments[1:]
    if default is not None or "-h" in arguments or "--help" in arguments:
        return default or "", arguments
    what = "NAME must come first: train" if command == "bench" else f"CONFIG must come first: {CONFIG}"
    raise JaxparError(f"{command}: {what}")


def _parse(parser: _Parser, name: str, arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    options, overrides = parser.parse_known_args([a for a in arguments if a not in ("-h", "--help")])
    if len(overrides) < len(arguments) and ("-h" in arguments or "--help" in arguments):
        _help(parser, name, options)
        raise SystemExit(0)

    from jaxpar.mesh.devices import quiet_plugins
    from jaxpar.runtime.start import configure_jax

    quiet_plugins()
    configure_jax()
    return options, overrides


def _help(parser: _Parser, name: str, options: argparse.Namespace) -> None:
    parser.print_help()
    if name:
        print(f"\nfields of {name}:")
        for path, kind, value, text in describe(_experiment(name, options.smoke, [])):
            print(f"  --{path} {kind}  (now {value}){'  ' + text if text else ''}")


# -- commands ----------------------------------------------------------------------------------------------------


def _train(arguments: list[str]) -> int:
    name, rest = _split("train", arguments)
    parser = _parser("train CONFIG", "Train the experiment of a config file or run folder.")
    parser.add_argument("--run", type=_folder, help="run folder; default: a new one under runs/")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --run, or start it")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.add_argument("--hosts", default="auto", help="ADDRESS:PORT,COUNT,INDEX; none; or auto: ask the environment")
    timeout = "seconds to wait for hosts, for their signs of life, and for a batch of data; default 120"
    parser.add_argument("--host-timeout", type=float, default=120.0, help=timeout)
    options, overrides = _parse(parser, name, rest)
    experiment = _experiment(name, options.smoke, overrides)

    from jaxpar.runtime.hosts import start_hosts

    run = options.run and str(options.run.absolute())
    facts = {"--run": run, "--resume": options.resume, "--devices": options.devices, **flatten(experiment)}
    with start_hosts(options.hosts, options.host_timeout, facts, options.quiet) as hosts:
        return _train_on(hosts, experiment, name, options)


def _train_on(hosts: Any, experiment: Any, name: str, options: argparse.Namespace) -> int:
    from jaxpar.mesh.devices import start_devices
    from jaxpar.runtime.loop import TrainingStopped, train

    def choose() -> str:
        here = Path(name).is_dir() and options.resume
        return str((options.run or (Path(name) if here else _new_run(name, options.resume))).absolute())

    run = Path(hosts.from_first(choose))
    devices = start_devices(options.devices)
    try:
        summary = train(experiment, run, devices, options.resume, options.quiet, hosts)
    except TrainingStopped:
        with contextlib.suppress(JaxparError, OSError):  # the message is what matters
            if hosts.index == 0:
                _draw(run, None)
        raise
    if hosts.index:
        return 0
    try:
        figure = _draw(run, summary.unigram_entropy)
    except OSError as error:
        raise TrainingStopped(f"the curve could not be drawn: {error.strerror}; the run itself is whole") from error
    if not options.quiet:
        print(f"curve    {figure}")
    return 0


def _draw(run: Path, unigram_entropy: float | None) -> Path:
    """The loss curve of a run folder, as a PNG in its figures."""
    from jaxpar.report.curves import draw_loss
    from jaxpar.runtime.run_folder import RunFolder

    folder = RunFolder(run)
    figure = folder.figures / "loss.png"
    references = {} if unigram_entropy is None else {"unigram entropy": unigram_entropy}
    draw_loss(folder.read_metrics(), figure, folder.path.name, references)
    return figure


def _new_run(name: str, resume: bool) -> Path:
    """``runs/NAME``, or the first of ``runs/NAME-2``, ``-3``, ... that is not there yet."""
    stem = Path(name).stem
    if resume:
        raise ConfigError("--resume", "", "does not say which run goes on", "--run FOLDER, or a run folder as CONFIG")
    number, run = 1, Path("runs") / stem
    while run.exists():
        number += 1
        run = Path("runs") / f"{stem}-{number}"
    return run


def _show(arguments: list[str]) -> int:
    name, rest = _split("show", arguments)
    parser = _parser("show CONFIG", "Print what a config resolves to; compiles and reads nothing.")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options, overrides = _parse(parser, name, rest)
    experiment = _experiment(name, options.smoke, overrides)

    from jaxpar.mesh.devices import start_devices
    from jaxpar.program import Program
    from jaxpar.report.show import describe_program, render

    description = describe_program(Program(experiment, start_devices(options.devices)))
    print(json.dumps(description, indent=1) if options.json else render(description))
    return 0


def _parity(arguments: list[str]) -> int:
    name, rest = _split("parity", arguments, default="quickstart")
    parser = _parser("parity [CONFIG]", "Compare every layout on eight virtual devices with one device.")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--only", help="layouts whose name contains this")
    options, overrides = _parse(parser, name, rest)
    experiment = _experiment(name, True, overrides)

    from jaxpar.mesh.devices import start_devices
    from jaxpar.runtime.parity import run_parity

    return run_parity(experiment, start_devices(options.devices or "cpu:8"), options.only, options.json)


def _bench(arguments: list[str]) -> int:
    name, rest = _split("bench", arguments)
    parser = _parser("bench NAME", "Measure; NAME: train.")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options, overrides = _parse(parser, "", rest)
    if name != "train":
        raise ConfigError("bench", name, "is not a benchmark", "train")
    if overrides:
        raise ConfigError("bench", " ".join(overrides), "takes no overrides")

    from jaxpar.runtime.bench_train import run_bench

    return run_bench(options.json)


if __name__ == "__main__":
    sys.exit(main())
