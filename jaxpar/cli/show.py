"""``jaxpar show``: what a config resolves to."""

from __future__ import annotations

import json

from jaxpar.cli.arguments import experiment_of, parse, parser_of, split
from jaxpar.errors import ConfigError


def run(arguments: list[str]) -> int:
    name, rest = split("show", arguments)
    about = "Print what a config resolves to; compiles and reads nothing."
    parser = parser_of("show CONFIG", about, devices=True, smoke=True, target=True)
    parser.add_argument("--json", action="store_true", help="as JSON")
    options, overrides = parse(parser, name, rest)
    experiment = experiment_of(name, options.smoke, overrides)

    from jaxpar.mesh.devices import start_devices
    from jaxpar.program import Program
    from jaxpar.report.show import describe_program, render

    if options.devices is not None and options.target.text != "attached":
        raise ConfigError("--devices", options.devices, "is given beside --target, which says them", "one of the two")
    devices = options.target.devices() if options.devices is None else start_devices(options.devices)
    description = describe_program(Program(experiment, devices))
    print(json.dumps(description, indent=1) if options.json else render(description))
    return 0
