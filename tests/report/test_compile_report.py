"""The text of `jaxpar compile`: what fits, what was refused, what nobody asked for, and two side by side."""

import copy
import re

import pytest

from jaxpar.report.compile import render, render_comparison

HBM = {
    "total": 13_600_000_000, "peak": 11_300_000_000, "parameters": 1_690_000_000, "optimizer": 3_370_000_000,
    "batch": 139_000, "gradients": 1_680_000_000, "activations": 6_800_000_000, "code": 42_700_000, "padding": 0,
}  # fmt: skip
TPU = {
    "target": "v5e:4x4", "device": "TPU v5 lite", "devices": 16, "parameters": 6_738_415_616,
    "mesh": {"data": 1, "fsdp": 4, "pipe": 1, "expert": 1, "context": 1, "tensor": 4}, "kernel": "splash",
    "compute_dtype": "bfloat16", "tokens_per_step": 131_072, "fits": True, "hbm_limit": 16_900_000_000,
    "hbm_bytes": HBM,
    "largest_buffers": [{"bytes": 2_150_000_000, "shape": "bf16[32,4,2048,4096]", "name": "parameter layers.mlp.up"}],
    "flops": {
        "hlo": 4.4e14, "analytic": 4.39e14, "model": 3.38e14, "matmul": 4e14, "kernels": {"splash_mha_fwd": 3e13},
        "unknown": ["strange_kernel"], "unknown_loops": ["while.7"],
    },
    "wire_bytes": {
        "total": 7.5e10, "by_kind": {"all-gather": 2.5e10, "all-reduce": 5e10},
        "by_axis": {"fsdp": 6e10, "tensor": 1.5e10},
        "by_axis_and_kind": {"tensor": {"all-gather": 1.5e10}, "fsdp": {"all-gather": 1e10, "all-reduce": 5e10}},
        "asynchronous": 2.25e10,
    },
    "unrequested": [], "unnamed_bytes": 0.0,
    "hbm_traffic": 1e12, "estimated_cycles": 4_200_691_618.0,
    "seconds": {
        "import": 2.5, "lower": 1.7, "compile": 112.0, "audit": 1.0, "processor": 92.0,
        "roofline": {
            "compute": 2.2289, "hbm": 1.226, "ici": 0.0008368, "dcn": 0.0, "overlapped": 2.2289, "serial": 3.0,
        },
    },
    "mfu": {"overlapped": 0.77, "serial": 0.56}, "versions": {"jax": "0.10.2"},
}  # fmt: skip
REFUSED = {
    "target": "v5e:2x2", "device": "TPU v5 lite", "devices": 4, "parameters": 6_738_415_616,
    "mesh": {"data": 1, "fsdp": 4}, "fits": False, "hbm_limit": 16_900_000_000,
    "hbm_bytes": {"total": 54_000_000_000, "peak": 54_000_000_000, "parameters": 6_740_000_000,
                  "optimizer": 13_500_000_000, "batch": 139_000, "activations": 33_759_861_000},
    "largest_buffers": [], "versions": {}, "seconds": {"import": 2.0, "lower": 1.0, "compile": 9.0},
}  # fmt: skip


def test_a_step_that_fits():
    assert render(TPU).splitlines() == [
        "target      v5e:4x4: 16 x TPU v5 lite",
        "mesh        fsdp 4 x tensor 4",
        "step        6,738,415,616 parameters, 131,072 tokens, bfloat16, splash attention",
        "compiled    in 1 min 52 s, after 2.5 s of start-up and 1.7 s of lowering; 1 min 32 s of processor time in all",
        "",
        "memory      on each device",
        "  parameters                     1.69 GB",
        "  optimizer state                3.37 GB",
        "  gradients                      1.68 GB",
        "  activations and temporaries     6.8 GB",
        "  batch                           139 kB",
        "  code                           42.7 MB",
        "  sum                            13.6 GB   of which live at once 11.3 GB",
        "  11.3 GB of 16.9 GB on each device: fits",
        "",
        "largest buffers",
        "    2.15 GB  bf16[32,4,2048,4096]          parameter layers.mlp.up",
        "",
        "work        of each device in a step",
        "  440 TFLOP in the compiled step, +0.23% against the formula (439 TFLOP)",
        "  338 TFLOP in the model itself, nothing recomputed",
        "  30 TFLOP of it in kernels: splash_mha_fwd",
        "  not counted: kernel strange_kernel",
        "  counted once: loop while.7, whose length is not known",
        "  1 TB between memory and cores, estimated",
        "  4,200,691,618 cycles by the TPU compiler's own estimate",
        "",
        "wire        75 GB sent by each device in a step, 30% of it asynchronous",
        "  fsdp                   60 GB   all-reduce 50 GB, all-gather 10 GB",
        "  tensor                 15 GB   all-gather 15 GB",
        "  every collective was asked for",
        "",
        "roofline    at least this long, each by itself",
        "  products                     2,228.9 ms",
        "  memory                       1,226.0 ms",
        "  between chips (ICI)            836.8 us",
        "  all at once                  2,228.9 ms   MFU 77.0%",
        "  networks wait                3,000.0 ms   MFU 56.0%",
    ]


