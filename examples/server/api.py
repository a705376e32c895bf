"""HTTP in the OpenAI form: what a request may say, and how answers are told. Nothing here knows of blocks."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvpager.metrics import CONTENT_TYPE

from .requests import Event, Failed, NeverFitsError, OverloadedError, Request
from .scheduler import Scheduler

MAX_BODY_BYTES = 4 << 20
ROLES = ("system", "user", "assistant")
# Fields of the API that this server does not have, with the values that ask for nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "top_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
}
# Fields that change no answer.
IGNORED = {"user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier"}


class BadRequestError(ValueError):
    """What the client sent cannot be answered."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


class Fields:
    """A request's fields. What is not asked for by the end was not understood, and is refused rather than ignored."""

    def __init__(self, values: object, name: str | None = None) -> None:
        if not isinstance(values, dict):
            raise BadRequestError(f"{name or 'the body'} must be a JSON object", name)
        # null is the same as absent.
        self.values = {name: value for name, value in values.items() if value is not None}

    def take(self, name: str) -> Any:
        return self.values.pop(name, None)

    def integer(self, name: str, low: int, high: int | None = None) -> int | None:
        value: int | None = self.take(name)
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (is_integer and value >= low and (high is None or value <= high)):
            limits = f"an integer of {low} or more" if high is None else f"an integer of {low} to {high}"
            raise BadRequestError(f"{name} must be {limits}, not {_show(value)}", name)
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        value: float | None = self.take(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and math.isfinite(value) and low <= value <= high):
            raise BadRequestError(f"{name} must be a number of {low} to {high}, not {_show(value)}", name)
        return value

    def boolean(self, name: str) -> bool:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise BadRequestError(f"{name} must be true or false, not {_show(value)}", name)
        return bool(value)

    def done(self, where: str = "") -> None:
        for name, value in self.values.items():
            if name not in IGNORED and value not in NEUTRAL.get(name, ()):
                raise BadRequestError(f"{where}{name} is not supported by this server: leave it out", where + name)


def _show(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _messages(value: object) -> list[tuple[str, str]]:
    if not isinstance(value, list) or not value:
        raise BadRequestError("messages must be a list of one message or more", "messages")
    messages = []
    for number, message in enumerate(value):
        where = f"messages[{number}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise BadRequestError(f"{where} must be an object whose role is one of {', '.join(ROLES)}", where)
        content = message.get("content")
        if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            texts = [part.get("text") for part in content]
            content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
        if not isinstance(content, str):
            raise BadRequestError(f"{where}.content must be a string, or a list of text parts", f"{where}.content")
        try:
            content.encode()
        except UnicodeEncodeError as error:
            raise BadRequestError(f"{where}.content holds half a surrogate pair", f"{where}.content") from error
        messages.append((str(message["role"]), content))
    return messages


def _stop(value: object) -> tuple[str, ...]:
    stop = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stop, list) or len(stop) > 4 or not all(isinstance(each, str) and each for each in stop):
        raise BadRequestError("stop must be a string that is not empty, or a list of at most 4 of them", "stop")
    return tuple(stop)


class Api:
    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.model = scheduler, scheduler.model.name
        self.created = int(time.time())

    def app(self) -> Starlette:
        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            self.scheduler.start()
            try:
                yield
            finally:
                self.scheduler.close()

        routes = [
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/metrics", self.metrics),
        ]
        handlers: dict[Any, Any] = {HTTPException: _http_error, BadRequestError: _bad_request}
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)

    async def models(self, _: HttpRequest) -> Response:
        model = {"id": self.model, "object": "model", "created": self.created, "owned_by": "kvpager-example"}
        return JSONResponse({"object": "list", "data": [model]})

    async def metrics(self, _: HttpRequest) -> Response:
        """In the text form of Prometheus."""
        return Response(self.scheduler.exposition(), headers={"content-type": CONTENT_TYPE})

    async def chat_completions(self, http: HttpRequest) -> Response:
        fields = Fields(await _json(http))
        if (model := fields.take("model")) not in (None, self.model):
            raise BadRequestError(
                f"there is no model {_show(model)}, only {self.model!r}", "model", 404, "model_not_found"
            )
        is_streamed = fields.boolean("stream")
        options = fields.take("stream_options")
        options = Fields({} if options is None else options, "stream_options")
        has_usage = options.boolean("include_usage")
        options.done("stream_options.")
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()
        request = self._request(http, fields, lambda event: loop.call_soon_threadsafe(events.put_nowait, event))
        fields.done()
        try:
            self.scheduler.submit(request)
        except NeverFitsError as error:
            raise BadRequestError(str(error), "messages", code="context_length_exceeded") from error
        except OverloadedError as error:
            raise BadRequestError(str(error), status=503, code="overloaded") from error
        answer = Answer(self, request, events)
        if is_streamed:
            return AbortingStream(answer, has_usage)
        try:
            return await answer.whole(http)
        finally:
            self.scheduler.abort(request)

    def _request(self, http: HttpRequest, fields: Fields, on_event: Any) -> Request:
        prompt = self.scheduler.tokenizer.chat(_messages(fields.take("messages")))
        max_tokens = fields.integer("max_tokens", 1)
        temperature = fields.number("temperature", 0, 2)
        seed = fields.integer("seed", -(2**63), 2**64 - 1)
        # Who may share cached prefixes with whom: a client could tell by the time what others have asked.
        key = hashlib.sha256(http.headers.get("authorization", "").encode()).digest()
        return Request(
            prompt=np.array(prompt, np.int32),
            max_tokens=fields.integer("max_completion_tokens", 1) or max_tokens,
            on_event=on_event,
            temperature=1.0 if temperature is None else temperature,
            seed=secrets.randbits(64) if seed is None else seed % 2**64,
            stop=_stop(fields.take("stop")),
            n=fields.integer("n", 1, self.scheduler.limits.max_seqs) or 1,
            namespace=(("api-key", key),),
        )


