"""jaxpar: parallel training research in JAX. One config, any mesh.

An ``Experiment`` (a typed config) bound to a ``Mesh`` is a ``Program``: initial state, one step, and their shardings.
Read ``experiment.py`` and ``program.py`` first; every folder's docstring says what its room is for.

Importing this package imports nothing heavy; the objects below load when they are first asked for.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_HOMES = {
    "Experiment": "jaxpar.experiment",
    "Program": "jaxpar.program",
    "generate": "jaxpar.runtime.generate",
    "train": "jaxpar.runtime.loop",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'jaxpar' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
