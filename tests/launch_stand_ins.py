"""Stand-ins for gcloud, SLURM and a TPU machine, for ``test_launch.py``.

The stand-in gcloud keeps one queued resource in a folder, plays the states that the test wrote down for it, and runs
what is sent by ssh in a folder that is the machine's home: so the script ``worker`` runs in earnest, with a stand-in
jaxpar.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
SCRIPTS = REPOSITORY / "tpu_scripts"
HANGS = 30  # seconds, on a busy machine

# Each line of `states` is what describe says once (the last one for ever), of this pod and those that follow it. "!"
# before a state: the pod goes away at that moment, and what runs on it with it.
GCLOUD = r"""#!/usr/bin/env bash
set -u
printf '%s\n' "${*@Q}" >>"$PLAY/calls"
[[ $1 != alpha ]] || shift
verb=$4
shift 4
say_no() { echo "ERROR: (gcloud.compute.tpus.queued-resources.$verb) $1" >&2; exit 1; }
[[ ! -e $PLAY/$verb.error ]] || say_no "$(cat "$PLAY/$verb.error")"
here() { [[ -e $PLAY/pod ]] || say_no "NOT_FOUND: Resource 'projects/p/$1' was not found"; }
gone() {
    kill -KILL "$(cat "$PLAY/home/jaxpar-run/pid")"
    rm -rf "$PLAY/home"
} 2>/dev/null
case $verb in
    create)
        [[ ! -e $PLAY/pod ]] || say_no "ALREADY_EXISTS: Resource 'projects/p/$1' already exists"
        mkdir -p "$PLAY/home" && touch "$PLAY/pod" ;;
    delete) here "$1"; gone; rm -f "$PLAY/pod" ;;
    list) echo "NAME ZONE STATE" ;;
    describe)
        here "$1"
        state=$(head -n 1 "$PLAY/states")
        [[ $(wc -l <"$PLAY/states") == 1 ]] || sed -i 1d "$PLAY/states"
        [[ $state != !* ]] || gone
        reason=
        [[ $state != *FAILED ]] || reason="the quota is used up"
        printf '%s|%s|%s\n' "${state#!}" "$(date -u +%FT%TZ)" "$reason" ;;
    scp)
        here "$2"
        cp "$1" "$PLAY/home/" ;;
    ssh)
        here "$1"
        [[ -d $PLAY/home ]] || say_no "[255] the machine does not answer"
        [[ ! -e $PLAY/missing ]] || echo "WARNING: Could not prepare all 2 nodes, attempting to ssh into the rest." >&2
        for word; do [[ $word != --command=* ]] || command=${word#--command=}; done
        cd "$PLAY/home" && HOME=$PLAY/home PATH=$PLAY/machine:$PATH bash -c "$command" ;;
esac
"""
UV = r"""#!/usr/bin/env bash
printf '%s\n' "uv $*" >>"$PLAY/machine.calls"
[[ $1 != venv ]] || mkdir -p .venv/bin
[[ $1 != pip ]] || cp "$PLAY/jaxpar" .venv/bin/jaxpar
"""
# Each line of `runs` is how one start of jaxpar ends: an exit code, or "wait" for a signal.
JAXPAR = r"""#!/usr/bin/env bash
printf '%s\n' "${*@Q}" >>"$PLAY/runs.calls"
run=$(head -n 1 "$PLAY/runs")
sed -i 1d "$PLAY/runs"
echo "step 1 # of $run"
trap 'echo saved; exit 143' TERM
while [[ $run == wait ]]; do sleep 0.05; done
exit "$run"
"""
RECORDS = r"""#!/usr/bin/env bash
printf '%s\n' "$(basename "$0") ${*@Q}" >>"$PLAY/machine.calls"
"""
SBATCH = r"""#!/usr/bin/env bash
printf '%s\n' "${*@Q}" >>"$PLAY/calls"
[[ ! -e $PLAY/sbatch.error ]] || { cat "$PLAY/sbatch.error" >&2; exit 1; }
echo "17;cluster"
"""
SRUN = r"""#!/usr/bin/env bash
printf '%s\n' "srun ${*@Q}" >>"$PLAY/calls"
eval "$(cat "$PLAY/script")"
"""
SQUEUE = '#!/usr/bin/env bash\ncat "$PLAY/state"\n'
SCONTROL = '#!/usr/bin/env bash\necho "scontrol $*" >>"$PLAY/calls"\n'


class Play:
    """A folder with the stand-ins, and the scripts run against them."""

    def __init__(self, folder: Path):
        self.folder = folder
        stand_ins = {"gcloud": GCLOUD, "sbatch": SBATCH, "srun": SRUN, "squeue": SQUEUE, "scontrol": SCONTROL}
        machine = {"uv": UV, "findmnt": "#!/bin/sh\nexit 1\n"}
        machine |= {name: RECORDS for name in ("sudo", "gcsfuse", "mount.nfs")}
        for room, commands in (("bin", stand_ins), ("machine", machine), (".", {"jaxpar": JAXPAR})):
            (folder / room).mkdir(exist_ok=True)
            for name, text in commands.items():
                (folder / room / name).write_text(text)
                (folder / room / name).chmod(0o755)
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "PLAY": str(folder), "JAXPAR_POLL_SECONDS": "0.05"}
        self.write("states", "ACTIVE")

    def write(self, name, *lines):
        (self.folder / name).write_text("".join(f"{line}\n" for line in lines))

    def lines(self, name="calls"):
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def verbs(self):
        """What gcloud was asked for, in order, without the looks: ``create``, ``ssh``, ..."""
        words = [shlex.split(line) for line in self.lines()]
        verbs = [each[4 if each[0] == "alpha" else 3] for each in words]
        return [verb for verb, each in zip(verbs, words, strict=True) if verb != "describe" and "--node=0" not in each]

    def start(self, script, *arguments):
        return subprocess.Popen(
            [SCRIPTS / script, *map(str, arguments)],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script, *arguments, code=0):
        """What it printed, and the line of its error; fails unless the exit code is ``code``."""
        process = self.start(script, *arguments)
        out, err = process.communicate(timeout=HANGS)
        assert process.returncode == code, (out, err)
        assert err.count("\n") == (code != 0), err
        return out, err.removesuffix("\n")

    def await_line(self, name, line):
        deadline = time.monotonic() + HANGS
        while line not in self.lines(name):
            assert time.monotonic() < deadline, self.lines(name)
            time.sleep(0.02)
