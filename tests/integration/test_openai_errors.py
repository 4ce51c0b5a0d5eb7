"""Every error has OpenAI's shape, its status and a request id; the server stays up."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from baton_gateway.config import Settings
from baton_gateway.drain_state import DrainState
from msgspec import structs

from baton.errors import BatonError, EngineFailed, InvalidRequest, NoWorkers, Overloaded
from baton.messages.attempts import DecodeTask
from tests.harness.gateway.actors import CONTEXT_TOKENS, MODEL
from tests.harness.gateway.stage import Stage, open_stage
from tests.harness.limits import HANG_S

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
SETTINGS = Settings(port=0, body_bytes_max=100_000, admission_wait_s=0.3, choices_max=4)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with open_stage(SETTINGS) as opened:
        opened.say("ok")
        yield opened


@pytest.fixture
async def impatient() -> AsyncIterator[Stage]:
    """A gateway that waits half a second for a head and for a body: no request that must succeed is sent to it."""
    async with open_stage(structs.replace(SETTINGS, body_read_s=0.5)) as opened:
        yield opened


@pytest.fixture
async def client(stage: Stage) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stage.base_url, timeout=HANG_S, verify=False) as opened:
        yield opened


def error_of(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Check an error's form and return it."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == code
    assert body["error"]["message"]
    return body["error"]


async def test_paths_and_methods(client: httpx.AsyncClient) -> None:
    missing = error_of(await client.post("/chat/completions", json=HI), 404, "not_found")
    assert "/v1/chat/completions" in missing["message"]
    error_of(await client.get("/v1/models/nope"), 404, "model_not_found")
    error_of(await client.post(CHAT, json={**HI, "model": "nope"}), 404, "model_not_found")
    refused = await client.get(CHAT)
    error_of(refused, 405, "method_not_allowed")
    assert refused.headers["allow"] == "POST"
    for path, methods in (("/v1/models", "GET, HEAD"), ("/v1/responses/r", "DELETE, GET, HEAD")):
        refused = await client.put(path)
        error_of(refused, 405, "method_not_allowed")
        assert refused.headers["allow"] == methods
    assert (await client.post(f"{CHAT}/", json=HI)).status_code == 200
    models, head = await client.get("/v1/models/"), await client.head("/v1/models")
    assert (models.json()["object"], head.status_code, head.content) == ("list", 200, b"")
    assert models.json()["data"][0]["root"] == MODEL
    assert head.headers["content-length"] == models.headers["content-length"]


async def test_a_gateway_that_is_being_stopped_sends_requests_elsewhere(
    stage: Stage, client: httpx.AsyncClient
) -> None:
    stage.gateway.drain_state = DrainState.CLOSING
    served = await client.post(CHAT, json=HI)
    assert (served.status_code, served.headers["connection"]) == (200, "close")
    error_of(await client.get("/ready"), 503, "unavailable")
    stage.gateway.drain_state = DrainState.CLOSED
    refused = await client.post(CHAT, json=HI)
    error_of(refused, 503, "unavailable")
    assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")
    assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400), (b"{", 400), (b"[]", 400), (b"\xff", 400), (b'{"model": "\xff"}', 400), (b"[" * 50_000, 400),
        (b'{"temperature": NaN}', 400), (b"x" * 100_001, 413),
    ],
)  # fmt: skip
async def test_bodies_that_are_none(client: httpx.AsyncClient, content: bytes, status: int) -> None:
    response = await client.post(CHAT, content=content)
    error_of(response, status, "payload_too_large" if status == 413 else "invalid_request")


async def test_a_body_without_a_length_is_cut_off_too(client: httpx.AsyncClient) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b"x" * 1000

    try:
        response = await client.post(CHAT, content=endless())
    except httpx.TransportError:
        return  # The server closed while we were still writing.
    error_of(response, 413, "payload_too_large")


async def connect(stage: Stage) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = stage.base_url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


CHUNKED = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()


def head_of(content_bytes: int) -> bytes:
    return f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {content_bytes}\r\n\r\n".encode()


async def test_a_body_that_never_comes(impatient: Stage) -> None:
    reader, writer = await connect(impatient)
    writer.write(head_of(100) + b"{")
    answer = await reader.read(4096)
    assert b"400" in answer.split(b"\r\n")[0]
    assert b"did not arrive" in answer
    writer.close()


async def exchange(stage: Stage, sent: bytes) -> tuple[int, bytes]:
    """Send bytes; return the status and the body received until the connection ends."""
    reader, writer = await connect(stage)
    writer.write(sent)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x00\x01 nonsense\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx-slow: ", 408),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"x" * 70_000, 431),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"x" * 70_000 + b"\r\n\r\n", 431),
        (CHUNKED + b"zz\r\n", 400),
    ],
)
async def test_heads_that_are_none(impatient: Stage, sent: bytes, status: int) -> None:
    answered, body = await exchange(impatient, sent)
    assert answered == status
    assert json.loads(body)["error"]["code"] == "invalid_request"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/", "/v1/messages/count_tokens?beta=true"])
@pytest.mark.parametrize(
    ("rest", "status"),
    [
        (b"host: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"host: x\r\ncontent-length: many\r\n\r\n", 400),
        (b"host: x\r\nx-slow: ", 408),
        (b"host: x\r\nx-long: " + b"x" * 70_000 + b"\r\n\r\n", 431),
    ],
    ids=["chunk", "length", "slow", "long"],
)
async def test_malformed_messages_get_errors_of_anthropic(
    impatient: Stage, path: str, rest: bytes, status: int
) -> None:
    answered, body = await exchange(impatient, f"POST {path} HTTP/1.1\r\n".encode() + rest)
    assert answered == status
    error = json.loads(body)
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert set(error) == {"type", "error", "request_id"}


async def test_malformed_requests_are_not_logged(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    for sent in (b"nonsense\r\n\r\n", CHUNKED + b"zz\r\n"):
        await exchange(stage, sent)
    assert [record.getMessage() for record in caplog.records if record.name.startswith("uvicorn")] == []


async def test_a_malformed_body_leaves_the_answer_before_it_alone(stage: Stage) -> None:
    stage.workers["d1"].script.stall_at = 1
    asked = json.dumps({**HI, "stream": True}).encode()
    reader, writer = await connect(stage)
    writer.write(head_of(len(asked)) + asked)
    answer = await reader.readuntil(b"}\n\n")
    writer.write(CHUNKED + b"zz\r\n")
    answer += await reader.read()
    writer.close()
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith(b"HTTP/1.1 200 OK")


async def test_a_connection_without_a_request_is_closed() -> None:
    async with open_stage(Settings(port=0, keep_alive_s=1)) as stage:
        reader, writer = await connect(stage)
        assert await reader.read() == b""
        writer.close()


async def test_an_offer_of_another_protocol_is_declined(client: httpx.AsyncClient) -> None:
    offer = {"connection": "upgrade, http2-settings", "upgrade": "h2c", "http2-settings": "AAEAAEAA"}
    for _ in range(2):
        answer = await client.post(CHAT, json=HI, headers=offer)
        assert (answer.status_code, answer.json()["object"]) == (200, "chat.completion")


async def test_a_long_body_counts_nothing_towards_the_head_behind_it(stage: Stage) -> None:
    body = json.dumps(HI).encode() + b" " * 70_000
    reader, writer = await connect(stage)
    writer.write(head_of(len(body)) + body + b"GET /health HTTP/1.1\r\nhost: ")
    assert b" 200 " in await reader.readuntil(b"\r\n")
    writer.write(b"x\r\nconnection: close\r\n\r\n")
    assert b'{"status":"alive"}' in await reader.read()
    writer.close()


async def test_the_rest_of_a_refused_body_is_received(stage: Stage) -> None:
    reader, writer = await connect(stage)
    for _ in range(2):  # Each body is shorter than what is received of one, both together are longer.
        writer.write(head_of(200_000))
        assert b" 413 " in await reader.readuntil(b"}}")
        writer.write(b"x" * 200_000)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert b'{"status":"alive"}' in await reader.read()
    writer.close()


async def test_an_endless_body_is_left_once_it_is_refused(stage: Stage) -> None:
    reader, writer = await connect(stage)
    writer.write(head_of(1 << 40))
    assert b" 413 " in await reader.readuntil(b"}}")
    with pytest.raises(ConnectionError):
        for _ in range(256):  # More MiB than the sockets' buffers hold.
            writer.write(b"x" * (1 << 20))
            await writer.drain()
    writer.close()


async def test_a_body_in_a_coding(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, content=gzip.compress(b"{}"), headers={"content-encoding": "gzip"})
    assert "gzip" in error_of(response, 400, "invalid_request")["message"]


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{}]}, "tools[0].type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"temperature": 9}, "temperature"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"n": 5}, "n"),
    ({"stop_token_ids": [512]}, "stop_token_ids"),
    ({"logit_bias": {"512": 1, "5": 1}}, 'logit_bias["512"]'),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
]


@pytest.mark.parametrize(("fields", "param"), FIELDS)
async def test_fields(client: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    error = error_of(await client.post(CHAT, json={**HI, **fields}), 400, "invalid_request")
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("prompt", ["", [512], [[1], [4_000_000_000]]])
async def test_prompts(client: httpx.AsyncClient, prompt: object) -> None:
    error = error_of(await client.post(COMPLETIONS, json={"model": MODEL, "prompt": prompt}), 400, "invalid_request")
    assert error["param"].startswith("prompt")


@pytest.mark.parametrize("prompt_tokens", [CONTEXT_TOKENS, 8000])
async def test_context_length(client: httpx.AsyncClient, prompt_tokens: int) -> None:
    body = {"model": MODEL, "prompt": [5] * prompt_tokens, "max_tokens": 1}
    error = error_of(await client.post(COMPLETIONS, json=body), 400, "context_length_exceeded")
    assert str(CONTEXT_TOKENS) in error["message"]
    assert str(prompt_tokens) in error["message"]


async def test_an_output_that_no_context_has_room_for(client: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": [5], "max_tokens": CONTEXT_TOKENS + 1}
    error = error_of(await client.post(COMPLETIONS, json=body), 400, "context_length_exceeded")
    assert error["param"] == "max_tokens"


@pytest.mark.parametrize("asked", [{"max_tokens": CONTEXT_TOKENS}, {"max_tokens": 6}, {}], ids=str)
async def test_an_output_is_cut_to_the_room_that_the_prompt_leaves(
    stage: Stage, client: httpx.AsyncClient, asked: dict[str, int]
) -> None:
    """The rule of vLLM's server, for requested output lengths and for the default of 16."""
    stage.say("and so on " * 10, ends=False)
    body = {"model": MODEL, "prompt": [5] * (CONTEXT_TOKENS - 5), **asked}
    answer = (await client.post(COMPLETIONS, json=body)).json()
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "header",
    [
        ("x-baton-deadline-s", "nan"),
        ("x-baton-deadline-s", "-1"),
        ("x-baton-disaggregation", "maybe"),
        ("x-baton-ttft-ms", "0"),
        ("x-baton-tpot-ms", "fast"),
        ("x-baton-priority", "0"),
    ],
)
async def test_headers(client: httpx.AsyncClient, header: tuple[str, str]) -> None:
    error = error_of(await client.post(CHAT, json=HI, headers=dict([header])), 400, "invalid_request")
    assert error["param"] == header[0]


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        ("?starting_after=abc", "starting_after", "`starting_after`: input should be a valid integer"),
        ("?starting_after=-2", "starting_after", "`starting_after`: input should be greater than or equal to -1"),
        ("?stream=maybe", "stream", "`stream`: input should be a valid boolean"),
        ("/input_items?limit=1000", "limit", "`limit`: input should be less than or equal to 100"),
        ("/input_items?order=foo", "order", "`order`: input should be 'asc' or 'desc'"),
    ],
)
async def test_query_parameters(client: httpx.AsyncClient, asked: str, param: str, said: str) -> None:
    error = error_of(await client.get(f"/v1/responses/resp_x{asked}"), 400, "invalid_request")
    assert error["param"] == param
    assert error["message"].startswith(said)
    assert "\n" not in error["message"]
    assert ".py" not in error["message"]


