"""The scripts of ``tpu_scripts/`` against stand-ins for gcloud and SLURM, first in PATH."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launch_stand_ins import HANGS, REPOSITORY, SCRIPTS, Play

pytestmark = pytest.mark.slow  # the scripts are bash: one Python is enough


@pytest.fixture
def play(tmp_path):
    play = Play(tmp_path)
    yield play
    pid = tmp_path / "home" / "jaxpar-run" / "pid"
    if pid.exists():
        subprocess.run(["kill", "-KILL", pid.read_text().strip()], capture_output=True)


TRAIN = ("--", "jaxpar", "train", "llama2_7b", "--run", "/mnt/shared/a run")
KEEP = ("keep", "pod", "--target", "v5e:16x16", "--share", "gs://mine")
COMMAND = "'train' 'llama2_7b' '--run' '/mnt/shared/a run'"
GOING_ON = f"{COMMAND} '--resume'"


# -- what is wrong, before anything is done


@pytest.mark.parametrize(
    ("script", "arguments", "line"),
    [
        ("tpu", "launch pod", "launch: is no command (legal: keep, create, fill, run, follow, stop, status, delete)"),
        ("tpu", "fill", "NAME: is missing (tpu fill NAME ...)"),
        ("tpu", "fill one two", "NAME: one two are several (legal: one; a command to run comes after --)"),
        ("tpu", "fill Pod_1", "NAME: Pod_1 is no name of a pod (legal: at most 50 of a-z, 0-9 and -, a letter first)"),
        ("tpu", "create pod", "--target: is missing (legal: such as v5e:16x16, or v5p:8x8x8*2 for two slices)"),
        ("tpu", "create pod --target h100:4x8", "--target: h100:4x8 is no TPU target (legal: v4|v5p|tpu7x:AxBxC, "),
        ("tpu", "create pod --target v5e:16x16*0", "--target: v5e:16x16*0 is no TPU target"),
        ("tpu", "create pod --target v5e:4x2", "--target: v5e:4x2 is no shape of a v5e slice (legal: 1x1 2x2 2x4"),
        ("tpu", "create pod --target v5p:16x16", "--target: v5p:16x16 is no shape of a v5p slice (legal: AxBxC)"),
        ("tpu", "create pod --target tpu7x:2x2x8", "--target: tpu7x:2x2x8 is no shape of a tpu7x slice (legal: 2x2x1"),
        ("tpu", "create pod --target v4:2x2x2 --spot --reserved", "--spot: does not go with --reserved"),
        ("tpu", "fill pod --iap --internal-ip", "--iap: does not go with --internal-ip"),
        ("tpu", "create pod --target", "--target: has no value (write --target=VALUE)"),
        ("tpu", "fill pod --zone --quiet", "--zone: has no value (write --zone=VALUE)"),
        ("tpu", "fill pod --spot", "--spot: is no option here (legal: --zone VALUE --project VALUE --iap "),
        ("tpu", "create pod --target v5e:2x2 --target=v5e:4x4", "--target: is given twice"),
        ("tpu", "run pod -- jaxpar train a --run /mnt/shared/b --run=/c", "--run: is given twice in 'jaxpar train a"),
        ("tpu", "fill pod --quiet=no", "--quiet: no is a value, and it takes none"),
        ("tpu", "fill pod --share /mnt", "--share: /mnt can not be mounted (legal: gs://BUCKET, or HOST:/FOLDER)"),
        ("tpu", "fill pod -- ls", "--: ls is a command, and tpu fill runs none"),
        ("tpu", "run pod -- ls -l", "--: 'ls -l' is no training (legal: -- jaxpar train CONFIG --run FOLDER ...)"),
        (
            "tpu",
            "run pod -- jaxpar train a",
            "--run: is missing in 'jaxpar train a' (legal: a folder under /mnt/shared)",
        ),
        ("tpu", "run pod -- jaxpar train a --run gs://b/c", "--run: gs://b/c is no folder (legal: a folder under /mnt"),
        ("tpu", "keep pod --target v4:2x2x2 -- jaxpar train a --run /b", "--share: is missing (legal: gs://BUCKET"),
        (
            "tpu",
            "keep pod --target v4:2x2x2 --share gs://a -- jaxpar train a --run runs/b",
            "--run: runs/b is lost with the pod (legal: under /mnt/shared)",
        ),
        (
            "tpu",
            f"{' '.join(KEEP)} -- jaxpar train a --run /mnt/shared/b",
            "--yes: is missing, and there is no terminal",
        ),
        (
            "tpu",
            "delete pod",
            "--yes: is missing, and there is no terminal to ask: Delete pod and what is on its disks?",
        ),
        (
            "slurm",
            "--nodes 2 -- jaxpar train a --run /b",
            "--gpus: is missing (legal: such as --nodes 4 --gpus 8 --time",
        ),
        ("slurm", "--nodes 0 -- jaxpar train a --run /b", "--nodes: 0 is no count (legal: a whole number from 1)"),
        (
            "slurm",
            "--nodes 1 --gpus 8 --time soon -- jaxpar train a --run /b",
            "--time: soon is no time (legal: MINUTES",
        ),
        ("slurm", "--nodes 1 --gpus 8 --time 60 -- jaxpar train a --run b", "--run: b depends on where the job starts"),
        (
            "slurm",
            "--nodes 1 --gpus 8 --time 60 jaxpar train a",
            "--: is missing before 'jaxpar train a' (legal: slurm",
        ),
    ],
)
def test_wrong_input_is_one_line_before_anything_is_asked_for(play, script, arguments, line):
    _, error = play.run(script, *arguments.split(), code=2)
    assert error.startswith(f"{script}: {line}")
    assert play.lines() == []


def test_how_often_it_looks_is_a_number(play):
    play.environment["JAXPAR_POLL_SECONDS"] = "often"
    assert "JAXPAR_POLL_SECONDS: often is no number" in play.run("tpu", "status", code=2)[1]


def test_help(play):
    for script in ("tpu", "slurm"):
        out, _ = play.run(script, "--help")
        assert script in out.splitlines()[2] and "--dry-run" in out and "#" not in out.splitlines()[0]


# -- what gcloud is asked for


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (
            "--target v5e:16x16",
            "--accelerator-type=v5litepod-256 --runtime-version=v2-alpha-tpuv5-lite --node-id=pod",
        ),
        (
            "--target v6e:4x4*4 --spot",
            "--accelerator-type=v6e-16 --runtime-version=v2-alpha-tpuv6e --node-count=4 --spot",
        ),
        (
            "--target v4:2x2x4 --reserved",
            "--type=v4 --topology=2x2x4 --runtime-version=tpu-ubuntu2204-base --node-id=pod --reserved",
        ),
        (
            "--target v5p:8x8x8 --runtime-version mine",
            "--type=v5p --topology=8x8x8 --runtime-version=mine --node-id=pod",
        ),
        (
            "--target=tpu7x:4x4x4 --also=--network=net --also --labels=a=b",
            "--accelerator-type=tpu7x-128 --runtime-version=v2-alpha-tpu7-ubuntu2404 --node-id=pod",
        ),
    ],
)
def test_targets_in_the_words_of_gcloud(play, arguments, asked):
    """v5e and v6e count chips, tpu7x two cores a chip; only gcloud's alpha track knows the shapes of v5p."""
    arguments = arguments.replace("--also --labels", "--also=--labels").split()
    play.run("tpu", "create", "pod", "--zone", "us-a", "--project=p", *arguments)
    [words] = [shlex.split(line) for line in play.lines()]
    assert (words[0] == "alpha") == ("v5p" in arguments[1])
    more = [word.removeprefix("--also=") for word in arguments if word.startswith("--also=")]
    scopes = "--scopes=https://www.googleapis.com/auth/cloud-platform"
    expected = ["create", "pod", *asked.split(), scopes, *more, "--zone=us-a", "--project=p", "--quiet"]
    assert words[words.index("create") :] == expected


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            "RESOURCE_EXHAUSTED: Quota limit 'TPUS' has been exceeded.",
            "RESOURCE_EXHAUSTED: Quota limit 'TPUS' has been",
        ),
        (
            "You do not currently have an active account selected.\nPlease run:\n\n  $ gcloud auth login\n",
            "Please run: $ g",
        ),
        ("Error parsing [x].\nFailed to find attribute [zone]. The attribute ...", "Failed to find attribute [zone]."),
    ],
)
def test_what_gcloud_refuses_is_one_line(play, error, said):
    play.write("create.error", error)
    _, line = play.run("tpu", "create", "pod", "--target", "v4:2x2x1", code=1)
    assert line.startswith("tpu: pod: (gcloud.compute.tpus.queued-resources.create) ") and said in line


