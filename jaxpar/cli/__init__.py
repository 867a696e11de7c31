"""The ``jaxpar`` command.

    jaxpar train CONFIG     train, in a new run folder
    jaxpar generate RUN     what a run's model writes after a prompt
    jaxpar show CONFIG      the resolved config, parameters, batch, optimizer routing and shardings
    jaxpar compile CONFIG   the step compiled for a TPU pod or GPU cluster that need not be there, and its costs
    jaxpar data CONFIG      what the model will see: sources, packing, document lengths, decoded rows
    jaxpar parity [CONFIG]  every layout against one device, on eight virtual devices
    jaxpar bench NAME       measurements, as ratios of two things run alternately
    jaxpar tokenizer train  a byte-level BPE tokenizer from the text of a CONFIG, or of files
    jaxpar report RUN ...   one page about a run or several: curves, memory, time, and what differs
    jaxpar import FOLDER    a Hugging Face model becomes a run folder, to train on from
    jaxpar export RUN       a run's parameters become a Hugging Face model

CONFIG is a file, the name of one in ``configs/``, or a run folder. Any field of it can be set by a dotted flag:
``--optim.learning_rate 1e-3 --mesh.tensor 2``.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import time
from collections.abc import Callable

from jaxpar.errors import ConfigError, JaxparError, did_you_mean, is_of_the_disk

STARTED = time.perf_counter()
COMMANDS = {  # the function of each, by module of this package; its module is imported when it is asked for
    "train": "train.run",
    "generate": "generate.run",
    "tokenizer": "tokenizer.run",
    "show": "show.run",
    "compile": "compile.run",
    "data": "data.run",
    "parity": "parity.run",
    "bench": "bench.run",
    "report": "report.run",
    "import": "weights.run_import",
    "export": "weights.run_export",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code.

    0: done. 1: the run, the disk or the comparison failed. 2: the input is wrong, or a step does not fit its target.
    128 + N: signal N ended it; ``train`` has saved a checkpoint, from which ``--resume`` goes on.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__.strip().replace("``", ""))
        return 0
    try:
        if arguments[0] == "--version":
            from jaxpar import __version__

            print(__version__)
            return 0
        if arguments[0] not in COMMANDS:
            raise ConfigError(
                "command", arguments[0], f"is not a command.{did_you_mean(arguments[0], COMMANDS)}", ", ".join(COMMANDS)
            )
        code = _command(arguments[0])(arguments[1:])
        sys.stdout.flush()
        return code
    except JaxparError as error:
        print(f"jaxpar: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("jaxpar: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # who read the output has gone, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except OSError as error:  # a path that cannot be looked at, or a full disk
        print(f"jaxpar: {error.filename or 'output'}: {error.strerror or error}", file=sys.stderr)
        return 1 if is_of_the_disk(error) else 2


def _command(name: str) -> Callable[[list[str]], int]:
    module, _, function = COMMANDS[name].partition(".")
    return getattr(importlib.import_module(f"jaxpar.cli.{module}"), function)
