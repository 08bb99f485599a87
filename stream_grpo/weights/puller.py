"""Brings published weights from another node into a folder of this one, where a `Subscriber` finds them as usual."""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path

from curator.wire import Client, Message, RemoteError
from stream_grpo.errors import WeightsError
from stream_grpo.files import replace_with, sha256, sync, write_synced
from stream_grpo.types import PolicyVersion
from stream_grpo.weights.manifest import (
    LATEST_FILE,
    MANIFEST_FILE,
    TENSORS_FILE,
    Manifest,
    folder_name,
    from_json,
    parse_folder_name,
)

POLL_S = 0.2
"""How often it asks for the newest version: what this adds to the lag of a publish, at most."""
_CALL_S = 30.0
_KEPT = 2
"""Versions that stay: the newest, and the one that may just be read."""
_log = logging.getLogger(__name__)


class Puller:
    """Follows one `WeightsService`. Belongs to one thread; the folder is its own."""

    def __init__(self, client: Client, directory: Path) -> None:
        """What an earlier one left half pulled is gone on with."""
        self._client, self._directory = client, directory
        directory.mkdir(parents=True, exist_ok=True)
        pointer = directory / LATEST_FILE
        self._pulled = [pointer.read_text().strip()] if pointer.exists() else []
        """Names of what was pulled, the newest last: a restore publishes versions in another order than theirs."""
        self._newest = parse_folder_name(self._pulled[-1]) if self._pulled else None
        self._held: dict[str, set[str]] = {}
        """Of what came whole, by name: the versions whose files hold what it leaves out."""
        self.trouble = ""
        """Why the last turn brought nothing; empty where it went well. May be read from any thread."""

    def run(self, stop: threading.Event) -> None:
        """Pull until `stop` is set; what goes wrong, a cut connection or a full disk, is waited out and said once."""
        while not stop.wait(POLL_S):
            try:
                self.turn()
            except Exception as error:
                # Without this thread the sampler would stay at its weights for ever, and nobody would know why.
                self._note(error)

    def _note(self, error: Exception) -> None:
        name = type(error).__name__
        if not self.trouble.startswith(f"{name}:"):
            _log.warning("weights cannot be pulled: %s: %s", name, error)
        self.trouble = f"{name}: {error}"

    def turn(self) -> PolicyVersion | None:
        """Bring the newest version here, where it is not; returns the one that is.

        Raises WireError where nobody answers in time, WeightsError where what came is not what was published; what has
        come of a version stays, and the next turn goes on from there.
        """
        told = self._client.call("newest", timeout_s=_CALL_S).fields["version"]
        if told is not None and (version := PolicyVersion(int(told[0]), int(told[1]))) != self._newest:
            try:
                self._pull(version)
            except RemoteError as error:
                self._note(error)  # pruned meanwhile: the next turn asks again
                return self._newest
        self.trouble = ""
        return self._newest

    def _pull(self, version: PolicyVersion) -> None:
        name, here = folder_name(version), self._kept() | self._held.keys()
        # A folder of that name may be of another run, unless it came from this one.
        missing = {folder_name(held) for held in self._manifest(version)[0].held_in.values()} - here
        wanted = [*sorted(missing), name]
        for other in self._directory.glob(".pulling-*"):
            if other.name.removeprefix(".pulling-") not in wanted:
                shutil.rmtree(other)
        for each in wanted:
            self._pull_folder(parse_folder_name(each))
        replace_with(self._directory / LATEST_FILE, name.encode())
        self._newest = version
        self._pulled = [*(other for other in self._pulled if other != name), name][-_KEPT:]
        self._prune()

    def _manifest(self, version: PolicyVersion) -> tuple[Manifest, Message]:
        answer = self._client.call("manifest", {"version": list(version)}, timeout_s=_CALL_S)
        return from_json(answer.body[0].decode()), answer

    def _pull_folder(self, version: PolicyVersion) -> None:
        name = folder_name(version)
        unfinished = self._directory / f".pulling-{name}"
        manifest, answer = self._manifest(version)
        unfinished.mkdir(exist_ok=True)
        self._pull_tensors(unfinished / TENSORS_FILE, manifest, int(answer.fields["num_bytes"]))
        write_synced(unfinished / MANIFEST_FILE, answer.body[0])
        sync(unfinished)
        shutil.rmtree(self._directory / name, ignore_errors=True)
        unfinished.rename(self._directory / name)
        self._held[name] = {folder_name(held) for held in manifest.held_in.values()}

    def _pull_tensors(self, path: Path, manifest: Manifest, num_bytes: int) -> None:
        with path.open("ab") as file:
            while (offset := file.tell()) < num_bytes:
                asked = {"version": list(manifest.version), "offset": offset}
                piece = self._client.call("piece", asked, timeout_s=_CALL_S).body[0]
                if not piece:
                    break
                file.write(piece)
            file.flush()
        sync(path)
        if (received := sha256(path)) != manifest.sha256:
            path.unlink()
            raise WeightsError(f"{path}: sha256 of the pulled bytes is {received}, published {manifest.sha256}")

    def _prune(self) -> None:
        kept = self._kept()
        for path in self._directory.iterdir():
            if path.is_dir() and not path.name.startswith(".") and path.name not in kept:
                shutil.rmtree(path)
                self._held.pop(path.name, None)

    def _kept(self) -> set[str]:
        """The newest versions, and those whose files hold what they leave out."""
        for name in self._pulled:
            path = self._directory / name / MANIFEST_FILE
            if name not in self._held and path.exists():
                self._held[name] = {folder_name(held) for held in from_json(path.read_text()).held_in.values()}
        return set(self._pulled).union(*(self._held.get(name, set()) for name in self._pulled))
