"""The plan of a body: the model's defaults, the room in its context, its template's roles."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from baton_gateway.intake import CARRIED_BYTES_MAX, Intake, Plan
from baton_gateway.text_bound import chars_per_token_max
from baton_gateway.tokenise import ModelTokenizer
from baton_gateway.workers import Model
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from baton.blocks import hash_blocks
from baton.errors import ConfigurationError, ContextLengthExceeded, InvalidRequest
from baton.messages.attempts import Sampling
from baton.messages.base import unpack_tokens
from tests.harness.gateway.actors import CHAT_TEMPLATE, make_tokenizer, tiny_model

CONTEXT_TOKENS = 64
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def plan(tokenizer: ModelTokenizer, body: dict[str, Any], *, model_defaults: bool = True) -> Plan:
    intake = Intake()
    payload = json.dumps({"model": "m", **body}).encode()
    intake.parse("chat" if "messages" in body else "text_completion", payload)
    model = Model(name="m", path="", digest="d", block_tokens=16, context_tokens_max=CONTEXT_TOKENS)
    return intake.plan(tokenizer, model, model_defaults=model_defaults)


@pytest.fixture
def tokenizer() -> ModelTokenizer:
    return tiny_model()[1]


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., ModelTokenizer]:
    """Return a function that loads the small tokenizer with another chat template, or other defaults."""

    def load(*, template: str = CHAT_TEMPLATE, **generation: object) -> ModelTokenizer:
        folder = make_tokenizer(tmp_path)
        described = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**described, "chat_template": template}))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2], **generation}))
        return ModelTokenizer(str(folder))

    return load


# ---------------------------------------------------------------- constrained answers

THINKS = CHAT_TEMPLATE + "<think>{# </think> <tool_call></tool_call> {{ tools | tojson }} #}"
CONSTRAINTS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"regex": "a+"},
]


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_a_constrained_answer_is_content(load: Callable[..., ModelTokenizer], constraint: dict[str, Any]) -> None:
    tokenizer = load(template=THINKS)
    assert plan(tokenizer, HI).output.parsing
    assert plan(tokenizer, {**HI, "response_format": {"type": "text"}}).output.parsing
    assert plan(tokenizer, {**HI, **constraint}).output.parsing is None


@pytest.mark.parametrize("constraint", CONSTRAINTS[1:])
def test_tools_beside_a_constraint_other_than_json_are_refused(
    tokenizer: ModelTokenizer, constraint: dict[str, Any]
) -> None:
    body = {**HI, **constraint, "tools": [{"type": "function", "function": {"name": "f"}}]}
    with pytest.raises(InvalidRequest, match="to JSON only") as refused:
        plan(tokenizer, body)
    assert refused.value.param == "tools"
    assert plan(tokenizer, {**body, "tool_choice": "none"}).sampling.constraint


# ---------------------------------------------------------------- defaults

DEFAULTS: dict[str, Any] = {
    "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05, "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
}  # fmt: skip
"""Parameters in generation_config.json that vLLM 0.32 takes: `get_diff_sampling_param` in its vllm/config/model.py."""


def sampled(sampling: Sampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in DEFAULTS}


@pytest.mark.parametrize("body", [HI, {"prompt": "hi"}], ids=["chat", "completion"])
def test_the_models_own_sampling_is_the_default(load: Callable[..., ModelTokenizer], body: dict[str, Any]) -> None:
    tokenizer = load(**DEFAULTS, do_sample=True, transformers_version="5")
    assert sampled(plan(tokenizer, body).sampling) == DEFAULTS
    assert sampled(plan(tokenizer, {**body, **dict.fromkeys(DEFAULTS)}).sampling) == DEFAULTS, "null is not given"
    neutral = sampled(plan(tokenizer, body, model_defaults=False).sampling)
    assert neutral == sampled(Sampling(max_tokens=1))
    explicit = plan(tokenizer, {**body, **neutral}).sampling
    assert sampled(explicit) == neutral, "what is given wins, be it zero"


def test_the_models_own_length_is_the_default_of_a_chat(load: Callable[..., ModelTokenizer]) -> None:
    tokenizer = load(max_new_tokens=7)
    room_tokens = CONTEXT_TOKENS - len(unpack_tokens(plan(tokenizer, HI).prompts[0].tokens))
    assert plan(tokenizer, HI).prompts[0].max_tokens == 7
    assert plan(tokenizer, {**HI, "max_tokens": 9}).prompts[0].max_tokens == 9
    assert plan(tokenizer, HI, model_defaults=False).prompts[0].max_tokens == room_tokens
    assert plan(tokenizer, {"prompt": "hi"}).prompts[0].max_tokens == 16, "OpenAI's and vLLM's default"
    assert plan(load(max_new_tokens=CONTEXT_TOKENS), HI).prompts[0].max_tokens == room_tokens


def test_malformed_defaults_are_named(load: Callable[..., ModelTokenizer]) -> None:
    with pytest.raises(ConfigurationError, match=r"generation_config\.json .*\.temperature"):
        load(temperature="warm")


# ---------------------------------------------------------------- room


def test_an_output_has_the_room_that_its_prompt_leaves(tokenizer: ModelTokenizer) -> None:
    prompts = [[5] * 10, [5] * (CONTEXT_TOKENS - 3)]
    planned = plan(tokenizer, {"prompt": prompts, "max_tokens": 20})
    assert [prompt.max_tokens for prompt in planned.prompts] == [20, 3]
    assert [unpack_tokens(prompt.tokens) for prompt in planned.prompts] == prompts
    assert [prompt.blocks for prompt in planned.prompts] == [
        hash_blocks(planned.root, prompt.tokens, 16) for prompt in planned.prompts
    ]
    with pytest.raises(ContextLengthExceeded, match="leaves none"):
        plan(tokenizer, {"prompt": [5] * CONTEXT_TOKENS})
    with pytest.raises(ContextLengthExceeded, match=f"`max_tokens` is {CONTEXT_TOKENS + 1}"):
        plan(tokenizer, {"prompt": [5], "max_tokens": CONTEXT_TOKENS + 1})
    with pytest.raises(InvalidRequest, match="`min_tokens` is 4, above `max_tokens` of 3"):
        plan(tokenizer, {"prompt": prompts, "max_tokens": 20, "min_tokens": 4})


def test_parameters_for_engines_do_not_multiply(tokenizer: ModelTokenizer) -> None:
    body = {"prompt": "hi", "guided_json": {"a": "x" * (CARRIED_BYTES_MAX // 16)}}
    carried = plan(tokenizer, {**body, "n": 15}).extensions
    assert msgspec.msgpack.decode(carried["guided_json"]) == body["guided_json"]
    with pytest.raises(InvalidRequest, match="together are longer") as caught:
        plan(tokenizer, {**body, "n": 16})
    assert caught.value.param == "n"


class Untouched(ModelTokenizer):
    """Does not tokenise."""

    def tokenise(self, text: str, *, add_special: bool, salt: str) -> bytes:
        raise AssertionError("a text that cannot fit was tokenised")


@pytest.mark.parametrize("body", [{"messages": [{"role": "user", "content": "a" * 9999}]}, {"prompt": "a" * 9999}])
def test_what_cannot_fit_is_refused_before_it_is_tokenised(body: dict[str, Any]) -> None:
    with pytest.raises(ContextLengthExceeded, match="maximum context length is 64 tokens") as caught:
        plan(Untouched(str(tiny_model()[0])), body)
    assert caught.value.param in body


def byte_fallback() -> Tokenizer:
    """Return a tokenizer as Llama 2's."""
    pieces = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", "a", "▁a", "aa", "▁aa"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("a", "a"), ("▁", "aa")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def byte_level(normalizer: object = None) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(tiny_model()[0] / "tokenizer.json"))
    if normalizer is not None:
        tokenizer.normalizer = normalizer  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


