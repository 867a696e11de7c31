"""``jaxpar import`` and ``jaxpar export``: a Hugging Face model becomes a run folder, and a run's parameters one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxpar.cli.arguments import folder_of, named_folder, parse, parser_of, split
from jaxpar.errors import ConfigError
from jaxpar.overrides import apply_overrides
from jaxpar.serialize import type_check


def run_import(arguments: list[str]) -> int:
    name, rest = split("import", arguments, what="HF_FOLDER must come first: a folder with config.json")
    about = "Make a run folder of a Hugging Face model; fields of its config can be set by dotted flags."
    parser = parser_of("import HF_FOLDER", about, devices=True)
    parser.add_argument("--run", type=folder_of, help="run folder to make; needed")
    parser.add_argument("--verify", action="store_true", help="compare logits with PyTorch's; exit code 1: they differ")
    options, overrides = parse(parser, "", rest)
    if options.run is None:
        raise ConfigError("--run", "", "does not say which folder to make", "a new folder")

    from jaxpar.mesh.devices import start_devices
    from jaxpar.weights.convert import import_folder

    def adjust(experiment: Any) -> Any:
        experiment = apply_overrides(experiment, overrides)
        type_check(experiment)
        return experiment

    devices = start_devices(options.devices)
    same = import_folder(named_folder("HF_FOLDER", name), options.run, devices, print, adjust, options.verify)
    return 0 if same else 1


def run_export(arguments: list[str]) -> int:
    what = "RUN and HF_FOLDER must come first: a run folder, and a new folder to write"
    name, rest = split("export", arguments, what=what)
    target, rest = split("export", rest, what=what)
    parser = parser_of("export RUN HF_FOLDER", "Write a run's parameters as a Hugging Face model.")
    parser.add_argument("--step", type=int, help="of the checkpoint; default: the newest")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: as imported, else float32")
    parser.add_argument("--max-shard-size", default="5GB", help="of a safetensors file; default: 5GB")
    parser.add_argument("--verify", action="store_true", help="compare logits with PyTorch's; exit code 1: they differ")
    options, overrides = parse(parser, "", rest)
    if overrides:
        raise ConfigError("export", " ".join(overrides), "takes no overrides")

    from jaxpar.mesh.devices import start_devices
    from jaxpar.weights.convert import export_run
    from jaxpar.weights.files import parse_size

    size = parse_size(options.max_shard_size)
    start_devices()
    folder = named_folder("HF_FOLDER", target)
    same = export_run(Path(name), folder, print, options.dtype, size, options.step, options.verify)
    return 0 if same else 1
