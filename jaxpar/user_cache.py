"""The user's cache folder, for what can be made again: tokens and compiled programs."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache(name: str) -> Path | None:
    """``jaxpar/NAME`` in ``XDG_CACHE_HOME``, else in ``~/.cache``; None for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxpar" / name
    except RuntimeError:
        return None
