"""The ``jaxpar`` command.

    jaxpar train CONFIG     train, in a new run folder
    jaxpar generate RUN     what a run's model writes after a prompt
    jaxpar show CONFIG      the resolved config, parameters, batch, optimizer routing and shardings
    jaxpar data CONFIG      what the model will see: sources, packing, document lengths, decoded rows
    jaxpar parity [CONFIG]  every layout against one device, on eight virtual devices
    jaxpar bench NAME       measurements, as ratios of two things run alternately
    jaxpar tokenizer train  a byte-level BPE tokenizer from the text of a CONFIG, or of files
    jaxpar report RUN ...   one page about a run or several: curves, memory, time, and what differs
    jaxpar import FOLDER    a Hugging Face model becomes a run folder, to train on from
    jaxpar export RUN       a run's parameters become a Hugging Face model

CONFIG is a file, the name of one in ``configs/``, or a run folder. Any field of it can be set by a dotted flag:
``--optim.learning_rate 1e-3 --mesh.tensor 2``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from jaxpar.errors import ConfigError, JaxparError, did_you_mean
from jaxpar.overrides import apply_overrides, describe, load_config
from jaxpar.serialize import flatten, from_json, type_check

CONFIG = "a config file, its name, or a run folder"
MOST_ROWS = 10_000


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code.

    0: done. 1: the run or the comparison failed. 2: the input is wrong. 128 + N: signal N ended it; ``train`` has saved
    a checkpoint, from which ``--resume`` goes on.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    commands = {
        "train": _train,
        "generate": _generate,
        "tokenizer": _tokenizer,
        "show": _show,
        "data": _data,
        "parity": _parity,
        "bench": _bench,
        "report": _report,
        "import": _import,
        "export": _export,
    }
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
        return error.exit_code
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


def _parser(command: str, description: str, *, devices: bool = False, smoke: bool = False) -> _Parser:
    """The parser of a command, with the options that it shares with others."""
    parser = _Parser(prog=f"jaxpar {command}", description=description, allow_abbrev=False)
    if devices:
        parser.add_argument("--devices", help="N devices to use, a CPU cut into as many virtual ones; or cpu:N")
    if smoke:
        parser.add_argument("--smoke", action="store_true", help="the config's smoke(): the same experiment, tiny")
    return parser


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("a folder without a name")
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text} is not a folder of this machine's file systems")
    return Path(text)


def _named_folder(field: str, text: str) -> Path:
    """The same for an argument in its place, which argparse does not see."""
    try:
        return _folder(text)
    except argparse.ArgumentTypeError:
        raise ConfigError(field, text, "is not the name of a folder", "a path on this machine") from None


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a number of rows, 0 or more")
    if int(text) > MOST_ROWS:
        raise argparse.ArgumentTypeError(f"{text} is more than the {MOST_ROWS:,} rows that are shown at most")
    return int(text)


def _experiment(name: str, smoke: bool, overrides: list[str]) -> Any:
    """The experiment of a config file or of a run folder, with overrides."""
    from jaxpar.experiment import Experiment

    folder = Path(name)
    if folder.is_dir():
        if smoke:
            raise ConfigError("--smoke", name, "is a run folder, which has one config", "a config file or its name")
        from jaxpar.runtime.run_folder import RunFolder

        experiment: Any = _with_own_tokenizer(from_json(Experiment, RunFolder(folder).read_config()), RunFolder(folder))
    else:
        experiment = load_config(name, "smoke" if smoke else "config")
    if not isinstance(experiment, Experiment):
        raise ConfigError("config", name, f"gives a {type(experiment).__name__}", "a jaxpar.Experiment")
    experiment = apply_overrides(experiment, overrides)
    type_check(experiment)
    return experiment


def _with_own_tokenizer(experiment: Any, folder: Any) -> Any:
    """Where the tokenizer of an import has gone or moved, the copy of it that the run folder keeps."""
    used, own = Path(experiment.data.tokenizer).expanduser(), folder.huggingface / "tokenizer.json"
    if used.parts[-2:] != own.parts[-2:] or used.exists() or not own.exists():
        return experiment
    print(f"note     data.tokenizer {used} is not there: {own} is used", file=sys.stderr)
    return dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, tokenizer=str(own)))


def _split(
    command: str, arguments: list[str], default: str | None = None, what: str = f"CONFIG must come first: {CONFIG}"
) -> tuple[str, list[str]]:
    """The first argument, ``what`` it must be, and what follows it."""
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], arguments[1:]
    if default is not None or "-h" in arguments or "--help" in arguments:
        return default or "", arguments
    raise JaxparError(f"{command}: {what}")


def _parse(parser: _Parser, name: str, arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    options, overrides = parser.parse_known_args([a for a in arguments if a not in ("-h", "--help")])
    if len(overrides) < len(arguments) and ("-h" in arguments or "--help" in arguments):
        _help(parser, name, getattr(options, "smoke", False))
        raise SystemExit(0)

    from jaxpar.mesh.devices import quiet_plugins
    from jaxpar.runtime.start import configure_jax

    quiet_plugins()
    configure_jax()
    return options, overrides


def _help(parser: _Parser, name: str, smoke: bool) -> None:
    parser.print_help()
    if name:
        print(f"\nfields of {name}:")
        for path, kind, value, text in describe(_experiment(name, smoke, [])):
            print(f"  --{path} {kind}  (now {value}){'  ' + text if text else ''}")


# -- commands ----------------------------------------------------------------------------------------------------


def _train(arguments: list[str]) -> int:
    name, rest = _split("train", arguments)
    about = "Train the experiment of a config file or run folder."
    parser = _parser("train CONFIG", about, devices=True, smoke=True)
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
    from jaxpar.report.page import draw_loss

    try:
        summary = train(experiment, run, devices, options.resume, options.quiet, hosts)
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
        raise TrainingStopped(f"the curve could not be drawn: {error.strerror}; the run itself is whole") from error
    if figure and not options.quiet:
        print(f"curve    {figure}")
    return code


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


def _generate(arguments: list[str]) -> int:
    name, rest = _split("generate", arguments, what="RUN must come first: a run folder")
    about = "Print what the model of a run folder writes after a prompt."
    parser = _parser("generate RUN", about, devices=True)
    parser.add_argument("--prompt", action="append", help="a text to continue; may be given several times")
    parser.add_argument("--prompts", type=Path, help="a file with one prompt a line")
    parser.add_argument("--tokens", type=int, default=200, help="new tokens at most (200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (0.8)")
    parser.add_argument("--top-k", type=int, help="draw from the so many likeliest tokens")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest tokens of this probability")
    parser.add_argument("--stop", action="append", default=[], help="a text that ends it; may be given several times")
    parser.add_argument("--samples", type=int, default=1, help="texts for each prompt")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument(
        "--special-tokens", action="store_true", help="what the tokenizer adds to a prompt, such as BOS"
    )
    parser.add_argument("--step", type=int, help="of the checkpoint; default: the newest")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options, overrides = _parse(parser, name, rest)
    if not Path(name).is_dir():
        raise ConfigError("run", name, "is not a folder", "the folder of a run")
    for flag, least, most in (("tokens", 1, 2**24), ("samples", 1, 2**16), ("seed", 0, 2**31 - 1)):
        if not least <= getattr(options, flag) <= most:
            raise ConfigError(f"--{flag}", getattr(options, flag), "is out of range", f"{least} to {most}")
    prompts = list(options.prompt or [])
    if options.prompts is not None:
        prompts += _lines(options.prompts)
    experiment = _experiment(name, False, overrides)

    from jaxpar.mesh.devices import start_devices
    from jaxpar.models.sampling import SamplingConfig
    from jaxpar.runtime.generate import print_texts

    print_texts(
        experiment,
        Path(name),
        prompts or [""],
        options.tokens,
        SamplingConfig(options.temperature, options.top_k, options.top_p),
        samples=options.samples,
        devices=start_devices(options.devices),
        seed=options.seed,
        stop=options.stop,
        special_tokens=options.special_tokens,
        step=options.step,
        as_json=options.json,
    )
    return 0


def _lines(path: Path) -> list[str]:
    """The lines of the file of ``--prompts``, one at least."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError("--prompts", str(path), f"is not UTF-8 text (byte {error.start})") from None
    if not text:
        legal = "one prompt a line; an empty line: the start of a document"
        raise ConfigError("--prompts", str(path), "is empty", legal)
    return text.removesuffix("\n").split("\n")


