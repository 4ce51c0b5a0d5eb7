"""An intake process whose model loads at once, for tests of the processes. The prompt selects the behaviour.

    python -m tests.harness.gateway.stub_intake [PATH]

While PATH exists no model loads; one that would makes the file `PATH.begun`.

A prompt that begins with `hang` is never tokenised, one with `exit` ends the process, one with `until PATH` makes
the file `PATH.begun` and waits for PATH. All others are `TOKENS`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from baton_gateway.detokenise import Spellings
from baton_gateway.intake_process import main
from baton_gateway.parameters import SamplingDefaults
from baton_gateway.tokenise import ModelFacts, ModelTokenizer

from baton.messages.base import pack_tokens

COMMAND: Final = (sys.executable, "-m", "tests.harness.gateway.stub_intake")
TOKENS: Final = [5, 6, 7]


class StubTokenizer(ModelTokenizer):
    def __init__(self, path: str) -> None:
        spellings = Spellings(pieces=path.encode(), ends=b"", special=frozenset(), decoder="null")
        self.facts = ModelFacts(spellings=spellings, eos_tokens=frozenset())
        self.defaults = SamplingDefaults()

    def check_length(self, text: str, context_tokens_max: int, param: str) -> None:
        pass

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        pass

    def tokenise(self, text: str, *, add_special: bool, salt: str) -> bytes:
        match text.split():
            case ["hang", *_]:
                while True:
                    pass
            case ["exit", *_]:
                os._exit(3)
            case ["until", path, *_]:
                wait_until(Path(path).exists, Path(f"{path}.begun"))
            case _:
                pass
        return pack_tokens(TOKENS)


def wait_until(condition: Callable[[], bool], begun: Path) -> None:
    begun.touch()
    while not condition():
        time.sleep(0.01)


def load(path: str) -> StubTokenizer:
    held = Path(next(iter(sys.argv[1:]), "/no-such-file"))
    if held.exists():
        wait_until(lambda: not held.exists(), Path(f"{held}.begun"))
    return StubTokenizer(path)


if __name__ == "__main__":
    main(load)
