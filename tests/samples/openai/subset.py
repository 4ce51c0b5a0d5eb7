"""Cuts what Baton serves out of OpenAI's published specification (github.com/openai/openai-openapi, MIT licence):

python tests/samples/openai/subset.py openapi.yaml > tests/samples/openai/openapi.json
"""

# pyright: basic
# The specification is any JSON.

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

SERVED: Final = {
    "/chat/completions": ("post",),
    "/completions": ("post",),
    "/models": ("get",),
    "/models/{model}": ("get",),
    "/responses": ("post",),
    "/responses/{response_id}": ("get", "delete"),
    "/responses/{response_id}/cancel": ("post",),
    "/responses/{response_id}/input_items": ("get",),
}
DROPPED: Final = frozenset(
    {"x-oaiMeta", "x-oaiExpandable", "x-stainless-const", "example", "examples", "description", "summary"}
)
"""Parts that say nothing of what is valid."""


def subset(specification: dict[str, Any]) -> dict[str, Any]:
    """Return the served paths with all that they refer to."""
    paths = {
        path: {method: _lean(specification["paths"][path][method]) for method in methods}
        for path, methods in SERVED.items()
    }
    components: dict[str, dict[str, Any]] = {}
    missing = set(_references(paths))
    while missing:
        section, name = missing.pop()
        found = components.setdefault(section, {})[name] = _lean(specification["components"][section][name])
        missing |= {(section, name) for section, name in _references(found) if name not in components.get(section, {})}
    return {
        "openapi": specification["openapi"],
        "info": {"title": "OpenAI API, the part that Baton serves", "version": specification["info"]["version"]},
        "paths": paths,
        "components": components,
    }


def _lean(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _lean(each)
            for name, each in value.items()
            # A property may have such a name, too; then it is a schema.
            if name not in DROPPED or (name in ("description", "example", "summary") and isinstance(each, dict))
        }
    return [_lean(each) for each in value] if isinstance(value, list) else value


def _references(value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        reference = value.get("$ref")
        if isinstance(reference, str):
            section, name = reference.split("/")[-2:]
            yield section, name
        for each in value.values():
            yield from _references(each)
    elif isinstance(value, list):
        for each in value:
            yield from _references(each)


if __name__ == "__main__":
    print(json.dumps(subset(yaml.safe_load(Path(sys.argv[1]).read_text())), indent=1, sort_keys=True))
