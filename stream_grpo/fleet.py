"""The samplers of a run: those of its configuration, and those that come and go by order while it goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stream_grpo.config import Config
from stream_grpo.errors import OrderError
from stream_grpo.launch import Launcher
from stream_grpo.orders import Handler
from stream_grpo.parts_common import sampler_names
from stream_grpo.rundir import check_room

MAX_SAMPLERS = 4096
MAX_WITHIN_S = 86400.0


class Fleet:
    """Places samplers, and carries out orders to add and remove some."""

    def __init__(self, config: Config, launcher: Launcher, say: Callable[[str], None]) -> None:
        self._config, self._launcher, self._say = config, launcher, say
        self.names = sampler_names(config)
        """All there have been in this start of the run, the first to come first."""
        self._addresses: dict[str, str] = {}
        self._is_sampling, self._has_ended = False, False

    @property
    def present(self) -> list[str]:
        """Those that have not left."""
        return [name for name in self.names if self._launcher.has(name)]

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """What is done on which order."""
        return {"samplers": self._list, "samplers.add": self._add, "samplers.remove": self._remove}

    def place(self, **addresses: str) -> None:
        """Start the processes of those of the configuration; they are told these addresses by name."""
        self._addresses = addresses
        for name in self.names:
            self._place(name)

    def _place(self, name: str, *, by_order: bool = False) -> None:
        self._launcher.place(
            name,
            "sampler",
            restarts=self._config.sampler.max_restarts,
            by_order=by_order,
            sampler_id=name,
            **self._addresses,
        )

    def has_begun(self) -> None:
        """The loops run: one that is added from now on begins as soon as it is built."""
        self._is_sampling = True

    def end(self) -> None:
        """Stop them all; no order is carried out any more."""
        self._has_ended = True
        self._launcher.stop(*self.present)

    def _list(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "samplers": [self._launcher.facts(name) for name in self.present],
            "configured": self._config.sampler.num_samplers,
        }

    def _add(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        number = fields.get("number")
        self._refuse_ended()
        if type(number) is not int or number < 1 or len(self.present) + number > MAX_SAMPLERS:
            raise OrderError(
                f"--add {number!r}: expected 1 to {max(0, MAX_SAMPLERS - len(self.present))}, as a run has "
                f"{MAX_SAMPLERS} samplers at most"
            )
        sampler = self._config.sampler.model_copy(update={"num_samplers": len(self.present) + number})
        check_room(self._config.model_copy(update={"sampler": sampler}))
        if why := self._launcher.lacks("sampler", number):
            raise OrderError(f"--add {number}: {why}")
        # A name is used once in a start, so that what is told of it is of one process and its restarts.
        added = [f"sampler-{len(self.names) + index}" for index in range(number)]
        for name in added:
            self.names.append(name)
            self._place(name, by_order=True)
        if self._is_sampling:
            self._launcher.run(*added)
        self._say(f"{' and '.join(added)} added by order; the run has {len(self.present)} samplers")
        return {"added": added} | self._list({})

    def _remove(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        name, within_s = fields.get("name"), fields.get("within_s")
        self._refuse_ended()
        if not isinstance(name, str) or name not in self.present:
            raise OrderError(f"--remove {name}: no such sampler; there are {', '.join(self.present)}")
        if isinstance(within_s, bool) or not isinstance(within_s, int | float) or not 0 <= within_s <= MAX_WITHIN_S:
            raise OrderError(f"--within {within_s!r}: expected 0 to {MAX_WITHIN_S:.0f} seconds")
        if name == self.names[0] and self._config.evaluation.interval:
            raise OrderError(
                f"--remove {name}: the first sampler evaluates during training (evaluation.interval = "
                f"{self._config.evaluation.interval}); remove another one"
            )
        if self._launcher.staying("sampler") == [name]:
            raise OrderError(f"--remove {name}: it is the only one, and the learner would wait for groups in vain")
        self._say(f"{name} is removed by order: it takes no more tickets, and has {within_s:g} s for its groups")
        self._launcher.let_leave(name, within_s)
        return {"leaving": name} | self._list({})

    def _refuse_ended(self) -> None:
        if self._has_ended:
            raise OrderError("training has ended; what is left is the evaluation after it")