class Answer:
    """One request's events, told in either form."""

    def __init__(self, api: Api, request: Request, events: asyncio.Queue[Event]) -> None:
        self.api, self.request, self.events = api, request, events
        self.head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": api.model}

    @property
    def usage(self) -> dict[str, Any]:
        prompt, completion = len(self.request.prompt), self.request.num_sampled
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.request.num_cached},
        }

    async def deltas(self) -> AsyncIterator[Event]:
        """Until each sample has ended, or the request failed."""
        unfinished = self.request.n
        while unfinished:
            event = await self.events.get()
            yield event
            unfinished = 0 if isinstance(event, Failed) else unfinished - (event.finish_reason is not None)

    async def whole(self, http: HttpRequest) -> Response:
        collect = asyncio.create_task(self._collect())
        gone = asyncio.create_task(_disconnected(http))
        try:
            await asyncio.wait([collect, gone], return_when=asyncio.FIRST_COMPLETED)
            return collect.result() if collect.done() else Response(status_code=499)  # the client is gone
        finally:
            for task in (collect, gone):
                task.cancel()

    async def _collect(self) -> Response:
        texts, reasons = [""] * self.request.n, [""] * self.request.n
        async for event in self.deltas():
            if isinstance(event, Failed):
                return _error(event.message, 500, "server_error")
            texts[event.index] += event.text
            reasons[event.index] = event.finish_reason or ""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text},
                "logprobs": None,
                "finish_reason": reason,
            }
            for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        return JSONResponse({**self.head, "object": "chat.completion", "choices": choices, "usage": self.usage})

    async def stream(self, has_usage: bool) -> AsyncIterator[str]:
        def data(choices: list[dict[str, Any]], **more: Any) -> str:
            chunk = {**self.head, "object": "chat.completion.chunk", "choices": choices, **more}
            return f"data: {json.dumps(chunk)}\n\n"

        def choice(index: int, delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
            return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

        for index in range(self.request.n):
            yield data([choice(index, {"role": "assistant", "content": ""})])
        async for event in self.deltas():
            if isinstance(event, Failed):
                yield f"data: {json.dumps(_error_body(event.message, 'server_error'))}\n\n"
                return
            if event.text or event.finish_reason:
                delta = {"content": event.text} if event.text else {}
                yield data([choice(event.index, delta, event.finish_reason)])
        if has_usage:
            yield data([], usage=self.usage)
        yield "data: [DONE]\n\n"


class AbortingStream(StreamingResponse):
    """A response whose end, however it comes, ends the request: nothing is computed for a client that is gone."""

    def __init__(self, answer: Answer, has_usage: bool) -> None:
        super().__init__(answer.stream(has_usage), media_type="text/event-stream")
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.answer.api.scheduler.abort(self.answer.request)


async def _json(http: HttpRequest) -> object:
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise BadRequestError(f"the body is larger than {MAX_BODY_BYTES} bytes", status=413)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is not JSON: {error}") from error


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _error(message: str, status: int, kind: str, param: str | None = None, code: str | None = None) -> Response:
    return JSONResponse(_error_body(message, kind, param, code), status)


async def _bad_request(_: HttpRequest, error: BadRequestError) -> Response:
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return _error(str(error), error.status, kind, error.param, error.code)


async def _http_error(_: HttpRequest, error: HTTPException) -> Response:
    return _error(error.detail, error.status_code, "invalid_request_error")
