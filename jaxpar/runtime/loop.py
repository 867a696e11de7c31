"""Training: a Program, its data, and a run folder.

The order of things in a step: dispatch step t, then read the metrics of step t - 1 (so the device never waits for the
host), then evaluate, save, or stop where step t says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from jaxpar.data import HOW_LOADED
from jaxpar.errors import ConfigError, JaxparError, RunError
from jaxpar.experiment import Experiment
from jaxpar.mesh.devices import peak_flops
from jaxpar.program import Program
from jaxpar.runtime.checkpoints import Checkpoints
from jaxpar.runtime.executables import load_step
from jaxpar.runtime.generate import Writer
from jaxpar.runtime.hosts import Hosts, one_host
from jaxpar.runtime.metrics import Meter, memory
from jaxpar.runtime.opening import describe_step, introduction, load_data
from jaxpar.runtime.pretrained import Pretrained
from jaxpar.runtime.profile import Profile
from jaxpar.runtime.run_folder import RunFolder
from jaxpar.runtime.trackers import Trackers, check_trackers
from jaxpar.serialize import difference, from_json, to_json


class TrainingStopped(RunError):
    """The run cannot go on, and says where it can be picked up."""


@dataclasses.dataclass(frozen=True)
class Summary:
    """How a run ended."""

    step: int
    train_loss: float  # nats per token, of the last step
    eval_loss: float | None  # nats per token, of the last evaluation
    unigram_entropy: float | None  # nats per token: what a model of token frequencies alone would score
    tokens: int  # valid tokens trained on
    stopped_by: str | None  # the signal, if one ended the run early


def train(
    experiment: Experiment,
    run: Path | str,
    devices: list[Any] | None = None,
    resume: bool = False,
    quiet: bool = False,
    hosts: Hosts | None = None,
    compiled: Path | None = None,
) -> Summary:
    """Run ``experiment`` in the folder ``run`` on ``devices`` (all there are).

    ``resume`` goes on from the newest checkpoint of a run that is there already, bit for bit as if it had never
    stopped; the mesh and the devices may differ. Raises ConfigError for what cannot work, before anything is compiled;
    TrainingStopped when the loss stays non-finite, or when metrics or a checkpoint cannot be written.

    ``compiled``: a file of ``jaxpar compile --save`` whose step is used; ConfigError where it was compiled from
    something else.

    On several hosts (``start_hosts`` gives ``hosts``) all make the same call inside its ``with`` block.
    """
    hosts = hosts or one_host()
    if jax.process_count() != hosts.count:
        raise JaxparError(f"{jax.process_count()} processes were started, not by start_hosts: no hosts, or others")
    return _Training(experiment, run, devices or jax.devices(), resume, quiet, hosts, compiled).run()


class _Training:
    """One call of ``train``."""

    def __init__(
        self,
        experiment: Experiment,
        run: Path | str,
        devices: list[Any],
        resume: bool,
        quiet: bool,
        hosts: Hosts,
        compiled: Path | None = None,
    ):
        started = time.perf_counter()
        self.experiment, self.resume, self.hosts, self.compiled = experiment, resume, hosts, compiled
        self.quiet = quiet or hosts.index > 0
        self.program = Program(experiment, devices)
        self.devices = devices
        flops = experiment.model.flops_per_token(experiment.train.seq_len)
        self.meter = Meter(experiment.tokens_per_step, flops, started)
        self.trackers = Trackers(self._say)
        self.step = 0  # whose metrics were read last
        self.folder = RunFolder(run)
        keep, every = experiment.train.keep_checkpoints, experiment.train.keep_every
        self.checkpoints = Checkpoints(self.folder.checkpoints, keep, every)
        self.scalars = self.program.scalars()
        self.tokens = 0  # valid tokens so far
        self.sequences = 0  # sequences so far: where the data goes on
        self.skipped = 0.0  # non-finite steps so far
        self.skipped_in_a_row = 0
        self.train_loss = math.nan
        self.eval_loss: float | None = None

    # -- before the first step -----------------------------------------------------------------------------------

    def run(self) -> Summary:
        """Everything, with the folder locked while it lasts."""
        if self.hosts.index == 0:
            if not self.resume:
                self.folder.refuse_a_run()
            check_trackers(self.experiment.track)
        loaded = self._load_step()
        saved = self._saved_config()
        pretrained = self._pretrained()
        self.data = load_data(self.experiment, self.quiet)
        if self.hosts.index == 0:
            self.folder.start(to_json(saved or self.experiment), self.resume)
        with self.folder, self.trackers:
            self.hosts.check_shared(self.folder.path)
            self.hosts.say_where(self._where_to_go_on)
            first = self.hosts.from_first(self.checkpoints.latest) if self.resume else None
            self.entropy = self.data.unigram_entropy()
            self._introduce(first, saved)
            earlier = self.folder.read_metrics()
            state = None if first is None else self._restore(first, saved, earlier)
            self.folder.write_config(to_json(self.experiment))  # not before it is known to fit the checkpoint
            self.step = first or 0
            self.meter.carry_over(self.step, [*earlier, self.folder.read("time.json")])
            self._write_time()
            self.folder.truncate_after(self.step)
            self.trackers.start(self.experiment, self.folder, self.step, earlier)
            step = self._step(loaded)
            self.folder.write("data.json", {"unigram_entropy": self.entropy})
            if state is None:
                state = self.program.init()
            if pretrained is not None:
                del state["params"]  # freed before their successors come
                state["params"] = pretrained.load()
                if self.hosts.index == 0:
                    pretrained.hand_on(self.folder)
                self._say(f"begins   with the parameters of {pretrained.directory}; optimizer and schedule are new")
            try:
                return self._loop(step, state, first or 0)
            except TrainingStopped:
                raise
            except RunError as error:  # a full disk
                self._let_saving_end()
                raise TrainingStopped(f"{error}; {self._where_to_go_on()}") from error
            finally:
                with self.meter.phase("checkpoint"):
                    self._let_saving_end()
                with contextlib.suppress(JaxparError):
                    self._write_time()

    def _load_step(self) -> float | None:
        """Give the program its step from the file, if there is one; the seconds that it took."""
        if self.compiled is None:
            return None
        begin = time.perf_counter()
        self.program.step = load_step(self.compiled, self.program)
        return time.perf_counter() - begin

    def _step(self, loaded: float | None) -> Any:
        """The compiled step, described in compile.json; ``loaded``: the seconds since it is there, if it was loaded."""
        begin = time.perf_counter()
        with self.meter.phase("compile"):
            step = self.program.step
        seconds = {"compile": time.perf_counter() - begin} if loaded is None else {"load": loaded}
        how = "compiled" if loaded is None else f"loaded the step from {self.compiled}"
        self._say(f"{how} in {sum(seconds.values()):.1f} s")
        if self.hosts.index == 0:
            self.folder.write("compile.json", describe_step(self.program, seconds, self._say))
        return step

    def _write_time(self) -> None:
        self.folder.write("time.json", {"step": self.step, **self.meter.seconds()})

    def _let_saving_end(self) -> None:
        if self.hosts.count == 1:  # several hosts save together: after a failure one would wait for the others in vain
            with contextlib.suppress(JaxparError):
                self.checkpoints.wait()

    def _where_to_go_on(self) -> str:
        latest = self.checkpoints.latest()
        return "no checkpoint is complete" if latest is None else f"--resume goes on from step {latest}"

    def _saved_config(self) -> Experiment | None:
        """The config of the run that is resumed; checks that it can go on with this one."""
        if not (self.resume and self.folder.config_file.exists()):
            return None
        latest = self.checkpoints.latest()
        if latest is not None and "imported" in self.checkpoints.metadata(latest):
            rule = "holds imported weights, not a run that can go on"
            legal = f"another folder, with --train.init_from {self.folder.path}"
            raise ConfigError("run", str(self.folder.path), rule, legal)
        return from_json(Experiment, self.folder.read_config())

    def _introduce(self, first: int | None, saved: Experiment | None) -> None:
        if (samples := self.experiment.samples).every is not None:
            self._writer.check(samples.prompts, samples.tokens)
        self._say(f"run      {self.folder.path}")
        for line in introduction(self.program, self.data, self.entropy):
            self._say(line)
        if first is not None:
            self._say(f"resuming from step {first:,}")
            for path, (old, new) in (difference(saved, self.experiment) if saved else {}).items():
                self._say(f"changed  {path}: {old} -> {new}")
        elif self.resume:
            self._say("no checkpoint to resume from; starting at step 0")

    def _pretrained(self) -> Pretrained | None:
        """What the run begins with, known to fit; None where a checkpoint of its own or random weights are."""
        origin = self.experiment.train.init_from
        if origin is None or (self.resume and self.checkpoints.latest() is not None):
            return None
        return Pretrained(origin, self.program.abstract_params)

    def _restore(self, step: int, saved: Experiment | None, earlier: list[dict[str, Any]]) -> Any:
        metadata = self.checkpoints.metadata(step)
        if metadata["data"] != self.data.fingerprint:
            changed = difference(saved, self.experiment) if saved else {}
            fields = [path for path in changed if path.startswith("data.") or path in ("train.seq_len", "train.seed")]
            fields = [path for path in fields if path.removeprefix("data.") not in HOW_LOADED]
            raise ConfigError(
                "data",
                ", ".join(fields) or "the text itself",
                f"changed since the checkpoint at step {step}, and with it the order of the data",
                "what the run began with, or a new run",
            )
        if step > self.experiment.train.steps:
            steps = self.experiment.train.steps
            raise ConfigError("train.steps", steps, f"is before the checkpoint at step {step}", f"{step} or more")
        self.tokens, self.sequences = metadata["tokens"], metadata["sequences"]
        for record in earlier:
            self.train_loss = record.get("loss") or self.train_loss
            self.eval_loss = record.get("eval_loss", self.eval_loss)
        state = self.checkpoints.restore(step, self.program.abstract_state)
        self.skipped = float(state["skipped"])
        return state

    # -- the loop ------------------------------------------------------------------------------------------------

    def _loop(self, step: Any, state: Any, first: int) -> Summary:
        train = self.experiment.train
        peak, source = peak_flops(self.devices)
        self._say(f"peak     {peak / 1e12:.3g} TFLOP/s: {source}" if peak else "peak     unknown: no MFU")
        self.meter.peak_flops = peak
        self.profile = Profile(train.profiled_steps(), self.folder.path / "profile", first, self._say)
        done = first  # steps whose metrics have been read
        with (
            _Signals() as signals,
            self.data.loader(train.global_batch, self.sequences, self.program.host_rows()) as loader,
            self._progress_bar(first) as self.bar,
            self.profile,
            self.meter.phase("step"),
        ):
            pending, stopped = None, None
            batches = self.hosts.watched(loader)
            for t in range(first, train.steps):
                if t + 1 in self.profile.edges:
                    with self.meter.phase("start"):
                        self.profile.turn()
                with self.meter.phase("step", t + 1):
                    with self.meter.phase("data"):
                        batch = next(batches)
                    state, metrics = step(state, self.program.put(batch), self.scalars)
                    if pending is not None:
                        done += 1
                        self._record(done, pending)
                pending = metrics
                last = t + 1 == train.steps
                stopped = self.hosts.stop_after(t + 1, signals.caught)
                stopping = stopped is not None or last
                evaluating = (t + 1) % train.eval_every == 0 or last  # a signal changes no metrics
                saving = (t + 1) % train.checkpoint_every == 0 or stopping
                every = self.experiment.samples.every
                sampling = every is not None and ((t + 1) % every == 0 or last)
                looking = evaluating or sampling or saving or t + 2 in self.profile.edges
                if looking or self.skipped_in_a_row:
                    done += 1
                    self._record(done, pending)
                    pending = None
                    if self.skipped_in_a_row > train.max_skipped:
                        self._give_up(done, state)
                    if evaluating:
                        with self.meter.phase("evaluate"):
                            self._evaluate(done, state)
                    if sampling:
                        with self.meter.phase("evaluate"):
                            self._write_samples(done, state)
                    if saving:
                        with self.meter.phase("checkpoint"):
                            self._save(done, state)
                if stopping:
                    break
                self.checkpoints.check()
            with self.meter.phase("checkpoint"):
                self.checkpoints.wait()
        return self._finish(done, stopped if done < train.steps else None)

    def _progress_bar(self, first: int) -> tqdm:
        """Steps done, with an ETA; a line now and then where the output is a file, not a terminal or a notebook."""
        often = 0.2 if sys.stderr.isatty() or "ipykernel" in sys.modules else 10.0
        total = self.experiment.train.steps
        return tqdm(total=total, initial=first, unit="step", disable=self.quiet, dynamic_ncols=True, mininterval=often)

    def _record(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Read a step's metrics, which waits for the device, and write them down."""
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        reading = self.meter.step()
        self.step = step
        self.tokens += int(values["tokens"])
        self.sequences += self.experiment.train.global_batch
        self.train_loss = values["loss"]
        finite = values["skipped"] == self.skipped  # as the step itself decided
        self.skipped = values["skipped"]
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        train = self.experiment.train
        if step % train.log_every == 0 or step == train.steps or not finite:
            self._append(
                {
                    "step": step,
                    "tokens": self.tokens,
                    "loss": _finite(values["loss"]),
                    "grad_norm": _finite(values["grad_norm"]),
                    "learning_rate": values["learning_rate"],
                    "skipped": int(values["skipped"]),
                    "tokens_per_second": round(reading.tokens_per_second, 1),
                    "mfu": None if reading.mfu is None else round(reading.mfu, 4),
                    **self.meter.seconds(),
                    **memory(self.devices),
                }
            )
        if not finite:
            self._say(f"step {step}: loss {values['loss']}, gradient norm {values['grad_norm']}: skipped whole")
        shown = {"loss": f"{values['loss']:.3f}", "tokens/s": f"{reading.tokens_per_second:,.0f}"}
        if reading.mfu is not None:
            shown["MFU"] = f"{reading.mfu:.0%}"
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update()

    def _append(self, record: dict[str, Any]) -> None:
        self.folder.append(record)
        self.trackers.log(record)

    def _evaluate(self, step: int, state: Any) -> None:
        """Mean loss over held-out tokens, each counted once however the batches were cut."""
        if self.data.evaluation is None:
            return
        with self.meter.phase("compile"):
            evaluate = self.program.evaluate
        train = self.experiment.train
        size = train.global_batch // train.microbatches
        sums = []
        most = train.eval_batches * train.microbatches
        for batch in self.hosts.watched(self.data.evaluation.batches(size, most, self.program.host_rows(0))):
            sums.append(evaluate(state["params"], self.program.put(batch, 0), self.scalars))
        losses, counts = zip(*jax.device_get(sums), strict=True)  # the one wait for the device
        count = int(sum(map(float, counts)))
        self.eval_loss = sum(map(float, losses)) / max(count, 1)
        self._append({"step": step, "tokens": self.tokens, "eval_loss": self.eval_loss, "eval_tokens": count})
        self._say(f"step {step:,}: evaluation loss {self.eval_loss:.4f} nats/token")

    @functools.cached_property
    def _writer(self) -> Writer:
        return Writer(self.program, self.data.tokenizer)

    def _write_samples(self, step: int, state: Any) -> None:
        """What the model writes after each prompt, by the same draws every time."""
        samples, seed = self.experiment.samples, self.experiment.train.seed
        weights = self._writer.generator.ready(state["params"])
        for one in self._writer.write(weights, samples.prompts, samples.tokens, samples.sampling, seed):
            self.folder.append_sample({"step": step, **dataclasses.asdict(one)})
            self._say(f"step {step:,}: {json.dumps(one.prompt + one.text, ensure_ascii=False)}")

    def _save(self, step: int, state: Any) -> None:
        metadata = {"tokens": self.tokens, "sequences": self.sequences, "data": self.data.fingerprint}
        self.checkpoints.save(step, state, metadata)

    def _give_up(self, step: int, state: Any) -> None:
        """Stop: the state is that of the last finite step, since the others were skipped whole."""
        self._save(step, state)
        self.checkpoints.wait()
        raise TrainingStopped(
            f"loss, gradients or updates were not finite in the last {self.skipped_in_a_row} steps up to step {step}; "
            f"the parameters from before them are in {self.folder.checkpoints / f'step_{step}'}; "
            "try a lower optim.learning_rate or more optim.schedule.warmup_steps"
        )

    def _finish(self, step: int, stopped_by: str | None) -> Summary:
        entropy = self.entropy
        self._say(f"time     {self.meter.shares()}")
        if self.profile.written:
            folder = self.profile.folder
            self._say(f"profile  in {folder}: xprof --logdir {folder}  (pip install xprof)")
        if stopped_by:
            self._say(f"stopped by {stopped_by} after step {step:,}; checkpoint saved; continue with --resume")
        else:
            versus = f" (unigram entropy {entropy:.4f})" if entropy is not None else ""
            ended = f"evaluation loss {self.eval_loss:.4f} nats/token{versus}" if self.eval_loss is not None else ""
            self._say(f"finished {step:,} steps, {self.tokens:,} tokens; {ended}")
        return Summary(step, self.train_loss, self.eval_loss, entropy, self.tokens, stopped_by)

    def _say(self, line: str) -> None:
        if not self.quiet:
            try:
                tqdm.write(line, file=sys.stdout)
            except (OSError, ValueError, AttributeError):  # who read the output has gone; the run goes on
                self.quiet = True


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


class _Signals:
    """SIGTERM and the first SIGINT are noted, for the loop to stop at a step's end; a second SIGINT interrupts."""

    def __init__(self) -> None:
        self.caught: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        with contextlib.suppress(ValueError):  # not in the main thread: the caller handles signals
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: Any) -> None:
        if self.caught is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.caught = signal.Signals(number).name

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