async def test_request_ids(client: httpx.AsyncClient) -> None:
    mine = await client.get("/health", headers={"x-request-id": "my-id.1"})
    assert mine.headers["x-request-id"] == "my-id.1"
    for hostile in ("a" * 129, "a b", "", "<script>"):
        made = await client.get("/nope", headers={"x-request-id": hostile})
        assert made.headers["x-request-id"] not in ("", hostile)


@pytest.mark.parametrize(
    ("refusal", "status"), [(Overloaded("full", retry_after_s=1.2), 429), (NoWorkers("none"), 503)]
)
async def test_refused_by_the_scheduler(
    stage: Stage, client: httpx.AsyncClient, refusal: BatonError, status: int
) -> None:
    stage.scheduler.refusal = refusal
    response = await client.post(CHAT, json=HI)
    error_of(response, status, refusal.code)
    if status == 429:
        assert response.headers["retry-after"] == "2"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_deadline(stage: Stage, client: httpx.AsyncClient, stream: bool) -> None:
    stage.workers["d1"].script.stall_at = 0
    response = await client.post(CHAT, json={**HI, "stream": stream}, headers={"x-baton-deadline-s": "0.2"})
    error_of(response, 504, "deadline_exceeded")
    await stage.wait_for(lambda: not stage.workers["d1"].attempts)