def _show(arguments: list[str]) -> int:
    name, rest = _split("show", arguments)
    about = "Print what a config resolves to; compiles and reads nothing."
    parser = _parser("show CONFIG", about, devices=True, smoke=True)
    parser.add_argument("--json", action="store_true", help="as JSON")
    options, overrides = _parse(parser, name, rest)
    experiment = _experiment(name, options.smoke, overrides)

    from jaxpar.mesh.devices import start_devices
    from jaxpar.program import Program
    from jaxpar.report.show import describe_program, render

    description = describe_program(Program(experiment, start_devices(options.devices)))
    print(json.dumps(description, indent=1) if options.json else render(description))
    return 0


def _data(arguments: list[str]) -> int:
    name, rest = _split("data", arguments)
    parser = _parser("data CONFIG", "Show what a model will see.", smoke=True)
    parser.add_argument("--examples", type=_count, default=2, metavar="N", help="training rows to show; default: 2")
    parser.add_argument("--figure", type=_folder, metavar="PATH", help="draw the lengths of the documents, as a PNG")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options, overrides = _parse(parser, name, rest)
    experiment = _experiment(name, options.smoke, overrides)
    experiment.validate()
    if options.figure and options.figure.suffix != ".png":
        raise ConfigError(
            "--figure", str(options.figure), "is no name of a PNG", f"{options.figure.with_suffix('.png')}"
        )

    from jaxpar.report.data import describe_data, draw_lengths, render
    from jaxpar.runtime.opening import load_data

    data = load_data(experiment, quiet=options.json)
    description = describe_data(experiment, data, options.examples)
    print(json.dumps(description, indent=1) if options.json else render(description))
    if options.figure:
        draw_lengths(data, options.figure, Path(name).stem)
        if not options.json:
            print(f"\nfigure     {options.figure}")
    return 0


