"""Next-token prediction."""

from __future__ import annotations

import dataclasses

import jax
from flax import nnx

from jaxpar.errors import ConfigError
from jaxpar.models.decoder import Decoder, DecoderConfig
from jaxpar.parallel.layout import MeshLayout


@dataclasses.dataclass(frozen=True)
class LanguageModelConfig:
    """The loss of a language model."""

    z_loss: float = 0.0  # weight of logsumexp(logits)^2 (PaLM); 1e-4 is usual

    def validate(self) -> None:
        """Raise ConfigError for a weight that cannot be."""
        if not self.z_loss >= 0:
            raise ConfigError("task.z_loss", self.z_loss, "is no weight", "0 or more")

    def scalars(self) -> dict[str, float]:
        """The traced numbers of the objective."""
        return {"z_loss": self.z_loss}

    def init(self, config: DecoderConfig, key: jax.Array) -> Decoder:
        """The model with random weights."""
        return Decoder(config, rngs=nnx.Rngs(params=key))

    def objective(
        self, model: Decoder, batch: dict[str, jax.Array], scalars: dict[str, jax.Array], layout: MeshLayout
    ) -> tuple[jax.Array, jax.Array]:
        """This device's shares of (cross-entropy + z-loss, cross-entropy), in nats, summed over its valid tokens.

        ``batch``: tokens, positions, targets, mask, and segments where documents are masked, each [B, S].
        """
        x_BSD, head_DV = model.hidden(batch["tokens"], batch["positions"], batch.get("segments"), layout)
        return layout.cross_entropy(
            x_BSD, head_DV, batch["targets"], batch["mask"], scalars["z_loss"], model.config.logit_softcap
        )
