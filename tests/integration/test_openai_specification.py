"""OpenAI's published specification, the part that is served: schemathesis makes requests of it, valid and not."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import quote

import httpx
import jsonschema
import pytest
from baton_gateway import fields
from baton_gateway.bodies import NAMES
from baton_gateway.config import Settings
from baton_gateway.responses.bodies import INCLUDED, REFUSED, ResponsesBody
from baton_gateway.responses.store import MemoryStore
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from baton.clock import SystemClock
from tests.harness.gateway.actors import MODEL
from tests.harness.gateway.stage import Stage, open_stage
from tests.harness.limits import HANG_S

ROOT: Final = Path(__file__).parents[2]
SPECIFICATION: Final = ROOT / "tests" / "samples" / "openai" / "openapi.json"
DOCUMENT: Final = ROOT / "docs" / "openai-specification.md"
EXAMPLES: Final = 200
HEALTH_CHECKS: Final = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
REQUESTS: Final = {
    "/chat/completions": "CreateChatCompletionRequest",
    "/completions": "CreateCompletionRequest",
    "/responses": "CreateResponse",
}
ANSWERS: Final = {
    "/chat/completions": ("CreateChatCompletionResponse", "CreateChatCompletionStreamResponse"),
    "/completions": ("CreateCompletionResponse", "CreateCompletionResponse"),
    "/responses": ("Response", "ResponseStreamEvent"),
}
STORED: Final = "/responses/{response_id}"
OPERATIONS: Final = {
    ("GET", STORED): "Response",
    ("DELETE", STORED): None,
    ("POST", f"{STORED}/cancel"): "Response",
    ("GET", f"{STORED}/input_items"): "ResponseItemList",
}
"""Requests about a stored response, and what they answer with; the specification does not say how a deletion does."""
MEMBERS: Final = {
    "Tool": ("FunctionTool",),
    "ToolChoiceParam": ("ToolChoiceOptions", "ToolChoiceAllowed", "ToolChoiceFunction"),
    "InputItem": ("EasyInputMessage", "Item"),
    "Item": ("InputMessage", "OutputMessage", "FunctionToolCall", "FunctionCallOutputItemParam", "ReasoningItem"),
    "InputContent": ("InputTextContent",),
}
"""Members of unions that are served: types of tools, items and parts in requests for responses."""
CLOSED: Final = (
    "FunctionTool", "Reasoning", "ResponseFormatJsonObject", "ResponseFormatText", "ResponseTextParam",
    "TextResponseFormatJsonSchema", "ToolChoiceAllowed", "ToolChoiceFunction",
)  # fmt: skip
"""Objects within requests for responses in which other keys are refused."""
STATUSES: Final = frozenset({200, 400, 404, 413, 422, 429})

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]


def published() -> dict[str, Any]:
    """Return the published specification, with `nullable`, a word of an earlier OpenAPI, as a type."""

    def with_null(value: dict[str, Any]) -> dict[str, Any]:
        if value.get("nullable") is True and "type" in value:
            value["type"] = [value["type"], "null"]
            value.get("enum", []).append(None)
        return value

    return json.loads(SPECIFICATION.read_text(), object_hook=with_null)


def specification() -> dict[str, Any]:
    """Return the specification with requests that have only known fields, and nothing that is refused.

    Otherwise few requests would be answered. `docs/api-fields.md` and `docs/responses-api.md` list what is refused.
    """
    document = published()
    schemas = document["components"]["schemas"]
    for name in REQUESTS.values():
        properties, required = parts_of(schemas[name], schemas)
        refused = {*fields.REFUSED, *(REFUSED if name == "CreateResponse" else ())}
        taken = {field: each for field, each in properties.items() if field not in refused}
        schemas[name] = {"type": "object", "properties": taken, "required": required, "additionalProperties": False}
    schemas["CreateResponse"]["required"] = ["input"]
    schemas["IncludeEnum"]["enum"] = list(INCLUDED)
    for name in CLOSED:
        schemas[name]["additionalProperties"] = False
    for name, members in MEMBERS.items():
        union = schemas[name]["oneOf"]
        schemas[name]["oneOf"] = [each for each in union if each["$ref"].rpartition("/")[2] in members]
    return document


def parts_of(schema: dict[str, Any], schemas: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the properties of an object, and those that it must have, from all its parts."""
    if reference := schema.get("$ref"):
        return parts_of(schemas[reference.rpartition("/")[2]], schemas)
    properties, required = dict(schema.get("properties", {})), list(schema.get("required", ()))
    for part in schema.get("allOf", ()):
        more, needed = parts_of(part, schemas)
        properties |= more
        required += needed
    return properties, required


