"""``jaxpar generate``: what a run's model writes after a prompt."""

from __future__ import annotations

from pathlib import Path

from jaxpar.cli.arguments import experiment_of, parse, parser_of, split
from jaxpar.errors import ConfigError


def run(arguments: list[str]) -> int:
    name, rest = split("generate", arguments, what="RUN must come first: a run folder")
    about = "Print what the model of a run folder writes after a prompt."
    parser = parser_of("generate RUN", about, devices=True)
    parser.add_argument("--prompt", action="append", help="a text to continue; may be given several times")
    parser.add_argument("--prompts", type=Path, help="a file with one prompt a line")
    parser.add_argument("--tokens", type=int, default=200, help="new tokens at most (200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (0.8)")
    parser.add_argument("--top-k", type=int, help="draw from the so many likeliest tokens")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest tokens of this probability")
    parser.add_argument("--stop", action="append", default=[], help="a text that ends it; may be given several times")
    parser.add_argument("--samples", type=int, default=1, help="texts for each prompt")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument(
        "--special-tokens", action="store_true", help="what the tokenizer adds to a prompt, such as BOS"
    )
    parser.add_argument("--step", type=int, help="of the checkpoint; default: the newest")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options, overrides = parse(parser, name, rest)
    if not Path(name).is_dir():
        raise ConfigError("run", name, "is not a folder", "the folder of a run")
    for flag, least, most in (("tokens", 1, 2**24), ("samples", 1, 2**16), ("seed", 0, 2**31 - 1)):
        if not least <= getattr(options, flag) <= most:
            raise ConfigError(f"--{flag}", getattr(options, flag), "is out of range", f"{least} to {most}")
    prompts = list(options.prompt or [])
    if options.prompts is not None:
        prompts += _lines(options.prompts)
    experiment = experiment_of(name, False, overrides)

    from jaxpar.mesh.devices import start_devices
    from jaxpar.models.sampling import SamplingConfig
    from jaxpar.runtime.generate import print_texts

    print_texts(
        experiment,
        Path(name),
        prompts or [""],
        options.tokens,
        SamplingConfig(options.temperature, options.top_k, options.top_p),
        samples=options.samples,
        devices=start_devices(options.devices),
        seed=options.seed,
        stop=options.stop,
        special_tokens=options.special_tokens,
        step=options.step,
        as_json=options.json,
    )
    return 0


def _lines(path: Path) -> list[str]:
    """The lines of the file of ``--prompts``, one at least."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError("--prompts", str(path), f"is not UTF-8 text (byte {error.start})") from None
    if not text:
        legal = "one prompt a line; an empty line: the start of a document"
        raise ConfigError("--prompts", str(path), "is empty", legal)
    return text.removesuffix("\n").split("\n")
