"""A thin client of OpenAI-compatible endpoints, and the reading of what models send back.

`openai` is imported on the first request, never at module import: everything else works without it and offline.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from openai import OpenAI

DEFAULT_MODEL = "gpt-4o-mini"
DEFAULT_URL = "https://api.openai.com/v1"
_LOCAL_KEY = "not-needed"  # local servers want a key to be there, and ignore it


class ModelError(RuntimeError):
    """An endpoint or a reply failed. The message names the endpoint or position, what happened, and the remedy."""


class Client:
    """Chat completions over the `openai` package.

    `timeout` is in seconds a try; `retries` counts tries after the first, on 408, 409, 429, 5xx, timeouts and lost
    connections, with back-off (`Retry-After` is honoured). `usage` sums tokens and `requests` (replies received).
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        model: str | None = None,
        timeout: float = 60.0,
        retries: int = 3,
    ) -> None:
        self.base_url = (base_url or DEFAULT_URL).strip()
        self.model = model or DEFAULT_MODEL
        self.timeout = timeout
        self.retries = retries
        self.usage = {"prompt_tokens": 0, "completion_tokens": 0, "requests": 0}
        self.endpoint = _public(self.base_url)
        self._key = (api_key or "").strip() or _LOCAL_KEY
        if not (self._key.isascii() and self._key.isprintable() and " " not in self._key):
            # Left to the HTTP layer, this ends in an error that quotes the header, and with it the key.
            raise ModelError("the API key holds a space, line break or non-ASCII; set OPENAI_API_KEY to the key alone")
        self._openai: OpenAI | None = None

    def __repr__(self) -> str:
        return f"Client({self.endpoint!r}, model={self.model!r})"

    @classmethod
    def from_env(cls) -> Client | None:
        """The client of OPENAI_API_KEY, OPENAI_BASE_URL and AMEM_MODEL; None when neither key nor address is set."""
        key, url = os.environ.get("OPENAI_API_KEY"), os.environ.get("OPENAI_BASE_URL")
        return cls(url, key, os.environ.get("AMEM_MODEL")) if key or url else None

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send the body of a chat completion and return the raw response, usage included, as a plain dict.

        A `model` in the request wins over the client's. An endpoint that refuses `response_format` json_schema
        (400 or 422) is asked once more without it. Raises ModelError.
        """
        import openai

        self._openai = self._openai or openai.OpenAI(
            base_url=self.base_url, api_key=self._key, timeout=self.timeout, max_retries=self.retries
        )
        body: dict[str, Any] = {"model": self.model, **request}
        bare = {key: value for key, value in body.items() if key != "response_format"}
        reply: Any = None
        try:
            try:
                reply = self._openai.post("/chat/completions", body=body, cast_to=object)
            except (openai.BadRequestError, openai.UnprocessableEntityError):
                if (body.get("response_format") or {}).get("type") != "json_schema":
                    raise
                reply = self._openai.post("/chat/completions", body=bare, cast_to=object)
            reply = json.loads(reply) if isinstance(reply, str) else reply
            if not isinstance(reply, dict):
                raise ValueError("not an object")
        except (openai.OpenAIError, ValueError) as error:
            # `from None`: the causes below may quote headers or bodies with the key in them.
            raise ModelError(self._what_happened(error)) from None
        used = reply.get("usage") or {}
        self.usage["prompt_tokens"] += used.get("prompt_tokens") or 0
        self.usage["completion_tokens"] += used.get("completion_tokens") or 0
        self.usage["requests"] += 1
        return reply

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


def text_of(response: dict[str, Any]) -> str:
    """The text of a raw response's first choice. Raises ModelError if there is none, or if it was cut off."""
    choices = response.get("choices") or [{}]
    message = choices[0].get("message") or {}
    if choices[0].get("finish_reason") == "length":
        raise ModelError("the reply was cut off at the token limit; raise max_tokens or ask for less")
    if not isinstance(message.get("content"), str) or not message["content"].strip():
        cause = message.get("refusal") or response.get("error") or f"finish_reason {choices[0].get('finish_reason')}"
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
        except (json.JSONDecodeError, RecursionError) as error:
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
