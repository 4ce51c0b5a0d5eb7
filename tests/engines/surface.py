"""Requests over the whole API, and answers in a form that can be compared field by field."""

# pyright: basic
# The answers are any JSON.

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any, Final

import msgspec

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
QUESTIONS: Final = ("Tell a story.", "def fib(n):", "naïve café, 你好世界 😀", "import os\nimport sys\n" * 8)
CHANGING: Final = frozenset({"id", "created", "created_at", "completed_at", "item_id"})
"""Fields that differ from request to request."""


class Ask(msgspec.Struct, frozen=True):
    name: str
    path: str
    body: dict[str, Any] | None
    """None: a GET."""

    @property
    def kind(self) -> str:
        """Endpoint, and whether it streams."""
        path = self.path.removeprefix("/v1/").strip("/")
        return f"{path}, streamed" if self.body and self.body.get("stream") is True else path


SHARED: Final[dict[str, dict[str, Any]]] = {
    # Fields of both endpoints that both servers take.
    "nothing": {},
    "temperature 0.7": {"temperature": 0.7, "seed": 1},
    "top_p": {"temperature": 1, "top_p": 0.5, "seed": 2},
    "top_k": {"temperature": 1, "top_k": 5, "seed": 3},
    "min_p": {"temperature": 1, "min_p": 0.2, "seed": 4},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "logit_bias": {"logit_bias": {"5": 100}},
    "min_tokens": {"min_tokens": 8},
    "ignore_eos": {"ignore_eos": True},
    "stop_token_ids": {"logit_bias": {"9": 100}, "stop_token_ids": [9]},
    "stop": {"logit_bias": {"70": 50, "71": 50}, "stop": ["g", "h"]},
    "stop shown": {"logit_bias": {"70": 50, "71": 50}, "stop": "g", "include_stop_str_in_output": True},
    "ten stops": {"stop": [f"never {n}" for n in range(10)]},
    "n": {"n": 2, "temperature": 1, "seed": 5},
    "special tokens shown": {"skip_special_tokens": False, "ignore_eos": True},
    "cache_salt": {"cache_salt": "a"},
    "truncated": {"truncate_prompt_tokens": 3},
    "truncated right": {"truncate_prompt_tokens": 3, "truncation_side": "right"},
    "token ids": {"return_token_ids": True},
    "request_id": {"request_id": "mine", "user": "me", "priority": 0},
    "allowed_token_ids": {"allowed_token_ids": [40, 41, 42]},
    "neutral fields": {"use_beam_search": False, "length_penalty": 1.0, "spaces_between_special_tokens": True},
    "regex": {"structured_outputs": {"regex": "[ab]{3}"}},
    "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "json": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}}},
    "vllm_xargs": {"vllm_xargs": {"mine": 1}},
    "nulls": {"temperature": 0, "stop": None, "logit_bias": None, "seed": None, "stream_options": None},
}
OF_CHAT: Final[dict[str, dict[str, Any]]] = {
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "logprobs alone": {"logprobs": True},
    "tokens as ids": {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True},
    "max_completion_tokens": {"max_completion_tokens": 3},
    "no generation prompt": {"add_generation_prompt": False},
    "variables": {"chat_template_kwargs": {"enable_thinking": False}, "documents": [{"title": "a", "text": "b"}]},
    "own template": {"chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}"},
    "tools for none": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": "none",
    },
}
OF_COMPLETIONS: Final[dict[str, dict[str, Any]]] = {
    "logprobs": {"logprobs": 2},
    "logprobs 0": {"logprobs": 0},
    "tokens as ids": {"logprobs": 1, "return_tokens_as_token_ids": True},
    "echo": {"echo": True},
    "token ids in": {"prompt": [5, 6, 7, 8]},
    "several prompts": {"prompt": ["a story", "another"], "n": 1},
    "lists of token ids": {"prompt": [[5, 6], [7, 8, 9]]},
    "no special tokens": {"add_special_tokens": False},
}
USER: Final = {"role": "user", "content": QUESTIONS[0]}
OF_RESPONSES: Final[dict[str, dict[str, Any]]] = {
    "nothing": {},
    "instructions": {"instructions": "Be brief."},
    "sampled": {"temperature": 0.7, "top_p": 0.9, "seed": 1},
    "items": {"input": [{"role": "system", "content": "Be brief."}, USER]},
    "parts": {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}]},
    "a conversation": {"input": [USER, {"role": "assistant", "content": "once"}, {"role": "user", "content": "on"}]},
    "metadata": {"metadata": {"a": "b"}, "user": "me"},
    "json": {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "boolean"}}}},
    "not stored": {"store": False},
}
OF_MESSAGES: Final[dict[str, dict[str, Any]]] = {
    "nothing": {},
    "system": {"system": "Be brief."},
    "system parts": {"system": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
    "top_k": {"top_p": 0.9, "top_k": 20},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    "a conversation": {"messages": [USER, {"role": "assistant", "content": "once"}, {"role": "user", "content": "on"}]},
    "stop_sequences": {"stop_sequences": ["e", "never"]},
    "metadata": {"metadata": {"user_id": "me"}},
}
REFUSED_RESPONSES: Final[dict[str, dict[str, Any]]] = {
    "a built-in tool": {"tools": [{"type": "web_search"}]},
    "an unknown predecessor": {"previous_response_id": "resp_unknown"},
    "another model": {"model": "nope"},
    "temperature too low": {"temperature": -1},
    "too many tokens": {"max_output_tokens": 100_000},
    "input that is none": {"input": 1},
}
REFUSED_MESSAGES: Final[dict[str, dict[str, Any]]] = {
    "no messages": {"messages": []},
    "another model": {"model": "nope"},
    "temperature too low": {"temperature": -1},
    "no tokens": {"max_tokens": 0},
    "max_tokens left out": {"max_tokens": None},
    "a role that is none": {"messages": [{"role": "wizard", "content": "x"}]},
}
STREAMED: Final[dict[str, dict[str, Any]]] = {
    "usage": {"stream_options": {"include_usage": True}},
    "continuous usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
}
REFUSED: Final[dict[str, dict[str, Any]]] = {
    "temperature too high": {"temperature": -1},
    "top_p 0": {"top_p": 0},
    "top_p 2": {"top_p": 2},
    "top_k -2": {"top_k": -2},
    "min_p 2": {"min_p": 2},
    "n 0": {"n": 0},
    "max_tokens 0": {"max_tokens": -1},
    "max_tokens beyond the context": {"max_tokens": 100_000},
    "min_tokens above": {"min_tokens": 9, "max_tokens": 4},
    "logit_bias out of the vocabulary": {"logit_bias": {"99999999": 1}},
    "penalty out of range": {"presence_penalty": 3},
    "seed as a text": {"seed": "x"},
    "another model": {"model": "nope"},
    "options without a stream": {"stream_options": {"include_usage": True}},
    "a misspelt field": {"temprature": 0.5},
    "an unknown format": {"response_format": {"type": "poem"}},
    "a regex that is none": {"structured_outputs": {"regex": "("}},
    "too much truncation": {"truncate_prompt_tokens": 100_000},
    "priority": {"priority": 1},
    "best_of": {"best_of": 2},
    "a temperature as a text": {"temperature": "0"},
}
OTHERS: Final = (
    Ask("models", "/v1/models", None),
    Ask("a model", "/v1/models/tiny", None),
    Ask("no such path", "/v1/nothing", None),
    Ask("tokenize", "/tokenize", {"model": "tiny", "prompt": QUESTIONS[2]}),
    Ask("tokenize, spelled", "/tokenize", {"model": "tiny", "prompt": QUESTIONS[1], "return_token_strs": True}),
    Ask("tokenize a chat", "/tokenize", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}),
    Ask("detokenize", "/detokenize", {"model": "tiny", "tokens": [40, 41, 42, 300]}),
    Ask("detokenize nonsense", "/detokenize", {"model": "tiny", "tokens": [1 << 40]}),
    Ask("chat without messages", CHAT, {"model": "tiny", "messages": []}),
    Ask("a role that is none", CHAT, {"model": "tiny", "messages": [{"role": "wizard", "content": "x"}]}),
    Ask("completion without a prompt", COMPLETIONS, {"model": "tiny"}),
    Ask("logprobs too many", CHAT, {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "logprobs": True,
                                    "top_logprobs": 21}),
    Ask("parts", CHAT, {"model": "tiny", "temperature": 0, "max_tokens": 4, "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}),
    Ask("continued", CHAT, {"model": "tiny", "temperature": 0, "max_tokens": 4, "messages": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "once upon"}],
        "add_generation_prompt": False, "continue_final_message": True}),
    Ask("prompt_logprobs", COMPLETIONS, {"model": "tiny", "prompt": "a", "max_tokens": 2, "prompt_logprobs": 1}),
    Ask("echo with logprobs", COMPLETIONS, {"model": "tiny", "prompt": "a b", "max_tokens": 2, "echo": True,
                                            "logprobs": 1, "temperature": 0}),
    Ask("count_tokens", "/v1/messages/count_tokens", {"model": "tiny", "messages": [USER]}),
    Ask("no such response", "/v1/responses/resp_unknown", None),
)  # fmt: skip


