"""`kvpager tier`: what is in the directory of a disk store, and whether it is whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from .. import _core
from .options import json_option
from .output import Bar, counted, note, print_json, print_table, print_text, printable

PATH = click.Path(path_type=Path)


@click.group(short_help="Look into the directory of a disk store, or check it.", invoke_without_command=True)
@click.pass_context
def tier(ctx: click.Context) -> None:
    """Look into the directory of a disk store (kvpager.tiers.DiskStore), or check it.

    Both commands only read, take no lock, and may run beside the process that writes. Each prints one JSON object with
    --json.

    \b
    Examples:
      kvpager tier inspect /var/cache/llama     what is there: records, segments, sizes, files that are not the store's
      kvpager tier verify /var/cache/llama      read everything and compare the checksums
      kvpager tier verify /var/cache/llama --json | jq .damaged
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@tier.command(short_help="What is there: records, segments, sizes, foreign files.")
@click.argument("path", type=PATH)
@json_option
def inspect(path: Path, as_json: bool) -> None:
    """What is in the directory PATH of a disk store.

    Segments are the files in which records lie, oldest first. The keys of one lie beside it once it is full or the
    store was closed; records of a segment whose keys are missing or damaged are counted by their heads. For payloads,
    see kvpager tier verify.

    \b
    Examples:
      kvpager tier inspect /var/cache/llama
      kvpager tier inspect /var/cache/llama --json | jq .records
    """
    store, segments = _look(path, verify=False, as_json=as_json)
    _show("tier inspect", path, store, segments, as_json=as_json)


@tier.command(short_help="Read everything and compare the checksums.")
@click.argument("path", type=PATH)
@json_option
def verify(path: Path, as_json: bool) -> int:
    """Read every record in the directory PATH of a disk store, and compare keys, metas and payloads with their
    checksums.

    A damaged record is a miss for the store, never wrong bytes, so there is nothing to repair: it is computed and
    stored again. Damage that returns means a disk to replace. Beside a running writer, the record that is being
    written counts as unfinished bytes.

    Exit status: 1 if anything is damaged, 0 if not.

    \b
    Examples:
      kvpager tier verify /var/cache/llama
      kvpager tier verify /var/cache/llama --json | jq .damaged
    """
    store, segments = _look(path, verify=True, as_json=as_json)
    damaged = _show("tier verify", path, store, segments, as_json=as_json)
    return 1 if damaged else 0


def _look(path: Path, *, verify: bool, as_json: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    store = _core.inspect_store(path)
    with Bar(quiet=as_json) as bar:
        progress = bar.stage("verifying" if verify else "looking")

        def segments() -> Iterator[dict[str, Any]]:
            for done, number in enumerate(store["segments"]):
                progress(done, len(store["segments"]))
                # One that is gone by now was dropped by the writer, for room.
                if (segment := _core.inspect_segment(path, number, verify)) is not None:
                    yield segment

        return store, list(segments())


def _show(command: str, path: Path, store: dict[str, Any], segments: list[dict[str, Any]], *, as_json: bool) -> int:
    """Print it; the number of records and segments that are damaged."""
    names = ("records", "deleted", "damaged")
    sums: dict[str, int] = {name: sum(segment[name] for segment in segments) for name in names}
    unusable = sum(int(segment["unusable"]) for segment in segments)
    bad_keys = sum(int(segment["keys"] == "damaged") for segment in segments)
    if as_json:
        print_json(
            command,
            path=str(path),
            identity=store["identity"].hex(),
            row_bytes=store["row_bytes"],
            meta_bytes=store["meta_bytes"],
            record_bytes=store["record_bytes"],
            bytes=store["bytes"],
            **sums,
            unusable_segments=unusable,
            segments=segments,
            foreign=store["foreign"],
        )
        return sums["damaged"] + unusable
    print_table(
        f"{printable(str(path))}: {counted(sums['records'], 'record')} of {store['record_bytes']:,} bytes"
        f" ({store['row_bytes']:,} of KV, blocks of {(store['meta_bytes'] - 32) // 4} tokens) in"
        f" {counted(len(segments), 'segment')}, {store['bytes']:,} bytes in all.",
        ["segment", "bytes", "slots", "records", "deleted", "damaged", "unfinished bytes", "keys"],
        [
            (
                f"{segment['number']:016x}",
                *(
                    f"{segment[name]:,}"
                    for name in ("bytes", "slots", "records", "deleted", "damaged", "unfinished_bytes")
                ),
                segment["keys"],
            )
            for segment in segments
        ],
    )
    print_text(f"Identity: {_identity(store['identity'])}")
    if store["foreign"]:
        print_text(f"Not the store's, left alone: {', '.join(printable(name) for name in store['foreign'])}")
    if command == "tier verify":
        whole = not (sums["damaged"] or unusable)
        print_text(
            "Every record is whole."
            if whole
            else f"{counted(sums['damaged'], 'damaged record')}, {counted(unusable, 'unusable segment')}:"
            " misses for the store, and written again when they are needed."
        )
    if bad_keys:
        note(
            f"damaged keys of {counted(bad_keys, 'segment')}: the next start looks through its records and repairs them"
        )
    return sums["damaged"] + unusable


def _identity(identity: bytes) -> str:
    text = repr(identity[:80])[1:]
    return f"{text}... ({len(identity):,} bytes)" if len(identity) > 80 else text
