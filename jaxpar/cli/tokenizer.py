"""``jaxpar tokenizer train``: a byte-level BPE tokenizer from text."""

from __future__ import annotations

from pathlib import Path

from jaxpar.cli.arguments import CONFIG, experiment_of, parse, parser_of, split
from jaxpar.errors import ConfigError, JaxparError, did_you_mean
from jaxpar.overrides import apply_overrides


def run(arguments: list[str]) -> int:
    action, rest = split("tokenizer", arguments, what="NAME must come first: train")
    name, rest = split("tokenizer train", rest, default="")
    about = "Train a byte-level BPE tokenizer on the text of a CONFIG or files; measure it on held-out text."
    parser = parser_of("tokenizer train [CONFIG]", about, smoke=True)
    parser.add_argument("--input", nargs="+", metavar="PATH", help="files, patterns or folders, in place of CONFIG")
    parser.add_argument("--vocab-size", type=int, help="tokens, with the 256 bytes and the end of a document")
    parser.add_argument("--output", type=Path, help="the tokenizer.json to write, a new file")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    options, overrides = parse(parser, name, rest)
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
        experiment = experiment_of(name, options.smoke, overrides)
    else:
        sources = tuple(source_of(path, "--input") for path in options.input)
        experiment = apply_overrides(Experiment(data=DataConfig(sources=sources)), overrides)
    report = train_tokenizer(experiment.data, options.vocab_size, options.output, options.quiet)
    if not options.quiet:
        print(report.render())
    return 0