async def test_an_error_in_a_stream_is_an_event(stage: Stage, client: httpx.AsyncClient) -> None:
    stage.say("the client sees some of this")
    script = stage.workers["d1"].script
    script.fail_at, script.interval_s = 5, 0.02
    response = await client.post(CHAT, json={**HI, "stream": True, "seed": 1})
    assert response.status_code == 200
    *events, last, nothing = response.text.split("\n\n")
    assert nothing == ""
    assert events
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "not_resumable"


async def test_the_engines_refusal_reaches_the_client(stage: Stage, client: httpx.AsyncClient) -> None:
    stage.workers["d1"].script.refuse = InvalidRequest("guided_choice is a list", param="guided_choice")
    error = error_of(await client.post(CHAT, json={**HI, "guided_choice": 1}), 400, "invalid_request")
    assert (error["message"], error["param"]) == ("guided_choice is a list", "guided_choice")
    assert len(stage.workers["d1"].got(DecodeTask)) == 1
    assert [place.parameters for place in stage.scheduler.places] == [("guided_choice",)] * 2


@pytest.mark.parametrize("name", ["foo", "x" * 500, "x" * 60_000])
async def test_a_parameter_that_no_worker_takes_is_refused_before_it_is_placed(
    stage: Stage, client: httpx.AsyncClient, name: str
) -> None:
    error = error_of(await client.post(CHAT, json={**HI, name: 1}), 400, "invalid_request")
    assert name.startswith(error["param"])
    assert len(error["message"]) < 300
    assert not stage.scheduler.places