def test_a_name_that_is_there_and_one_that_is_not(play):
    _, error = play.run("tpu", "fill", "pod", code=1)
    assert error == "tpu: pod: there is no such pod (make it: tpu create pod --target ...)"
    play.run("tpu", "create", "pod", "--target", "v4:2x2x1")
    _, error = play.run("tpu", "create", "pod", "--target", "v4:2x2x1", code=1)
    assert "ALREADY_EXISTS" in error


@pytest.mark.parametrize("script", ["tpu", "slurm"])
def test_a_dry_run_prints_lines_to_paste_and_runs_none(play, script):
    create = ("--target", "v5e:4x4*2", "--zone", "us-a")
    lines = [
        ("create", "pod", *create),
        ("fill", "pod", "--share", "host:/folder"),
        ("run", "pod", *TRAIN),
        ("follow", "pod"),
        ("stop", "pod"),
        ("status",),
        ("status", "pod"),
        ("delete", "pod"),
        (*KEEP, "--delete", *TRAIN),
    ]
    if script == "slurm":
        lines = [("--nodes", "2", "--gpus", "8", "--time", "60", *TRAIN)]
    for arguments in lines:
        index = arguments.index("--") if "--" in arguments else len(arguments)
        out, _ = play.run(script, *arguments[:index], "--dry-run", *arguments[index:])
        said = [line for line in out.splitlines() if not line.startswith("#")]
        assert said
        for line in said:
            subprocess.run(["bash", "-n"], input=line, text=True, check=True)
            assert shlex.split(line)[0] in ("gcloud", "bash", "sbatch")
            for word in shlex.split(line):  # what a machine is to run is a line of bash too
                if word.startswith("--command="):
                    subprocess.run(["bash", "-n"], input=word.removeprefix("--command="), text=True, check=True)
        if "run" in arguments or "keep" in arguments:
            assert any("'/mnt/shared/a run'" in word for line in said for word in shlex.split(line))
    assert play.lines() == []


