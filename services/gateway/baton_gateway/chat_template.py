"""A model's chat template: renders messages and tools, each in the form that the template was written for."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

import msgspec
from jinja2 import TemplateError

from baton.errors import InvalidRequest
from baton_gateway.bodies import ChatBody, ChatMessage
from baton_gateway.parameters import pack_bounded
from baton_gateway.tool_bodies import CalledTool

TEMPLATE_ERRORS: Final = (
    TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
"""Errors that a template raises on messages that it was not written for."""
PROBE_TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {"name": "probe_tool", "description": "", "parameters": {"type": "object", "properties": {}}},
}
PROBE_ARGUMENTS: Final = {"probe_key": "probe_value"}


@dataclass(frozen=True, slots=True)
class CallForm:
    """Form of an assistant's calls that a template was written for."""

    arguments_as_text: bool
    no_content: str | None
    """Content of a message that has calls only."""


CALL_FORMS: Final = tuple(CallForm(as_text, none) for none in ("", None) for as_text in (False, True))


class ChatTemplate:
    """Renders chats with one tokenizer's template. What the template supports is found out by rendering probes."""

    def __init__(self, tokenizer: Any) -> None:
        self._render: Callable[..., str] = tokenizer.apply_chat_template
        self.text = str(tokenizer.chat_template or "")
        self._reserved = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters)
        developer = [_probe("developer", "<probe>"), _probe("user", "x")]
        self._knows_developer = "<probe>" in self._rendered("developer", developer)
        self.takes_tools = "probe_tool" in self._rendered("tools", [_probe("user", "x")], tools=[PROBE_TOOL])
        self._call_form = next((form for form in CALL_FORMS if self._shows_call(form)), None)

    def render(self, body: ChatBody) -> str:
        """Return the prompt's text. Raises InvalidRequest if the template refuses the messages."""
        if not self.text and body.chat_template is None:
            raise InvalidRequest(f"the model `{body.model}` has no chat template; use /v1/completions", param="model")
        variables = self._variables(body)
        if tools := body.active_tools():
            variables["tools"] = [tool.described() for tool in tools]
        going_on = bool(body.continue_final_message)
        opening = body.add_generation_prompt if body.add_generation_prompt is not None else not going_on
        if going_on and opening:
            raise InvalidRequest(
                "`continue_final_message` needs `add_generation_prompt` to be false", param="continue_final_message"
            )
        messages = [self._plain(message, index) for index, message in enumerate(body.messages)]
        try:
            return self._render(
                messages, tokenize=False, add_generation_prompt=opening, continue_final_message=going_on, **variables
            )
        except TEMPLATE_ERRORS as error:
            detail = f"the model's chat template refuses these messages: {error}"
            raise InvalidRequest(detail, param="messages") from error

    def sample(self) -> str:
        """Return a rendered conversation, empty if the template renders none."""
        messages = [_probe(role, "x") for role in ("user", "assistant", "user")]
        return self._rendered("", messages, add_generation_prompt=True)

    def _plain(self, message: ChatMessage, index: int) -> dict[str, Any]:
        """Return the message as templates expect it: a dictionary with plain text and a known role."""
        role = "system" if message.role == "developer" and not self._knows_developer else message.role
        plain: dict[str, Any] = {**(message.model_extra or {}), "role": role, "content": message.text()}
        for name in ("name", "tool_call_id"):
            if (given := getattr(message, name)) is not None:
                plain[name] = given
        reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
        if reasoning is not None:
            # As in vLLM, templates find it by both names.
            plain |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if message.tool_calls:
            form, where = self._call_form, f"messages[{index}].tool_calls"
            if form is None:
                raise InvalidRequest(f"`{where}`: the model's chat template shows no tool calls", param=where)
            called = enumerate(message.tool_calls)
            plain["tool_calls"] = [_plain_call(call, form, f"{where}[{number}]") for number, call in called]
            plain["content"] = plain["content"] or form.no_content
        return plain

    def _variables(self, body: ChatBody) -> dict[str, Any]:
        variables = dict(body.chat_template_kwargs or {})
        pack_bounded({"chat_template_kwargs": variables})
        if taken := sorted(self._reserved & variables.keys()):
            raise InvalidRequest(f"`chat_template_kwargs` cannot set `{taken[0]}`", param="chat_template_kwargs")
        if body.reasoning_effort is not None:
            variables["reasoning_effort"] = body.reasoning_effort
        if body.documents is not None:
            variables["documents"] = body.documents
        if body.chat_template is not None:
            variables["chat_template"] = body.chat_template
        return variables

    def _shows_call(self, form: CallForm) -> bool:
        arguments = json.dumps(PROBE_ARGUMENTS) if form.arguments_as_text else PROBE_ARGUMENTS
        # Mistral's templates take only ids of nine letters and digits.
        call = {"id": "probe0000", "type": "function", "function": {"name": "probe_tool", "arguments": arguments}}
        messages = [_probe("user", "x"), {**_probe("assistant", form.no_content), "tool_calls": [call]}]
        shown = self._rendered("tool_calls", messages, tools=[PROBE_TOOL])
        # Python's own spelling means that the template was written for text.
        return "probe_value" in shown and "'probe_value'" not in shown

    def _rendered(self, name: str, messages: list[dict[str, Any]], **variables: object) -> str:
        """Return these messages as text; empty if the template refuses them or does not use this name.

        Templates that name no role render any role, even one that the model was not trained on.
        """
        if name not in self.text:
            return ""
        try:
            return self._render(messages, tokenize=False, **variables)
        except TEMPLATE_ERRORS:
            return ""


def _probe(role: str, content: str | None) -> dict[str, Any]:
    return {"role": role, "content": content}


def _plain_call(call: CalledTool, form: CallForm, where: str) -> dict[str, Any]:
    text, where = call.function.arguments or "{}", f"{where}.function.arguments"
    try:
        arguments: object = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"`{where}` is not valid JSON: {error}", param=where) from error
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"`{where}` must be a JSON object", param=where)
    shown = text if form.arguments_as_text else cast("object", arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": shown}}
