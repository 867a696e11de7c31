"""``jaxpar compile``: what a compiled step costs, as text; one step, or two side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxpar.audit.memory import readable_name, verdict
from jaxpar.words import bytes_text, duration, mesh_text, shortened

CLASSES = {  # of hbm_bytes, in the order of the table
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "gradients": "gradients",
    "activations": "activations and temporaries",
    "batch": "batch",
    "code": "code",
    "padding": "padding and outputs",
}
NETWORKS = {
    "ici": "between chips (ICI)",
    "dcn": "between slices (DCN)",
    "nvlink": "within a node (NVLink)",
    "network": "between nodes",
}


def render(result: dict[str, Any]) -> str:
    """The audit of one step."""
    lines = [*_head(result), "", *_memory(result)]
    if "flops" in result:
        lines += ["", *_work(result), "", *_wire(result), "", *_time(result)]
    return "\n".join(lines)


def _head(result: dict[str, Any]) -> list[str]:
    mesh = mesh_text(result["mesh"])
    seconds = result["seconds"]
    lines = [f"target      {result['target']}: {result['devices']} x {result['device']}", f"mesh        {mesh}"]
    if "flops" in result:
        lines += [
            f"step        {result['parameters']:,} parameters, {result['tokens_per_step']:,} tokens, "
            f"{result['compute_dtype']}, {result['kernel']} attention",
            f"compiled    in {duration(seconds['compile'])}, after {duration(seconds['import'])} of start-up and "
            f"{duration(seconds['lower'])} of lowering; {duration(seconds['processor'])} of processor time in all",
        ]
    return lines


def _memory(result: dict[str, Any]) -> list[str]:
    of = result["hbm_bytes"]
    lines = ["memory      on each device"]
    lines += [f"  {text:<28} {bytes_text(of[name]):>9}" for name, text in CLASSES.items() if of.get(name)]
    once = f"   of which live at once {bytes_text(of['peak'])}" if of["peak"] != of["total"] else ""
    lines.append(f"  {'sum':<28} {bytes_text(of['total']):>9}{once}")
    lines.append(f"  {verdict(result)}")
    if result["largest_buffers"]:
        lines += ["", "largest buffers"]
        for buffer in result["largest_buffers"]:
            lines.append(f"  {bytes_text(buffer['bytes']):>9}  {shortened(buffer['shape'], 28):<28}  {buffer['name']}")
    return lines


def _work(result: dict[str, Any]) -> list[str]:
    flops = result["flops"]
    formula = f"{flops['hlo'] / flops['analytic'] - 1:+.2%} against the formula ({_flops(flops['analytic'])})"
    lines = [
        "work        of each device in a step",
        f"  {_flops(flops['hlo'])} in the compiled step, {formula}",
        f"  {_flops(flops['model'])} in the model itself, nothing recomputed",
    ]
    if flops["kernels"]:
        lines.append(f"  {_flops(sum(flops['kernels'].values()))} of it in kernels: {', '.join(flops['kernels'])}")
    for name in flops["unknown"]:
        lines.append(f"  not counted: kernel {name}")
    for name in flops["unknown_loops"]:
        lines.append(f"  counted once: loop {name}, whose length is not known")
    lines.append(f"  {bytes_text(result['hbm_traffic'])} between memory and cores, estimated")
    if result["estimated_cycles"]:
        lines.append(f"  {result['estimated_cycles']:,.0f} cycles by the TPU compiler's own estimate")
    return lines


def _wire(result: dict[str, Any]) -> list[str]:
    wire = result["wire_bytes"]
    share = f", {wire['asynchronous'] / wire['total']:.0%} of it asynchronous" if wire["total"] else ""
    lines = [f"wire        {bytes_text(wire['total'])} sent by each device in a step{share}"]
    for axis, kinds in sorted(wire["by_axis_and_kind"].items(), key=lambda item: -sum(item[1].values())):
        each = ", ".join(f"{kind} {bytes_text(count)}" for kind, count in sorted(kinds.items(), key=lambda k: -k[1]))
        lines.append(f"  {axis:<18} {bytes_text(sum(kinds.values())):>9}   {each}")
    if result["unrequested"]:
        lines.append("  not asked for by any rule:")
        for r in result["unrequested"]:
            place = "/".join(r["source"].split("/")[-2:])
            line = f"    {r['kind']} over {r['axis']}, {bytes_text(r['bytes'])}: {readable_name(r['op']) or r['op']}"
            lines.append(f"{line}, {place}" if place else line)
    if result["unnamed_bytes"]:
        lines.append(f"  of {bytes_text(result['unnamed_bytes'])} XLA left no name that says whether it was asked for")
    elif wire["total"] and not result["unrequested"]:
        lines.append("  every collective was asked for")
    return lines


def _time(result: dict[str, Any]) -> list[str]:
    times, mfu = result["seconds"]["roofline"], result["mfu"]
    if times is None:
        return ["roofline    none: no figures of this device are known"]
    lines = ["roofline    at least this long, each by itself"]
    names = {"compute": "products", "hbm": "memory", **NETWORKS}
    lines += [f"  {names[name]:<28} {_ms(times[name]):>10}" for name in names if times.get(name)]
    lines += [
        f"  {'all at once':<28} {_ms(times['overlapped']):>10}   MFU {mfu['overlapped']:.1%}",
        f"  {'networks wait':<28} {_ms(times['serial']):>10}   MFU {mfu['serial']:.1%}",
    ]
    return lines


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.1f} us"


def _flops(count: float) -> str:
    """``110.1 MFLOP``."""
    size, unit = next((s, u) for s, u in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (0, "")) if count >= s)
    return f"{count / (size or 1):.4g} {unit}FLOP"


def _number(value: float) -> str:
    return f"{value:.4g}"


ROWS: list[tuple[str, Callable[[dict[str, Any]], Any], Callable[[Any], str]]] = [
    ("HBM, sum", lambda r: r["hbm_bytes"]["total"], bytes_text),
    ("HBM, live at once", lambda r: r["hbm_bytes"]["peak"], bytes_text),
    *[(f"  {text}", lambda r, name=name: r["hbm_bytes"].get(name), bytes_text) for name, text in CLASSES.items()],
    ("FLOPs", lambda r: r["flops"]["hlo"], _flops),
    ("memory traffic", lambda r: r["hbm_traffic"], bytes_text),
    ("estimated cycles", lambda r: r["estimated_cycles"], _number),
    ("wire", lambda r: r["wire_bytes"]["total"], bytes_text),
    ("  asynchronous", lambda r: r["wire_bytes"]["asynchronous"], bytes_text),
    ("roofline, all at once", lambda r: r["seconds"]["roofline"]["overlapped"], _ms),
    ("roofline, networks wait", lambda r: r["seconds"]["roofline"]["serial"], _ms),
    ("compile", lambda r: r["seconds"]["compile"], duration),
]


def render_comparison(results: list[dict[str, Any]]) -> str:
    """Two audits side by side, and the second as a multiple of the first."""
    columns = [shortened(result["config"], 34) for result in results]
    table = [("", *columns, "B / A"), ("target", *[result["target"] for result in results], "")]
    table.append(("mesh", *[mesh_text(result["mesh"]) for result in results], ""))
    rows = list(ROWS)
    at = next(i for i, row in enumerate(rows) if row[0] == "  asynchronous")
    by_axis = [result.get("wire_bytes", {}).get("by_axis", {}) for result in results]
    for axis in sorted({*by_axis[0], *by_axis[1]}, key=lambda axis: max(of.get(axis, 0) for of in by_axis)):
        rows.insert(at, (f"  over {axis}", _of_axis(axis), bytes_text))  # the largest ends up first
    for name, value_of, text in rows:
        values = [_value(result, value_of) for result in results]
        if not any(values):
            continue
        ratio = f"{values[1] / values[0]:.2f}" if all(values) else ""
        table.append((name, *["-" if value is None else text(value) for value in values], ratio))
    table.append(("fits", *["yes" if result["fits"] else "no" for result in results], ""))
    widths = [max(len(row[i]) for row in table) for i in range(4)]
    lines = [
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}".rstrip()
        for row in table
    ]
    return "\n".join([*lines, "", *[f"{c}: {verdict(r)}" for c, r in zip(columns, results, strict=True)]])


def _of_axis(axis: str) -> Callable[[dict[str, Any]], float | None]:
    return lambda result: result["wire_bytes"]["by_axis"].get(axis)


def _value(result: dict[str, Any], value_of: Callable[[dict[str, Any]], Any]) -> Any:
    try:
        return value_of(result)
    except (KeyError, TypeError):  # refused by XLA, or no figures of the device are known
        return None
