"""A run folder: one writer at a time, no run overwritten, metrics that survive any end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.errors import ConfigError, JaxparError, RunError
from jaxpar.runtime.run_folder import RunFolder


def message(error):
    text = str(error.value)
    assert "\n" not in text
    return text


def test_config_and_metrics_come_back(tmp_path):
    with RunFolder(tmp_path / "deep" / "run") as run:
        run.start({"model": {"width": 64}, "rates": [1e-3]})
        run.append({"step": 1, "loss": jnp.float32(2.5), "tokens": np.int64(4096)})
        run.append({"step": 2, "loss": float("nan")})
        assert run.checkpoints.is_dir() and run.figures.is_dir()
    reader = RunFolder(tmp_path / "deep" / "run")
    assert reader.read_config() == {"model": {"width": 64}, "rates": [1e-3]}
    first, second = reader.read_metrics()
    assert first == {"step": 1, "loss": 2.5, "tokens": 4096} and isinstance(first["tokens"], int)
    assert np.isnan(second["loss"])


def test_each_line_is_in_the_file_at_once(tmp_path):
    with RunFolder(tmp_path) as run:
        run.start({})
        for step in range(3):
            run.append({"step": step})
            assert [record["step"] for record in RunFolder(tmp_path).read_metrics()] == list(range(step + 1))


def test_only_the_process_that_started_the_folder_writes(tmp_path):
    with RunFolder(tmp_path) as run:
        run.start({})
        run.append({"step": 1})
        other = RunFolder(tmp_path)
        other.append({"step": 2})
        other.truncate_after(0)
        assert other.read_metrics() == [{"step": 1}]


def test_truncate_after_drops_later_records_and_a_torn_line(tmp_path):
    with RunFolder(tmp_path) as run:
        run.start({})
        run.truncate_after(0)  # no metrics yet
        for step in (1, 2, 2, 3, 4):
            run.append({"step": step})
        with open(run.metrics_file, "a") as file:
            file.write('{"step": 5, "lo')
        assert [record["step"] for record in run.read_metrics()] == [1, 2, 2, 3, 4]
        run.truncate_after(2)
        run.append({"step": 3, "again": True})
        assert run.metrics_file.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 2}\n{"step": 3, "again": true}\n'


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(RunError) as error:
        RunFolder(tmp_path).read_metrics()
    assert message(error).startswith(f"{tmp_path}/metrics.jsonl is damaged")


def test_another_run_is_not_overwritten(tmp_path):
    with RunFolder(tmp_path) as run:
        run.start({"seed": 1}, resume=True)  # nothing there yet: a new run
    with RunFolder(tmp_path) as run:
        with pytest.raises(ConfigError) as error:
            run.start({"seed": 2})
        assert message(error) == f"run: {tmp_path} already holds a run (legal: another folder, or resume)"
        assert run.read_config() == {"seed": 1}
        run.start({"seed": 1, "steps": 20}, resume=True)  # a refused start holds no lock
    assert RunFolder(tmp_path).read_config() == {"seed": 1, "steps": 20}


def test_a_second_writer_is_refused_until_the_first_is_killed(tmp_path):
    code = "import sys, time; from jaxpar.runtime.run_folder import RunFolder; run = RunFolder(sys.argv[1])"
    code += "; run.start({}); print(flush=True); time.sleep(600)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    first = subprocess.Popen([sys.executable, "-c", code, tmp_path], env=environment, stdout=subprocess.PIPE)
    assert first.stdout.readline() == b"\n"
    with RunFolder(tmp_path) as second:
        with pytest.raises(ConfigError) as error:
            second.start({}, resume=True)
        assert message(error) == f"run: {tmp_path} is being written by another process"
        first.send_signal(signal.SIGKILL)
        first.communicate()
        second.start({}, resume=True)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/run")):
        with pytest.raises(ConfigError) as error:
            RunFolder(path).start({})
        assert message(error).startswith(f"run: {path} cannot be written: ")


def test_a_folder_without_a_run(tmp_path):
    assert RunFolder(tmp_path).read_metrics() == []
    with pytest.raises(JaxparError) as error:
        RunFolder(tmp_path).read_config()
    assert message(error) == f"{tmp_path}/config.json could not be read: No such file or directory"
    assert error.value.exit_code == 2
    (tmp_path / "config.json").write_text(json.dumps({"a": 1})[:-2])
    with pytest.raises(RunError) as error:
        RunFolder(tmp_path).read_config()
    assert "config.json is damaged" in message(error)
