"""The command as a user meets it: wrong input is one line on stderr and exit code 2, before anything is compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import jaxpar
from jaxpar.cli import main
from jaxpar.cli.arguments import experiment_of
from jaxpar.cli.train import new_run
from jaxpar.data.tokenizers import ByteTokenizer
from jaxpar.experiment import Experiment
from jaxpar.report import page
from jaxpar.runtime import loop
from jaxpar.runtime.checkpoints import Checkpoints
from jaxpar.runtime.run_folder import RunFolder

CONFIG = """
from jaxpar.data import DataConfig, TextFiles
from jaxpar.experiment import AdamWConfig, DecoderConfig, Experiment, TrainConfig


def config():
    return Experiment(
        model=DecoderConfig(vocab_size=264, num_layers=2, embed=16, num_heads=4, num_kv_heads=4, mlp_width=32),
        data=DataConfig(sources=(TextFiles("numbers.txt", separator="\\n"),), eval_fraction=0.2),
        optim=AdamWConfig(learning_rate=1e-2),
        train=TrainConfig(steps=4, global_batch=8, seq_len=16, eval_every=2, eval_batches=2, max_skipped=1),
    )
"""
FILES = {
    "tiny.py": CONFIG,
    "numbers.txt": "\n".join(f"{i} and {i * i} and {i**3}" for i in range(200)),
    "empty.txt": "",
    "blank.txt": " \n\t\n",
    "binary.txt": b"\xff\xfe\x00\x80",
    "lines.jsonl": '{"text": "one"}\n{two\n',
    "keys.jsonl": '{"content": "one"}\n',
    "object.json": "{}",
    "text.json": "hello",
    "file": "in the way",
    "raises.py": "def config():\n    return 1 / 0\n",
    "syntax.py": "def config(:\n",
    "imports.py": "import no_such_module\n",
    "nothing.py": "x = 1\n",
    "part.py": "from jaxpar.experiment import TrainConfig\n\n\ndef config():\n    return TrainConfig()\n",
    "typed.py": "from jaxpar.experiment import *\n\n\ndef config():\n    return Experiment(train=TrainConfig('9'))\n",
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with the files above, the compile cache left as the tests have it."""
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    return tmp_path


