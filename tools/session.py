"""minfer session inspect and verify: what is in a session file, and whether all of it is whole."""

import json
import os
from collections import Counter
from itertools import chain
from typing import Any

from rich.console import Console
from rich.table import Table

import minfer
from minfer.tools import render
from minfer.tools.conversation import cache_path, state_summary
from minfer.tools.render import count, one_line


def main(args) -> int:
    """Runs the subcommand; returns the exit status."""
    try:
        with opened(args.file) as file:
            if args.verify:
                report, show = _verdict(file), _show_verdict
            else:
                report, show = _report(file), _show_report
    except (minfer.FormatError, minfer.UnsupportedError) as error:
        if not (args.verify and args.json):
            raise
        print(json.dumps({"file": args.file, "good": False, "error": " ".join(str(error).split())}))
        return 1
    if args.json:
        print(json.dumps(report))
    else:
        show(report)
    return 0


def opened(path: str) -> minfer.SessionFile:
    """The file at a path, verified. Whoever names the history of a conversation is told where its
    cache is."""
    try:
        with render.Bar("verifying") as bar:
            return minfer.SessionFile(path, progress=bar)
    except (minfer.FormatError, minfer.MissingFileError) as error:
        cache = cache_path(path)
        if not os.path.isfile(cache):
            raise
        raise type(error)(f"{error}; the cache of a conversation is in {cache}") from None


# ---- verify --------------------------------------------------------------------------------------


def _verdict(file: minfer.SessionFile) -> dict[str, Any]:
    return {
        "file": file.path,
        "good": True,
        "sequences": len(file.seqs),
        "rows": max(group.n_rows for group in file.groups),  # no group has more of them
        "bytes": file.info.file_bytes,
    }


def _show_verdict(verdict: dict[str, Any]) -> None:
    path, n_rows = render.printable(verdict["file"]), verdict["rows"]
    print(
        f"{path}: good: {count(verdict['sequences'], 'sequence')}, {count(n_rows, 'row')},"
        f" {render.size(verdict['bytes'])}, every byte verified"
    )


# ---- inspect -------------------------------------------------------------------------------------


def _report(file: minfer.SessionFile) -> dict[str, Any]:
    info, groups = file.info, range(len(file.groups))
    spans = [[file.spans(i, g) for i in range(len(file.seqs))] for g in groups]
    shared = [_shared(of_group) for of_group in spans]
    return {
        "file": file.path,
        **info._asdict(),
        "groups": [
            {**group._asdict(), "bytes": 2 * group.n_layers * group.n_rows * info.row_bytes}
            for group in file.groups
        ],
        "kinds": [file.groups[file.layer_group(i)].kind for i in range(info.n_layer)],
        "sequences": [
            {**seq._asdict(), "groups": [_rows(spans[g][i], shared[g][i]) for g in groups]}
            for i, seq in enumerate(file.seqs)
        ],
        "sections": [
            {**section._asdict(), "checksum": f"{section.checksum:016x}"}
            for section in file.sections
        ],
        "host_state": _host_state(file.host_state),
    }


def _shared(spans: list[list[minfer.Span]]) -> list[int]:
    """How many rows of a group each sequence, by its spans, reads that others read too."""
    turns: Counter[int] = Counter()  # row: how many more spans have it than the one before it
    for span in chain.from_iterable(spans):
        turns[span.cell] += 1
        turns[span.cell + span.len] -= 1
    before, n_shared = {}, 0  # row: how many below it are shared
    last, n_readers = 0, 0
    for row in sorted(turns):
        if n_readers > 1:
            n_shared += row - last
        before[row], last = n_shared, row
        n_readers += turns[row]
    return [sum(before[s.cell + s.len] - before[s.cell] for s in each) for each in spans]


def _rows(spans: list[minfer.Span], n_shared: int) -> dict[str, Any]:
    """What a sequence has in a group."""
    live = sum(span.len for span in spans)
    return {"live": live, "shared": n_shared, "spans": [span._asdict() for span in spans]}


def _host_state(data: bytes) -> dict[str, Any]:
    about = {"bytes": len(data)}
    conversation = state_summary(data)
    if conversation:
        return {"is": "conversation", **about, **conversation}
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return {"is": "json", **about, "keys": list(value)}
    return {"is": "opaque", **about}


def _host_facts(state: dict[str, Any]) -> list[tuple[str, str]]:
    size = render.size(state["bytes"])
    if state["is"] == "conversation":
        texts = f"{count(state['messages'], 'message')}, {count(state['tokens'], 'token')}"
        settings = (
            f"{one_line(name)} {one_line(json.dumps(value))}"
            for name, value in state["sampling"].items()
        )
        return [
            ("host state", f"a conversation, version {state['version']}: {texts} ({size})"),
            ("sampler", ", ".join(settings)),
        ]
    if state["is"] == "json":
        return [("host state", f"JSON ({size}) with the keys {_listed(state['keys'])}")]
    return [("host state", f"{state['bytes']:,} opaque bytes" if state["bytes"] else "none")]


def _listed(keys: list[str], most: int = 12) -> str:
    more = [f"and {len(keys) - most} more"] if len(keys) > most else []
    return ", ".join([one_line(key) for key in keys[:most]] + more) or "(none)"


def _show_report(report: dict[str, Any]) -> None:
    console = Console(markup=False, emoji=False)  # the file's text is text
    facts = Table(box=None, show_header=False)
    heads = f"{count(report['n_head_kv'], 'head')} of {report['head_dim']}"
    for name, value in (
        ("file", f"{render.printable(report['file'])}, version {report['version']}"),
        ("size", render.size(report["file_bytes"])),
        ("model", f"{count(report['n_layer'], 'layer')} of width {report['n_embd']}"),
        ("fingerprint", report["fingerprint"]),
        ("context", f"{report['n_ctx']:,} tokens, on the device {report['device']}"),
        ("K and V", f"{report['kv_format']}, {heads}: rows of {report['row_bytes']:,} bytes"),
        *_host_facts(report["host_state"]),
    ):
        facts.add_row(name, value)
    console.print(facts)

    groups = _table("group", "kind", "layers", "rows", "size", words=2)
    for g, group in enumerate(report["groups"]):
        numbers = (str(group["n_layers"]), f"{group['n_rows']:,}", render.size(group["bytes"]))
        groups.add_row(str(g), one_line(group["kind"]), *numbers)
    console.print(groups)

    if report["sequences"]:
        names = ("sequence", "rows", "clean", "next position", "group", "live", "spans", "shared")
        seqs = _table(*names)
        for seq in report["sequences"]:
            cells = [seq["len"], seq["clean"], seq["next_pos"]]
            about = [str(seq["seq"]), *(f"{n:,}" for n in cells)]
            for g, group in enumerate(seq["groups"]):
                cells = [group["live"], len(group["spans"]), group["shared"]]
                seqs.add_row(*about, str(g), *(f"{n:,}" for n in cells))
                about = [""] * len(about)
        console.print(seqs)

    parts = _table("section", "number", "offset", "size", words=1)
    for name in dict.fromkeys(section["name"] for section in report["sections"]):
        some = [section for section in report["sections"] if section["name"] == name]
        size = render.size(sum(section["bytes"] for section in some))
        parts.add_row(name, str(len(some)), f"{some[0]['offset']:,}", size)
    console.print(parts)


def _table(*columns: str, words: int = 0) -> Table:
    """A table whose first columns are words, the others numbers."""
    table = Table(box=None)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < words else "right")
    return table
