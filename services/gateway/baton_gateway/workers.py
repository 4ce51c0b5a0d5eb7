"""Models that the gateway serves, as reported by the workers on the bus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from baton.errors import InvalidRequest, ModelNotFound
from baton.messages.attempts import ConstraintKind
from baton.messages.base import PARAMETER_CHARACTERS_MAX
from baton.messages.workers import Heartbeat, Role
from baton.node.membership import Workers
from baton_gateway.bodies import NAMES
from baton_gateway.fields import hint

CONSTRAINT_PARAMETERS: Final = frozenset(kind.parameter for kind in ConstraintKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Facts of a model that the gateway needs to prepare a prompt."""

    name: str
    path: str
    digest: str
    block_tokens: int
    context_tokens_max: int


class WorkerTable:
    """Workers on the bus, and the models that they serve. Pure."""

    def __init__(self, lost_after_s: float) -> None:
        self.members = Workers(lost_after_s=lost_after_s)

    def counts(self) -> Counter[tuple[str, str]]:
        """Return the number of live workers by role and model."""
        return Counter((heartbeat.role, heartbeat.model) for heartbeat in self.members.beats())

    def served(self) -> set[tuple[str, str]]:
        """Return path and digest of each model that a worker has, or had within the last minute as its newest one."""
        return {(beat.model_path, beat.model_digest) for beat in (*self.members.beats(), *self.members.newest_beats())}

    def models(self) -> list[Model]:
        """Return the models that a live decode worker serves, by name."""
        names = sorted({heartbeat.model for heartbeat in self._serving()})
        return [self.model(name) for name in names]

    def model(self, name: str) -> Model:
        """Return the model of this name. Raises ModelNotFound if no worker had it within the last minute.

        If all its workers have left or are leaving, the last one's facts hold: requests wait until a worker is back.
        """
        serving = [heartbeat for heartbeat in self._serving() if heartbeat.model == name]
        if not serving and (last := self.members.newest(name)) is not None:
            serving = [last]
        if not serving:
            raise ModelNotFound(f"the model `{name}` does not exist", param="model")
        # Workers of one model should agree; while the model is being replaced, the newest generation decides.
        newest = max(serving, key=lambda heartbeat: (heartbeat.address.generation, heartbeat.address.worker))
        agreeing = [heartbeat for heartbeat in serving if heartbeat.model_digest == newest.model_digest]
        return Model(
            name=name,
            path=newest.model_path,
            digest=newest.model_digest,
            block_tokens=newest.block_tokens,
            context_tokens_max=min(heartbeat.context_tokens_max for heartbeat in agreeing),
        )

    def check_parameters(
        self, model: str, names: Iterable[str], constraint_field: str = "", *, beside_tools: bool = False
    ) -> None:
        """Raise InvalidRequest, naming one parameter, if no live decode worker of the model takes all of these.

        `constraint_field`: the request's field that constrains the answer; its parameter is named otherwise.
        `beside_tools`: the answer may be calls instead.
        If none is live at the moment, the request waits for one, which then decides.
        """
        wanted = set(names)
        decodes = (beat for beat in self.members.beats() if beat.role is Role.DECODE and beat.model == model)
        lacking = [sorted(wanted.difference(beat.parameters)) for beat in decodes]
        if lacking and all(lacking):
            name = min(lacking, key=len)[0][:PARAMETER_CHARACTERS_MAX]
            if constraint_field and name in CONSTRAINT_PARAMETERS:
                beside = " beside `tools`" if beside_tools else ""
                said = f"no worker of the model `{model}` can enforce `{constraint_field}`{beside}"
                raise InvalidRequest(said, param=constraint_field)
            parameters = {name for beat in self.members.beats() for name in beat.parameters}
            # A part of a known field, such as `structured_outputs.json`, is spelt as it should be.
            meant = "" if name.partition(".")[0] in NAMES else hint(name, NAMES | parameters)
            raise InvalidRequest(f"no worker of the model `{model}` takes the parameter `{name}`{meant}", param=name)

    def _serving(self) -> list[Heartbeat]:
        return [each for each in self.members.beats() if each.role is Role.DECODE and not each.draining]
