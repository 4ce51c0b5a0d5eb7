"""Prints the results of an engine's own parameter checks. Needs the engine's packages, but runs no engine."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from baton.errors import BatonError
from baton.messages.attempts import Sampling

VOCABULARY = 1000


def outcome(check: Callable[[], BatonError | object]) -> list[str | None] | None:
    try:
        result = check()
    except BatonError as error:
        result = error
    return [result.code, result.param, result.detail] if isinstance(result, BatonError) else None


def vllm() -> tuple[Sequence[str], Callable[[Sampling], object], Mapping[str, BatonError | None]]:
    from vllm.exceptions import VLLMValidationError

    from baton.engines.vllm.engine import engine_error
    from baton.engines.vllm.sampling import PARAMETERS, sampling_params

    errors = {
        "refused": engine_error(VLLMValidationError("too many log-probabilities")),
        "broken": engine_error(ValueError("not enough values to unpack")),
        "confused": engine_error(TypeError("unhashable")),
    }
    return sorted(PARAMETERS), sampling_params, errors


def sglang() -> tuple[Sequence[str], Callable[[Sampling], object], Mapping[str, BatonError | None]]:
    from baton.engines.sglang.sampling import PARAMETERS, refusal_of, sampling_params

    errors = {
        "refused": refusal_of({"type": "abort", "message": "no such grammar", "status_code": 400}),
        "aborted": refusal_of({"type": "abort", "message": "by us"}),
        "broken": refusal_of({"type": "abort", "message": "out of memory", "status_code": 500}),
    }
    return sorted(PARAMETERS), lambda sampling: sampling_params(sampling, VOCABULARY, grammars=True), errors


def main(engine: str, samplings: Sequence[Mapping[str, Any]]) -> None:
    declared, check, errors = {"vllm": vllm, "sglang": sglang}[engine]()
    asked = [msgspec.convert(fields, Sampling) for fields in samplings]
    report = {
        "declared": declared,
        "outcomes": [outcome(lambda sampling=sampling: check(sampling)) for sampling in asked],
        "errors": {name: outcome(lambda error=error: error) for name, error in errors.items()},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