def _parity(arguments: list[str]) -> int:
    name, rest = _split("parity", arguments, default="quickstart")
    about = "Compare every layout of a config's smoke() on eight virtual devices with one device."
    parser = _parser("parity [CONFIG]", about, devices=True)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--only", help="layouts whose name contains this")
    options, overrides = _parse(parser, name, rest)
    if Path(name).is_dir():
        raise ConfigError("config", name, "is a run folder, which has no smoke()", "a config file or its name")
    experiment = _experiment(name, True, overrides)

    from jaxpar.mesh.devices import start_devices
    from jaxpar.runtime.parity import run_parity

    return run_parity(experiment, start_devices(options.devices or "cpu:8"), options.only, options.json)


def _bench(arguments: list[str]) -> int:
    name, rest = _split("bench", arguments, what="NAME must come first: train")
    parser = _parser("bench NAME", "Measure; NAME: train.")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options, overrides = _parse(parser, "", rest)
    if name != "train":
        raise ConfigError("bench", name, "is not a benchmark", "train")
    if overrides:
        raise ConfigError("bench", " ".join(overrides), "takes no overrides")

    from jaxpar.runtime.bench_train import run_bench

    return run_bench(options.json)


def _tokenizer(arguments: list[str]) -> int:
    action, rest = _split("tokenizer", arguments, what="NAME must come first: train")
    name, rest = _split("tokenizer train", rest, default="")
    about = "Train a byte-level BPE tokenizer on the text of a CONFIG or files; measure it on held-out text."
    parser = _parser("tokenizer train [CONFIG]", about, smoke=True)
    parser.add_argument("--input", nargs="+", metavar="PATH", help="files, patterns or folders, in place of CONFIG")
    parser.add_argument("--vocab-size", type=int, help="tokens, with the 256 bytes and the end of a document")
    parser.add_argument("--output", type=Path, help="the tokenizer.json to write, a new file")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    options, overrides = _parse(parser, name, rest)
    if action != "train":
        rule = f"is nothing it can do.{did_you_mean(action, ('train',))}"
        raise ConfigError("tokenizer", action, rule, "train")
    if bool(name) == bool(options.input):
        raise JaxparError(f"tokenizer train: the text is that of either CONFIG ({CONFIG}) or --input PATH ...")
    if options.smoke and not name:
        raise ConfigError("--smoke", "true", "does not go with --input, which has no smoke()", "a CONFIG")
    for option in ("vocab_size", "output"):
        if getattr(options, option) is None:
            raise JaxparError(f"tokenizer train: --{option.replace('_', '-')} is missing")

    from jaxpar.data import DataConfig
    from jaxpar.data.sources import source_of
    from jaxpar.data.train_tokenizer import train_tokenizer
    from jaxpar.experiment import Experiment

    if name:
        experiment = _experiment(name, options.smoke, overrides)
    else:
        sources = tuple(source_of(path, "--input") for path in options.input)
        experiment = apply_overrides(Experiment(data=DataConfig(sources=sources)), overrides)
    report = train_tokenizer(experiment.data, options.vocab_size, options.output, options.quiet)
    if not options.quiet:
        print(report.render())
    return 0


