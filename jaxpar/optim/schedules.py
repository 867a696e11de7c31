"""Learning-rate schedules as functions of the optimizer step."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxpar.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """Linear warmup from 0, then ``kind``. All lengths are in optimizer steps."""

    kind: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    warmup_steps: int = 0
    decay_steps: int | None = None  # wsd: length of the final decay; none: a fifth of the run
    final_ratio: float = 0.1  # learning rate at the end, as a share of the peak

    def validate(self) -> None:
        """Raise ConfigError for lengths or shares that cannot be."""
        if self.warmup_steps < 0:
            raise ConfigError("optim.schedule.warmup_steps", self.warmup_steps, "is negative", "0 or more")
        if self.decay_steps is not None and self.decay_steps < 1:
            raise ConfigError("optim.schedule.decay_steps", self.decay_steps, "is not positive", "1 or more, or none")
        if not 0 <= self.final_ratio <= 1:
            raise ConfigError("optim.schedule.final_ratio", self.final_ratio, "is not a share", "0 to 1")

    def validate_for(self, total_steps: int) -> None:
        """Raise ConfigError where the decay of ``wsd`` would begin before the warmup ends."""
        decay = int(self.scalars(total_steps)["decay_steps"])
        if self.kind == "wsd" and self.warmup_steps + decay > total_steps:
            raise ConfigError(
                "optim.schedule.decay_steps",
                decay,
                f"and warmup_steps {self.warmup_steps} do not fit in train.steps {total_steps}",
                f"at most {max(total_steps - self.warmup_steps, 0)}",
            )

    def scalars(self, total_steps: int) -> dict[str, float]:
        """The traced numbers of the schedule."""
        decay = self.decay_steps if self.decay_steps is not None else max(total_steps // 5, 1)
        return {
            "warmup_steps": float(self.warmup_steps),
            "decay_steps": float(decay),
            "total_steps": float(total_steps),
            "final_ratio": self.final_ratio,
        }

    def factor(self, step: jax.Array, scalars: dict[str, Any]) -> jax.Array:
        """Share of the peak learning rate at 0-based optimizer step ``step``.

        Step t of the warmup has t / warmup_steps; the last step of the run comes out just above ``final_ratio``, which
        step ``total_steps`` would have exactly.
        """
        t = step.astype(jnp.float32)
        warmup, total, final = scalars["warmup_steps"], scalars["total_steps"], scalars["final_ratio"]
        start = total - scalars["decay_steps"] if self.kind == "wsd" else warmup
        done = jnp.clip((t - start) / jnp.maximum(total - start, 1.0), 0.0, 1.0)
        if self.kind == "constant":
            shape = jnp.float32(1.0)
        elif self.kind == "cosine":
            shape = final + (1 - final) * 0.5 * (1 + jnp.cos(jnp.pi * done))
        else:
            shape = 1 - (1 - final) * done
        return jnp.where(t < warmup, t / jnp.maximum(warmup, 1.0), shape)
