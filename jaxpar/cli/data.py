"""``jaxpar data``: what a model will see."""

from __future__ import annotations

import json
from pathlib import Path

from jaxpar.cli.arguments import count_of, experiment_of, folder_of, parse, parser_of, split
from jaxpar.errors import ConfigError


def run(arguments: list[str]) -> int:
    name, rest = split("data", arguments)
    parser = parser_of("data CONFIG", "Show what a model will see.", smoke=True)
    parser.add_argument("--examples", type=count_of, default=2, metavar="N", help="training rows to show; default: 2")
    parser.add_argument("--figure", type=folder_of, metavar="PATH", help="draw the lengths of the documents, as a PNG")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options, overrides = parse(parser, name, rest)
    experiment = experiment_of(name, options.smoke, overrides)
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
