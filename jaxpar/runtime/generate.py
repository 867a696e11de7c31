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


@dataclasses.dataclass(frozen=True)
class Continuation:
    """What a model wrote after a prompt."""

    prompt: str
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
            return [self._read(prompt, before, ids, stop) for prompt, before, ids in rows]

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

    def _read(self, prompt: str, before: np.ndarray, ids: np.ndarray, stop: Sequence[str]) -> Continuation:
        # What tokens spell depends on those before: at the start of a text, decoders of Llama-2's kind drop a space.
        whole, start = self.tokenizer.decode(np.concatenate([before, ids])), self.tokenizer.decode(before)
        text = whole.removeprefix(start) if whole.startswith(start) else self.tokenizer.decode(ids)
        found = [at for at in (text.find(end) for end in stop) if at >= 0]
        if found:
            return Continuation(prompt, text[: min(found)], len(ids), "stop")
        ended = len(ids) and ids[-1] == self.tokenizer.eos
        return Continuation(prompt, text, len(ids), "end" if ended else "length")


def generate(
    experiment: Experiment,
    run: Path,
    devices: list[Any],
    prompts: Sequence[str],
    tokens: int,
    sampling: SamplingConfig,
    *,
    samples: int = 1,
    seed: int = 0,
    stop: Sequence[str] = (),
    special_tokens: bool = False,
    step: int | None = None,
    as_json: bool = False,
) -> None:
    """Print what the model of ``run`` (its newest checkpoint, or that of ``step``) writes after each prompt.

    One text alone is printed as it grows. Raises ConfigError before anything is read for what cannot work.
    """
    sampling.validate("generate")
    check_texts("prompts", prompts)
    check_texts("--stop", [*stop, ""])
    checkpoints = Checkpoints(RunFolder(run).checkpoints)
    steps = checkpoints.steps()
    if not steps:
        raise ConfigError("run", str(run), "holds no complete checkpoint", "a run that has saved one")
    step = steps[-1] if step is None else step
    if step not in steps:
        raise ConfigError("--step", step, "is no complete checkpoint of the run", ", ".join(map(str, steps)))
    for number, text in enumerate(stop):
        if not text:
            raise ConfigError("--stop", number, "is an empty text, which ends everything", "one character or more")
    program = Program(for_generation(experiment, len(devices)), devices)
    writer = Writer(program, load_tokenizer(experiment.data.tokenizer, experiment.data.eos_token))
    prompts = [prompt for prompt in prompts for _ in range(samples)]
    writer.check(prompts, tokens)
    weights = writer.generator.ready(checkpoints.restore(step, program.abstract_params, only="params"))
    alone = len(prompts) == 1 and not as_json
    start = time.perf_counter()
    printed = _Growing(prompts[0], stop) if alone else None
    with tqdm(total=tokens, unit="token", leave=False, disable=alone or not sys.stderr.isatty()) as bar:

        def show(so_far: list[Continuation]) -> None:
            if printed is not None:
                printed.grow(so_far[0].text)
            bar.update(max(one.tokens for one in so_far) - bar.n)

        written = writer.write(weights, prompts, tokens, sampling, seed, stop, special_tokens, show)
    seconds, count = time.perf_counter() - start, sum(one.tokens for one in written)
    if printed is not None:
        printed.grow(written[0].text, last=True)
    elif as_json:
        print(json.dumps([{**dataclasses.asdict(one), "step": step} for one in written], indent=1, ensure_ascii=False))
    else:
        for number, one in enumerate(written):
            print(f"--- {number + 1} of {len(written)}, ended by {one.ended_by}\n{one.prompt}{one.text}")
    note = f"step {step}: {count} tokens in {seconds:.1f} s, compilation included"
    seen = experiment.train.seq_len
    if any(len(ids) + tokens > seen for ids in writer.tokenizer.encode(list(prompts))):
        note += f"; beyond the {seen} tokens that the model was trained on at once"
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
    """A text on standard output that is printed as it comes.

    Its end waits while that may be a part of a character, or of a text of ``stop``.
    """

    def __init__(self, prompt: str, stop: Sequence[str]):
        self._printed = 0
        self._begun = {end[:length] for end in stop for length in range(1, len(end))}
        print(prompt, end="", flush=True)

    def grow(self, text: str, last: bool = False) -> None:
        shown = text if last else self._settled(text.rstrip("\N{REPLACEMENT CHARACTER}"))
        print(shown[self._printed :], end="\n" if last else "", flush=True)
        self._printed = max(self._printed, len(shown))

    def _settled(self, text: str) -> str:
        longest = max(map(len, self._begun), default=0)
        starts = range(max(0, len(text) - longest), len(text))
        return text[: next((at for at in starts if text[at:] in self._begun), len(text))]
