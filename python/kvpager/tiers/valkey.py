"""Blocks on a Valkey or Redis server, shared by every process that uses the same prefix.

A record is one string value: a header of 16 bytes, the meta, the payload. The header is ``b"KVP1"`` and three
little-endian uint32: the CRC-32 of meta and payload, the length of the meta, the length of the payload. Its key is
``key_prefix`` and the 32 bytes of the block's key.
"""

from __future__ import annotations

import re
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, TransferError
from .breaker import Breaker
from .store import KEY_BYTES, Bytes, Shape, without

if TYPE_CHECKING:
    import redis

__all__ = ["ValkeyStore"]

MAGIC = b"KVP1"
HEADER = struct.Struct("<4sIII")
MAX_VALUE_BYTES = 512 * 2**20
"""What a server takes as one value unless it is told otherwise (``proto-max-bulk-len``)."""
COMMANDS = 1024
"""Commands of one batch at most, however small they are."""
COUNTS = ("hits", "misses", "stored", "present", "dropped", "corrupt", "deleted", "errors", "refused", "skipped")
OURS = {
    "socket_timeout": "give timeout_seconds",
    "socket_connect_timeout": "give timeout_seconds",
    "retry": "what fails is a miss, and tried again after rest_seconds",
    "retry_on_error": "what fails is a miss, and tried again after rest_seconds",
    "retry_on_timeout": "what fails is a miss, and tried again after rest_seconds",
    "decode_responses": "records are bytes",
    "protocol": "RESP2 is all that is needed, and all servers have it",
}
"""Options of the client that the store sets itself, and why."""
SECRET = ("username", "password", "ssl_password")


