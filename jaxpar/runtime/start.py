"""Process start-up: the compile cache and quiet logs, before JAX starts."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from jaxpar.user_cache import user_cache


def compile_cache_folder() -> Path | None:
    """Where compiled programs are kept: ``JAX_COMPILATION_CACHE_DIR``, or the user's cache folder; "" turns it off."""
    given = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if given is not None:
        return Path(given) if given else None
    return user_cache("xla")


def configure_jax() -> None:
    """Turn on the persistent compile cache for every program, and silence what a user need not see."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA's notes; real errors come as exceptions
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    import jax

    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)
    folder = compile_cache_folder()
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if writable:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
