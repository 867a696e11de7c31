"""Logits of ``transformers`` (PyTorch) and of ours, in fp32 on the CPU, for the same weights and tokens."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxpar.errors import JaxparError
from jaxpar.models.decoder import Decoder, DecoderConfig
from jaxpar.words import Say

TOLERANCE = 1e-4  # of the largest difference, relative to the largest logit
SEQUENCES, LENGTH = 3, 64


def require_transformers() -> None:
    """Raise JaxparError where the comparison cannot be made."""
    if missing := [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]:
        raise JaxparError(f"--verify needs {' and '.join(missing)}: pip install torch==2.13.0 transformers")


def verify(folder: Path, config: DecoderConfig, params: Any, say: Say) -> bool:
    """Whether the model in ``folder`` and ``params`` give the same logits for a few random sequences; says how far off.

    Holds the weights once more on the host while either model runs.
    """
    tokens_BS = np.random.default_rng(0).integers(0, config.vocab_size, (SEQUENCES, LENGTH))
    theirs = _logits_of_transformers(folder, tokens_BS)
    ours = _logits(config, params, tokens_BS)
    apart, largest = float(np.max(np.abs(ours - theirs))), float(np.max(np.abs(theirs)))
    same = apart <= TOLERANCE * largest  # not where any is NaN
    say(
        f"verify   logits of {SEQUENCES} sequences of {LENGTH} tokens, fp32: largest difference {apart:.1e}, "
        f"{apart / largest if largest else apart:.1e} of the largest logit {largest:.3g} "
        f"(tolerance {TOLERANCE:.0e}): {'pass' if same else 'FAIL'}"
    )
    if config.sliding_window is not None and config.sliding_window >= LENGTH:
        say(f"note     sequences this short do not reach the sliding window of {config.sliding_window}")
    return same


def host_device() -> Any:
    """The CPU, or the first device where JAX was started without it."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]


def _logits_of_transformers(folder: Path, tokens_BS: np.ndarray) -> np.ndarray:
    require_transformers()
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    with torch.no_grad():
        return model.eval()(input_ids=torch.from_numpy(tokens_BS), use_cache=False).logits.numpy()


def _logits(config: DecoderConfig, params: Any, tokens_BS: np.ndarray) -> np.ndarray:
    graph, template = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(params=0))))
    here = jax.sharding.SingleDeviceSharding(host_device())
    nnx.replace_by_pure_dict(template, jax.tree.map(lambda x: jax.device_put(x, here), params))
    with jax.default_matmul_precision("highest"):
        logits_BSV = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))(
            template, jax.device_put(tokens_BS.astype(np.int32), here)
        )
    return np.asarray(logits_BSV)
