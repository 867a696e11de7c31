"""What comes before the first step: the data, read and checked, and what a run says of itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from jaxpar.audit.audit import audit
from jaxpar.audit.memory import verdict
from jaxpar.data import Data, build_data
from jaxpar.data.progress import Bar
from jaxpar.errors import ConfigError
from jaxpar.experiment import Experiment
from jaxpar.program import Program
from jaxpar.words import Say, mesh_text


def load_data(experiment: Experiment, quiet: bool = True) -> Data:
    """The experiment's data, checked against its model."""
    with _reading_bar(quiet) as (progress, say):
        data = build_data(experiment.data, experiment.train.seq_len, experiment.train.seed, progress, say)
    if data.tokenizer.vocab_size > experiment.model.vocab_size:
        raise ConfigError(
            "model.vocab_size",
            experiment.model.vocab_size,
            f"is smaller than the {data.tokenizer.vocab_size} tokens of data.tokenizer {experiment.data.tokenizer}",
            f"{data.tokenizer.vocab_size} or more",
        )
    return data


@contextlib.contextmanager
def _reading_bar(quiet: bool) -> Iterator[Any]:
    """What ``build_data`` reports to: a bar of tokens, their rate and, where it is known, the time left; and lines."""
    with Bar(unit=" tokens", unit_scale=True, leave=False, disable=quiet, delay=1.0, dynamic_ncols=True) as bar:

        def progress(source: str, documents: int, tokens: int, share: float | None) -> None:
            if tokens < bar.n:  # the next source
                bar.reset()
            bar.total = tokens / share if share else None
            bar.set_description(f"reading {source}", refresh=False)
            bar.set_postfix_str(f"{documents:,} documents", refresh=False)
            bar.update(tokens - bar.n)

        def say(line: str) -> None:
            if not quiet:
                bar.clear()
                with contextlib.suppress(OSError, ValueError):  # who read the output has gone
                    print(line, flush=True)

        yield progress, say


def introduction(program: Program, data: Data, entropy: float | None) -> Iterator[str]:
    """The lines with which a run begins: model, kernel, mesh, batch, data, and what is worth a note.

    ``entropy``: of the held-out text's unigrams, in nats per token.
    """
    experiment, train = program.experiment, program.experiment.train
    devices = program.mesh.devices.size
    mesh = mesh_text(program.sizes)
    yield f"model    {program.num_parameters:,} parameters"
    yield f"kernel   {program.kernel} attention: {program.kernel_reason}"
    yield (
        f"mesh     {mesh} on {devices} {program.mesh.devices.flat[0].platform} device{'s' * (devices > 1)}, "
        f"ZeRO {experiment.rules.zero}, compute {program.dtype.name}"
    )
    accumulated = f", in {train.microbatches} microbatches" if train.microbatches > 1 else ""
    yield (
        f"batch    {train.global_batch} sequences x {train.seq_len} tokens = "
        f"{experiment.tokens_per_step:,} tokens a step{accumulated}; {train.steps:,} steps"
    )
    for corpus in data.corpora:
        size = f"{len(corpus.hashes_D):,} documents, {len(corpus.tokens_N):,} tokens"
        yield f"data     {corpus.name}: {size}, {corpus.origin}"
    tokens = sum(source.counts()["tokens"] for source in data.train.sources)
    held = "" if entropy is None else f"; unigram entropy of the held-out text {entropy:.3f} nats/token"
    yield f"data     {tokens:,} training tokens{held}"
    whole = [p.name for p in program.parameters if p.layout.zero_dim is None]
    if experiment.rules.zero and program.sizes["fsdp"] > 1 and whole:
        yield f"note     {len(whole)} vectors do not divide by fsdp and stay whole: {', '.join(whole[:4])}"
    if experiment.optim.schedule.warmup_steps > train.steps:
        yield "note     the warmup is longer than the run: the learning rate never reaches its peak"


def describe_step(program: Program, seconds: dict[str, float], say: Say) -> dict[str, Any]:
    """What compile.json holds: ``seconds`` and the step's audit. Says what the step holds on each device.

    No failure of the audit stops a run: it is one line, and its keys are missing.
    """
    try:
        costs = audit(program, program.step)
    except Exception as error:  # an HLO text that it cannot read, of any kind
        say(f"note     no audit: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        return {"seconds": seconds}
    say(f"memory   {verdict(costs)}")
    return {**costs, "seconds": {**seconds, **costs["seconds"]}}