async def test_thousands_of_parameters_are_one_refusal(stage: Stage, client: httpx.AsyncClient) -> None:
    error_of(await client.post(CHAT, json={**HI, **{f"p{n}": n for n in range(5000)}}), 400, "invalid_request")
    assert not stage.scheduler.places


async def test_a_conversation_has_one_name_which_does_not_show_the_clients(
    stage: Stage, client: httpx.AsyncClient
) -> None:
    named: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({}, {"x-baton-session": "alice"}),
        ({"prompt_cache_key": "alice", "user": "bob"}, {}),
        ({"user": "alice", "safety_identifier": "bob"}, {}),
        ({"safety_identifier": "alice", "pad": "x" * 3000, "prompt_cache_key": 7}, {}),
        ({"user": "bob"}, {"x-baton-session": "alice"}),
    ]
    for body, headers in [*named, ({"user": "bob"}, {}), ({}, {})]:
        # A long body is read by another process.
        pad = {"messages": [{"role": "user", "content": body.pop("pad")}]} if "pad" in body else {}
        assert (await client.post(CHAT, json={**HI, **pad, **body}, headers=headers)).status_code == 200
    alice, *others, bob, unnamed = [place.session for place in stage.scheduler.places]
    assert len(alice) == 32
    assert others == [alice] * 4
    assert bob not in ("", alice)
    assert unnamed == ""


async def test_failed_attempts_are_a_gateway_error(stage: Stage, client: httpx.AsyncClient) -> None:
    script = stage.workers["d1"].script
    script.fail_at, script.failure = 0, EngineFailed("out of memory")
    error = error_of(await client.post(CHAT, json=HI), 502, "engine_failed")
    assert "4 attempts" in error["message"]


async def test_a_bug_is_a_500_in_the_same_shape(
    stage: Stage, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug with secrets in it")

    monkeypatch.setattr(stage.gateway.workers, "model", broken)
    error = error_of(await client.post(CHAT, json=HI), 500, "internal_error")
    assert "secrets" not in error["message"]
    monkeypatch.undo()
    assert (await client.post(CHAT, json=HI)).status_code == 200


async def test_health_and_readiness(stage: Stage, client: httpx.AsyncClient) -> None:
    assert (await client.get("/ready")).status_code == 200
    stage.workers["d1"].die()
    stage.scheduler.refusal = NoWorkers("none")
    while (answer := await client.get("/ready")).status_code == 200:  # noqa: ASYNC110 - a positive answer holds for 1 s.
        await asyncio.sleep(0.05)
    error_of(answer, 503, "no_workers")
    assert (await client.get("/health")).status_code == 200


async def test_missing_keys() -> None:
    settings = Settings(port=0, api_keys=("secret",))
    async with open_stage(settings) as stage, httpx.AsyncClient(base_url=stage.base_url, verify=False) as client:
        for authorization in ("", "Basic secret", "Bearer", "Bearer  wrong"):
            refused = await client.get("/v1/models", headers={"authorization": authorization})
            error_of(refused, 401, "invalid_api_key")
            assert refused.headers["www-authenticate"] == "Bearer"
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/nope")).status_code == 401


async def test_the_document_describes_the_bodies(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    for path, kind in ((CHAT, "ChatBody"), (COMPLETIONS, "CompletionBody")):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": f"#/components/schemas/{kind}"}
        assert "model" in document["components"]["schemas"][kind]["required"]
    for operation in (operation for path in document["paths"].values() for operation in path.values()):
        assert set(operation["responses"]) == {"200", "default"}
    text = json.dumps(document)
    for name in {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}:
        assert name in document["components"]["schemas"]
