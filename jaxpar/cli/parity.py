"""``jaxpar parity``: every layout against one device."""

from __future__ import annotations

from pathlib import Path

from jaxpar.cli.arguments import experiment_of, parse, parser_of, split
from jaxpar.errors import ConfigError


def run(arguments: list[str]) -> int:
    name, rest = split("parity", arguments, default="quickstart")
    about = "Compare every layout of a config's smoke() on eight virtual devices with one device."
    parser = parser_of("parity [CONFIG]", about, devices=True)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--only", help="layouts whose name contains this")
    options, overrides = parse(parser, name, rest)
    if Path(name).is_dir():
        raise ConfigError("config", name, "is a run folder, which has no smoke()", "a config file or its name")
    experiment = experiment_of(name, True, overrides)

    from jaxpar.mesh.devices import start_devices
    from jaxpar.runtime.parity import run_parity

    return run_parity(experiment, start_devices(options.devices or "cpu:8"), options.only, options.json)
