"""``jaxpar bench``: measurements."""

from __future__ import annotations

from jaxpar.cli.arguments import parse, parser_of, split
from jaxpar.errors import ConfigError


def run(arguments: list[str]) -> int:
    name, rest = split("bench", arguments, what="NAME must come first: train")
    parser = parser_of("bench NAME", "Measure; NAME: train.")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options, overrides = parse(parser, "", rest)
    if name != "train":
        raise ConfigError("bench", name, "is not a benchmark", "train")
    if overrides:
        raise ConfigError("bench", " ".join(overrides), "takes no overrides")

    from jaxpar.runtime.bench_train import run_bench

    return run_bench(options.json)
