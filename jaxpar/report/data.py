"""``jaxpar data``: what a model will see of a config's text."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.data import Data
from jaxpar.experiment import Experiment
from jaxpar.report.canvas import MUTED, PALETTE

WIDTH = 100
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
SHOWN = {"\n": "↵", "\t": "⇥", "\r": "␍"}
END, MASKED = "⟨end⟩", "▒"
HEAD, TAIL = 6, 2  # lines shown of a long piece


def describe_data(experiment: Experiment, data: Data, examples: int = 0) -> dict[str, Any]:
    """Everything ``render`` prints, ready for JSON; ``examples`` is how many sequences of the stream, from the first.

    Lengths and counts are in tokens, the end token included. ``epochs`` is how often the run goes through a source.
    """
    train, summary = experiment.train, data.summary()
    sequences = train.steps * train.global_batch
    sources = []
    for k, (source, corpus) in enumerate(zip(summary["sources"], data.corpora, strict=True)):
        lengths_D = corpus.lengths_D
        held_out = int(corpus.held_out_D(data.config.eval_fraction, f"data.sources.{k}").sum())
        source["text_bytes"], source["dropped"] = corpus.text_bytes, corpus.dropped
        source["bytes_per_token"] = corpus.text_bytes / max(source["tokens"] - source["documents"], 1)
        source["train"]["documents"] = source["documents"] - held_out
        source["train"]["epochs"] = source["share"] * sequences / source["train"]["rows"]
        if source["eval"]:
            source["eval"]["documents"] = held_out
        source["document_tokens"] = {
            "mean": float(lengths_D.mean()),
            "quantiles": dict(zip(map(str, QUANTILES), np.quantile(lengths_D, QUANTILES).tolist(), strict=True)),
        }
        sources.append(source)
    return {
        **summary,
        "mask_documents": data.config.mask_documents,
        "sources": sources,
        "run": {
            "steps": train.steps,
            "global_batch": train.global_batch,
            "sequences": sequences,
            "tokens": experiment.tokens_per_step * train.steps,
        },
        "examples": [_describe_sequence(data, number) for number in range(examples)],
    }


def _describe_sequence(data: Data, number: int) -> dict[str, Any]:
    """Training sequence ``number``: where it comes from, and its pieces as the model gets them."""
    (k,), (row,) = (array.tolist() for array in data.train.order(number, 1))
    index = int(data.train.mixture.assign(number, 1)[1][0])
    rows, corpus = data.train.sources[k], data.corpora[k]
    batch = {name: array[0] for name, array in data.train.batch(number, 1).items()}
    pieces, filled = [], 0
    _, starts_P, lengths_P, columns_P, _ = rows.pieces(np.array([row]))
    for start, length, column in zip(starts_P.tolist(), lengths_P.tolist(), columns_P.tolist(), strict=True):
        at = slice(column, column + length)
        document = int(np.searchsorted(corpus.offsets, start, side="right")) - 1
        pieces.append(
            {
                "document": document,
                "first_column": column,
                "tokens": length,
                "segment": int(batch["segments"][column]),
                "positions": [int(batch["positions"][at][0]), int(batch["positions"][at][-1])],
                "from_start": start == int(corpus.offsets[document]),
                "to_end": start + length == int(corpus.offsets[document + 1]),
                "masked_columns": (column + np.flatnonzero(~batch["mask"][at])).tolist(),
                "text": data.tokenizer.decode(batch["tokens"][at]),
            }
        )
        filled = column + length
    return {
        "sequence": number,
        "source": corpus.name,
        "row": row,
        "epoch": index // rows.rows,
        "pieces": pieces,
        "padding": data.train.seq_len - filled,
    }


def render(description: dict[str, Any]) -> str:
    """The description as text of at most ``WIDTH`` columns."""
    run, sources = description["run"], description["sources"]
    text_bytes = sum(source["text_bytes"] for source in sources)
    text_tokens = sum(source["tokens"] - source["documents"] for source in sources)
    entropy = description["unigram_entropy"]
    apart = "documents kept apart" if description["mask_documents"] else "documents run into each other"
    lines = [
        f"tokenizer  {_short(description['tokenizer'], 60)}: {description['vocab_size']:,} ids, "
        f"{text_bytes / max(text_tokens, 1):.2f} bytes a token",
        f"rows       {description['seq_len']:,} tokens, {description['packing']} packing, {apart}",
        f"run        {run['steps']:,} steps x {run['global_batch']:,} sequences x {description['seq_len']:,} tokens = "
        f"{run['tokens']:,} tokens",
        f"held out   unigram entropy {entropy:.4f} nats/token" if entropy is not None else "held out   nothing",
        f"batches    fingerprint {description['fingerprint']}",
        *(f"source     {_short(source['name'], 60)}: {source['origin']}" for source in sources),
        "",
    ]
    table: list[tuple[str, ...]] = [("source", "mixture", "documents", "left out", "tokens", "bytes/token", "epochs")]
    splits: list[tuple[str, ...]] = [("source", "split", "documents", "tokens", "rows", "filled", "padding")]
    lengths: list[tuple[str, ...]] = [
        ("tokens per document", "least", "5%", "25%", "median", "75%", "95%", "most", "mean")
    ]
    for source in sources:
        name = _short(source["name"], 28)
        left_out = sum(source["dropped"].values())
        counts = (f"{number:,}" for number in (source["documents"], left_out, source["tokens"]))
        per_token, epochs = f"{source['bytes_per_token']:.2f}", f"{source['train']['epochs']:.3g}"
        table.append((name, f"{source['share']:.1%}", *counts, per_token, epochs))
        for split in ("train", "eval"):
            if part := source[split]:
                counts = (f"{part[key]:,}" for key in ("documents", "tokens", "rows"))
                splits.append((name, split, *counts, f"{part['packing_efficiency']:.2%}", f"{part['padding']:,}"))
        found = [*source["document_tokens"]["quantiles"].values(), source["document_tokens"]["mean"]]
        lengths.append((name, *(f"{value:,.0f}" for value in found)))
    reasons = [
        f"left out of {_short(source['name'], 28)}: "
        + ", ".join(f"{count:,} by {_short(why, 60)}" for why, count in source["dropped"].items())
        for source in sources
        if source["dropped"]
    ]
    for rows in (table, splits, lengths):
        lines += [*_table(rows), ""]
    lines += [
        *reasons,
        "epochs: how often the run goes through the source.",
        "filled: the share of the rows' places that hold a token; the others are padding.",
        "",
    ]
    if description["examples"]:
        lines.append(
            f"{END} the end of a document   {MASKED} the target of the token before it does not count   ↵ newline"
        )
    for example in description["examples"]:
        lines += ["", *_render_example(example, description["seq_len"])]
    return "\n".join(lines).rstrip()


def _render_example(example: dict[str, Any], seq_len: int) -> list[str]:
    name = _short(example["source"], 40)
    title = f"sequence {example['sequence']}: row {example['row']:,} of {name}, epoch {example['epoch']} "
    lines = [title.ljust(WIDTH, "─")]
    for piece in example["pieces"]:
        first, last = piece["first_column"], piece["first_column"] + piece["tokens"] - 1
        masked = len(piece["masked_columns"])
        where = f"columns {first:,}-{last:,}, positions {piece['positions'][0]:,}-{piece['positions'][1]:,}"
        begins = "begins" if piece["from_start"] else "goes on"
        ends = "ends" if piece["to_end"] else "is cut"
        count = "all targets count" if not masked else f"{masked:,} target{'s' * (masked > 1)} masked"
        lines.append(f"  {where}: document {piece['document']:,} {begins} and {ends}; {count}")
        end = (END if piece["to_end"] else "") + (MASKED if last in piece["masked_columns"] else "")
        lines += [f"  │ {line}" for line in _wrapped(visible(piece["text"]) + end, WIDTH - 4)]
    if example["padding"]:
        begin = seq_len - example["padding"]
        lines.append(f"  columns {begin:,}-{seq_len - 1:,}: padding; no target counts")
    return lines


def visible(text: str) -> str:
    """``text`` with a visible sign or an escape for everything a terminal would obey or not show."""
    return "".join(SHOWN.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode()) for c in text)


def _wrapped(text: str, width: int) -> list[str]:
    """``text`` cut every ``width`` columns; of a long one the first and the last lines."""
    lines, column = [""], 0
    for character in text:
        columns = 2 if unicodedata.east_asian_width(character) in "WF" else int(not unicodedata.combining(character))
        if column + columns > width:
            lines.append("")
            column = 0
        lines[-1] += character
        column += columns
    if len(lines) <= HEAD + TAIL + 1:
        return lines
    left_out = sum(map(len, lines[HEAD:-TAIL]))
    return [*lines[:HEAD], f"... {left_out:,} characters more ...", *lines[-TAIL:]]


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns under their headings, the first to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def _short(name: str, width: int) -> str:
    """The end of a long name."""
    name = visible(name)
    return name if len(name) <= width else "…" + name[1 - width :]


def draw_lengths(data: Data, path: Path, title: str) -> None:
    """Draw how long each source's documents are, and in documents of what length its tokens lie, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.6), dpi=150, layout="constrained")
    document_axes, token_axes = figure.subplots(2, 1, sharex=True)
    seq_len = data.train.seq_len
    shortest = min(int(corpus.lengths_D.min()) for corpus in data.corpora)
    longest = max(int(corpus.lengths_D.max()) for corpus in data.corpora)
    edges = np.unique(np.geomspace(shortest, longest + 1, 61).round())  # whole: no bin lies between two lengths
    for k, corpus in enumerate(data.corpora):
        lengths_D, colour = corpus.lengths_D, PALETTE[k % len(PALETTE)]
        label = f"{_short(corpus.name, 32)}: {len(lengths_D):,} documents, {len(corpus.tokens_N):,} tokens"
        for axes, weights in ((document_axes, None), (token_axes, lengths_D)):
            counts = np.histogram(lengths_D, edges, weights=weights)[0]
            axes.stairs(100 * counts / counts.sum(), edges, color=colour, linewidth=1.4, label=label)
            axes.stairs(100 * counts / counts.sum(), edges, color=colour, alpha=0.12, fill=True)
    for axes, what in ((document_axes, "documents"), (token_axes, "tokens")):
        axes.axvline(seq_len, color=MUTED, linestyle=(0, (6, 3)), linewidth=1.2)
        axes.set(ylabel=f"{what} (% of the source's)", ylim=(0, None))
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    note = f" a row: {seq_len:,} tokens"
    document_axes.annotate(note, (seq_len, 1), xycoords=("data", "axes fraction"), va="top", color=MUTED, fontsize=9)
    token_axes.set(xscale="log", xlabel="length of the document (tokens, the end token included)")
    token_axes.xaxis.set_major_formatter("{x:,.0f}")
    figure.suptitle(title.encode("utf-8", "replace").decode(), x=0.01, ha="left", fontsize=11, fontweight="bold")
    figure.legend(*document_axes.get_legend_handles_labels(), loc="outside lower center", frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
