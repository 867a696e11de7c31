"""``jaxpar bench``: measurements."""

from __future__ import annotations

from jaxpar.cli.arguments import parse, parser_of, split
from jaxpar.errors import ConfigError


def run(arguments: list[str]) -> int:
    name, rest = split("bench", arguments, what="NAME must come first: train or compile")
    parser = parser_of("bench NAME", "Measure; NAME: train or compile.")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options, overrides = parse(parser, "", rest)
    if name not in ("train", "compile"):
        raise ConfigError("bench", name, "is not a benchmark", "train, compile")
    if overrides:
        raise ConfigError("bench", " ".join(overrides), "takes no overrides")

    if name == "compile":
        from jaxpar.runtime import bench_compile

        return bench_compile.run_bench(options.json)
    from jaxpar.runtime import bench_train

    return bench_train.run_bench(options.json)
