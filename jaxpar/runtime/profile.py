"""A profile of a few steps, written by ``jax.profiler`` into the run folder for xprof or TensorBoard.

Steps show up as "step" with their number; inside and between them "data", "evaluate" and "checkpoint" (the phases of
``jaxpar.runtime.metrics``). Python's own calls are left out.
"""

from __future__ import annotations

from pathlib import Path

import jax

from jaxpar.words import Say


class Profile:
    """Traces ``steps`` of a run that goes on after step ``first``; use it in a ``with``, which ends a trace.

    The caller calls ``turn`` before each step in ``edges``, when the device has nothing left to do. A profiler that
    fails is said in one line, and the run goes on.
    """

    def __init__(self, steps: range, folder: Path, first: int, say: Say):
        self.folder, self._say = folder, say
        self.steps = range(max(steps.start, first + 1), steps.stop)
        self.edges = (self.steps.start, self.steps.stop) if self.steps else ()
        self.written = False
        self._tracing = False
        if steps and not self.steps:
            say(f"profile  none: steps {steps.start} to {steps.stop - 1} are done already")

    def turn(self) -> None:
        """Start the trace, or end and write it."""
        try:
            if not self._tracing:
                options = jax.profiler.ProfileOptions()
                options.python_tracer_level = 0
                self._tracing = True
                jax.profiler.start_trace(self.folder, profiler_options=options)
            else:
                self._tracing = False
                jax.profiler.stop_trace()
                self.written = True
        except Exception as error:  # whatever it is, it is not worth a run
            self._tracing, self.edges = False, ()
            self._say(f"profile  failed, the run goes on without: {' '.join(str(error).split())}")

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tracing:
            self.turn()
