"""What several tests of the runtime look at."""

import jax
import pytest


@pytest.fixture
def compiled():
    """The names of the functions compiled (or fetched from the compile cache) during the test."""
    names = []

    def listen(event, duration, **about):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(about["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)
