"""The page over HTTP: who may see it, and what it gives."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from stream_grpo.dashboard.access import HEADERS, is_loopback
from stream_grpo.dashboard.server import make_app, static_files
from tests.dashboard.runs import WrittenRun

TOKEN = "t" * 43


@pytest.fixture
def run(tmp_path: Path) -> WrittenRun:
    run = WrittenRun(tmp_path / "runs" / "mine")
    run.steps(1, 5)
    return run


@contextmanager
def page(*paths: Path, token: str | None = None, url: str = "http://127.0.0.1:8000") -> Iterator[TestClient]:
    with TestClient(make_app(paths, token), base_url=url, follow_redirects=False) as client:
        yield client


def test_the_page_and_all_that_it_names_are_there(run: WrittenRun) -> None:
    with page(run.path) as client:
        index = client.get("/")
        assert index.headers["content-type"].startswith("text/html")
        for name in re.findall(r'(?:src|href)="(/[^"]+)"', index.text):
            assert client.get(name).status_code == 200, name


def test_every_module_that_is_imported_is_shipped_and_nothing_comes_from_elsewhere() -> None:
    files = {name: content.decode() for name, (_, content) in static_files().items()}
    for name, text in files.items():
        assert set(re.findall(r'from "\./([^"]+)"', text)) <= set(files), name
        outside = set(re.findall(r"(?:https?:)?//[a-z][^\s\"')]*", text)) - {"http://www.w3.org/2000/svg"}
        assert not [url for url in outside if not url.startswith("//")], name


def test_no_text_becomes_markup() -> None:
    for name, (_, content) in static_files().items():
        for sink in (b"innerHTML", b"outerHTML", b"insertAdjacentHTML", b"document.write", b"eval(", b"new Function"):
            assert sink not in content, f"{name}: {sink!r}"


def test_every_answer_forbids_what_the_page_does_not_need(run: WrittenRun) -> None:
    with page(run.path) as client:
        for path in ("/", "/static/page.css", "/api/runs", "/nowhere"):
            headers = client.get(path).headers
            assert {name: headers.get(name) for name in HEADERS} == dict(HEADERS)


@pytest.mark.parametrize(
    "path",
    ["/static/../server.py", "/static/%2e%2e%2fserver.py", "/static/..%2f..%2fconfig.toml", "/static//etc/passwd"],
)
def test_no_request_leads_out_of_the_static_files(run: WrittenRun, path: str) -> None:
    with page(run.path) as client:
        assert client.get(path).status_code == 404


def test_runs_are_read_with_cursors(run: WrittenRun) -> None:
    with page(run.path) as client:
        (first,) = client.get("/api/runs").json()["runs"]
        assert first["steps"]["x"] == [1, 2, 3, 4, 5]
        run.steps(6, 6)
        (again,) = client.get("/api/runs", params={"since": first["cursor"]}).json()["runs"]
        assert again["steps"]["x"] == [5, 6]


def test_two_runs_of_one_name_are_told_apart(run: WrittenRun, tmp_path: Path) -> None:
    other = WrittenRun(tmp_path / "other" / "mine")
    with page(run.path, other.path) as client:
        assert [found["name"] for found in client.get("/api/runs").json()["runs"]] == ["runs:mine", "other:mine"]


def test_a_run_that_cannot_be_read_leaves_the_others_on_the_page(run: WrittenRun, tmp_path: Path) -> None:
    bad = WrittenRun(tmp_path / "bad")
    (bad.path / "metrics.jsonl").unlink()
    (bad.path / "metrics.jsonl").mkdir()
    with page(bad.path, run.path) as client:
        first, second = client.get("/api/runs").json()["runs"]
    assert (first["step"], first["num_warnings"], second["step"]) == (0, 1, 5)
    assert first["warnings"][0]["message"] == "metrics.jsonl cannot be read: Is a directory"


def test_what_is_asked_wrongly_is_said_in_a_sentence(run: WrittenRun) -> None:
    with page(run.path) as client:
        assert client.get("/api/runs/theirs/groups").status_code == 404
        assert "no journal there" in client.get("/api/runs/mine/groups").json()["error"]
        answer = client.get("/api/runs/mine/groups", params={"step": "<b>"})
        assert (answer.status_code, answer.json()) == (400, {"error": "step = '<b>': expected a number"})
        assert "no state of a group" in client.get("/api/runs/mine/groups", params={"fate": "lost"}).json()["error"]


def test_nothing_can_be_changed(run: WrittenRun) -> None:
    with page(run.path) as client:
        assert client.post("/api/runs").status_code == 405


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost:9", 200),
        ("[::1]:9", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
    ],
)
def test_on_loopback_a_name_that_another_site_gave_the_address_is_refused(
    run: WrittenRun, host: str, status: int
) -> None:
    with page(run.path) as client:
        assert client.get("/api/runs", headers={"host": host}).status_code == status


def test_a_link_with_the_token_leaves_a_cookie_and_nothing_in_the_address(run: WrittenRun) -> None:
    with page(run.path, token=TOKEN, url="http://host.example:80") as client:
        assert client.get("/").status_code == 401
        assert client.get("/", params={"token": "wrong"}).status_code == 401
        answer = client.get("/", params={"token": TOKEN, "x": "1"})
        assert (answer.status_code, answer.headers["location"]) == (303, "/?x=1")
        assert {"HttpOnly", "SameSite=lax"} <= set(answer.headers["set-cookie"].split("; "))
        assert client.get("/api/runs").status_code == 200  # by the cookie


def test_pages_on_two_ports_of_one_host_leave_each_other_their_cookies(run: WrittenRun) -> None:
    first, second = "http://host.example:8001", "http://host.example:8002"
    jar = dict[str, str]()
    for url, token in ((first, TOKEN), (second, "u" * 43)):
        with page(run.path, token=token, url=url) as client:
            jar.update(client.get("/", params={"token": token}).cookies)
    # A browser sends both to either: cookies know no ports.
    for url, token in ((first, TOKEN), (second, "u" * 43)):
        with page(run.path, token=token, url=url) as client:
            client.cookies.update(jar)
            assert client.get("/api/runs").status_code == 200


def test_a_port_that_is_none_does_not_get_into_the_cookie(run: WrittenRun) -> None:
    with page(run.path, token=TOKEN) as client:
        answer = client.get("/", params={"token": TOKEN}, headers={"host": "a:1; Domain=b"})
        assert answer.headers["set-cookie"].startswith("stream-grpo-token-=")


@pytest.mark.parametrize(
    ("header", "status"),
    [(f"Bearer {TOKEN}", 200), (f"bearer {TOKEN}", 200), (TOKEN, 401), ("Bearer ", 401), ("Bearer \u00e9", 401)],
)
def test_a_program_brings_the_token_as_a_header(run: WrittenRun, header: str, status: int) -> None:
    with page(run.path, token=TOKEN) as client:
        assert client.get("/api/runs", headers={"authorization": header.encode()}).status_code == status


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.evil", False),
    ],
)
def test_loopback_is_what_no_other_machine_reaches(host: str, is_ours: bool) -> None:
    assert is_loopback(host) is is_ours
