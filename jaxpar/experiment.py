"""An experiment: the configs of all components in one typed object, and the checks that span them."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, Literal

import numpy as np

from jaxpar.data import DataConfig
from jaxpar.errors import ConfigError, divisors
from jaxpar.mesh.axes import MeshConfig
from jaxpar.mesh.rules import BATCH_AXES, ShardingRules
from jaxpar.models.decoder import DecoderConfig
from jaxpar.models.sampling import SamplingConfig, check_texts
from jaxpar.optim.optimizers import AdamWConfig, SGDConfig
from jaxpar.tasks.language_model import LanguageModelConfig


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How long, how much at once, and what is kept."""

    steps: int = 1000  # optimizer steps of the whole run
    global_batch: int = 32  # sequences per optimizer step
    microbatches: int = 1  # pieces a step is cut into; gradients add up
    seq_len: int = 256  # tokens per sequence
    seed: int = 0  # of weights and of the order of data
    init_from: str | None = None  # a run folder or one of its checkpoints: start with its parameters, all else fresh
    compute: Literal["auto", "float32", "bfloat16"] = "auto"  # matrix products; auto: bfloat16, on a CPU float32
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"  # gradients while devices add them
    remat: Literal["none", "dots", "qkv", "attention", "full", "offload"] = (
        "none"  # what the backward pass recomputes in a layer
    )
    eval_every: int = 200  # steps between evaluations; there is always one at the end
    eval_batches: int = 20  # batches of an evaluation at most
    checkpoint_every: int = 500  # steps between checkpoints; there is always one at the end
    keep_checkpoints: int = 2  # the newest ones to keep
    keep_every: int | None = None  # and every multiple of this many steps; none: only the newest
    log_every: int = 1  # steps between lines of metrics.jsonl
    max_skipped: int = 5  # consecutive non-finite steps, each skipped whole, after which the run stops
    compiler_options: tuple[str, ...] = ()  # of XLA: NAME=VALUE; xla_tpu_... is for TPUs only, and so on
    profile: str | None = None  # steps to trace, FIRST:STOP: 10:13 is 10, 11 and 12; the first step of a run is 1

    def validate(self) -> None:
        """Raise ConfigError for counts that cannot be."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < (0 if field.name in ("seed", "max_skipped") else 1):
                least = 0 if field.name in ("seed", "max_skipped") else 1
                raise ConfigError(f"train.{field.name}", value, "is too small", f"{least} or more")
        if self.seed >= 2**31:
            raise ConfigError("train.seed", self.seed, "is too large", f"0 to {2**31 - 1}")
        if self.global_batch % self.microbatches:
            raise ConfigError(
                "train.microbatches",
                self.microbatches,
                f"does not divide train.global_batch {self.global_batch}",
                divisors(self.global_batch),
            )
        self.profiled_steps()
        self.options()

    def options(self) -> dict[str, str | bool]:
        """``compiler_options`` as XLA takes them. Raises ConfigError."""
        found: dict[str, str | bool] = {}
        for option in self.compiler_options:
            name, equals, value = option.partition("=")
            if not equals or not re.fullmatch(r"\w+", name) or not value:
                rule = "is not NAME=VALUE"
                raise ConfigError(
                    "train.compiler_options", option, rule, "such as xla_tpu_enable_async_all_to_all=true"
                )
            found[name] = {"true": True, "false": False}.get(value.lower(), value)
        return found

    def profiled_steps(self) -> range:
        """The steps to trace, numbered as in metrics.jsonl. Raises ConfigError."""
        if self.profile is None:
            return range(0)
        found = re.fullmatch(r"(\d+):(\d+)", self.profile)
        steps = range(*map(int, found.groups())) if found else range(0)
        if not steps or steps[0] < 1 or steps[-1] > self.steps:
            rule = f"is no range FIRST:STOP of this run's steps 1 to {self.steps}"
            raise ConfigError("train.profile", self.profile, rule, "such as 10:13 for steps 10, 11 and 12")
        return steps


@dataclasses.dataclass(frozen=True)
class SamplesConfig:
    """Texts that a run writes as it trains, into its ``samples.jsonl``."""

    every: int | None = None  # steps between samples; none: no samples
    prompts: tuple[str, ...] = ("",)  # an empty one: the start of a document
    tokens: int = 64  # new tokens of each
    sampling: SamplingConfig = SamplingConfig()

    def validate(self) -> None:
        """Raise ConfigError for numbers that cannot be."""
        for name in ("every", "tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"samples.{name}", value, "is too small", "1 or more")
        if not self.prompts:
            raise ConfigError("samples.prompts", self.prompts, "holds no prompt", "one or more")
        check_texts("samples.prompts", self.prompts)
        self.sampling.validate("samples.sampling")


@dataclasses.dataclass(frozen=True)
class TrackConfig:
    """Where a run is mirrored, beside its folder."""

    to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()  # one or more, such as tensorboard,trackio
    project: str = "jaxpar"  # of W&B and trackio
    name: str | None = None  # of the run there; none: that of the run folder

    def validate(self) -> None:
        """Raise ConfigError for a tracker named twice, or a name that some tracker does not take."""
        if len(set(self.to)) < len(self.to):
            raise ConfigError("track.to", ",".join(self.to), "names a tracker twice", "each once")
        for field, text in (("project", self.project), ("name", self.name)):
            if text is not None and not re.fullmatch(r"[\w-][\w. -]{0,99}", text):
                raise ConfigError(f"track.{field}", repr(text), "is no name", "letters, digits and _-. up to 100")


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything a run depends on, but the devices."""

    model: DecoderConfig = DecoderConfig()
    task: LanguageModelConfig = LanguageModelConfig()
    data: DataConfig = DataConfig()
    optim: AdamWConfig | SGDConfig = AdamWConfig()
    train: TrainConfig = TrainConfig()
    samples: SamplesConfig = SamplesConfig()
    mesh: MeshConfig = MeshConfig()
    rules: ShardingRules = ShardingRules()
    track: TrackConfig = TrackConfig()

    def validate(self) -> None:
        """Check every component by itself. Raises ConfigError."""
        for part in (self.model, self.task, self.data, self.optim, self.train, self.samples, self.rules, self.track):
            part.validate()
        self.optim.schedule.validate_for(self.train.steps)
        for name, value in self.scalars().items():
            unbounded = name == "max_grad_norm" and self.optim.max_grad_norm is None
            if not (unbounded or abs(value) <= float(np.finfo(np.float32).max)):
                field = f"task.{name}" if name in self.task.scalars() else f"optim.{name}"
                raise ConfigError(field, value, "is not finite in fp32", "up to 3e38")

    def validate_on(self, sizes: dict[str, int]) -> None:
        """Check what must divide on a mesh of these axis sizes (the weights are checked where they are laid out)."""
        if sizes["pipe"] > 1:
            raise ConfigError("mesh.pipe", sizes["pipe"], "needs a pipeline schedule, which there is none of yet", "1")
        ways = math.prod(sizes[a] for a in BATCH_AXES)
        piece = self.train.global_batch // self.train.microbatches
        if piece % ways:
            shards = " x ".join(f"mesh.{a} {sizes[a]}" for a in BATCH_AXES if sizes[a] > 1)
            raise ConfigError(
                "train.global_batch",
                self.train.global_batch,
                f"in {self.train.microbatches} microbatches gives {piece} sequences, not divisible by {shards}",
                f"multiples of {ways * self.train.microbatches}",
            )
        for field, logical in (
            ("num_heads", "heads"), ("num_kv_heads", "kv_heads"), ("mlp_width", "mlp"), ("vocab_size", "vocab"),
        ):  # fmt: skip
            value, split = getattr(self.model, field), self.rules.mesh_axes(logical)
            if value % math.prod(sizes[a] for a in split):
                rule = f"is not divisible by mesh.{split[0]} {sizes[split[0]]}"
                raise ConfigError(f"model.{field}", value, rule, f"mesh.{split[0]} from {divisors(value)}")
        cut = sizes["context"] * sizes["tensor"]
        if self.train.seq_len % cut:
            axes = " x ".join(f"mesh.{a} {sizes[a]}" for a in ("context", "tensor") if sizes[a] > 1)
            raise ConfigError("train.seq_len", self.train.seq_len, f"is not divisible by {axes}", f"multiples of {cut}")

    def scalars(self) -> dict[str, float]:
        """The numbers that enter the compiled step as arguments: changing them recompiles nothing."""
        return {**self.optim.scalars(self.train.steps), **self.task.scalars()}

    @property
    def tokens_per_step(self) -> int:
        """Positions of a step, padding included."""
        return self.train.global_batch * self.train.seq_len

    def compute_dtype(self, platform: str) -> Any:
        """The dtype of matrix products on ``platform``."""
        import jax.numpy as jnp

        if self.train.compute == "auto":
            return jnp.dtype(jnp.float32 if platform == "cpu" else jnp.bfloat16)
        return jnp.dtype(self.train.compute)
