"""OpenAI's published specification, the part that is served: schemathesis makes requests of it, valid and not."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
from collections import Counter
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, cast

import httpx
import jsonschema
import pytest
from baton_gateway import fields
from baton_gateway.bodies import NAMES
from baton_gateway.config import Settings
from hypothesis import HealthCheck, given, seed, settings

from tests.harness.gateway.actors import MODEL
from tests.harness.gateway.stage import open_stage
from tests.harness.limits import HANG_S

ROOT: Final = Path(__file__).parents[2]
SPECIFICATION: Final = ROOT / "tests" / "samples" / "openai" / "openapi.json"
DOCUMENT: Final = ROOT / "docs" / "openai-specification.md"
EXAMPLES: Final = 200
HEALTH_CHECKS: Final = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
REQUESTS: Final = {"/chat/completions": "CreateChatCompletionRequest", "/completions": "CreateCompletionRequest"}
ANSWERS: Final = {
    "/chat/completions": ("CreateChatCompletionResponse", "CreateChatCompletionStreamResponse"),
    "/completions": ("CreateCompletionResponse", "CreateCompletionResponse"),
}
STATUSES: Final = frozenset({200, 400, 404, 413, 422, 429})

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]


def specification() -> dict[str, Any]:
    """Return the specification with requests that have only known fields, and none that is refused.

    Otherwise few requests would be answered. `docs/api-fields.md` lists what is refused.
    """
    document = json.loads(SPECIFICATION.read_text())
    schemas = document["components"]["schemas"]
    for name in REQUESTS.values():
        properties, required = parts_of(schemas[name], schemas)
        taken = {field: each for field, each in properties.items() if field not in fields.REFUSED}
        schemas[name] = {"type": "object", "properties": taken, "required": required, "additionalProperties": False}
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


def properties_in(value: Any) -> set[str]:
    """Return the names of all properties in a schema, at any depth."""
    if isinstance(value, dict):
        schema = cast("dict[str, Any]", value)
        own = schema.get("properties")
        names = set(cast("dict[str, Any]", own)) if isinstance(own, dict) else set[str]()
        return names.union(*map(properties_in, schema.values()))
    return set[str]().union(*map(properties_in, cast("list[Any]", value))) if isinstance(value, list) else set()


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
        self._properties = NAMES | properties_in(document)
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
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}, error
            assert error["message"] and isinstance(error["type"], str) and isinstance(error["code"], str), error
            if not faults and response.status_code == 400:
                self.stricter[self.path, self.place_of(str(error["param"]))] = f"{error['message']}: {body}"
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
            *events, done = [event.removeprefix("data: ") for event in response.text.strip().split("\n\n")]
            assert done == "[DONE]", response.text
            wrong = [(fault, event) for event in events for fault in self.chunk.iter_errors(json.loads(event))]
        for fault, text in wrong:
            place = pattern_of(".".join(map(str, fault.absolute_path)))
            self.answers[self.path, place] = f"{fault.message[:300]}: {text[:500]}"

    def place_of(self, param: str) -> str:
        """Return the field that an error names, as the document lists it."""
        place = pattern_of(param)
        if re.split(r"[.\[]", place)[0] not in NAMES:
            return "any other name"
        known = takewhile(lambda part: part.partition("[")[0] in self._properties, place.split("."))
        return ".".join(known)


def pattern_of(path: str) -> str:
    """Return a path without its numbers, down to the objects whose names clients choose."""
    path = re.sub(r"\[\d+\]|\.\d+", "[]", path)
    chosen = re.match(r"logit_bias|metadata|response_format.json_schema.schema|tools\[\].function.parameters", path)
    return chosen[0] if chosen else path


def library() -> Any:
    """Return schemathesis, whose import takes seconds."""
    return importlib.import_module("schemathesis")


def fuzz(path: str, mode: Any, send: Callable[[Any], httpx.Response], observed: Observed) -> None:
    operation = library().openapi.from_dict(specification())[path]["POST"]

    @seed(17)
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=HEALTH_CHECKS, database=None)
    @given(case=operation.as_strategy(generation_mode=mode))
    def each(case: Any) -> None:
        body = case.body
        if isinstance(body, dict):
            # Otherwise each request would name a model that does not exist.
            body = {**cast("dict[str, Any]", body), "model": MODEL}
        observed.see(body, send(body))

    each()


@pytest.mark.parametrize("valid", [True, False])
@pytest.mark.parametrize("path", list(REQUESTS))
async def test_requests_of_the_specification(path: str, valid: bool) -> None:
    observed = Observed(path, json.loads(SPECIFICATION.read_text()))
    async with open_stage(Settings(port=0, admission_wait_s=0.3)) as stage:
        stage.say("the quick brown fox")
        with httpx.Client(base_url=stage.base_url, timeout=HANG_S, verify=False) as client:

            def send(body: Any) -> httpx.Response:
                # As schemathesis would: half surrogates and infinite numbers, too, reach the server.
                content = body if isinstance(body, bytes) else json.dumps(body, default=repr).encode()
                return client.post(f"/v1{path}", content=content, headers={"content-type": "application/json"})

            modes = library().GenerationMode
            mode = modes.POSITIVE if valid else modes.NEGATIVE
            await asyncio.to_thread(fuzz, path, mode, send, observed)
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


async def test_models_of_the_specification() -> None:
    document = json.loads(SPECIFICATION.read_text())
    async with open_stage(Settings(port=0)) as stage, httpx.AsyncClient(base_url=stage.base_url) as client:
        validator(document, "ListModelsResponse").validate((await client.get("/v1/models")).json())
        validator(document, "Model").validate((await client.get(f"/v1/models/{MODEL}")).json())
