"""Writes the table of request fields into `api-fields.md`, from the gateway's code: `python docs/api_fields_table.py`.

`engine_fields.json` has the names of the fields that the classes of vLLM's and SGLang's servers have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from baton_gateway import constraints, fields
from baton_gateway.bodies import NAMES, ChatBody, CompletionBody

DOCUMENT: Final = Path(__file__).parent / "api-fields.md"
ENGINE_FIELDS: Final = Path(__file__).parent / "engine_fields.json"
BEGIN: Final = "<!-- the table: python docs/api_fields_table.py -->\n"
END: Final = "<!-- end of the table -->\n"
ENDPOINTS: Final = ("chat", "completions")

NOTES: Final = {
    "add_generation_prompt": "default: true unless `continue_final_message`",
    "add_special_tokens": "default: false for chats, true for completions",
    "cache_salt": "1 to 256 characters; prompts with different salts share no cache",
    "chat_template": "with `--trust-request-chat-template` only, under vLLM's name for it",
    "chat_template_kwargs": "variables for the template; it sees no other field that is unknown",
    "documents": "a variable for the template",
    "echo": "without `logprobs`; the text of a prompt of token ids is decoded",
    "extra_args": "vLLM's name inside; the same as `vllm_xargs`",
    "ignore_eos": "the end-of-sequence token does not end the answer",
    "json_schema": "[structured output](../services/gateway/README.md#structured-output)",
    "logit_bias": "1024 tokens",
    "logprobs": "at most 20",
    "max_completion_tokens": "as `max_tokens`, before which it comes if both are given",
    "max_tokens": "cut to the room that the prompt leaves; above the model's whole context 400",
    "messages": "see below",
    "min_tokens": "stop strings and end-of-sequence do not count before",
    "n": "with the number of prompts at most `--choices-max`",
    "no_stop_trim": "the same as `include_stop_str_in_output`",
    "parallel_tool_calls": "false: calls after the first are left out",
    "prompt_cache_key": "names the conversation, for placement",
    "reasoning_effort": "a variable for the template",
    "request_id": "a name for `baton trace` and `baton explain`, beside `x-request-id`; the answer keeps its own id",
    "return_token_ids": "`prompt_token_ids` and `token_ids`, where vLLM has them; `echo` adds nothing to them",
    "return_tokens_as_token_ids": "tokens in log-probabilities are spelled `token_id:…`",
    "rid": "the same as `request_id`; one name",
    "safety_identifier": "names the conversation, if nothing else does",
    "seed": "choice i samples with `seed + i`",
    "session_id": "names the conversation, for placement",
    "stop": "64 texts of at most 1024, together 4096 characters",
    "stop_token_ids": "64 ids",
    "stream_options": "see below",
    "thinking_token_budget": "needs vLLM's own setting for reasoning",
    "tool_choice": "`auto`, `none`, `required`, a function or `allowed_tools`, which shows the model only these",
    "tools": "1024 tools",
    "top_logprobs": "at most 20",
    "truncate_prompt_tokens": "keeps the end of the prompt; -1: as much as leaves room for one token",
    "truncation_side": "`right` keeps the beginning",
    "user": "names the conversation, if nothing better does",
    "vllm_xargs": "workers of vLLM only",
}
"""What a reader should know of fields that are taken or passed on."""
IGNORED_NOTE: Final = "describes the request, or asks for a speed"


def handling(name: str, endpoint: str) -> str:
    """Return what becomes of a field: taken, to the engine, ignored, refused, or nothing if the endpoint lacks it."""
    kind = ChatBody if endpoint == "chat" else CompletionBody
    if name in kind.model_fields or name in constraints.FIELDS or name in fields.SESSION:
        return "taken"
    if name in fields.REFUSED:
        return "refused"
    if name in fields.IGNORED:
        return "ignored"
    return "engine" if name in fields.ENGINE else ""


def table() -> str:
    """Return one row for each field that this server, vLLM's or SGLang's has."""
    engines: dict[str, dict[str, list[str]]] = json.loads(ENGINE_FIELDS.read_text())
    named = {name for engine in engines.values() for of_endpoint in engine.values() for name in of_endpoint}
    lines = ["| field | vLLM | SGLang | Baton | |", "|---|---|---|---|---|"]
    for name in sorted(NAMES | named):
        own = {endpoint: handling(name, endpoint) for endpoint in ENDPOINTS}
        servers = [
            {each: "yes" for each in ENDPOINTS if name in engines[engine][each]} for engine in ("vllm", "sglang")
        ]
        cells = [_cell(server) for server in servers] + [_cell({each: how for each, how in own.items() if how})]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {_note(name, own['chat'], own['completions'])} |")
    return "".join(line + "\n" for line in lines)


def _cell(by_endpoint: dict[str, str]) -> str:
    """Return a cell that names the endpoints only where they differ."""
    if len(by_endpoint) == len(ENDPOINTS) and len(set(by_endpoint.values())) == 1:
        return next(iter(by_endpoint.values()))
    return ", ".join(f"{how} ({endpoint})" for endpoint, how in by_endpoint.items()) or "–"


def _note(name: str, *how: str) -> str:
    return "; ".join(_notes(name, how))


def _notes(name: str, how: tuple[str, ...]) -> Iterator[str]:
    if name in NOTES:
        yield NOTES[name]
    if "refused" in how:
        refusal = fields.REFUSED[name]
        yield refusal.reason
        if refusal.neutral not in ((), (False,)):
            yield "allowed: " + ", ".join(f"`{json.dumps(value)}`" for value in refusal.neutral)
    if "ignored" in how:
        yield IGNORED_NOTE


if __name__ == "__main__":
    before, rest = DOCUMENT.read_text().split(BEGIN)
    DOCUMENT.write_text(before + BEGIN + table() + END + rest.split(END)[1])
