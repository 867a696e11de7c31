"""``jaxpar compile``: a step compiled for a machine that need not be there, and what it costs."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from jaxpar.cli.arguments import CONFIG, experiment_of, parse, parser_of, split
from jaxpar.errors import ConfigError


def run(arguments: list[str]) -> int:
    if "--compare" in arguments:
        return _compare(arguments)
    name, rest = split("compile", arguments)
    about = "Compile a config's step for a target; exit code 2: it does not fit."
    parser = parser_of("compile CONFIG", about, smoke=True, target=True)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--hlo", type=Path, metavar="FILE", help="write the optimized HLO")
    parser.add_argument(
        "--save",
        type=Path,
        metavar="FILE",
        help="write the executable, for train --compiled; leaves out the largest buffers",
    )
    options, overrides = parse(parser, name, rest)
    experiment = experiment_of(name, options.smoke, overrides)

    from jaxpar.cli import STARTED
    from jaxpar.report.compile import render
    from jaxpar.runtime.compile import compile_for

    result = compile_for(experiment, options.target, started=STARTED, hlo=options.hlo, save=options.save)
    print(json.dumps(result, indent=1) if options.json else render(result))
    if options.save and not options.json and "flops" in result:
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
    options, overrides = parse(parser, "", arguments)

    from jaxpar.report.compile import render_comparison
    from jaxpar.runtime.compile import compile_for

    for flag in ("--hlo", "--save"):
        if any(argument.partition("=")[0] == flag for argument in overrides):
            raise ConfigError(flag, "", "is for one config, and --compare has two", "jaxpar compile CONFIG without it")
    experiments = []
    for side in options.compare:
        name, *own = shlex.split(side) or [""]
        if not name or name.startswith("-"):
            raise ConfigError("--compare", repr(side), "does not begin with a config", CONFIG)
        doubled = {flag.partition("=")[0] for flag in own} & {flag.partition("=")[0] for flag in overrides}
        both = [flag for flag in doubled if flag.startswith("--")]
        if both:
            raise ConfigError("--compare", side, f"sets {both[0]}, which is set for both sides too", "one of the two")
        experiments.append(experiment_of(name, options.smoke, [*own, *overrides]))
    results = []
    for side, experiment in zip(options.compare, experiments, strict=True):
        print(f"compiling {side} for {options.target.text}", file=sys.stderr, flush=True)
        results.append({"config": side, **compile_for(experiment, options.target)})
    print(json.dumps(results, indent=1) if options.json else render_comparison(results))
    return 0 if all(result["fits"] for result in results) else 2
