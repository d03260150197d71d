"""A thin client of OpenAI-compatible endpoints, and the reading of what models send back.

`openai` is imported on the first request, never at module import: everything else works without it and offline.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from openai import OpenAI

DEFAULT_MODEL = "gpt-4o-mini"
DEFAULT_URL = "https://api.openai.com/v1"
TIMEOUT = 60.0  # seconds a try
CONCURRENCY = 8  # requests that run at the same time
MANY = 300  # brackets from which a reply may be nested too deeply to be written
_LOCAL_KEY = "not-needed"  # local servers want a key to be there, and ignore it


T = TypeVar("T")
R = TypeVar("R")


class ModelError(RuntimeError):
    """An endpoint or a reply failed. The message names the endpoint or position, what happened, and the remedy."""


class Client:
    """Chat completions over the `openai` package.

    `timeout` is in seconds a try; `retries` counts tries after the first, on 408, 409, 429, 5xx, timeouts and lost
    connections, with back-off (`Retry-After` is honoured). `usage` sums tokens and `requests` (replies received).
    One client may be used by several threads; `in_order` runs up to `concurrency` of them.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        model: str | None = None,
        timeout: float = TIMEOUT,
        retries: int = 3,
        concurrency: int = CONCURRENCY,
    ) -> None:
        self.base_url = (base_url or DEFAULT_URL).strip()
        self.model = model or DEFAULT_MODEL
        self.timeout = timeout
        self.retries = retries
        self.concurrency = concurrency
        self.usage = {"prompt_tokens": 0, "completion_tokens": 0, "requests": 0}
        self.endpoint = _public(self.base_url)
        self._key = (api_key or "").strip() or _LOCAL_KEY
        if not (self._key.isascii() and self._key.isprintable() and " " not in self._key):
            # Left to the HTTP layer, this ends in an error that quotes the header, and with it the key.
            raise ModelError("the API key holds a space, line break or non-ASCII; set OPENAI_API_KEY to the key alone")
        self._openai: OpenAI | None = None
        self._no_schema = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Client({self.endpoint!r}, model={self.model!r})"

    @classmethod
    def from_env(cls) -> Client | None:
        """The client of OPENAI_API_KEY, OPENAI_BASE_URL and AMEM_MODEL; None when neither key nor address is set.

        AMEM_TIMEOUT (seconds a try) and AMEM_CONCURRENCY stand beside them. Raises ModelError.
        """
        key, url = os.environ.get("OPENAI_API_KEY"), os.environ.get("OPENAI_BASE_URL")
        if not (key or url):
            return None
        seconds = number_from_env("AMEM_TIMEOUT") or TIMEOUT
        at_once = int(number_from_env("AMEM_CONCURRENCY") or CONCURRENCY)
        return cls(url, key, os.environ.get("AMEM_MODEL"), seconds, concurrency=max(1, at_once))

    def in_order(self, work: Callable[[T], R], items: Iterable[T], most: int = 1) -> Iterator[list[R]]:
        """`work(item)` of each item, in the order of the items, while up to `concurrency` of them run.

        Yields what is ready, up to `most` at a time. When the caller stops early, what has begun is finished and
        nothing more is begun.
        """
        pool = ThreadPoolExecutor(self.concurrency)
        try:
            running = deque(pool.submit(work, item) for item in items)
            while running:
                ready = [running.popleft().result()]
                while running and running[0].done() and len(ready) < most:
                    ready.append(running.popleft().result())
                yield ready
        finally:
            pool.shutdown(cancel_futures=True)

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send the body of a chat completion and return the raw response, usage included, as a plain dict.

        A `model` in the request wins over the client's. An endpoint that refuses `response_format` json_schema
        (400 or 422) is asked once more without it, and from then on without. Raises ModelError.
        """
        import openai

        with self._lock:
            self._openai = self._openai or openai.OpenAI(
                base_url=self.base_url, api_key=self._key, timeout=self.timeout, max_retries=self.retries
            )
        body: dict[str, Any] = {"model": self.model, **request}
        schema = (body.get("response_format") or {}).get("type") == "json_schema"
        bare = {key: value for key, value in body.items() if key != "response_format"}
        try:
            try:
                reply = self._post(bare if schema and self._no_schema else body)
            except (openai.BadRequestError, openai.UnprocessableEntityError):
                if not schema or self._no_schema:
                    raise
                reply = self._post(bare)
                self._no_schema = True
        except (openai.OpenAIError, ValueError, RecursionError) as error:
            # `from None`: the causes below may quote headers or bodies with the key in them.
            raise ModelError(self._what_happened(error)) from None
        with self._lock:
            for name, count in tokens_of(reply).items():
                self.usage[name] += count
        return reply

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        assert self._openai is not None
        for again in (self.retries > 0, False):  # what is no JSON is asked for once more: the `openai` client does not
            try:
                reply = self._openai.post("/chat/completions", body=body, cast_to=object)
                return self._clean(json.loads(reply) if isinstance(reply, str) else reply)
            except ValueError:
                if not again:
                    raise
        raise AssertionError

    def _clean(self, reply: Any) -> dict[str, Any]:
        """The reply as it may be stored: without the key, should the server echo it, and without half characters."""
        if not isinstance(reply, dict):
            raise ValueError("not an object")
        text = json.dumps(reply, ensure_ascii=False)
        if text.count("[") + text.count("{") > MANY:
            json.dumps(reply, indent=1)  # as run folders write it: hostile nesting fails here
        kept = text if self._key == _LOCAL_KEY else text.replace(json.dumps(self._key)[1:-1], "[key]")
        kept = re.sub("[\ud800-\udfff]", "\ufffd", kept)
        return reply if kept == text else json.loads(kept)

    def _what_happened(self, error: Exception) -> str:
        import openai

        tries = f"{self.retries + 1} {'try' if self.retries == 0 else 'tries'}"
        if isinstance(error, openai.APITimeoutError):
            return f"{self.endpoint} gave no answer within {self.timeout:g} s in {tries}; check it or raise the timeout"
        if isinstance(error, openai.APIConnectionError):
            return f"{self.endpoint} cannot be reached after {tries}; check OPENAI_BASE_URL and that the server runs"
        if not isinstance(error, openai.APIStatusError):
            return f"{self.endpoint} answered with something other than a JSON object; check OPENAI_BASE_URL"
        status, said = error.status_code, str(error.message).replace(self._key, "[key]")[:300]
        if status in (401, 403):
            return f"{self.endpoint} refused the key ({status}); check OPENAI_API_KEY"
        if status in (408, 409, 429) or status >= 500:
            return f"{self.endpoint} still fails after {tries} ({status}: {said}); wait, or check your quota there"
        return (
            f"{self.endpoint} refused the request ({status}: {said}); check OPENAI_BASE_URL, AMEM_MODEL and the request"
        )


def _public(url: str) -> str:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.scheme not in ("http", "https"):
        raise ModelError("the endpoint is no http(s) address; set OPENAI_BASE_URL to one like http://localhost:8000/v1")
    # Without user, password and query: those are secrets too.
    return f"{parts.scheme}://{host}{f':{port}' if port else ''}{parts.path}"


def number_from_env(name: str) -> float | None:
    """The number in an environment variable, above or at 0; None when it is not set. Raises ModelError."""
    said = os.environ.get(name, "").strip()
    if not said:
        return None
    if not re.fullmatch(r"\d+(\.\d+)?", said):
        raise ModelError(f"{name} is no number ({said[:40]!r}); set it to one like 2.5, or leave it out")
    return float(said)


def tokens_of(response: dict[str, Any]) -> dict[str, int]:
    """What a raw response says it used: prompt_tokens and completion_tokens (0 where it doesn't), and 1 request."""
    said = response.get("usage")
    used = said if isinstance(said, dict) else {}
    counts = {name: used.get(name) for name in ("prompt_tokens", "completion_tokens")}
    return {name: count if isinstance(count, int) else 0 for name, count in counts.items()} | {"requests": 1}


def text_of(response: dict[str, Any], cut: bool = False) -> str:
    """The text of a raw response's first choice. Raises ModelError if there is none.

    A text that was cut off at the token limit is an error too, unless `cut` says to take it.
    """
    choices = response.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    message = first["message"] if isinstance(first.get("message"), dict) else {}
    if first.get("finish_reason") == "length" and not cut:
        raise ModelError("the reply was cut off at the token limit; raise max_tokens or ask for less")
    if not isinstance(message.get("content"), str) or not message["content"].strip():
        cause = message.get("refusal") or response.get("error") or f"finish_reason {first.get('finish_reason')}"
        raise ModelError(f"the reply holds no text ({str(cause)[:200]}); ask again or use another model")
    return str(message["content"])


def json_of(text: str) -> Any:
    """The one JSON value in a reply: bare, fenced, or with prose around it.

    Broken or cut-off JSON is an error, never its longest healthy part, and so are two different values:
    facts must not get lost in silence. Raises ModelError with the position.
    """
    decoder = json.JSONDecoder(strict=False)  # models write raw line breaks into strings
    text = text.rstrip()
    first = start = len(text) - len(text.lstrip("\ufeff \t\r\n"))
    ranks: tuple[list[Any], ...] = ([], [], [])  # fenced; plain; and "[1]" or "{}", which may be just prose
    while start < len(text):
        kind, rest = text[start], text[start + 1 : start + 200].lstrip()[:1]
        meant = (kind == "{" and rest == '"') or (kind == "[" and rest in ("{", "[", '"'))
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
            if meant:
                where = _place(text, error.pos if isinstance(error, json.JSONDecodeError) else start)
                begun = _place(text, start)
                raise ModelError(
                    f"the reply's JSON, begun at {begun}, breaks at {where}; ask again, or for less"
                ) from None
            end = start + 1
        else:
            if start == first and end == len(text):
                return value
            if kind in "{[":
                fence = text[max(0, start - 12) : start].rstrip().lower().endswith(("```", "```json"))
                ranks[0 if fence else 1 if meant else 2].append(value)
        start = min((at for at in (text.find("{", end), text.find("[", end)) if at >= 0), default=len(text))
    found = next(filter(None, ranks), None)
    if not found:
        raise ModelError(
            f"the reply holds no JSON between line 1, column 1 and {_place(text, len(text))}: {text[:80]!r}; ask again"
        )
    if any(value != found[0] for value in found):
        raise ModelError(f"the reply holds {len(found)} different JSON values; ask for a single one")
    return found[0]


def _place(text: str, position: int) -> str:
    line = text.count("\n", 0, position) + 1
    return f"line {line}, column {position - text.rfind(chr(10), 0, position)}"
