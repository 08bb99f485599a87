"""The sampler's side of weights over NCCL: manifest and probe from files, tensors from the learner, into the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from curator.wire import Client, WireError
from stream_grpo.errors import WeightsError
from stream_grpo.types import PolicyVersion
from stream_grpo.weights.manifest import HASH, TensorSpec
from stream_grpo.weights.nccl_sender import ADDRESS_FILE
from stream_grpo.weights.subscriber import Published, Subscriber

_HASH = {HASH: TensorSpec((32,), "uint8")}
_PAUSE_S = 0.05
_CALL_S = 5.0
"""An answer comes at once, but from a learner that is gone: the one after it has another address."""


class Join(NamedTuple):
    """What the workers of an engine do to receive."""

    init_info: dict[str, Any] | None
    """vLLM's, of a group to join before; None: they go on in the one they have."""
    update_info: dict[str, Any]
    """vLLM's, of the tensors in the order in which they come."""


class RemoteWeights:
    """Stands for the tensors of a version that the learner holds for this sampler."""

    def __init__(self, client: Client, expected: Mapping[str, TensorSpec], *, anew: bool) -> None:
        self._client, self._expected = client, dict(sorted(expected.items()))
        self.is_broken = anew
        """Whether the next that receives needs another group."""

    def receive(self, num_workers: int) -> Join:
        """Have the learner begin to send to so many workers. Raises WeightsError where it does not."""
        asked = {
            "tensors": [[name, list(shape), dtype] for name, (shape, dtype) in self._expected.items()],
            "num_workers": num_workers,
            "anew": self.is_broken,
        }
        # Until it has gone well nothing is known of the group.
        self.is_broken = True
        try:
            answer = self._client.call("receive", asked).fields
        except WireError as error:
            raise WeightsError(f"the learner sends no weights: {error}") from error
        update_info = {
            "names": list(self._expected),
            "dtype_names": [spec.dtype for spec in self._expected.values()],
            "shapes": [list(spec.shape) for spec in self._expected.values()],
        }
        return Join({"rank_offset": 1, **answer["group"]} if answer["is_new"] else None, update_info)

    def received(self) -> None:
        """All workers have them: the group is sound."""
        self.is_broken = False


class NcclSubscriber:
    """A `Subscriber` whose tensors are no files."""

    def __init__(self, directory: Path, connect: Callable[[str], Client], wait_s: float) -> None:
        """`connect` gives a client of the learner at an address; `wait_s`: for a learner that is started again."""
        self._files, self._directory, self._connect = Subscriber(directory, is_sent=True), directory, connect
        self._wait_s = wait_s
        self._address = ""
        self._client: Client | None = None
        self._weights: RemoteWeights | None = None

    def newest(self) -> PolicyVersion | None:
        """As the subscriber's."""
        return self._files.newest()

    def read(self, version: PolicyVersion, expected: Mapping[str, TensorSpec]) -> Published:
        """The manifest of a version that the learner holds for this sampler from now on, or of a newer one.

        `tensors` is a `RemoteWeights`. A learner that begins anew offers nothing until it has restored and published:
        it is waited for. Raises WeightsError where it does not offer the newest version in time.
        """
        deadline = time.monotonic() + self._wait_s
        while True:
            manifest = self._files.read(version, _HASH).manifest
            try:
                client = self._hold(manifest.version)
                break
            except WireError as error:
                if time.monotonic() >= deadline:
                    raise WeightsError(
                        f"weights {manifest.version}: waited {self._wait_s:g} s for the learner to offer them, "
                        f"or newer ones: {error}"
                    ) from error
            time.sleep(_PAUSE_S)
            version = self.newest() or version
        is_broken = self._weights is None or self._weights.is_broken
        self._weights = RemoteWeights(client, expected, anew=is_broken)
        tensors: Any = self._weights
        return Published(manifest, tensors)

    def _hold(self, version: PolicyVersion) -> Client:
        """Raises RemoteError where the learner offers another version or none, WireTimeout where it does not answer."""
        address = (self._directory / ADDRESS_FILE).read_text()
        if self._client is None or address != self._address:  # a learner that was started again
            if self._client is not None:
                self._client.close()
            self._client, self._address, self._weights = self._connect(address), address, None
        self._client.call("hold", {"version": list(version)}, timeout_s=_CALL_S)
        return self._client
