"""``jaxpar bench compile``: llama2_7b compiled for 256 TPU v5e, beside a peer's figures for the same model and batch.

Each row is a fresh process, so that its processor time is that of the whole command, from Python's start to the
executable.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from jaxpar.errors import RunError

LIMIT = "xla_tpu_scheduler_percent_shared_memory_limit"
# Sequence 2048, 4 sequences a device, bf16 compute and gradient reduction, AdamW with fp32 state, full remat but where
# the row says otherwise. The peer's figures are per device and step:
# MaxText 0.2.5, jax 0.12.0.1, libtpu 0.0.50.1; processor seconds on a quiet machine with 2 cores.
FSDP = {"hbm": 6.16e9, "wire": 52.5e9, "asynchronous": 23.8e9, "cycles": 4.73e9, "processor": 104.0}
TUNED = {"hbm": 12.40e9, "wire": 53.2e9, "asynchronous": 23.8e9, "cycles": 4.17e9, "processor": 108.0}
TENSOR = {"hbm": 8.62e9, "wire": 97.7e9, "asynchronous": 30.2e9, "cycles": 5.01e9, "processor": 76.0}
ROWS: dict[str, tuple[tuple[str, ...], dict[str, float]]] = {
    "FSDP 256": ((), FSDP),
    "FSDP 256, attention's inputs kept": (
        ("--train.remat", "qkv", "--train.compiler_options", ""),
        TUNED,
    ),
    "FSDP 256, layers' inputs kept on the host": (
        ("--train.remat", "offload", "--train.compiler_options", ""),
        FSDP,
    ),
    "FSDP 64 x tensor 4": (("--mesh.tensor", "4", "--train.compiler_options", ""), TENSOR),
    "FSDP 64 x tensor 4, least memory": (
        ("--mesh.tensor", "4", "--train.compiler_options", f"{LIMIT}=25"),
        TENSOR,
    ),
}


def run_bench(as_json: bool) -> int:
    """Compile every row and print it beside the peer's; the exit code is 0."""
    rows = []
    for name, (flags, peer) in ROWS.items():
        if not as_json:
            print(f"compiling {name}", file=sys.stderr, flush=True)
        ours = _ours(flags)
        ratios = {key: ours[key] / value for key, value in peer.items()}
        rows.append({"row": name, "flags": list(flags), "ours": ours, "peer": peer, "ratio": ratios})
    if as_json:
        print(json.dumps(rows, indent=1))
        return 0
    print("llama2_7b, v5e:16x16, per device and step; beside MaxText 0.2.5, ours / its")
    titles = {"hbm": "HBM GB", "wire": "wire GB", "asynchronous": "of it async", "cycles": "1e9 cycles"}
    columns = {**titles, "processor": "processor s"}
    print(f"{'':<42}" + "".join(f"{title:>22}" for title in columns.values()))
    for row in rows:
        cells = "".join(f"{_cell(key, row):>22}" for key in columns)
        print(f"{row['row']:<42}{cells}")
    return 0


def _cell(key: str, row: dict[str, Any]) -> str:
    scale = 1.0 if key == "processor" else 1e9
    ours, peer = row["ours"][key] / scale, row["peer"][key] / scale
    return f"{ours:.3g} / {peer:.3g} = {row['ratio'][key]:.2f}"


def _ours(flags: tuple[str, ...]) -> dict[str, float]:
    """One row, compiled in a process of its own."""
    command = [sys.executable, "-m", "jaxpar.cli", "compile", "llama2_7b", "--target", "v5e:16x16", "--json"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True)
    if done.returncode:
        raise RunError(done.stderr.strip().removeprefix("jaxpar: ") or f"the compiler ended with {done.returncode}")
    result = json.loads(done.stdout)
    return {
        "hbm": result["hbm_bytes"]["total"],
        "peak": result["hbm_bytes"]["peak"],
        "wire": result["wire_bytes"]["total"],
        "asynchronous": result["wire_bytes"]["asynchronous"],
        "cycles": result["estimated_cycles"],
        "processor": result["seconds"]["processor"],
        "flops": result["flops"]["hlo"],
        "flops_analytic": result["flops"]["analytic"],
    }