def test_a_step_that_is_refused():
    """No count of a step that was never compiled, and no traceback for want of one."""
    assert render(REFUSED).splitlines() == [
        "target      v5e:2x2: 4 x TPU v5 lite",
        "mesh        fsdp 4",
        "",
        "memory      on each device",
        "  parameters                     6.74 GB",
        "  optimizer state                13.5 GB",
        "  activations and temporaries    33.8 GB",
        "  batch                           139 kB",
        "  sum                              54 GB",
        "  54 GB of 16.9 GB on each device: does not fit by 37.1 GB",
    ]


def test_what_nobody_asked_for():
    one = {
        "kind": "all-gather", "axis": "fsdp", "bytes": 3e9, "source": "/a/clone/jaxpar/models/decoder.py:57",
        "op": "jit(_step)/shard_map/jvp()/while/body/closed_call/layers/mlp/up/bsd,df->bsf/dot_general",
    }  # fmt: skip
    text = render({**TPU, "unrequested": [one, {**one, "op": "jit(_step)/reshape", "source": ""}]})
    assert "every collective was asked for" not in text
    assert (
        "  not asked for by any rule:\n"
        "    all-gather over fsdp, 3 GB: forward: layers.mlp.up (bsd,df->bsf dot_general), models/decoder.py:57\n"
        "    all-gather over fsdp, 3 GB: update: reshape\n"
    ) in text


def test_what_has_no_name_was_not_found_to_be_asked_for():
    """Between TPU slices. *Wrong*: that every collective was."""
    text = render({**TPU, "unnamed_bytes": 6.1e5})
    assert "every collective was asked for" not in text
    assert "  of 610 kB XLA left no name that says whether it was asked for\n" in text


def test_a_device_without_figures():
    seconds = {**TPU["seconds"], "roofline": None}
    text = render({**TPU, "seconds": seconds, "mfu": None, "estimated_cycles": None, "hbm_limit": 0})
    assert text.endswith("roofline    none: no figures of this device are known")
    assert "11.3 GB on each device, of an amount that is not known" in text and "cycles" not in text


def test_side_by_side():
    """Every row of both, ratios of what both have, aligned."""
    other = copy.deepcopy(TPU)
    other["mesh"] |= {"fsdp": 16, "tensor": 1}
    other["hbm_bytes"]["activations"] *= 2
    other["wire_bytes"]["by_axis"] = {"fsdp": 3e10}
    rows = render_comparison([{"config": "llama", **TPU}, {"config": "llama --mesh.tensor 1", **other}]).splitlines()
    name, *_ = cells = [re.split("  +", row.strip()) for row in rows]
    assert name == ["llama", "llama --mesh.tensor 1", "B / A"]
    of = {name: values for name, *values in cells}
    assert of["activations and temporaries"] == ["6.8 GB", "13.6 GB", "2.00"]
    assert of["over fsdp"] == ["60 GB", "30 GB", "0.50"]
    assert of["over tensor"] == ["15 GB", "-"]
    assert of["roofline, all at once"] == ["2,228.9 ms", "2,228.9 ms", "1.00"]
    table = rows[: rows.index("")]
    assert len({len(row) for row in table if row.endswith("1.00")} | {len(rows[0])}) == 1
    assert rows[-1] == "llama --mesh.tensor 1: 11.3 GB of 16.9 GB on each device: fits"


@pytest.mark.parametrize("order", [1, -1])
def test_beside_one_that_is_refused(order):
    """Whichever side it is."""
    text = render_comparison([{"config": "a", **TPU}, {"config": "b", **REFUSED}][::order])
    fits = next(line for line in text.splitlines() if line.startswith("fits"))
    assert fits.split() == ["fits", *["yes", "no"][::order]]
    assert "b: 54 GB of 16.9 GB on each device: does not fit by 37.1 GB" in text
    wire = next(line for line in text.splitlines() if line.startswith("wire"))
    assert re.split("  +", wire) == ["wire", *["75 GB", "-"][::order]]
