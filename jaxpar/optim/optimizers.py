"""AdamW and SGD as optax chains over traced numbers."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import jax
import numpy as np
import optax

from jaxpar.errors import ConfigError
from jaxpar.optim.routing import Group
from jaxpar.optim.schedules import ScheduleConfig

Scalars = dict[str, Any]  # name -> float, or a traced fp32 scalar


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(abc.ABC):
    """What every optimizer has."""

    learning_rate: float = 1e-3  # the peak
    schedule: ScheduleConfig = ScheduleConfig()
    weight_decay: float = 0.1  # decoupled, times the learning rate; matrices, embedding and head, never vectors
    max_grad_norm: float | None = 1.0  # clip the global norm of the gradient; none: never

    def validate(self) -> None:
        """Raise ConfigError for numbers no optimizer takes."""
        for name in ("learning_rate", "weight_decay"):
            if not getattr(self, name) >= 0:  # NaN too
                raise ConfigError(f"optim.{name}", getattr(self, name), "is not a rate", "0 or more")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError("optim.max_grad_norm", self.max_grad_norm, "is not positive", "a positive number or none")
        self.schedule.validate()

    def scalars(self, total_steps: int) -> dict[str, float]:
        """The numbers that enter the compiled step as arguments."""
        norm = float("inf") if self.max_grad_norm is None else self.max_grad_norm
        return {
            "learning_rate": self.learning_rate,
            "weight_decay": self.weight_decay,
            "max_grad_norm": norm,
            **self.schedule.scalars(total_steps),
        }

    @abc.abstractmethod
    def transform(self, scalars: Scalars, groups: Any) -> optax.GradientTransformation:
        """The chain up to, not including, the learning rate. ``groups``: a tree of Group like the parameters."""


@dataclasses.dataclass(frozen=True)
class AdamWConfig(OptimizerConfig):
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) for every group."""

    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8

    def validate(self) -> None:
        """Raise ConfigError for numbers AdamW does not take."""
        super().validate()
        for name in ("b1", "b2"):
            if not 0 <= np.float32(getattr(self, name)) < 1:
                raise ConfigError(f"optim.{name}", getattr(self, name), "is not a decay rate in fp32", "0 <= x < 1")
        if not np.float32(self.eps) > 0:
            raise ConfigError("optim.eps", self.eps, "is not positive", "a positive number")

    def scalars(self, total_steps: int) -> dict[str, float]:
        """Adds the moments' numbers."""
        return {**super().scalars(total_steps), "b1": self.b1, "b2": self.b2, "eps": self.eps}

    def transform(self, scalars: Scalars, groups: Any) -> optax.GradientTransformation:
        """Moments, then decay."""
        return optax.chain(optax.scale_by_adam(scalars["b1"], scalars["b2"], scalars["eps"]), decay(scalars, groups))


@dataclasses.dataclass(frozen=True)
class SGDConfig(OptimizerConfig):
    """SGD with momentum, for every group."""

    learning_rate: float = 0.1
    weight_decay: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False

    def validate(self) -> None:
        """Raise ConfigError for numbers SGD does not take."""
        super().validate()
        if not 0 <= self.momentum < 1:
            raise ConfigError("optim.momentum", self.momentum, "is not a decay rate", "0 <= x < 1")

    def scalars(self, total_steps: int) -> dict[str, float]:
        """Adds the momentum."""
        return {**super().scalars(total_steps), "momentum": self.momentum}

    def transform(self, scalars: Scalars, groups: Any) -> optax.GradientTransformation:
        """Momentum where it is not zero, then decay."""
        momentum = optax.trace(scalars["momentum"], self.nesterov) if self.momentum else optax.identity()
        return optax.chain(momentum, decay(scalars, groups))


def decay(scalars: Scalars, groups: Any) -> optax.GradientTransformation:
    """Decoupled weight decay of everything but vectors."""
    decayed: set[Group] = {"matrix", "embedding", "head"}
    mask = jax.tree.map(lambda group: group in decayed, groups)
    return optax.masked(optax.add_decayed_weights(scalars["weight_decay"]), mask)
