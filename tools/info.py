"""minfer info: what a model is, what its cache costs, and what fits."""

import json
import os
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

import minfer
from minfer.demo import model_path
from minfer.tools import render


def main(args) -> int:
    """Runs the subcommand; returns the exit status."""
    with render.Bar(f"loading {args.model}") as bar:
        path = model_path(args.model, bar)
        with minfer.load(
            path,
            n_ctx=args.n_ctx,
            threads=args.threads,
            cache_type=args.cache_type,
            progress=bar,
        ) as engine:
            report = _report(engine)
    if args.json:
        print(json.dumps(report))
    else:
        _show(report)
    return 0


def _report(engine: minfer.Engine) -> dict[str, Any]:
    tensors, counts, sizes = engine.metadata.tensors, Counter(), Counter()
    for tensor in tensors:
        counts[tensor.type] += 1
        sizes[tensor.type] += tensor.bytes
    stats = engine.stats()
    needed = stats.weight_bytes + stats.kv_bytes + stats.compute_bytes
    return {
        "model": engine.metadata.path,
        "name": engine.metadata.get("general.name", ""),
        "arch": engine.arch,
        "parameters": engine.n_params,
        "layers": engine.n_layer,
        "embedding": engine.n_embd,
        "vocabulary": engine.n_vocab,
        "trained_context": engine.n_ctx_train,
        "chat_template": engine.chat_template is not None,
        "tensors": [{"type": t, "count": counts[t], "bytes": sizes[t]} for t in sorted(counts)],
        "kv_format": engine.kv_format,
        "groups": [_group(i, group) for i, group in enumerate(engine.kv.stats())],
        "kinds": engine.kv.kinds(),
        "n_ctx": engine.n_ctx,
        "memory": {
            "weights": stats.weight_bytes,
            "kv": stats.kv_bytes,
            "compute": stats.compute_bytes,
            "needed": needed,
            "machine": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "isa": engine.isa,
        "threads": engine.n_threads,
    }


def _group(i: int, group: minfer.KvGroup) -> dict[str, Any]:
    return {
        "group": i,
        "kind": group.kind,
        "n_layers": group.n_layers,
        "n_cells": group.n_cells,
        "bytes_per_token": group.bytes_per_token,
    }


def _show(report: dict[str, Any]) -> None:
    console, memory = Console(), report["memory"]
    facts = Table(box=None, show_header=False)
    title = f"{report['name']} ({report['arch']})" if report["name"] else report["arch"]
    for name, value in (
        ("model", render.printable(title)),
        ("parameters", f"{report['parameters'] / 1e6:,.1f} million"),
        ("layers", f"{report['layers']} of width {report['embedding']}"),
        ("vocabulary", f"{report['vocabulary']:,} tokens"),
        ("trained for", f"{report['trained_context']:,} tokens"),
        ("chat template", "yes" if report["chat_template"] else "none: a base model"),
        ("runs with", f"{report['isa']}, {report['threads']} threads"),
    ):
        facts.add_row(name, value)
    console.print(facts)

    tensors = Table("tensors", "type", "size", box=None)
    for row in report["tensors"]:
        tensors.add_row(str(row["count"]), row["type"], render.size(row["bytes"]))
    console.print(tensors)

    groups = Table("group", "kind", "layers", "cells", "bytes per token", box=None)
    for row in report["groups"]:
        layers, cells = str(row["n_layers"]), f"{row['n_cells']:,}"
        cost = f"{row['bytes_per_token']:,}"
        groups.add_row(str(row["group"]), row["kind"], layers, cells, cost)
    console.print(groups)

    parts = ", ".join(
        f"{part} {render.size(memory[part])}" for part in ("weights", "kv", "compute")
    )
    fits = "fits" if memory["needed"] <= memory["machine"] else "does not fit"
    console.print(
        f"memory for a context of {report['n_ctx']:,} tokens: {render.size(memory['needed'])}"
        f" ({parts}); {fits} in this machine's {render.size(memory['machine'])}",
        soft_wrap=True,
    )