class ValkeyStore:
    """A `Store` on a Valkey or Redis server. Needs the client: ``pip install '.[redis]'``.

    ``url``: ``redis://host:6379/0``, ``rediss://`` with TLS, or ``unix:///path``; ``client_options`` go to the client
    as they are: ``username``, ``password``, ``ssl_ca_certs``. Neither they nor the URL's user and password appear in
    messages or in ``repr``. The server is first asked by the first call: a store may be made before it.

    The server is a cache that may be away. Whatever cannot be read is a miss, what cannot be written is dropped, and
    no wait for it is longer than ``timeout_seconds``. After a failure the server is left alone for
    ``rest_seconds`` (``clock`` tells the time): all calls miss at once. Then one call tries it again. A command that
    the server refuses (out of memory, a replica, a cluster's other node) costs that record only. `last_error` says
    what it was; `stats` counts ``errors`` (calls that the server failed), ``refused`` (commands) and ``skipped`` (calls
    that were not tried). Only ``delete_many`` and ``clear`` raise TransferError in such a case, since what stays could
    be hit.

    Each batch of commands has at most ``batch_bytes`` of records, or one record. ConfigError for arguments that cannot
    work, and if a record is larger than a value may be. How long records stay is the server's business: give it a
    limit and a policy (``maxmemory``, ``maxmemory-policy allkeys-lru``), or it refuses writes when it is full; what
    was deleted is gone for good as soon as the server has made it durable, by its own settings. ``evicted`` is 0 here,
    ``records``, ``bytes`` and ``max_bytes`` are -1: the server knows, and others write to it.
    """

    def __init__(
        self,
        url: str = "redis://localhost:6379/0",
        *,
        row_bytes: int,
        block_size: int,
        key_prefix: bytes = b"kvpager:",
        timeout_seconds: float = 0.5,
        rest_seconds: float = 5.0,
        batch_bytes: int = 8 * 2**20,
        clock: Callable[[], float] = time.monotonic,
        **client_options: Any,
    ) -> None:
        self._shape = Shape.of(row_bytes, block_size)
        self._value_bytes = HEADER.size + self.meta_bytes + self.row_bytes
        if self._value_bytes > MAX_VALUE_BYTES:
            raise ConfigError(
                f"a record has {self._value_bytes} bytes, but a server takes values of at most {MAX_VALUE_BYTES}:"
                " make blocks smaller"
            )
        if not isinstance(key_prefix, bytes) or not key_prefix:
            raise ConfigError(f"key_prefix is {key_prefix!r}; it must be bytes, at least one: what is cleared by it")
        for name, value in (("timeout_seconds", timeout_seconds), ("rest_seconds", rest_seconds)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
                raise ConfigError(f"{name} is {value!r}; it must be a number of seconds above 0")
        if isinstance(batch_bytes, bool) or not isinstance(batch_bytes, int) or batch_bytes < 1:
            raise ConfigError(f"batch_bytes is {batch_bytes!r}; it must be a whole number of at least 1")
        self._prefix = key_prefix
        self._batch = max(1, min(COMMANDS, batch_bytes // self._value_bytes))
        self._client = _connect(url, float(timeout_seconds), client_options)
        self._failures = _failures()
        options = self._client.connection_pool.connection_kwargs
        self._secrets = [str(value) for name, value in options.items() if value and name in SECRET]
        self._breaker = Breaker(rest_seconds, clock)
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(COUNTS, 0)
        self._last_error: str | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        options = self._client.connection_pool.connection_kwargs
        where = options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
        return (
            f"ValkeyStore({where!r}, row_bytes={self.row_bytes},"
            f" block_size={(self.meta_bytes - KEY_BYTES) // 4}, key_prefix={self._prefix!r})"
        )

    @property
    def meta_bytes(self) -> int:
        """Bytes of a meta."""
        return self._shape.meta_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a payload."""
        return self._shape.row_bytes

    @property
    def is_resting(self) -> bool:
        """Whether the server failed and has not answered since."""
        return self._breaker.is_open

    @property
    def last_error(self) -> str | None:
        """What the server, or the way to it, last failed with; None if nothing has. No credentials in it."""
        return self._last_error

    @property
    def is_local(self) -> bool:
        """False: see `Store`."""
        return False

    def contains_many(self, keys: Bytes) -> npt.NDArray[np.bool_]:
        """Which keys are there; all False for a server that does not answer."""
        names = self._names(self._shape.keys(keys))
        self._check_open()
        found = np.zeros(len(names), bool)
        try:
            for part in _parts(len(names), COMMANDS):
                found[part.start : part.stop] = [one == 1 for one in self._ask([("EXISTS", names[i]) for i in part])]
        except _AwayError:
            pass
        return found

    def get_many(self, keys: Bytes, metas: Bytes, rows: Bytes, row_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Read records into ``rows[row_ids]``. A damaged one is deleted, so that it can be stored again."""
        given = self._shape.records(keys, metas, rows, row_ids, writes_rows=True)
        self._check_open()
        names = self._names(given.keys)
        found = np.zeros(len(names), bool)
        damaged: list[bytes] = []
        try:
            for part in _parts(len(names), self._batch):
                for i, value in zip(part, self._ask([self._read(names[i]) for i in part]), strict=True):
                    if not self._is_ours(value, given.metas[i]):
                        continue
                    if self._is_whole(value):
                        payload = np.frombuffer(value, np.uint8, offset=HEADER.size + self.meta_bytes)
                        given.rows[given.row_ids[i]] = payload
                        found[i] = True
                    else:
                        damaged.append(names[i])
            if damaged:
                self._ask([("UNLINK", *damaged)])
        except _AwayError:
            pass
        hits = int(found.sum())
        self._count(hits=hits, misses=len(names) - hits, corrupt=len(damaged))
        return found

    def put_many(self, keys: Bytes, metas: Bytes, rows: Bytes, row_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Store ``rows[row_ids]``; what is there with the same meta is only looked at."""
        given = self._shape.records(keys, metas, rows, row_ids, writes_rows=False)
        self._check_open()
        names = self._names(given.keys)
        kept = np.zeros(len(names), bool)
        present = 0
        try:
            for part in _parts(len(names), self._batch):
                writes, twins, latest = list[int](), list[tuple[int, int]](), dict[bytes, int]()
                for i, is_there in zip(part, self._look(names, given.metas, part), strict=True):
                    write = latest.get(names[i])  # of this call, which the server has not seen yet
                    if write is None and is_there:
                        kept[i] = True
                        present += 1
                    elif write is not None and np.array_equal(given.metas[write], given.metas[i]):
                        twins.append((i, write))
                    else:
                        latest[names[i]] = i
                        writes.append(i)
                sets = [("SET", names[i], self._value(given.metas[i], given.rows[given.row_ids[i]])) for i in writes]
                kept[writes] = [answer == b"OK" for answer in self._ask(sets)]
                for i, write in twins:
                    kept[i] = kept[write]
                    present += int(kept[write])
        except _AwayError:
            pass
        stored = int(kept.sum()) - present
        self._count(present=present, stored=stored, dropped=len(names) - present - stored)
        return kept

    def _look(self, names: Sequence[bytes], metas: Bytes, part: range) -> list[bool]:
        """Which of a part's records are there already, whole as far as their length tells."""
        last = HEADER.size + self.meta_bytes - 1
        starts = [("GETRANGE", names[i], 0, last) for i in part]
        answers = self._ask([*starts, *(("STRLEN", names[i]) for i in part)])
        looked = zip(part, answers[: len(part)], answers[len(part) :], strict=True)
        return [length == self._value_bytes and self._is_ours(start, metas[i]) for i, start, length in looked]

    def delete_many(self, keys: Bytes) -> int:
        """Delete these records, all below them, and what hangs in the air. Looks at every record of this prefix.

        Records that another process stores meanwhile may be missed. TransferError if the server cannot be asked or
        refuses: then some may be deleted.
        """
        keys = self._shape.keys(keys)
        self._check_open()
        if not len(keys):
            return 0
        parents: dict[bytes, bytes] = {}
        first, last = HEADER.size, HEADER.size + KEY_BYTES - 1
        try:
            for names in self._scan():
                answers = self._ask([("GETRANGE", name, first, last) for name in names])
                for name, parent in zip(names, answers, strict=True):
                    if isinstance(parent, bytes):
                        parents[name[len(self._prefix) :]] = parent
            return self._unlink([self._prefix + key for key in without(keys, parents)])
        except _AwayError as error:
            raise TransferError(f"records may be left on the server, as it cannot delete them: {error}") from None

    def clear(self) -> None:
        """Delete every key of this prefix that is as long as a record's, and no other. TransferError as above."""
        self._check_open()
        try:
            for names in self._scan():
                self._unlink(names)
        except _AwayError as error:
            raise TransferError(f"records may be left on the server, as it cannot delete them: {error}") from None

    def close(self) -> None:
        """Let go of the connections, those of calls under way when these end. What is on the server stays."""
        self._is_closed = True
        self._client.connection_pool.disconnect(inuse_connections=False)

    def stats(self) -> dict[str, int]:
        """As `Store.stats` says, and ``errors``, ``refused`` and ``skipped``. Does not ask the server."""
        with self._lock:
            return {"records": -1, "bytes": -1, "max_bytes": -1, **self._counts, "evicted": 0}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Records as values.

    def _names(self, keys: Bytes) -> list[bytes]:
        return [self._prefix + key.tobytes() for key in keys]

    def _read(self, name: bytes) -> tuple[Any, ...]:
        """The command that reads a record, and of a value that is longer than a record a byte more and no further."""
        return ("GETRANGE", name, 0, self._value_bytes)

    def _value(self, meta: Bytes, row: Bytes) -> bytes:
        checksum = zlib.crc32(row.data, zlib.crc32(meta.data))
        return b"".join((HEADER.pack(MAGIC, checksum, self.meta_bytes, self.row_bytes), meta.data, row.data))

    def _is_ours(self, value: object, meta: Bytes) -> bool:
        """Whether a value, or the start of one, is a record of these sizes and of this meta."""
        if not isinstance(value, bytes) or len(value) < HEADER.size + self.meta_bytes:
            return False
        magic, _, meta_bytes, row_bytes = HEADER.unpack_from(value)
        if (magic, meta_bytes, row_bytes) != (MAGIC, self.meta_bytes, self.row_bytes):
            return False
        return value[HEADER.size : HEADER.size + self.meta_bytes] == meta.tobytes()

    def _is_whole(self, value: bytes) -> bool:
        checksum: int = HEADER.unpack_from(value)[1]
        return len(value) == self._value_bytes and zlib.crc32(memoryview(value)[HEADER.size :]) == checksum

    # The server.

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransferError("the store is closed")

    def _count(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count

    def _ask(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The answers to commands that are sent together; None for one that the server refuses.

        Raises `_AwayError` if the server is resting, does not answer or answers with what is no answer.
        """
        if not commands:
            return []
        if not self._breaker.admits():
            self._count(skipped=1)
            raise _AwayError(f"the server has failed a moment ago ({self._last_error}) and is left alone for a while")
        ended = self._breaker.abandoned
        try:
            pipeline: Any = self._client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            answers: list[Any] = pipeline.execute(raise_on_error=False)
            ended = self._breaker.succeeded
        except self._failures as error:
            ended = self._breaker.failed
            self._last_error = self._words(error)
            self._count(errors=1)
            raise _AwayError(self._last_error) from None
        finally:
            ended()
            if ended != self._breaker.succeeded or self._is_closed:
                # An answer may still be on its way (after an interrupt, say): nobody may take it for his own.
                self._client.connection_pool.disconnect(inuse_connections=False)
        for i, answer in enumerate(answers):
            if isinstance(answer, Exception):
                self._last_error = self._words(answer)
                self._count(refused=1)
                answers[i] = None
        return answers

    def _words(self, error: Exception) -> str:
        """An error in one line, without what the caller would not want to read in a log."""
        words = " ".join(f"{type(error).__name__}: {error}".split())
        for secret in self._secrets:
            words = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", "***", words)
        return words[:300]

    def _scan(self) -> Iterator[list[bytes]]:
        """The names of this prefix's records, some at a time. Other keys with this prefix have another length."""
        pattern = re.sub(rb"([*?\[\]^\\-])", rb"\\\1", self._prefix) + b"*"
        cursor = b"0"
        while True:
            answer = self._ask([("SCAN", cursor, "MATCH", pattern, "COUNT", COMMANDS)])[0]
            match answer:
                case [bytes(cursor), list(names)] if cursor.isdigit():
                    pass
                case _:
                    raise _AwayError(self._last_error or f"{answer!r} is no answer to SCAN")
            if names := [name for name in names if len(name) == len(self._prefix) + KEY_BYTES]:
                yield names
            if cursor == b"0":
                return

    def _unlink(self, names: Sequence[bytes]) -> int:
        deleted = 0
        for part in _parts(len(names), COMMANDS):
            answer = self._ask([("UNLINK", *(names[i] for i in part))])[0]
            if not isinstance(answer, int):
                raise _AwayError(self._last_error or f"{answer!r} is no answer to UNLINK")
            deleted += answer
            self._count(deleted=answer)
        return deleted


class _AwayError(Exception):
    """The server cannot be asked, and why."""


def _failures() -> tuple[type[Exception], ...]:
    from redis.exceptions import RedisError

    return (RedisError, OSError)


def _parts(number: int, size: int) -> Iterator[range]:
    """0..number in ranges of at most ``size``."""
    return (range(at, min(at + size, number)) for at in range(0, number, size))


def _connect(url: str, timeout_seconds: float, options: dict[str, Any]) -> redis.Redis:
    """A client with its timeouts and without retries. Connects to nothing yet."""
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ModuleNotFoundError as error:
        if error.name != "redis":
            raise
        raise ConfigError("ValkeyStore needs the client redis: pip install '.[redis]' in a clone of kvpager") from None
    for name in options:
        if name in OURS:
            raise ConfigError(f"{name} is not the caller's to set: {OURS[name]}")
    try:
        pool = redis.ConnectionPool.from_url(url, protocol=2, **options)
    except (ValueError, TypeError, AttributeError):
        # The client's own words may have the URL in them, and that a password.
        raise ConfigError(
            "url is none that the client understands: expected redis://[user:password@]host:port[/database],"
            " rediss:// or unix:///path, special characters in user and password written as %40 and the like"
        ) from None
    pool.connection_kwargs |= {
        "socket_timeout": timeout_seconds,
        "socket_connect_timeout": timeout_seconds,
        "retry": Retry(NoBackoff(), 0),
        "decode_responses": False,
    }
    for name in ("retry_on_error", "retry_on_timeout"):
        pool.connection_kwargs.pop(name, None)
    try:
        pool.connection_class(**pool.connection_kwargs)
    except (ValueError, TypeError):
        raise ConfigError(f"the client does not take one of the options {', '.join(sorted(options))}") from None
    client = redis.Redis(connection_pool=pool)
    # Answers as they came: what turns them into Python's types stumbles over a server that answers with something else.
    client.response_callbacks.clear()
    return client
