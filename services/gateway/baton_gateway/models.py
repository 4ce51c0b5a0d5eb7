"""Models known to this gateway, with the tokenizers and vocabularies that read prompts and write answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass
from typing import Final

from baton.errors import ConfigurationError, Unavailable
from baton.node.ports import Ports
from baton_gateway.detokenise import Vocabulary
from baton_gateway.intake_pool import IntakePool
from baton_gateway.parsing.parser import AnswerFormat
from baton_gateway.tokenise import ModelFacts, ModelTokenizer

log = logging.getLogger(__name__)

LOAD_RETRY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class KnownModel:
    vocabulary: Vocabulary
    eos_tokens: frozenset[int]
    answers: AnswerFormat | None
    """Format of the answers; None: none is known."""
    tokenizer: ModelTokenizer | None
    """Tokenizer for short prompts, read in this process. None: only the intake processes have it."""

    @classmethod
    def of(cls, facts: ModelFacts, tokenizer: ModelTokenizer | None) -> KnownModel:
        vocabulary = Vocabulary(facts.spellings)
        answers = AnswerFormat(facts.answers, vocabulary.special()) if facts.answers else None
        return cls(vocabulary, facts.eos_tokens, answers, tokenizer)


class Models:
    """Loads each model's tokenizer once.

    Loading holds the interpreter for a second and more. So only the first model is loaded in this process: there is no
    stream yet that it could hold up. Later models are loaded in the intake processes, and only their tokens'
    spellings come back.
    """

    def __init__(
        self, *, ports: Ports, intake: IntakePool, load: Callable[[str], ModelTokenizer] = ModelTokenizer
    ) -> None:
        self.intake = intake
        self._ports = ports
        self._load = load
        self._first: tuple[str, str] | None = None
        self._loaded: dict[tuple[str, str], asyncio.Future[KnownModel]] = {}
        self._failed_at_s: dict[tuple[str, str], float] = {}

    @property
    def loaded(self) -> Set[tuple[str, str]]:
        """Paths and digests of the models that are loaded or being loaded."""
        return self._loaded.keys()

    def forget(self, served: Collection[tuple[str, str]]) -> None:
        """Forget models that are not `served` any more, but for the first: to load it again would hold up streams."""
        for key in [key for key in self._loaded if key not in served and key != self._first]:
            if self._loaded[key].done():
                del self._loaded[key]
                self._failed_at_s.pop(key, None)

    def prepare(self, path: str, digest: str) -> asyncio.Future[KnownModel]:
        """Begin to load the model unless that was done; a failed load is retried after a while."""
        key = (path, digest)
        known = self._loaded.get(key)
        if known is not None:
            failed = known.done() and (known.cancelled() or known.exception() is not None)
            if not failed or self._ports.clock.now_s() - self._failed_at_s.get(key, 0.0) < LOAD_RETRY_S:
                return known
        future = self._loaded[key] = asyncio.ensure_future(self._know(key))
        future.add_done_callback(lambda done: self._note_failure(key, done))
        return future

    async def _know(self, key: tuple[str, str]) -> KnownModel:
        path, digest = key
        if self._first is None:
            self._first = key
        if self._first != key:
            known = KnownModel.of(await self.intake.load(path, digest), None)
            _log_format(path, known)
            return known
        try:
            here = self._ports.threads.run(self._load, path)
            # An intake process loads it, too, so that it is ready for the first long prompt.
            tokenizer, _ = await asyncio.gather(here, self.intake.load(path, digest))
        except BaseException:
            self._first = None
            raise
        known = KnownModel.of(tokenizer.facts, tokenizer)
        _log_format(path, known)
        return known

    def _note_failure(self, key: tuple[str, str], done: asyncio.Future[KnownModel]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            self._failed_at_s[key] = self._ports.clock.now_s()
            log.error("%s", error)

    def known(self, path: str, digest: str) -> KnownModel | None:
        """Return the model if it is loaded."""
        future = self.prepare(path, digest)
        return future.result() if future.done() and future.exception() is None else None

    async def get(self, path: str, digest: str) -> KnownModel:
        """Return the model, waiting while it loads. Raises Unavailable if it does not load."""
        try:
            return await asyncio.shield(self.prepare(path, digest))
        except ConfigurationError as error:
            raise Unavailable(str(error), retry_after_s=LOAD_RETRY_S) from error

    async def aclose(self) -> None:
        for future in self._loaded.values():
            future.cancel()
        await asyncio.gather(*self._loaded.values(), return_exceptions=True)
        await self.intake.close()


def _log_format(path: str, known: KnownModel) -> None:
    if known.answers is None:
        log.info("%s: no known format of reasoning and tool calls, so answers are text and tools are refused", path)
    else:
        spec = known.answers.spec
        parts = [name for name, is_read in (("reasoning", spec.reasoning), ("tool calls", spec.has_tools)) if is_read]
        log.info("%s: answer format %s (%s)", path, spec.name, ", ".join(parts))