def _report(arguments: list[str]) -> int:
    parser = _parser("report", "Write an HTML page about run folders.")
    parser.add_argument("runs", nargs="+", type=_folder, metavar="RUN", help="run folders")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the page, with figures in a folder beside it; default: report.html, in the folder of a single run",
    )
    options = parser.parse_args(arguments)

    from jaxpar.report.page import write_report

    print(f"report   {write_report(options.runs, options.output)}")
    return 0


def _import(arguments: list[str]) -> int:
    name, rest = _split("import", arguments, what="HF_FOLDER must come first: a folder with config.json")
    about = "Make a run folder of a Hugging Face model; fields of its config can be set by dotted flags."
    parser = _parser("import HF_FOLDER", about, devices=True)
    parser.add_argument("--run", type=_folder, help="run folder to make; needed")
    parser.add_argument("--verify", action="store_true", help="compare logits with PyTorch's; exit code 1: they differ")
    options, overrides = _parse(parser, "", rest)
    if options.run is None:
        raise ConfigError("--run", "", "does not say which folder to make", "a new folder")

    from jaxpar.mesh.devices import start_devices
    from jaxpar.weights.convert import import_folder

    def adjust(experiment: Any) -> Any:
        experiment = apply_overrides(experiment, overrides)
        type_check(experiment)
        return experiment

    devices = start_devices(options.devices)
    same = import_folder(_named_folder("HF_FOLDER", name), options.run, devices, print, adjust, options.verify)
    return 0 if same else 1


def _export(arguments: list[str]) -> int:
    what = "RUN and HF_FOLDER must come first: a run folder, and a new folder to write"
    name, rest = _split("export", arguments, what=what)
    target, rest = _split("export", rest, what=what)
    parser = _parser("export RUN HF_FOLDER", "Write a run's parameters as a Hugging Face model.")
    parser.add_argument("--step", type=int, help="of the checkpoint; default: the newest")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: as imported, else float32")
    parser.add_argument("--max-shard-size", default="5GB", help="of a safetensors file; default: 5GB")
    parser.add_argument("--verify", action="store_true", help="compare logits with PyTorch's; exit code 1: they differ")
    options, overrides = _parse(parser, "", rest)
    if overrides:
        raise ConfigError("export", " ".join(overrides), "takes no overrides")

    from jaxpar.mesh.devices import start_devices
    from jaxpar.weights.convert import export_run
    from jaxpar.weights.files import parse_size

    size = parse_size(options.max_shard_size)
    start_devices()
    folder = _named_folder("HF_FOLDER", target)
    same = export_run(Path(name), folder, print, options.dtype, size, options.step, options.verify)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