@pytest.fixture
def refused(here, capfd):
    """``refused(*arguments)``: the one line with which the command says no."""
    compiled = []

    def listen(event, duration, **about):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(about["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)

    def run(*arguments):
        compiled.clear()
        before = sorted(here.rglob("[!_]*"))
        code = main(list(arguments))
        out, err = capfd.readouterr()
        assert code == 2
        assert out == ""
        assert err.startswith("jaxpar: ") and err.endswith("\n") and err.count("\n") == 1, err
        assert compiled == []
        assert [path for path in sorted(here.rglob("[!_]*")) if "__pycache__" not in path.parts] == before
        return err.removeprefix("jaxpar: ").rstrip("\n")

    yield run
    jax.monitoring.unregister_event_duration_listener(listen)


SOURCE = "--data.sources.0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # unknown fields
        ("--train.stesp 3", "train.stesp: 3 sets an unknown field of Train. Did you mean train.steps? (legal: steps,"),
        (
            "--learning_rate 1",
            "learning_rate: 1 sets an unknown field of Experiment. Did you mean optim.learning_rate?",
        ),
        ("--optim sgd --optim.b1 0.9", "optim.b1: 0.9 sets an unknown field of SGD"),
        ("--json", "json: --json sets an unknown field of Experiment"),
        ("more", "arguments: more does not belong to a flag"),
        # wrong types
        ("--train.steps three", "train.steps: three is not an int"),
        ("--train.steps 1.5", "train.steps: 1.5 is not an int"),
        ("--optim.learning_rate nan", "optim.learning_rate: nan is not a number"),
        ("--optim.learning_rate", "optim.learning_rate: --optim.learning_rate needs a value (legal: float)"),
        ("--train.compute float16", "train.compute: float16 is not one of the choices. Did you mean bfloat16?"),
        ("--train.steps 3 --train.steps 4", "train.steps: --train.steps is given twice"),
        # numbers that cannot be
        ("--train.steps 0", "train.steps: 0 is too small (legal: 1 or more)"),
        ("--train.seed 9876543210", "train.seed: 9876543210 "),
        ("--train.max_skipped -1", "train.max_skipped: -1 is too small (legal: 0 or more)"),
        ("--optim.learning_rate -1", "optim.learning_rate: -1.0 is not a rate"),
        ("--optim.b2 1", "optim.b2: 1.0 is not a decay rate"),
        ("--optim.b2 0.9999999999", "optim.b2: 0.9999999999 is not a decay rate in fp32"),  # 1 in fp32: 0 / 0
        ("--optim.learning_rate inf", "optim.learning_rate: inf is not finite in fp32"),
        ("--optim.weight_decay 1e39", "optim.weight_decay: 1e+39 is not finite in fp32"),
        ("--optim.eps 1e-50", "optim.eps: 1e-50 is not positive"),
        ("--task.z_loss inf", "task.z_loss: inf is not finite in fp32"),
        ("--model.logit_softcap inf", "model.logit_softcap: inf is not positive and finite"),
        ("--model.rope.scaling yarn --model.rope.theta 1", "model.rope.scaling: yarn has no finite frequencies"),
        ("--model.rope.scaling yarn --model.rope.beta_fast 0", "model.rope.scaling: yarn has no finite frequencies"),
        ("--devices 99999", "--devices: 99999 is not a number of devices"),
        ("--data.eval_fraction 1", "data.eval_fraction: 1.0 is out of range"),
        # what does not divide
        ("--model.num_heads 3", "model.num_heads: 3 does not divide model.embed 16"),
        ("--model.num_kv_heads 3", "model.num_kv_heads: 3 does not divide model.num_heads 4 (legal: 1, 2, 4)"),
        ("--model.scan_unroll 3", "model.scan_unroll: 3 does not divide model.num_layers 2 (legal: 1, 2)"),
        ("--train.microbatches 3", "train.microbatches: 3 does not divide train.global_batch 8 (legal: 1, 2, 4, 8)"),
        (
            "--devices 8 --mesh.tensor 8",
            "model.num_heads: 4 is not divisible by mesh.tensor 8 (legal: mesh.tensor from 1, 2, 4)",
        ),
        (
            "--devices 2 --mesh.tensor 2 --model.vocab_size 265",
            "model.vocab_size: 265 is not divisible by mesh.tensor 2",
        ),
        ("--devices 2 --mesh.tensor 2 --model.mlp_width 33", "model.mlp_width: 33 is not divisible by mesh.tensor 2"),
        (
            "--devices 8 --train.global_batch 4",
            "train.global_batch: 4 in 1 microbatches gives 4 sequences, not divisib",
        ),
        (
            "--devices 8 --train.microbatches 2",
            "train.global_batch: 8 in 2 microbatches gives 4 sequences, not divisib",
        ),
        ("--devices 8 --mesh.context 8 --train.seq_len 12", "train.seq_len: 12 is not divisible by mesh.context 8"),
        # impossible meshes
        ("--devices 8 --mesh.tensor 3", "mesh: tensor 3 needs a multiple of 3 devices, there are 8"),
        ("--devices 8 --mesh.fsdp 2 --mesh.tensor 2", "mesh: fsdp 2 x tensor 2 needs 4 devices, there are 8"),
        ("--devices 8 --mesh.tensor -1", "mesh.tensor: -1 is the second free axis beside mesh.fsdp"),
        ("--devices 8 --mesh.tensor 0", "mesh.tensor: 0 is not a size"),
        ("--devices 8 --mesh.pipe 2", "mesh.pipe: 2 needs a pipeline schedule"),
        ("--devices 0", "--devices: 0 is not a number of devices (legal: N or cpu:N, from 1 to 4096)"),
        ("--devices 999", "--devices: 999 devices are not there"),
        ("--devices two", "--devices: two is not a number of devices"),
        # data
        (f"{SOURCE}.path none.txt", "data.sources.0.path: none.txt does not exist and matches no file"),
        (f"{SOURCE}.path empty.txt", "data.sources.0.path: empty.txt holds no text"),
        (f"{SOURCE}.path blank.txt", "data.sources.0.path: blank.txt holds no text"),
        (f"{SOURCE}.path binary.txt", "data.sources.0.path: binary.txt holds a file that is not UTF-8 text"),
        (f"{SOURCE}.separator none", "data.eval_fraction: 0.2 needs two different documents in every source"),
        (f"{SOURCE} jsonlines", "data.sources.0.path: JsonLines has no default for this field"),
        (
            f"{SOURCE} jsonlines {SOURCE}.path lines.jsonl",
            "data.sources.0.path: lines.jsonl holds what is not JSON: lines.jsonl:2",
        ),
        (f"{SOURCE} jsonlines {SOURCE}.path keys.jsonl", "data.sources.0.column: text is missing in keys.jsonl:1"),
        (f"{SOURCE}.weight 0", "data.sources.0.weight: 0.0 cannot be a share"),
        # tokenizers
        ("--data.tokenizer none.json", "data.tokenizer: none.json cannot be read: No such file or directory"),
        ("--data.tokenizer object.json", "data.tokenizer: object.json is not a tokenizer"),
        ("--data.tokenizer text.json", "data.tokenizer: text.json is not a tokenizer"),
        ("--data.tokenizer .", "data.tokenizer: . cannot be read: Is a directory"),
        ("--model.vocab_size 256", f"model.vocab_size: 256 is smaller than the {ByteTokenizer.vocab_size} tokens of"),
        # run folders
        ("--run file", "run: HERE/file cannot be written: Not a directory"),
        ("--run file/run", "run: HERE/file/run cannot be written: Not a directory"),
        ("--run /proc/run", "run: /proc/run cannot be written: No such file or directory"),
        ("--run", "train CONFIG: argument --run: expected one argument"),
        ("--run=", "train CONFIG: argument --run: a folder without a name"),
        ("--resume", "--resume:  does not say which run goes on"),
        ("--run a --run=b", "run: --run is given twice"),
        ("--quiet=1", "train CONFIG: argument --quiet: ignored explicit argument '1'"),
    ],
)
def test_wrong_input_is_one_line(refused, here, arguments, message):
    got = refused("train", "tiny.py", *arguments.split())
    assert got.startswith(message.replace("HERE", str(here))), got


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("trian tiny.py", "command: trian is not a command. Did you mean train? (legal: train, "),
        ("train", "train: CONFIG must come first: a config file, its name, or a run folder"),
        ("train --devices 2 tiny.py", "train: CONFIG must come first"),
        ("bench", "bench: NAME must come first: train"),
        ("show quikstart", "config: quikstart is not a config file or a known name. Did you mean quickstart? (legal: "),
        ("show none.py", "config: none.py is not a config file or a known name (legal: gpt_124m, "),
        ("show file", "config: file is not a config file"),
        ("show .", "HERE/config.json could not be read: No such file or directory"),
        ("show raises.py", "config: raises.py raised ZeroDivisionError at HERE/raises.py:2: division by zero"),
        ("show syntax.py", "config: syntax.py raised SyntaxError at HERE/syntax.py:1: "),
        ("show imports.py", "config: imports.py raised ModuleNotFoundError at HERE/imports.py:1: "),
        ("show nothing.py", "config: nothing.py has no function config()"),
        ("show tiny.py --smoke", "config: tiny.py has no function smoke() (legal: config)"),
        ("show part.py", "config: part.py gives a TrainConfig (legal: a jaxpar.Experiment)"),
        ("show typed.py", "train.steps: '9' is not an int"),
        ("parity quickstart --only nothing", "--only: nothing is in no layout's name"),
        ("parity quickstart --devices 4", "--devices: 4 is too few for the layouts of parity (legal: 8 or more)"),
        ("parity .", "config: . is a run folder, which has no smoke()"),
        ("bench train --devices 2", "bench: --devices 2 takes no overrides"),  # taken and not heeded once
        ("bench speed", "bench: speed is not a benchmark (legal: train, compile)"),
    ],
)
def test_a_wrong_command_is_one_line(refused, here, arguments, message):
    got = refused(*arguments.split())
    assert got.startswith(message.replace("HERE", str(here))), got


