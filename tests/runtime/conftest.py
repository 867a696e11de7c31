"""What several tests of the runtime look at."""

import functools

import jax
import pytest
from run_helpers import tiny_experiment, write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    write_text(path)
    return path


@pytest.fixture(scope="module")
def tiny(text):
    """``tiny(mesh, zero, **train)``: an experiment."""
    return functools.partial(tiny_experiment, text)


@pytest.fixture(scope="module")
def one_device():
    return jax.devices()[:1]


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
