"""Check of answers that must have calls, over a pair of real engines with random weights."""

from __future__ import annotations

from baton_gateway.parsing.formats import FormatName
from cross_engines import Engines
from msgspec.structs import replace

from baton.messages.attempts import FinishReason, Sampling
from tests.harness.engine_pair import Pair
from tests.harness.forced_calls import calls_in, forced

TOKENS_MAX = 600


async def check_forced_calls(pair: Pair, engines: Engines, family: FormatName) -> None:
    """Check that the one call of an answer is valid, and that the rest of the answer continues exactly."""
    sampling = Sampling(max_tokens=TOKENS_MAX, temperature=0.0, constraint=forced(family, parallel=False))
    prompt = pair.prompt(70)
    whole = await pair.hand_off(prompt, sampling)
    assert whole.last.finish is FinishReason.STOP, family
    assert len(calls_in(family, engines.text(whole.tokens))) == 1, family
    delivered = len(whole.tokens) // 2
    left = replace(sampling, max_tokens=TOKENS_MAX - delivered, delivered_tokens=delivered)
    rest = await pair.hand_off([*prompt, *whole.tokens[:delivered]], left)
    assert rest.tokens == whole.tokens[delivered:], family
