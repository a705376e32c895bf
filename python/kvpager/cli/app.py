"""The command group, and what every command has in common when something goes wrong.

A command is a module with one `click.Command`, listed in `COMMANDS`; it is imported when it is named. It prints its
result to stdout (`output.print_table`, or one JSON object with `--json`), everything else to stderr, and raises
`KvPagerError` or `click.UsageError` for bad input: `run` turns these into one line and exit status 2. What could not
be written, because the disk is full or the reader has gone, is exit status 1.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import click

from .. import __version__
from ..errors import KvPagerError
from .output import printable

COMMANDS = {
    "demo": "demo:demo",
    "replay": "replay:replay",
    "bench": "bench:bench",
    "generate": "generate:generate",
    "blocksize": "blocksize:blocksize",
    "fragmentation": "fragmentation:fragmentation",
    "prefix": "prefix:prefix",
    "cost": "cost:cost",
    "simulate": "simulate:simulate",
    "diagnose": "diagnose:diagnose_command",
    "tier": "tier:tier",
}


class LazyGroup(click.Group):
    """Imports a command's module only when that command, or the list of all of them, is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        command = getattr(importlib.import_module(f".{module}", __package__), name)
        assert isinstance(command, click.Command)
        return command


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True},
)
@click.version_option(__version__, prog_name="kvpager")
@click.pass_context
def kvpager(ctx: click.Context) -> None:
    """The pager for LLM KV caches: see what paging, prefix sharing and eviction are worth.

    \b
    Start here:
      kvpager demo                              what the pager does, measured, in a few seconds
      kvpager replay trace.jsonl --sizes 1%,5%  hit rates of your own requests at several pool sizes
      kvpager bench                             what each call costs on this machine
      kvpager generate chat -o chat.jsonl       a made-up trace with tokens, for replay and blocksize
      kvpager blocksize chat.jsonl              which block size to take, and why
      kvpager fragmentation --plot slots.png    why pages: the same memory with and without them
      kvpager prefix                            what a prefix cache keeps and loses, block by block
      kvpager cost --tokens 4000                swap a victim or compute it again: what each takes
      kvpager simulate thrash                   a full pool, and what admission policies make of it
      kvpager diagnose trace.jsonl --blocks N   what is wrong with a load and its engine, and what to change
      kvpager tier inspect PATH                 what a disk store keeps; verify PATH reads and checks all of it

    Every command explains itself with --help and prints one JSON object with --json.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; whatever is wrong with it, its input or its output is one line on stderr, no traceback."""
    try:
        status = kvpager.main(arguments, prog_name="kvpager", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "kvpager"
        return _refuse(f"{command}: {error.format_message()} (see {command} --help)")
    except click.ClickException as error:
        return _refuse(f"kvpager: {error.format_message()}")
    except KvPagerError as error:
        return _refuse(f"kvpager: {error}")
    except MemoryError:
        return _refuse("kvpager: the machine has not enough memory for this")
    except (click.Abort, KeyboardInterrupt):
        click.echo("kvpager: interrupted", err=True)
        return 130
    except OSError as error:
        if error.filename is not None:  # of a file, not of the output: each command has its own words for that
            raise
        # Python would complain once more while it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # The reader has gone (`kvpager ... | head`): it has seen enough and needs no message.
        if not isinstance(error, BrokenPipeError):
            _refuse(f"kvpager: the output cannot be written: {error.strerror or error}")
        return 1


def _refuse(message: str) -> int:
    click.echo(printable(" ".join(message.split())), err=True)
    return 2
