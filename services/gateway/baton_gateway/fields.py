"""Fields of requests that the gateway knows and does not take, and hints for misspelt ones. Pure.

`docs/api-fields.md` lists every field, with those that the bodies take. All others are engine parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

from baton.errors import InvalidRequest

HINT_CHARS_MAX: Final = 64
"""Longest name that is compared with the known ones."""
HINT_SIMILARITY_MIN: Final = 0.75

SESSION: Final = ("session_id", "prompt_cache_key", "user", "safety_identifier")
"""Fields that tell conversations or their users apart, the most specific first."""
IGNORED: Final = frozenset(
    {
        "custom_labels", "metadata", "prompt_cache_options", "prompt_cache_retention", "service_tier", "store",
        "stream_interval",
    }
)  # fmt: skip
"""Fields that describe a request to the server's operator, or ask for a speed, and change no token."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A field that is refused, unless its value requests nothing."""

    reason: str
    neutral: tuple[object, ...] = (False,)
    """Values that request nothing, besides null."""


_TEXT: Final = "this server takes and returns text only"
_PLACEMENT: Final = "the scheduler places requests"
_INTERNALS: Final = "workers pass on tokens and log-probabilities only"
_LENGTH: Final = "the answer ends where the model, `stop` or `max_tokens` ends it"

REFUSED: Final[Mapping[str, Refusal]] = {
    # OpenAI's
    "audio": Refusal(_TEXT),
    "best_of": Refusal("ask for `n` answers, all of which are returned", (1,)),
    "function_call": Refusal("use `tool_choice`", ("none", "auto")),
    "functions": Refusal("use `tools`", ([],)),
    "modalities": Refusal(_TEXT, (["text"],)),
    "moderation": Refusal("this server has no moderation model"),
    "prediction": Refusal("whether tokens are predicted is a setting of the engine"),
    "suffix": Refusal("the models that are served do not fill in", ("",)),
    "verbosity": Refusal("say it in a message", ("medium",)),
    "web_search_options": Refusal("this server searches nothing"),
    # vLLM's
    "echo": Refusal("the last message is the client's own"),
    "ec_transfer_params": Refusal(_TEXT),
    "include_reasoning": Refusal("reasoning is returned as `reasoning_content`, for the client to drop", (True,)),
    "kv_transfer_params": Refusal(_PLACEMENT),
    "length_penalty": Refusal("it belongs to beam search", (1,)),
    "logprob_token_ids": Refusal("workers pass on the log-probabilities of the likeliest tokens only", ([],)),
    "media_io_kwargs": Refusal(_TEXT, ({},)),
    "mm_payload": Refusal(_TEXT, ("tensors", "none")),
    "mm_processor_kwargs": Refusal(_TEXT, ({},)),
    "priority": Refusal("send `x-baton-priority`, which the key must permit; vLLM and SGLang count contrarily", (0,)),
    "prompt_embeds": Refusal("prompts are found in caches by their tokens"),
    "prompt_logprobs": Refusal("what of a prompt is cached or transferred is not computed, so it has no probabilities"),
    "return_mm_kwargs": Refusal(_TEXT),
    "return_prompt_text": Refusal("ask /tokenize for the prompt's tokens"),
    "return_token_offsets": Refusal("ask /tokenize with `return_token_strs`"),
    "routed_experts_prompt_start": Refusal(_INTERNALS, (0,)),
    "spaces_between_special_tokens": Refusal("a token's text does not depend on its neighbours", (True,)),
    "use_beam_search": Refusal("beams share their beginning in one engine's cache, and cannot be handed over"),
    # SGLang's
    "bootstrap_host": Refusal(_PLACEMENT),
    "bootstrap_port": Refusal(_PLACEMENT),
    "bootstrap_room": Refusal(_PLACEMENT),
    "custom_logit_processor": Refusal("it is code, which only the operator may give to an engine"),
    "custom_params": Refusal("they belong to `custom_logit_processor`", ({},)),
    "data_parallel_rank": Refusal(_PLACEMENT),
    "disagg_prefill_dp_rank": Refusal(_PLACEMENT),
    "extra_key": Refusal("use `cache_salt`"),
    "images_config": Refusal(_TEXT, ({},)),
    "input_ids": Refusal("send token ids as `prompt` to /v1/completions"),
    "lora_path": Refusal("adapters are not served; a worker serves one model"),
    "max_dynamic_patch": Refusal(_TEXT),
    "min_dynamic_patch": Refusal(_TEXT),
    "return_cached_tokens_details": Refusal("`usage.prompt_tokens_details` has the number of cached tokens"),
    "return_flat_raw_output_top_logprobs": Refusal("use `top_logprobs`"),
    "return_flat_raw_top_logprobs_b64": Refusal("use `top_logprobs`", (True,)),
    "return_hidden_states": Refusal(_INTERNALS),
    "return_input_ids_in_sglext": Refusal("use `return_token_ids`"),
    "return_meta_info": Refusal(_INTERNALS),
    "return_output_ids_in_sglext": Refusal("use `return_token_ids`"),
    "return_prompt_token_ids": Refusal("use `return_token_ids`"),
    "return_routed_experts": Refusal(_INTERNALS),
    "return_sampling_mask": Refusal(_INTERNALS),
    "return_spec_tokens_details": Refusal(_INTERNALS),
    "routed_dp_rank": Refusal(_PLACEMENT),
    "routed_experts_start_len": Refusal(_INTERNALS, (0,)),
    "sampling_logprobs_mode": Refusal(_INTERNALS),
    "separate_reasoning": Refusal("reasoning is returned as `reasoning_content`, apart from `content`", (True,)),
    "session_params": Refusal("send the whole conversation; its beginning is cached"),
    "stop_regex": Refusal(_LENGTH),
    "stream_reasoning": Refusal("reasoning is streamed as it comes", (True,)),
    "task": Refusal("the models that are served have no tasks"),
    "thinking": Refusal("use `chat_template_kwargs`, under the template's own name for it"),
    "use_audio_in_video": Refusal(_TEXT),
    "video_config": Refusal(_TEXT, ({},)),
    "watermark": Refusal(_INTERNALS),
}

ENGINE: Final = frozenset(
    {
        "allowed_token_ids", "bad_words", "extra_args", "repetition_detection", "skip_reading_prefix_cache",
        "thinking_token_budget", "watermarking",
    }
)  # fmt: skip
"""Parameters of vLLM. Any other name is passed on, too, to a worker that declares it."""


def refuse(fields: dict[str, Any], taken: Iterable[str], elsewhere: Iterable[str]) -> None:
    """Raise InvalidRequest, with the reason, for fields that are refused; remove them where they request nothing.

    `taken`: fields of this endpoint. `elsewhere`: fields that only the other endpoint has.
    """
    for name in REFUSED.keys() & fields.keys():
        if name in taken:
            continue
        refusal, value = REFUSED[name], fields.pop(name)
        if value is not None and value not in refusal.neutral and not (name == "best_of" and value == fields.get("n")):
            raise InvalidRequest(f"`{name}` is not supported by this server: {refusal.reason}", param=name)
    for name in fields.keys() & set(elsewhere):
        if fields.pop(name) not in (None, False, []):
            raise InvalidRequest(f"`{name}` is not a field of this endpoint", param=name)


def hint(name: str, known: Iterable[str]) -> str:
    """Return a question that names the known field that is spelt most like `name`; empty if none is."""
    if len(name) > HINT_CHARS_MAX:
        return ""
    close = get_close_matches(name.lower(), sorted(known), n=1, cutoff=HINT_SIMILARITY_MIN)
    return f": did you mean `{close[0]}`?" if close else ""
