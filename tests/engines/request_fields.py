"""Prints the names of the fields of an engine's request classes. Needs the engine's packages, but runs no engine."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import json
import sys


def main(engine: str) -> None:
    if engine == "vllm":
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    else:
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
    fields = {"chat": sorted(ChatCompletionRequest.model_fields), "completions": sorted(CompletionRequest.model_fields)}
    if engine == "vllm":
        from baton.engines.vllm.sampling import EXTENSIONS

        fields["parameters"] = sorted(EXTENSIONS)
    print(json.dumps(fields))


if __name__ == "__main__":
    main(sys.argv[1])
