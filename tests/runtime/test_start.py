"""The compile cache: where it is, and that no start depends on it."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from jaxpar.runtime import start
from jaxpar.runtime.start import compile_cache_folder, configure_jax

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def settings(monkeypatch):
    """What ``configure_jax`` asks of JAX's config; nothing is really changed."""
    asked = {}
    monkeypatch.setattr(jax.config, "update", lambda name, value: asked.update({name: value}))
    return asked


def test_the_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compile_cache_folder() == tmp_path / "jaxpar" / "xla"
    for empty in ("", None):
        monkeypatch.setenv("XDG_CACHE_HOME", "") if empty == "" else monkeypatch.delenv("XDG_CACHE_HOME")
        assert compile_cache_folder() == Path.home() / ".cache" / "jaxpar" / "xla"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    assert compile_cache_folder() == Path("/elsewhere")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    assert compile_cache_folder() is None


def test_on_by_default_for_every_program(monkeypatch, tmp_path, settings):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    configure_jax()
    assert settings == dict(zip(SETTINGS, (str(tmp_path / "jaxpar" / "xla"), 0.0, -1), strict=True))
    assert (tmp_path / "jaxpar" / "xla").is_dir()


def test_a_user_without_a_home(monkeypatch, settings):
    """Such as a container's number that has no name: no traceback of every command."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    configure_jax()
    assert settings == {}


@pytest.mark.parametrize("place", ["", "{}/file/cache", "/proc/cache"])
def test_off_or_impossible_is_no_error(monkeypatch, tmp_path, settings, place):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", place.format(tmp_path))
    configure_jax()
    assert settings == {}


def test_a_folder_that_cannot_be_written_is_left_alone(monkeypatch, tmp_path, settings):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(start.os, "access", lambda path, mode: False)  # root may write anywhere
    configure_jax()
    assert settings == {}