def test_no_arguments_and_help(capsys):
    for arguments in ([], ["--help"], ["-h"]):
        assert main(arguments) == 0
        out, err = capsys.readouterr()
        assert out.startswith("The jaxpar command.") and "jaxpar train CONFIG" in out and err == ""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{jaxpar.__version__}\n"


@pytest.mark.parametrize("command", ["train", "show", "parity"])
def test_help_of_a_config_lists_every_field_with_its_value(capsys, command):
    with pytest.raises(SystemExit) as stop:
        main([command, "quickstart", "--help"])
    out, err = capsys.readouterr()
    assert stop.value.code == 0 and err == ""
    assert "--optim.learning_rate float  (now 0.003)  the peak\n" in out
    assert "--train.steps int  (now " in out and "  optimizer steps of the whole run\n" in out
    for flag in ("--devices", "--model.rope.theta", "--data.tokenizer", "--mesh.tensor", "--rules.zero"):
        assert flag in out


def test_help_without_a_config_lists_the_options(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "--help"])
    assert stop.value.code == 0
    assert "--resume" in capsys.readouterr().out


def test_train_show_and_resume(here, refused, capfd):
    """The way of a newcomer: train twice, look, go on, and the ways to get it wrong."""
    assert main(["train", "tiny.py", "--devices", "1"]) == 0
    out, _ = capfd.readouterr()
    run = here / "runs" / "tiny"
    assert "evaluation loss" in out and "unigram entropy" in out and f"curve    {run}/figures/loss.png" in out
    assert (run / "figures" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert main(["report", "runs/tiny"]) == 0  # what only the run itself knows is in its folder
    page = (run / "report.html").read_text()
    assert capfd.readouterr().out == f"report   {run}/report.html\n"
    assert all(fact in page for fact in ("finished", "unigram entropy", "1 cpu", "memory per device", "parameters"))
    assert [r["step"] for r in RunFolder(run).read_metrics()] == [1, 2, 2, 3, 4, 4]

    assert main(["show", "runs/tiny", "--devices", "1", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["config"] == json.loads((run / "config.json").read_text())

    assert refused("train", "tiny.py", "--devices", "1", "--run", "runs/tiny").startswith(
        f"run: {run} already holds a run (legal: another folder, or resume)"
    )
    assert refused("train", "runs/tiny", "--smoke").startswith(
        "--smoke: runs/tiny is a run folder, which has one config"
    )
    for change in ("--model.mlp_width 64", "--optim sgd", "--data.eval_fraction 0.5"):
        line = refused("train", "runs/tiny", "--devices", "1", "--resume", "--quiet", *change.split())
        assert "the config " in line or "changed since the checkpoint at step 4" in line

    more = ["train", "runs/tiny", "--devices", "1", "--resume", "--train.steps", "6"]  # after refusals, as if none
    assert main(more) == 0
    assert "resuming from step 4\nchanged  train.steps: 4 -> 6\n" in capfd.readouterr().out
    assert [r["step"] for r in RunFolder(run).read_metrics()][-3:] == [5, 6, 6]

    (run / "figures" / "loss.png").unlink()
    (run / "figures" / "loss.png").mkdir()
    assert main([*more, "--quiet"]) == 1
    assert capfd.readouterr().err == ("jaxpar: the curve could not be drawn: Is a directory; the run itself is whole\n")

    for file in (run / "checkpoints" / "step_6").rglob("d/*"):
        file.write_bytes(b"x" * file.stat().st_size)
    assert main(["generate", "runs/tiny", "--devices", "1"]) == 1  # the disk's fault, not the user's
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and "is damaged: its contents are not what was written" in err

    assert new_run("tiny.py", resume=False) == Path("runs/tiny-2")  # never into the folder of another run


@pytest.mark.parametrize(
    ("stopped_by", "code"), [(None, 0), ("SIGTERM", 143), ("SIGTERM to host 1 (node02)", 143), ("SIGINT", 130)]
)
def test_a_run_that_is_stopped_says_so_by_its_exit_code(here, monkeypatch, stopped_by, code):
    """0 would tell what started the run that it has finished; ``test_loop.py`` has a run that is stopped in earnest."""
    monkeypatch.setattr(loop, "train", lambda *_: loop.Summary(3, 1.0, None, None, 99, stopped_by))
    monkeypatch.setattr(page, "draw_loss", lambda run: None)
    assert main(["train", "tiny.py", "--devices", "1", "--run", "run"]) == code


def test_a_run_that_goes_wrong_is_one_line_and_exit_code_1(here, capfd):
    code = main(["train", "tiny.py", "--devices", "1", "--quiet", "--run", "run", "--optim.learning_rate", "1e30"])
    out, err = capfd.readouterr()
    assert code == 1
    assert out == "" and err.count("\n") == 1
    assert err.startswith("jaxpar: loss, gradients or updates were not finite in the last 2 steps up to step 3")
    assert Checkpoints(here / "run" / "checkpoints").latest() == 3


def output_into(writing):
    """Exit code and stderr of ``jaxpar show tiny.py --help`` with its output in the open file ``writing``."""
    code = "import sys; from jaxpar.cli import main; sys.exit(main(['show', 'tiny.py', '--help']))"
    environment = {**os.environ, "PYTHONPATH": str(Path(jaxpar.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, env=environment)
    os.close(writing)
    return done.returncode, done.stderr


def test_a_reader_that_goes_away_is_no_traceback(here):
    """``jaxpar show tiny.py | head -1``"""
    reading, writing = os.pipe()
    os.close(reading)
    assert output_into(writing) == (141, b"")


def test_a_full_disk_is_no_fault_of_the_input(here):
    """``jaxpar show tiny.py > file``"""
    assert output_into(os.open("/dev/full", os.O_WRONLY)) == (1, b"jaxpar: output: No space left on device\n")


def test_the_experiment_of_the_file_is_what_the_command_trains(here):
    """Flags and file meet in one object, whatever their order."""
    experiment = experiment_of("tiny.py", False, ["--optim.schedule.warmup_steps=7", "--optim.learning_rate", "3e-4"])
    assert isinstance(experiment, Experiment)
    assert (experiment.optim.learning_rate, experiment.optim.schedule.warmup_steps) == (3e-4, 7)
    assert experiment.train.steps == 4