def properties_in(value: Any, schemas: dict[str, Any], seen: set[str]) -> set[str]:
    """Return the names of all properties in a schema, at any depth; `seen`: names of schemas that are known already."""
    if isinstance(value, list):
        return set[str]().union(*(properties_in(each, schemas, seen) for each in cast("list[Any]", value)))
    if not isinstance(value, dict):
        return set()
    schema = cast("dict[str, Any]", value)
    own, reference = schema.get("properties"), schema.get("$ref")
    names = set(cast("dict[str, Any]", own)) if isinstance(own, dict) else set[str]()
    if isinstance(reference, str) and reference not in seen:
        seen.add(reference)
        names |= properties_in(schemas[reference.rpartition("/")[2]], schemas, seen)
    return names.union(*(properties_in(each, schemas, seen) for each in schema.values()))


def listed(heading: str) -> set[tuple[str, str]]:
    """Return the first two cells of each row of a table in the document."""
    section = DOCUMENT.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")][2:]
    return {(row[0].strip().strip("`"), row[1].strip().strip("`")) for row in rows}


def validator(document: dict[str, Any], name: str) -> Any:
    """Return a validator of `jsonschema`, whose types are incomplete."""
    return jsonschema.Draft202012Validator({**document, "$ref": f"#/components/schemas/{name}"})


class Observed:
    """What the answers said, by kind of request."""

    def __init__(self, path: str, document: dict[str, Any]) -> None:
        self.path = path
        self._fields = NAMES.union(ResponsesBody.model_fields if path == "/responses" else ())
        schemas = specification()["components"]["schemas"]
        self._properties = self._fields | properties_in(schemas[REQUESTS[path]], schemas, set())
        """Names of fields at any depth; what else an error names was made up."""
        self.request = validator(document, REQUESTS[path])
        self.whole, self.chunk = (validator(document, name) for name in ANSWERS[path])
        self.statuses: Counter[tuple[bool, int]] = Counter()
        self.stricter: dict[tuple[str, str], str] = {}
        """Fields for which a valid request is refused, with an example."""
        self.looser: dict[tuple[str, str], str] = {}
        """Fields for which an invalid request is answered, with an example."""
        self.answers: dict[tuple[str, str], str] = {}
        """Fields of answers that are not as specified, with an example."""

    def see(self, body: Any, response: httpx.Response) -> None:
        faults = list(self.request.iter_errors(body))
        self.statuses[not faults, response.status_code] += 1
        assert response.status_code in STATUSES, (response.status_code, response.text, body)
        assert response.headers["x-request-id"]
        if response.status_code != 200:
            error = error_of(response)
            if not faults and response.status_code == 400:
                place = self.place_of(str(error["param"]))
                if "does not know this field" in error["message"]:
                    place = place.rpartition(".")[0] or place
                self.stricter[self.path, place] = f"{error['message']}: {body}"
            return
        for fault in faults:
            place = pattern_of(".".join(map(str, fault.absolute_path)))
            if fault.instance is None:
                place = "null"
            elif place.split(".")[0] in fields.IGNORED.union(fields.SESSION):
                place = "what is ignored"
            self.looser[self.path, place] = f"{fault.message[:300]}: {body}"
        if response.headers["content-type"] == "application/json":
            wrong = [(fault, response.text) for fault in self.whole.iter_errors(response.json())]
        else:
            *events, done = [event.rpartition("data: ")[2] for event in response.text.strip().split("\n\n")]
            assert done == "[DONE]", response.text
            wrong = [(fault, event) for event in events for fault in self.chunk.iter_errors(json.loads(event))]
        for fault, text in ((inner, text) for outer, text in wrong for inner in within(outer)):
            place = pattern_of(".".join(map(str, fault.absolute_path)))
            # An event has the response within it.
            self.answers[self.path, place.removeprefix("response.")] = f"{fault.message[:300]}: {text[:500]}"

    def place_of(self, param: str) -> str:
        """Return the field that an error names, as the document lists it."""
        place = pattern_of(param)
        if re.split(r"[.\[]", place)[0] not in self._fields:
            return "any other name"
        known = takewhile(lambda part: part.partition("[")[0] in self._properties, place.split("."))
        return ".".join(known)


def within(fault: Any) -> list[Any]:
    """Return what is wrong in the member of a union whose type a value has, or the fault itself."""
    members: dict[Any, list[Any]] = {}
    for inner in fault.context or ():
        members.setdefault(inner.schema_path[0], []).append(inner)
    own = [faults for faults in members.values() if not any(list(each.path) == ["type"] for each in faults)]
    return [each for inner in own[0] for each in within(inner)] if len(own) == 1 else [fault]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Return an answer's error; raises AssertionError if it has not OpenAI's shape."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert error["message"] and isinstance(error["type"], str) and isinstance(error["code"], str), error
    return error


def pattern_of(path: str) -> str:
    """Return a path without its numbers, down to the objects whose names clients choose."""
    path = re.sub(r"\[\d+\]|\.\d+", "[]", path)
    chosen = re.match(
        r"logit_bias|metadata|(response_format.json_schema|text.format).schema|tools\[\](.function)?.parameters", path
    )
    return chosen[0] if chosen else path


def mode_of(valid: bool) -> Any:
    modes = library().GenerationMode
    return modes.POSITIVE if valid else modes.NEGATIVE


