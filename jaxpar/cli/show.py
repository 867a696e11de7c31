"""``jaxpar show``: what a config resolves to."""

from __future__ import annotations

import json

from jaxpar.cli.arguments import experiment_of, parse, parser_of, split


def run(arguments: list[str]) -> int:
    name, rest = split("show", arguments)
    about = "Print what a config resolves to; compiles and reads nothing."
    parser = parser_of("show CONFIG", about, devices=True, smoke=True)
    parser.add_argument("--json", action="store_true", help="as JSON")
    options, overrides = parse(parser, name, rest)
    experiment = experiment_of(name, options.smoke, overrides)

    from jaxpar.mesh.devices import start_devices
    from jaxpar.program import Program
    from jaxpar.report.show import describe_program, render

    description = describe_program(Program(experiment, start_devices(options.devices)))
    print(json.dumps(description, indent=1) if options.json else render(description))
    return 0