# -- a pod, step by step


def test_step_by_step(play):
    """The way of a researcher: each command after the other, what is refused on the way, and the exit codes."""
    play.write("states", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE")
    play.write("runs", "wait", "0", "2")
    play.run("tpu", "create", "pod", "--target", "v4:2x2x1")
    _, error = play.run("tpu", "run", "pod", *TRAIN, code=1)
    assert error == "tpu: pod: worker: nothing is installed: tpu fill"

    out, _ = play.run("tpu", "fill", "pod", "--share", "gs://mine")
    assert re.search(r"waiting  pod: WAITING_FOR_RESOURCES since \d+ s\nwaiting  pod: PROVISIONING since .*\n", out)
    assert ": ready\n" in out
    assert (play.folder / "home" / "jaxpar" / "pyproject.toml").read_text() == (
        REPOSITORY / "pyproject.toml"
    ).read_text()
    calls = play.lines("machine.calls")
    assert "uv pip install --quiet --python .venv/bin/python -e .[tpu]" in calls
    assert re.search(r"gcsfuse .*'--rename-dir-limit=\d+' 'mine' '/mnt/shared'", calls[-1])
    assert "run      idle\n" in play.run("tpu", "status", "pod")[0]

    play.run("tpu", "run", "pod", *TRAIN)
    play.await_line("runs.calls", COMMAND)
    assert re.fullmatch(r"pod      pod: ACTIVE since .*\nrun      running\n", play.run("tpu", "status", "pod")[0])
    going_on = f"a run is going on: {' '.join(TRAIN[1:])}"
    for again in (("run", "pod", *TRAIN), ("fill", "pod")):
        assert going_on in play.run("tpu", *again, code=1)[1]
    follow = play.start("tpu", "follow", "pod")
    assert follow.stdout.readline() == "step 1 # of wait\n"
    follow.send_signal(signal.SIGINT)
    assert follow.wait(HANGS) == 130
    assert follow.stderr.read() == "the run goes on: tpu follow pod\n"
    out, error = play.run("tpu", "stop", "pod", code=143)
    assert out == "step 1 # of wait\nsaved\nended    pod: exit code 143\n"
    assert error == "tpu: pod: the run was stopped; --resume goes on"
    assert "no run is going on" in play.run("tpu", "stop", "pod", code=1)[1]

    play.run("tpu", "run", "pod", *TRAIN)
    assert play.run("tpu", "follow", "pod")[0].endswith("step 1 # of 0\nended    pod: exit code 0\n")
    play.run("tpu", "run", "pod", *TRAIN)
    assert play.run("tpu", "follow", "pod", code=2)[1] == "tpu: pod: the run's input is wrong"

    play.run("tpu", "delete", "pod", "--yes")
    assert "there is no such pod" in play.run("tpu", "follow", "pod", code=1)[1]


def test_what_is_sent_replaces_what_was_sent(play):
    """A file that is gone from the checkout goes, the run folders of the machine stay."""
    play.run("tpu", "create", "pod", "--target", "v4:2x2x1")
    play.run("tpu", "fill", "pod")
    sent = play.folder / "home" / "jaxpar" / ".sent"
    sent.write_text(sent.read_text() + "old.py\n")
    for kept in ("old.py", "runs.txt"):
        (sent.parent / kept).touch()
    play.run("tpu", "fill", "pod")
    assert not (sent.parent / "old.py").exists()
    assert (sent.parent / "runs.txt").exists() and (sent.parent / "README.md").exists()


def test_a_start_that_arrives_twice_is_one_run(play):
    """gcloud sends a command again when the connection was lost; another run is refused all the same."""
    play.write("runs", "wait", "wait")
    play.run("tpu", "create", "pod", "--target", "v4:2x2x1")
    play.run("tpu", "fill", "pod")
    environment = {**play.environment, "HOME": str(play.folder / "home")}
    environment["PATH"] = f"{play.folder / 'machine'}:{environment['PATH']}"
    worker = play.folder / "home" / "jaxpar" / "tpu_scripts" / "worker"
    start = [worker, "start", "one", *TRAIN[1:]]
    for _ in range(2):
        subprocess.run(start, env=environment, check=True, timeout=HANGS)
    play.await_line("runs.calls", COMMAND)
    other = subprocess.run([worker, "start", "two", *TRAIN[1:]], env=environment, capture_output=True, text=True)
    assert other.returncode == 3 and "a run is going on" in other.stderr
    assert len(play.lines("runs.calls")) == 1


def test_a_node_that_gcloud_leaves_out_is_noticed(play):
    """gcloud warns, does the rest and ends with 0: half a pod would wait for the other half."""
    play.run("tpu", "create", "pod", "--target", "v4:2x2x1*2")
    play.write("missing", "")
    assert play.run("tpu", "fill", "pod", code=1)[1] == "tpu: pod: not all nodes of the pod can be reached"


# -- a pod that comes and goes


def test_keep_goes_on_after_preemptions_until_the_run_has_ended(play):
    states = ["ACCEPTED", "ACTIVE", "ACTIVE", "ACTIVE", "!SUSPENDING", "SUSPENDED"]
    play.write("states", *states, "PROVISIONING", "ACTIVE", "ACTIVE", "!SUSPENDED", "ACTIVE")
    play.write("runs", "wait", "wait", "0")
    out, _ = play.run("tpu", *KEEP, "--spot", "--yes", "--delete", *TRAIN)
    life = ["create", "scp", "ssh", "ssh", "delete"]
    assert play.verbs() == life * 3
    assert play.lines("runs.calls") == [GOING_ON] * 3
    assert out.count("step 1 # of wait") == 2 and out.count("lost     pod: SUSPENDED") == 2
    assert out.endswith("ended    pod: exit code 0\ndelete   pod\n")
    assert not (play.folder / "pod").exists()


@pytest.mark.parametrize("code", [2, 137])
def test_keep_ends_with_the_code_of_a_run_that_fails(play, code):
    play.write("runs", str(code))
    _, error = play.run("tpu", *KEEP, "--yes", *TRAIN, code=code)
    assert error == "tpu: pod: the run" + ("'s input is wrong" if code == 2 else f" failed with exit code {code}")
    assert play.verbs() == ["create", "scp", "ssh", "ssh"]


def test_keep_blames_the_pod_for_a_run_that_fails_just_before_it_goes(play):
    """One host goes first: the others end with 1, which says that it died, before gcloud says why."""
    play.write("states", "ACTIVE", "ACTIVE", "ACTIVE", "SUSPENDING", "!SUSPENDED", "ACTIVE")
    play.write("runs", "1", "0")
    play.run("tpu", *KEEP, "--yes", *TRAIN)
    assert play.verbs() == ["create", "scp", "ssh", "ssh", "delete", "create", "scp", "ssh", "ssh"]


def test_keep_starts_again_what_a_signal_ended_that_nobody_sent(play):
    play.write("runs", "143", "0")
    play.run("tpu", *KEEP, "--yes", *TRAIN)
    assert play.verbs() == ["create", "scp", "ssh", "ssh", "ssh"]


def test_keep_finds_its_run_again_and_ends_when_it_is_stopped(play):
    play.write("runs", "wait")
    first = play.start("tpu", *KEEP, "--yes", *TRAIN)
    play.await_line("runs.calls", GOING_ON)
    first.send_signal(signal.SIGINT)
    assert first.wait(HANGS) == 130
    assert first.stderr.read() == "the run goes on, but not after a preemption: start tpu keep again\n"
    other = [*TRAIN, "--train.seed", "1"]
    assert "another run is going on (tpu follow pod" in play.run("tpu", *KEEP, "--yes", *other, code=1)[1]
    second = play.start("tpu", *KEEP, "--yes", *TRAIN)
    assert second.stdout.readline() == "step 1 # of wait\n"
    play.run("tpu", "stop", "pod", code=143)
    assert second.wait(HANGS) == 143
    assert play.verbs() == ["create", "scp", "ssh", "ssh"]


def test_keep_does_not_ask_for_ever_for_what_it_cannot_have(play):
    play.write("states", "ACCEPTED", "FAILED")
    assert play.run("tpu", *KEEP, "--yes", *TRAIN, code=1)[1] == "tpu: pod: FAILED: the quota is used up"
    assert play.verbs() == ["create"]
    play.run("tpu", "delete", "pod", "--yes")
    play.write("create.error", "PERMISSION_DENIED: no")
    assert play.run("tpu", *KEEP, "--yes", *TRAIN, code=1)[1].endswith("PERMISSION_DENIED: no")


def test_follow_says_what_became_of_the_pod(play):
    play.run("tpu", "create", "pod", "--target", "v4:2x2x1")
    assert play.run("tpu", "follow", "pod", code=1)[1] == "tpu: pod: runs nothing"
    play.write("states", "!SUSPENDED")
    play.run("tpu", "status", "pod")
    assert play.run("tpu", "follow", "pod", code=1)[1] == "tpu: pod: is SUSPENDED (on another pod, --resume goes on)"


# -- SLURM


def test_what_is_submitted(play):
    arguments = ["--nodes=4", "--gpus", "8", "--time", "1-12", "--account", "us", "--also=--qos=high", *TRAIN]
    out, _ = play.run("slurm", *arguments)
    assert out.startswith("queued   job 17: 4 x 8 GPUs\n") and "tail -F a run-17.log" in out
    [line] = play.lines()
    words = shlex.split(line)
    job = words.index(str(SCRIPTS / "slurm_job"))
    assert words[job + 1 :] == ["/mnt/shared/a run", *TRAIN[1:], "--resume"]
    expected = "--nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --time=1-12 --signal=TERM@180 --requeue --account=us"
    assert {*expected.split(), "--qos=high", "--open-mode=append"} <= set(words[:job])
    play.write("sbatch.error", "sbatch: error: Batch job submission failed: Invalid account")
    _, error = play.run("slurm", *arguments, code=1)
    assert error == "slurm: sbatch: sbatch: error: Batch job submission failed: Invalid account"


@pytest.mark.parametrize(
    ("run", "state", "code", "said", "requeued"),
    [
        ("exit 0", "RUNNING", 0, "", False),
        ("exit 1", "RUNNING", 1, "", False),
        ("exit 2", "RUNNING", 2, "", False),
        ("mkdir $CHECKPOINTS/step_100; exit 143", "RUNNING", 0, "slurm: saved step_100; queued again to go on\n", True),
        ("mkdir $CHECKPOINTS/step_100; exit 143", "COMPLETING", 143, "", False),
        (
            "exit 143",
            "RUNNING",
            1,
            "slurm: the time was up before a step was saved: a longer --time is needed\n",
            False,
        ),
    ],
    ids=["finished", "failed", "wrong", "stopped", "cancelled", "too short"],
)
def test_how_a_job_ends(play, run, state, code, said, requeued):
    """Stopped with a new checkpoint, and by nobody's wish: queued again."""
    checkpoints = play.folder / "run" / "checkpoints"
    (checkpoints / "step_20").mkdir(parents=True)
    play.folder.joinpath("script").write_text(run)
    play.write("state", state)
    environment = {**play.environment, "CHECKPOINTS": str(checkpoints), "SLURM_JOB_ID": "17"}
    srun = play.folder / "bin" / "srun"
    srun.write_text(srun.read_text().replace("$PLAY/run", "$PLAY/script"))
    command = [SCRIPTS / "slurm_job", play.folder / "run", "jaxpar", "train", "a b"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANGS)
    assert (ended.returncode, ended.stderr) == (code, said)
    assert play.lines() == ["srun '--kill-on-bad-exit=0' '--wait=0' 'jaxpar' 'train' 'a b'"] + requeued * [
        "scontrol requeue 17"
    ]


# -- all shell files


def test_shell_files_are_clean():
    """Files without a suffix by their first line; what they source is checked with them."""
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    files = [name for name in listed.splitlines() if _is_bash(REPOSITORY / name)]
    assert {".ci/run", "tpu_scripts/tpu", "tpu_scripts/worker"} <= set(files)
    # SC1091: .ci/run sources what it makes while it runs
    shellcheck = [Path(sys.executable).parent / "shellcheck", "-x", "-a", "-e", "SC1091", *files]
    checked = subprocess.run(shellcheck, cwd=REPOSITORY, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def _is_bash(path: Path) -> bool:
    if not path.is_file() or path.suffix not in ("", ".sh"):
        return False
    with open(path, "rb") as file:
        return file.readline().startswith(b"#!/usr/bin/env bash")