def library() -> Any:
    """Return schemathesis, whose import takes seconds."""
    return importlib.import_module("schemathesis")


def each_case(path: str, method: str, mode: Any, see: Callable[[Any, bool], None]) -> None:
    """Have `see` take cases of an operation, each with a choice of its own."""
    operation = library().openapi.from_dict(specification())[path][method]

    @seed(17)
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=HEALTH_CHECKS, database=None)
    @given(case=operation.as_strategy(generation_mode=mode), choice=st.booleans())
    def each(case: Any, choice: bool) -> None:
        see(case, choice)

    each()


def stage_with_store() -> AbstractAsyncContextManager[Stage]:
    return open_stage(
        Settings(port=0, admission_wait_s=0.3), store=MemoryStore(SystemClock(), ttl_s=3600.0, bytes_max=64 << 20)
    )


def created(client: httpx.Client) -> str:
    """Return the id of a new stored response."""
    return client.post("/v1/responses", json={"model": MODEL, "input": "once", "background": True}).json()["id"]


@pytest.mark.parametrize("valid", [True, False])
@pytest.mark.parametrize("path", list(REQUESTS))
async def test_requests_of_the_specification(path: str, valid: bool) -> None:
    observed = Observed(path, published())
    async with stage_with_store() as stage:
        stage.say("the quick brown fox")
        with httpx.Client(base_url=stage.base_url, timeout=HANG_S, verify=False) as client:
            previous = await asyncio.to_thread(created, client)

            def send(case: Any, continues: bool) -> None:
                body = case.body
                if isinstance(body, dict):
                    # Otherwise each request would name a model, and perhaps a response, that does not exist.
                    body = {**cast("dict[str, Any]", body), "model": MODEL}
                    if continues and isinstance(body.get("previous_response_id"), str):
                        body["previous_response_id"] = previous
                # As schemathesis would: half surrogates and infinite numbers, too, reach the server.
                content = body if isinstance(body, bytes) else json.dumps(body, default=repr).encode()
                headers = {"content-type": "application/json"}
                observed.see(body, client.post(f"/v1{path}", content=content, headers=headers))

            await asyncio.to_thread(each_case, path, "POST", mode_of(valid), send)
            health = await asyncio.to_thread(client.get, "/health")
            assert health.status_code == 200
    print(observed.statuses)
    unlisted: dict[str, dict[tuple[str, str], str]] = {}
    for heading, found in (
        ("Refused though valid", observed.stricter),
        ("Answered though invalid", observed.looser),
        ("Answers", observed.answers),
    ):
        unlisted[heading] = {row: example for row, example in found.items() if row not in listed(heading)}
        for row, example in unlisted[heading].items():
            print(heading, *row, example[:600], sep=" | ")
    assert not any(unlisted.values()), "bring docs/openai-specification.md in line"
    assert observed.statuses[True, 200] > EXAMPLES // 40 if valid else observed.statuses[False, 400] > EXAMPLES // 2


# Nothing is invalid where there is only an id, which is any text.
@pytest.mark.parametrize(
    ("method", "path", "valid"),
    [(*operation, valid) for operation in OPERATIONS for valid in (True, False) if valid or operation[0] == "GET"],
)
async def test_requests_about_stored_responses(method: str, path: str, valid: bool) -> None:
    statuses: Counter[tuple[bool, int]] = Counter()
    answers = OPERATIONS[method, path]
    checks = answers and validator(published(), answers)
    async with stage_with_store() as stage:
        stage.say("the quick brown fox")
        with httpx.Client(base_url=stage.base_url, timeout=HANG_S, verify=False) as client:
            kept = await asyncio.to_thread(created, client)

            def send(case: Any, stored: bool) -> None:
                name = str(case.path_parameters["response_id"])
                if stored:
                    name = created(client) if method == "DELETE" else kept
                address = path.replace("{response_id}", quote(name.encode(errors="replace"), safe=""))
                response = client.request(method, f"/v1{address}", params=case.query)
                statuses[stored, response.status_code] += 1
                assert response.status_code in {*STATUSES, 405}, (response.status_code, response.text, address)
                assert response.headers["x-request-id"]
                if response.status_code != 200:
                    error_of(response)
                elif checks:
                    faults = checks.iter_errors(response.json())
                    places = {("/responses", ".".join(map(str, fault.absolute_path))) for fault in faults}
                    assert places <= listed("Answers"), (places, response.text)

            await asyncio.to_thread(each_case, path, method, mode_of(valid), send)
    print(statuses)
    assert statuses[True, 400 if path.endswith("cancel") else 200] > 0 or not valid
    assert not statuses[False, 200]


async def test_models_of_the_specification() -> None:
    document = published()
    async with open_stage(Settings(port=0)) as stage, httpx.AsyncClient(base_url=stage.base_url) as client:
        validator(document, "ListModelsResponse").validate((await client.get("/v1/models")).json())
        validator(document, "Model").validate((await client.get(f"/v1/models/{MODEL}")).json())
