"""The client against a real HTTP server on loopback, and the reading of replies."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import traceback
from typing import Any

import pytest
from endpoint import Endpoint, answer

from amem.llm import Client, ModelError, json_of, text_of

KEY = "sk-secret-0123456789"
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def test_a_reply_comes_back_as_the_endpoint_sent_it(endpoint: Endpoint) -> None:
    client = Client(endpoint.url, KEY, "tiny", timeout=5, retries=0)
    response = client.complete({**ASK, "top_k": 5})
    assert response == answer("hello")
    assert text_of(response) == "hello"
    assert endpoint.asked == [
        {"path": "/v1/chat/completions", "key": f"Bearer {KEY}", "body": {"model": "tiny", **ASK, "top_k": 5}}
    ]


def test_usage_adds_up_over_requests_and_survives_a_reply_without_it(endpoint: Endpoint) -> None:
    client = Client(endpoint.url, KEY, retries=0)
    endpoint.script = [(200, {}, answer("a")), (200, {}, {"choices": []}), (200, {}, answer("b"))]
    for _ in range(3):
        client.complete(ASK)
    assert client.usage == {"prompt_tokens": 14, "completion_tokens": 6, "requests": 3}


def test_the_model_of_the_request_wins_over_that_of_the_client(endpoint: Endpoint) -> None:
    Client(endpoint.url, KEY, "mine", retries=0).complete({"model": "theirs", **ASK})
    assert endpoint.asked[0]["body"]["model"] == "theirs"


def test_a_rate_limit_is_waited_out_for_as_long_as_the_server_says(endpoint: Endpoint) -> None:
    endpoint.script = [(429, {"Retry-After": "1"}, {"error": {"message": "slow down"}}), (200, {}, answer("ok"))]
    begun = time.monotonic()
    assert text_of(Client(endpoint.url, KEY, retries=1).complete(ASK)) == "ok"
    assert time.monotonic() - begun >= 1.0  # its own first back-off is at most half a second
    assert len(endpoint.asked) == 2


def test_a_server_that_keeps_failing_ends_in_one_sentence(endpoint: Endpoint) -> None:
    endpoint.script = [(500, {}, {"error": {"message": "out of memory"}})]
    with pytest.raises(ModelError, match=r"still fails after 2 tries \(500.*out of memory.*; wait") as caught:
        Client(endpoint.url, KEY, retries=1).complete(ASK)
    assert endpoint.url in str(caught.value)
    assert len(endpoint.asked) == 2


def test_a_refused_schema_is_left_out_once(endpoint: Endpoint) -> None:
    endpoint.script = [(400, {}, {"error": {"message": "response_format not supported"}}), (200, {}, answer("{}"))]
    request = {**ASK, "response_format": SCHEMA}
    assert text_of(Client(endpoint.url, KEY, retries=0).complete(request)) == "{}"
    first, second = (asked["body"] for asked in endpoint.asked)
    assert first["response_format"] == SCHEMA
    assert {**second, "response_format": SCHEMA} == first
    assert request["response_format"] == SCHEMA  # the caller's request stays as it was


def test_a_bad_request_is_not_repeated_for_ever(endpoint: Endpoint) -> None:
    endpoint.script = [(400, {}, {"error": {"message": "context too long"}})]
    for request, tries in (({**ASK, "response_format": SCHEMA}, 2), (ASK, 1)):
        endpoint.asked.clear()
        with pytest.raises(ModelError, match=r"refused the request.*context too long"):
            Client(endpoint.url, KEY, retries=3).complete(request)
        assert len(endpoint.asked) == tries


def test_an_endpoint_that_hangs_is_given_up_after_the_timeout(endpoint: Endpoint) -> None:
    endpoint.script = [(200, {}, 20.0)]
    begun = time.monotonic()
    with pytest.raises(ModelError, match=r"no answer within 0\.3 s in 1 try; check it or raise the timeout"):
        Client(endpoint.url, KEY, timeout=0.3, retries=0).complete(ASK)
    assert time.monotonic() - begun < 5


def test_an_endpoint_that_is_not_there_is_named(endpoint: Endpoint) -> None:
    client = Client("http://127.0.0.1:9/v1", KEY, retries=0)
    with pytest.raises(ModelError, match=r"http://127\.0\.0\.1:9/v1 cannot be reached.*check OPENAI_BASE_URL"):
        client.complete(ASK)


@pytest.mark.parametrize(
    ("headers", "body"),
    [({"Content-Type": "text/html"}, "<html>login</html>"), ({}, '{"choices": ['), ({}, "[1]"), ({}, "null")],
)
def test_an_answer_that_is_no_json_object_is_an_error(endpoint: Endpoint, headers: dict[str, str], body: str) -> None:
    endpoint.script = [(200, headers, body)]
    with pytest.raises(ModelError, match="something other than a JSON object"):
        Client(endpoint.url, KEY, retries=0).complete(ASK)


def test_json_under_a_wrong_content_type_is_read(endpoint: Endpoint) -> None:
    endpoint.script = [(200, {"Content-Type": "text/plain"}, answer("fine"))]
    assert text_of(Client(endpoint.url, KEY, retries=0).complete(ASK)) == "fine"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 429, 500])
def test_the_key_is_in_no_message_even_if_the_server_echoes_it(endpoint: Endpoint, status: int) -> None:
    endpoint.script = [(status, {}, {"error": {"message": f"bad key {KEY}"}})]
    client = Client(endpoint.url.replace("http://", "http://ann:pass@"), KEY, retries=0)
    with pytest.raises(ModelError) as caught:
        client.complete(ASK)
    shown = "".join(traceback.format_exception(caught.value)) + repr(client)
    assert "127.0.0.1" in shown
    assert KEY not in shown
    assert "pass@" not in shown


def test_a_key_that_no_header_can_carry_is_refused_without_quoting_it() -> None:
    for key in ("sk-abc\nsk-def", "sk abc", "密钥"):
        with pytest.raises(ModelError, match="OPENAI_API_KEY") as caught:
            Client(api_key=key)
        assert key not in str(caught.value)
    Client(api_key=f"{KEY}\n")  # the line ending of a key file is no fault


@pytest.mark.parametrize("address", ["localhost:8000/v1", "ftp://host/v1", "http://", "http://host:port/v1"])
def test_an_address_that_is_none_is_refused_at_once(address: str) -> None:
    with pytest.raises(ModelError, match=r"no http.* address; set OPENAI_BASE_URL"):
        Client(address)


def test_from_env_is_none_without_key_and_address(monkeypatch: pytest.MonkeyPatch, endpoint: Endpoint) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "AMEM_MODEL"):
        monkeypatch.delenv(name, raising=False)
    assert Client.from_env() is None
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    client = Client.from_env()
    assert client is not None and (client.model, client.endpoint) == ("gpt-4o-mini", "https://api.openai.com/v1")
    monkeypatch.delenv("OPENAI_API_KEY")
    monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url)
    monkeypatch.setenv("AMEM_MODEL", "local")
    client = Client.from_env()
    assert client is not None
    client.complete(ASK)
    assert endpoint.asked[0]["key"] == "Bearer not-needed"
    assert endpoint.asked[0]["body"]["model"] == "local"


def test_an_endpoint_that_refuses_schemas_is_sent_no_more_of_them(endpoint: Endpoint) -> None:
    endpoint.script = [(400, {}, {"error": {"message": "no response_format here"}}), (200, {}, answer("{}"))]
    client = Client(endpoint.url, KEY, retries=0)
    for _ in range(3):
        client.complete({**ASK, "response_format": SCHEMA})
    assert ["response_format" in asked["body"] for asked in endpoint.asked] == [True, False, False, False]


def test_an_answer_that_is_no_json_is_asked_for_once_more(endpoint: Endpoint) -> None:
    endpoint.script = [(200, {}, '{"choices": ['), (200, {}, answer("whole"))]
    assert text_of(Client(endpoint.url, KEY, retries=3).complete(ASK)) == "whole"


def test_what_a_reply_cannot_hold_in_a_file_is_put_right(endpoint: Endpoint) -> None:
    endpoint.script = [(200, {}, json.dumps({**answer("half \ud83d"), "echo": f"Bearer {KEY}"}))]
    reply = Client(endpoint.url, KEY, retries=0).complete(ASK)
    assert text_of(reply) == "half \ufffd" and reply["echo"] == "Bearer [key]"
    endpoint.script = [(200, {}, '{"choices":' + "[" * 5000 + "]" * 5000 + "}")]
    with pytest.raises(ModelError, match="something other than a JSON object"):
        Client(endpoint.url, KEY, retries=0).complete(ASK)


def test_work_runs_at_once_and_comes_back_in_order() -> None:
    client, lock, busy, most_busy = Client(concurrency=8), threading.Lock(), 0, 0

    def work(number: int) -> int:
        nonlocal busy, most_busy
        with lock:
            busy += 1
            most_busy = max(most_busy, busy)
        time.sleep(0.2 if number % 8 == 0 else 0.02)
        with lock:
            busy -= 1
        return number

    ready = list(client.in_order(work, range(32), most=4))
    assert [number for some in ready for number in some] == list(range(32))
    assert max(len(some) for some in ready) <= 4
    assert 2 <= most_busy <= 8


@pytest.mark.parametrize(("name", "value"), [("AMEM_TIMEOUT", "soon"), ("AMEM_CONCURRENCY", "-3")])
def test_a_setting_that_is_no_number_is_named(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv(name, value)
    with pytest.raises(ModelError, match=f"{name} is no number"):
        Client.from_env()


def test_importing_the_room_imports_no_openai() -> None:
    check = "import sys, amem.llm; amem.llm.Client('http://127.0.0.1:9'); sys.exit('openai' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0


@pytest.mark.parametrize(
    "response",
    [
        {},
        {"choices": []},
        {"choices": [{"message": {"content": None, "refusal": "I cannot"}}]},
        {"choices": [{"message": {"content": "  "}, "finish_reason": "content_filter"}]},
        {"error": {"message": "overloaded"}},
        {"choices": "none"},
        {"choices": [None]},
        {"choices": [{"message": "hello"}]},
    ],
)
def test_a_response_without_text_is_an_error(response: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="holds no text"):
        text_of(response)


def test_a_reply_cut_off_at_the_token_limit_is_an_error() -> None:
    with pytest.raises(ModelError, match="cut off at the token limit"):
        text_of(answer('{"facts": [', finish="length"))


FACTS = {"facts": [{"text": "a } and ``` in it"}, {"text": "押金 {3200}"}]}
CLEAN = json.dumps(FACTS, ensure_ascii=False)


@pytest.mark.parametrize(
    "reply",
    [
        CLEAN,
        f"  \n{CLEAN}\n",
        f"\ufeff{CLEAN}",
        json.dumps(FACTS, indent=2),
        f"```json\n{CLEAN}\n```",
        f"```\n{CLEAN}\n```\nThat is all.",
        f"Here it is:\n```JSON\n{CLEAN}\n```",
        f"The set {{a, b}} of [sic] facts [1] is {CLEAN} as in {{this}}.",
        f"I use {{}} for empty. {CLEAN}",
        f"{CLEAN}\n\nOnce more: {CLEAN}",
        f'For {{"text": "x"}} the answer is\n```json\n{CLEAN}\n```',
        f"{{{CLEAN}}}",
    ],
)
def test_the_json_of_a_reply_is_found_in_fences_and_prose(reply: str) -> None:
    assert json_of(reply) == FACTS


@pytest.mark.parametrize(("reply", "value"), [("[]", []), ("{}", {}), ("None found: []", []), ("null", None), ("3", 3)])
def test_an_empty_answer_is_an_answer(reply: str, value: Any) -> None:
    assert json_of(reply) == value


def test_raw_line_breaks_in_strings_are_taken() -> None:
    assert json_of('{"a": "one\ntwo"}') == {"a": "one\ntwo"}


@pytest.mark.parametrize("cut", range(2, len(CLEAN)))
def test_truncated_json_is_an_error_and_never_its_first_healthy_part(cut: int) -> None:
    with pytest.raises(ModelError, match=r"line 1, column \d+"):
        json_of(CLEAN[:cut])


def test_a_bad_escape_deep_inside_is_an_error_with_its_position() -> None:
    with pytest.raises(ModelError, match="begun at line 2, column 1, breaks at line 3, column 8"):
        json_of('Facts:\n{"facts": [{"text": "ok"},\n{"b": "\\x"}, {"c": 1}]}')


def test_two_different_answers_are_an_error() -> None:
    with pytest.raises(ModelError, match="2 different JSON values"):
        json_of('{"fact": 1}\n{"fact": 2}')


@pytest.mark.parametrize("reply", ["", "   ", "I found nothing.", "{'single': 'quotes'}", "{"])
def test_a_reply_without_json_is_an_error(reply: str) -> None:
    with pytest.raises(ModelError, match="holds no JSON between line 1, column 1 and"):
        json_of(reply)


def test_a_number_of_thousands_of_digits_is_an_error_and_not_a_crash() -> None:
    with pytest.raises(ModelError, match="breaks at"):
        json_of('{"a": ' + "9" * 5000 + "}")


def test_hostile_nesting_is_an_error_and_not_a_crash() -> None:
    with pytest.raises(ModelError, match="breaks at"):
        json_of("[" * 100_000)
