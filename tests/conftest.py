"""Every test runs on eight virtual CPU devices."""

import os
import shutil
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="jaxpar-tests-")  # no test reads or writes the user's tokens

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


def pytest_configure(config):
    """Compiled programs stay in pytest's cache folder from one test run to the next."""
    cache = getattr(config, "cache", None)
    if cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(cache.mkdir(f"jax-{jax.__version__}")))


def pytest_unconfigure():
    """What the tests tokenised goes."""
    shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


@pytest.fixture(scope="session")
def mesh8():
    """Eight devices: data 2, fsdp 2, tensor 2, the other axes 1."""
    return jax.make_mesh((2, 2, 1, 1, 1, 2), ("data", "fsdp", "pipe", "expert", "context", "tensor"))