@given(text=st.text(max_size=60) | st.text(alphabet="a \u0301e\u0323\u1100\u1161\u11a8的", max_size=60))
def test_no_token_holds_more_characters_than_the_bound(text: str) -> None:
    for tokenizer in (byte_level(), byte_level(normalizers.NFC()), byte_fallback()):
        bound = chars_per_token_max(tokenizer)
        assert bound is not None
        assert len(text) <= bound * len(tokenizer.encode(text, add_special_tokens=False).ids)


def test_tokenizers_that_drop_text_have_no_bound() -> None:
    splitting, stripping = byte_level(), byte_level(normalizers.Strip())
    splitting.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    unknown = Tokenizer(models.BPE(vocab={"<unk>": 0, "a": 1}, merges=[], unk_token="<unk>", fuse_unk=True))
    assert [chars_per_token_max(one) for one in (splitting, stripping, unknown)] == [None, None, None]


# ---------------------------------------------------------------- roles

PLAIN = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
KNOWING = PLAIN + "{# has a place for developer messages #}"
REFUSING = "{% for m in messages %}{% if m['role'] == 'developer' %}{{ raise_exception('no') }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "role"),
    [(PLAIN, "system"), (KNOWING, "developer"), (REFUSING + PLAIN, "system")],
    ids=["any", "known", "refused"],
)
def test_developers_are_the_system_where_the_template_does_not_know_them(
    load: Callable[..., ModelTokenizer], template: str, role: str
) -> None:
    tokenizer = load(template=template)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    planned = plan(tokenizer, {"messages": [{"role": "developer", "content": parts}, *HI["messages"]]})
    expected = tokenizer.encode(f"[{role}]one\ntwo[user]hi", add_special=False)
    assert unpack_tokens(planned.prompts[0].tokens) == expected