def asks() -> list[Ask]:
    """Return all requests. Without a temperature of its own, each is greedy."""
    made: list[Ask] = []
    for path, own in ((CHAT, OF_CHAT), (COMPLETIONS, OF_COMPLETIONS)):
        named = [*SHARED.items(), *own.items()]
        for number, (name, fields) in enumerate(named):
            made.append(Ask(name, path, _body(path, number, fields)))
            made.append(Ask(name, path, _body(path, number, {**fields, "stream": True})))
        for number, (name, fields) in enumerate(STREAMED.items()):
            for more in ({}, {"n": 2, "temperature": 1, "seed": 6}, {"stop": ["e"]}):
                body = _body(path, number, {**fields, **more, "stream": True})
                made.append(Ask(" with ".join([name, *more]), path, body))
        made += [Ask(name, path, _body(path, 0, fields)) for name, fields in REFUSED.items()]
    for path, own, refused in (
        (RESPONSES, OF_RESPONSES, REFUSED_RESPONSES),
        (MESSAGES, OF_MESSAGES, REFUSED_MESSAGES),
    ):
        for name, fields in own.items():
            made.append(Ask(name, path, _agents_body(path, fields)))
            made.append(Ask(name, path, _agents_body(path, {**fields, "stream": True})))
        made += [Ask(name, path, _agents_body(path, fields)) for name, fields in refused.items()]
    return [*made, *OTHERS]


