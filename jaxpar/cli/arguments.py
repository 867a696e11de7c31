"""What the commands share: their parsers, the experiment that is meant, and kinds of arguments."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from jaxpar.errors import ConfigError, JaxparError
from jaxpar.overrides import apply_overrides, describe, load_config
from jaxpar.serialize import from_json, type_check

CONFIG = "a config file, its name, or a run folder"
MOST_ROWS = 10_000


class Parser(argparse.ArgumentParser):
    """argparse whose errors are ours: one line, exit code 2; an option that is given twice is one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = [argument.partition("=")[0] for argument in (sys.argv[1:] if args is None else args)]
        for action in self._actions:
            if not isinstance(action, argparse._AppendAction) and sum(map(given.count, action.option_strings)) > 1:
                raise ConfigError(action.dest, max(action.option_strings, key=len), "is given twice")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> Any:
        raise JaxparError(f"{self.prog.removeprefix('jaxpar ')}: {message}")


def parser_of(
    command: str, description: str, *, devices: bool = False, smoke: bool = False, target: bool = False
) -> Parser:
    """The parser of a command, with the options that it shares with others."""
    parser = Parser(prog=f"jaxpar {command}", description=description, allow_abbrev=False)
    if devices:
        parser.add_argument("--devices", help="N devices to use, a CPU cut into as many virtual ones; or cpu:N")
    if target:
        targets = "v5e:16x16, v5p:4x4x4*2 (slices), h100:8x8 (nodes x GPUs), cpu:8, or attached (the default)"
        parser.add_argument("--target", default="attached", help=targets)
    if smoke:
        parser.add_argument("--smoke", action="store_true", help="the config's smoke(): the same experiment, tiny")
    return parser


def folder_of(text: str) -> Path:
    """The folder that ``text`` names; as the ``type`` of an option."""
    if not text:
        raise argparse.ArgumentTypeError("a folder without a name")
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text} is not a folder of this machine's file systems")
    return Path(text)


def named_folder(field: str, text: str) -> Path:
    """The same for an argument in its place, which argparse does not see."""
    try:
        return folder_of(text)
    except argparse.ArgumentTypeError:
        raise ConfigError(field, text, "is not the name of a folder", "a path on this machine") from None


def count_of(text: str) -> int:
    """The number of rows that ``text`` is; as the ``type`` of an option."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a number of rows, 0 or more")
    if int(text) > MOST_ROWS:
        raise argparse.ArgumentTypeError(f"{text} is more than the {MOST_ROWS:,} rows that are shown at most")
    return int(text)


def experiment_of(name: str, smoke: bool, overrides: list[str]) -> Any:
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


def split(
    command: str, arguments: list[str], default: str | None = None, what: str = f"CONFIG must come first: {CONFIG}"
) -> tuple[str, list[str]]:
    """The first argument, ``what`` it must be, and what follows it."""
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], arguments[1:]
    if default is not None or "-h" in arguments or "--help" in arguments:
        return default or "", arguments
    raise JaxparError(f"{command}: {what}")


def parse(parser: Parser, name: str, arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, with ``target`` a Target, and the overrides among ``arguments``; JAX is configured for what comes.

    ``--help`` prints what there is, with the fields of config ``name`` ("": of none), and raises SystemExit.
    """
    options, overrides = parser.parse_known_args([a for a in arguments if a not in ("-h", "--help")])
    if len(overrides) < len(arguments) and ("-h" in arguments or "--help" in arguments):
        _help(parser, name, getattr(options, "smoke", False))
        raise SystemExit(0)

    from jaxpar.mesh.devices import quiet_plugins
    from jaxpar.mesh.targets import parse_target, prepare_to_describe
    from jaxpar.runtime.start import configure_jax

    if hasattr(options, "target"):
        options.target = parse_target(options.target)
        if options.target.described:
            prepare_to_describe()
    quiet_plugins()
    configure_jax()
    return options, overrides


def _help(parser: Parser, name: str, smoke: bool) -> None:
    parser.print_help()
    if name:
        print(f"\nfields of {name}:")
        for path, kind, value, text in describe(experiment_of(name, smoke, [])):
            print(f"  --{path} {kind}  (now {value}){'  ' + text if text else ''}")
