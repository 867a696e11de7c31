"""Texts from a model: prompts and stop texts in characters around ``jaxpar.generator``, and ``jaxpar generate``."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jaxpar.data.tokenizers import Tokenizer, load_tokenizer
from jaxpar.errors import ConfigError
from jaxpar.experiment import Experiment
from jaxpar.generator import Generator
from jaxpar.mesh.rules import BATCH_AXES
from jaxpar.models.sampling import SamplingConfig, check_texts
from jaxpar.program import Program
from jaxpar.runtime.checkpoints import Checkpoints
from jaxpar.runtime.run_folder import RunFolder
from jaxpar.serialize import from_json


@dataclasses.dataclass(frozen=True)
class Continuation:
    """What a model wrote after a prompt."""

    prompt: str
    prompt_tokens: int
    text: str  # without the stop text that ended it
    tokens: int  # new ones, an end token included
    ended_by: str  # "end" (of the document), "stop" (a stop text) or "length"


Show = Callable[[list[Continuation]], None]


class Writer:
    """A Program and its tokenizer as one that continues texts."""

    def __init__(self, program: Program, tokenizer: Tokenizer):
        self.generator, self.tokenizer = Generator(program), tokenizer

    def write(
        self,
        weights: Any,
        prompts: Sequence[str],
        tokens: int,
        sampling: SamplingConfig,
        seed: int = 0,
        stop: Sequence[str] = (),
        special_tokens: bool = False,
        show: Show | None = None,
    ) -> list[Continuation]:
        """Continue each prompt by up to ``tokens`` tokens, or to the end of the document or the first text of ``stop``.

        ``weights`` come from ``generator.ready``. An empty prompt is the start of a document. ``special_tokens``: read
        prompts with what the tokenizer's own template adds, such as BOS. ``show`` is called with all continuations as
        they grow.
        """
        encoded = self._encode(prompts, special_tokens)

        def texts(written: Sequence[np.ndarray]) -> list[Continuation]:
            rows = zip(prompts, encoded, written, strict=True)
            return [self._continuation(prompt, before, ids, stop) for prompt, before, ids in rows]

        def watch(written: list[np.ndarray]) -> list[bool]:
            so_far = texts(written)
            if show is not None:
                show(so_far)
            return [one.ended_by == "stop" for one in so_far]

        vocab_size = self.tokenizer.vocab_size
        watching = watch if show is not None or stop else None
        return texts(
            self.generator.generate(
                weights, encoded, tokens, sampling, seed, (self.tokenizer.eos,), vocab_size, watching
            )
        )

    def check(self, prompts: Sequence[str], tokens: int) -> None:
        """Raise ConfigError for what ``write`` cannot do."""
        self.generator.check(self._encode(prompts), tokens)

    def _encode(self, prompts: Sequence[str], special_tokens: bool = False) -> list[np.ndarray]:
        found = self.tokenizer.encode(list(prompts), special_tokens)
        return [ids if len(ids) else np.array([self.tokenizer.eos]) for ids in found]

    def _continuation(self, prompt: str, before: np.ndarray, ids: np.ndarray, stop: Sequence[str]) -> Continuation:
        # What tokens spell depends on those before: at the start of a text, decoders of Llama-2's kind drop a space.
        whole, start = self.tokenizer.decode(np.concatenate([before, ids])), self.tokenizer.decode(before)
        text = whole.removeprefix(start) if whole.startswith(start) else self.tokenizer.decode(ids)
        found = [at for at in (text.find(end) for end in stop) if at >= 0]
        if found:
            return Continuation(prompt, len(before), text[: min(found)], len(ids), "stop")
        ended = len(ids) and ids[-1] == self.tokenizer.eos
        return Continuation(prompt, len(before), text, len(ids), "end" if ended else "length")


def generate(
    run: Path | str,
    prompts: Sequence[str],
    tokens: int = 200,
    sampling: SamplingConfig = SamplingConfig(),  # noqa: B008 (frozen)
    *,
    samples: int = 1,
    seed: int = 0,
    stop: Sequence[str] = (),
    special_tokens: bool = False,
    step: int | None = None,
    experiment: Experiment | None = None,
    devices: list[Any] | None = None,
    show: Show | None = None,
) -> list[Continuation]:
    """What the model in the run folder ``run`` writes after each prompt: ``samples`` texts of each.

    ``step``: of the checkpoint; None: the newest. ``experiment``: in place of the run's own config, such as with
    another mesh. ``devices``: all there are. The others as of ``Writer.write``. Raises ConfigError, before an array is
    read, for what cannot work.
    """
    for name, texts in (("prompts", prompts), ("stop", stop)):
        if isinstance(texts, str):
            raise ConfigError(name, texts, "is one text", "a list of texts")
        check_texts(name, texts)
    sampling.validate("sampling")
    folder = RunFolder(run)
    checkpoints = Checkpoints(folder.checkpoints)
    step = checkpoints.choose(step)
    for number, text in enumerate(stop):
        if not text:
            raise ConfigError("--stop", number, "is an empty text, which ends everything", "one character or more")
    experiment = experiment or from_json(Experiment, folder.read_config())
    devices = devices or jax.devices()
    program = Program(for_generation(experiment, len(devices)), devices)
    writer = Writer(program, load_tokenizer(experiment.data.tokenizer, experiment.data.eos_token))
    prompts = [prompt for prompt in prompts for _ in range(samples)]
    writer.check(prompts, tokens)
    weights = writer.generator.ready(checkpoints.restore(step, program.abstract_params, only="params"))
    return writer.write(weights, prompts, tokens, sampling, seed, stop, special_tokens, show)


def print_texts(
    experiment: Experiment,
    run: Path,
    prompts: Sequence[str],
    tokens: int,
    sampling: SamplingConfig,
    *,
    samples: int,
    step: int | None,
    as_json: bool,
    stop: Sequence[str] = (),
    **options: Any,
) -> None:
    """Print what ``generate`` gives with these arguments and ``options``; one text alone as it grows."""
    step = Checkpoints(RunFolder(run).checkpoints).choose(step)
    growing = _Growing(stop) if len(prompts) * samples == 1 and not as_json else None
    start = time.perf_counter()
    with tqdm(total=tokens, unit="token", leave=False, disable=bool(growing) or not sys.stderr.isatty()) as bar:

        def show(so_far: list[Continuation]) -> None:
            if growing is not None:
                growing.show(so_far[0])
            bar.update(max(one.tokens for one in so_far) - bar.n)

        written = generate(
            run,
            prompts,
            tokens,
            sampling,
            samples=samples,
            step=step,
            stop=stop,
            experiment=experiment,
            show=show,
            **options,
        )
    seconds, count = time.perf_counter() - start, sum(one.tokens for one in written)
    if growing is not None:
        growing.show(written[0], last=True)
    elif as_json:
        print(json.dumps([{**dataclasses.asdict(one), "step": step} for one in written], indent=1, ensure_ascii=False))
    else:
        for number, one in enumerate(written):
            print(f"--- {number + 1} of {len(written)}, ended by {one.ended_by}\n{one.prompt}{one.text}")
    note = f"step {step}: {count} tokens in {seconds:.1f} s, compilation included"
    if any(one.prompt_tokens + tokens > experiment.train.seq_len for one in written):
        note += f"; beyond the {experiment.train.seq_len} tokens that the model was trained on at once"
    print(note, file=sys.stderr)


def for_generation(experiment: Experiment, num_devices: int) -> Experiment:
    """The experiment with a batch that any mesh can hold: generation has rows and lengths of its own."""
    sizes = experiment.mesh.resolve(num_devices)
    train = dataclasses.replace(
        experiment.train,
        global_batch=math.prod(sizes[a] for a in BATCH_AXES),
        microbatches=1,
        seq_len=sizes["context"] * sizes["tensor"],
    )
    return dataclasses.replace(experiment, train=train)


class _Growing:
    """A prompt and its text on standard output, printed as they come.

    The end waits while it may be a part of a character, or of a text of ``stop``.
    """

    def __init__(self, stop: Sequence[str]):
        self._printed = 0
        self._begun = {end[:length] for end in stop for length in range(1, len(end))}

    def show(self, so_far: Continuation, last: bool = False) -> None:
        settled = so_far.text if last else self._settled(so_far.text.rstrip("\N{REPLACEMENT CHARACTER}"))
        text = so_far.prompt + settled
        print(text[self._printed :], end="\n" if last else "", flush=True)
        self._printed = max(self._printed, len(text))

    def _settled(self, text: str) -> str:
        longest = max(map(len, self._begun), default=0)
        starts = range(max(0, len(text) - longest), len(text))
        return text[: next((at for at in starts if text[at:] in self._begun), len(text))]