def _agents_body(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    question: dict[str, Any] = (
        {"input": QUESTIONS[0], "max_output_tokens": 12}
        if path == RESPONSES
        else {"messages": [USER], "max_tokens": 12}
    )
    return {"model": "tiny", "temperature": 0, **question, **fields}


def _body(path: str, number: int, fields: dict[str, Any]) -> dict[str, Any]:
    text = QUESTIONS[number % len(QUESTIONS)]
    question = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    return {"model": "tiny", "temperature": 0, "max_tokens": 12, **question, **fields}


def whole(text: str) -> Any:
    """Return an answer's JSON; of a stream, its choices put together, with the names of its chunks' fields."""
    if text.startswith("event: "):
        return _named_events(text)
    if not text.startswith("data: "):
        return json.loads(text)
    events = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    joined: dict[str, Any] = {"done": events[-1] == "[DONE]", "object": chunks[0].get("object"), "choices": {}}
    for chunk in chunks:
        joined.update({name: value for name, value in chunk.items() if name not in ("choices", "usage")})
        if chunk.get("usage"):
            joined["usage"] = chunk["usage"]
        for choice in chunk.get("choices", ()):
            _join(joined["choices"].setdefault(str(choice["index"]), {}), choice)
    joined["choices"] = [joined["choices"][index] for index in sorted(joined["choices"])]
    return joined


def _named_events(text: str) -> Any:
    """Return a stream of typed events: the types in order, the whole text, the last event of each type, and the end."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    events = [json.loads(each) for each in data if each != "[DONE]"]
    deltas = [event["delta"] for event in events if "delta" in event]
    return {
        "types": [kind for kind, _ in groupby(event["type"] for event in events)],
        "text": "".join(delta if isinstance(delta, str) else delta.get("text", "") for delta in deltas),
        "end": events.pop(),
        **{event.pop("type"): event for event in events},
    }


def _join(into: dict[str, Any], part: dict[str, Any]) -> None:
    """Add a chunk's part to what came before: texts and lists are appended, others replaced."""
    for name, value in part.items():
        before: Any = into.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            _join(before, value)
        elif (
            before is not None
            and type(before) is type(value)
            and type(value) in (str, list)
            and name not in ("role", "finish_reason")
        ):
            into[name] = before + value
        elif value is not None or name not in into:
            into[name] = value


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values inside by path; places in lists are not told apart by name, but by their order."""
    if isinstance(value, dict):
        for name, each in sorted(value.items()):
            if name not in CHANGING:
                yield from leaves(each, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for each in value:
            yield from leaves(each, f"{path}[]")
        yield f"{path}[]", len(value)
    else:
        yield path, round(value, 3) if isinstance(value, float) else value


def differences(kind: str, stock: Any, baton: Any) -> set[tuple[str, str, str]]:
    """Return where two answers to one request differ: the kind of request, the path, and how."""
    found: set[tuple[str, str, str]] = set()
    ours, theirs = _by_path(baton), _by_path(stock)
    for path in ours.keys() | theirs.keys():
        if path not in ours:
            # A null says no more than a field that is left out.
            how = "" if all(value is None for value in theirs[path]) else "vLLM only"
        elif path not in theirs:
            how = "" if all(value is None for value in ours[path]) else "Baton only"
        else:
            how = "" if ours[path] == theirs[path] else "differs"
        if how:
            found.add((kind, path, how))
    return found


def _by_path(value: Any) -> dict[str, list[Any]]:
    paths: dict[str, list[Any]] = {}
    for path, each in leaves(value):
        paths.setdefault(path, []).append(each)
    return paths
