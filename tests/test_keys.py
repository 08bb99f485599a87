"""Keys are made per run, kept from others, and let members of the run alone in."""

import stat
from pathlib import Path

import pytest

from stream_grpo import keys
from stream_grpo.errors import ConfigError


def test_keys_fit_each_other_and_are_new_every_time(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    keys.make(folder)
    server, client = keys.server_keys(folder), keys.client_keys(folder)
    assert client.server_public == server.public
    assert server.clients == {client.public}
    assert (server.server_public, client.clients) == (None, None)
    assert len({server.public, server.secret, client.public, client.secret}) == 4
    keys.make(folder)
    assert keys.server_keys(folder).public != server.public
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]


def test_nobody_else_may_read_them(tmp_path: Path) -> None:
    keys.make(tmp_path / "keys")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "keys").iterdir()}
    assert modes == {0o600}
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


@pytest.mark.parametrize("text", [None, "", "{}", '{"public": 3, "secret": "s", "server_public": null, "clients": []}'])
def test_what_are_no_keys_is_named(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "client.json").write_text(text)
    with pytest.raises(ConfigError, match=r"client\.json: no keys there .*; make them with: stream-grpo keys RUN"):
        keys.client_keys(tmp_path)


def test_a_folder_with_anything_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match=r"holds thesis\.tex, which are no keys"):
        keys.make(tmp_path)
    assert (tmp_path / "thesis.tex").exists()
