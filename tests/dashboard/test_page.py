"""The page in a real browser, headless: needs Chromium, and playwright to drive it."""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stream_grpo.dashboard.commands import LOOPBACK, address, listen
from stream_grpo.dashboard.server import make_app
from tests.dashboard.runs import WrittenRun
from tests.dashboard.test_browsing import HOSTILE, changed
from tests.rollouts.test_rollouts import LATER, V0, V1, Run

pytestmark = pytest.mark.nightly

PHONE, DESK = {"width": 375, "height": 812}, {"width": 1280, "height": 900}
CONTROLS = "a[href], button, select, input, summary, [tabindex='0']"
CONTRAST = """() => {
  const pixel = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
  const canvas = pixel.getContext("2d", { willReadFrequently: true });
  const painted = (colours) => {  // the last on top, as a browser mixes them
    for (const colour of ["white", ...colours]) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => rgb.map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const grounds = (element) => {
    const found = [];
    for (let at = element; at; at = at.parentElement) found.unshift(getComputedStyle(at).backgroundColor);
    return found;
  };
  const poor = [];
  for (const element of document.querySelectorAll("p, a, h1, h2, h3, h4, li, label, b, button, span, td, th")) {
    if (!element.checkVisibility() || !element.innerText?.trim()) continue;
    const under = grounds(element), colour = getComputedStyle(element).color;
    const [a, b] = [light(painted([...under, colour])), light(painted(under))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${element.className}: ${element.innerText.slice(0, 30)} ${ratio.toFixed(2)}`);
  }
  return poor;
}"""
"""Text whose contrast with its ground is below 4.5 to 1 (WCAG 2.2, 1.4.3)."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def run(tmp_path: Path) -> WrittenRun:
    """Twenty steps, an evaluation, and a journal with a group whose text is hostile."""
    run = WrittenRun(tmp_path / "mine")
    run.steps(1, 20)
    run.write("evaluation", step=10, heldout={"headline": {"pass_at_1": 0.5, "low": 0.4, "high": 0.6}})
    journal = Run(run.path)
    journal.leases.start(V0, {}, LATER)
    journal.insert(V0)
    journal.insert(V1, change=changed)
    return run


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Serves runs in a thread; gives their address, with the token if there is one."""
    uvicorn = pytest.importorskip("uvicorn")
    started: list[tuple[Any, threading.Thread]] = []

    def start(*paths: Path, token: str | None = None) -> str:
        listener = listen(LOOPBACK, 0)
        server = uvicorn.Server(uvicorn.Config(make_app(paths, token), log_level="warning", lifespan="off", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        started.append((server, thread))
        return address(listener, LOOPBACK, token)

    yield start
    for server, thread in started:
        server.should_exit = True
        thread.join()


class Opened:
    """A page with what went wrong on it."""

    def __init__(self, browser: Any, url: str, viewport: dict[str, int] = DESK, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport=viewport, color_scheme=scheme)
        self.page, self.wrong = self.context.new_page(), list[str]()
        self.page.on("console", lambda message: self.wrong.append(f"console {message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: (self.wrong.append("a dialog"), dialog.dismiss()))
        self.page.on("request", lambda request: request.url.startswith(url) or self.wrong.append(request.url))
        self.page.goto(url)
        self.page.wait_for_selector("body[data-ready=true]")

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, *error: object) -> None:
        self.context.close()
        assert self.wrong == []


def test_it_loads_draws_and_asks_nobody_else(browser: Any, run: WrittenRun, serve: Callable[..., str]) -> None:
    with Opened(browser, serve(run.path)) as page:
        assert page.title() == "mine: stream-grpo"
        assert "step 20 of 50" in page.inner_text("#runs")
        for section in ("reward", "flow", "ages", "pool", "tokens", "updates"):
            assert page.locator(f"#{section} figure svg path, #{section} figure svg rect").count() > 0, section
        assert page.get_attribute("#reward .canvas", "aria-label").count("held-out pass@1") == 1


def test_it_goes_on_as_lines_are_appended(browser: Any, run: WrittenRun, serve: Callable[..., str]) -> None:
    with Opened(browser, serve(run.path)) as page:
        before = page.get_attribute("#reward path.line.m1:not(.faint)", "d")
        run.steps(21, 25)
        run.write("alarm", step=25, name="all_truncated", sentence=HOSTILE, cause="The limit is too low.")
        page.wait_for_selector("text=step 25 of 50")
        page.wait_for_selector(".alarms li")
        assert HOSTILE in page.inner_text(".alarms li")
        assert page.get_attribute("#reward path.line.m1:not(.faint)", "d") != before


def test_links_that_are_clicked_on_another_site_lead_to_two_pages_of_one_host(
    browser: Any, run: WrittenRun, serve: Callable[..., str]
) -> None:
    elsewhere, links = "http://elsewhere.example/", [serve(run.path, token=letter * 43) for letter in "ab"]
    context = browser.new_context()
    page = context.new_page()
    anchors = "".join(f'<a href="{link}">{number}</a> ' for number, link in enumerate(links))
    page.route(elsewhere, lambda route: route.fulfill(content_type="text/html", body=anchors))
    for number, _ in enumerate(links):
        page.goto(elsewhere)
        page.click(f"text={number}")
        page.wait_for_selector("body[data-ready=true]")
    page.goto(links[0].partition("?")[0])
    page.wait_for_selector("body[data-ready=true]")
    context.close()


def test_it_says_so_when_nobody_answers(browser: Any, run: WrittenRun, serve: Callable[..., str]) -> None:
    opened = Opened(browser, serve(run.path))
    with opened as page:
        page.route("**/api/runs*", lambda route: route.fulfill(status=503))
        page.wait_for_selector("#connection:visible")
        page.unroute("**/api/runs*")
        page.wait_for_selector("#connection", state="hidden")
        # The browser itself names a request that fails.
        opened.wrong = [text for text in opened.wrong if "503" not in text]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("num_runs", [1, 3])
def test_on_a_phone_nothing_is_wider_than_the_screen_and_all_text_can_be_read(
    browser: Any, run: WrittenRun, serve: Callable[..., str], tmp_path: Path, scheme: str, num_runs: int
) -> None:
    others = [WrittenRun(tmp_path / f"{'long-name-' * 8}{number}") for number in range(1, num_runs)]
    for other in others:
        other.steps(1, 9)
    with Opened(browser, serve(run.path, *(other.path for other in others)), PHONE, scheme) as page:
        open_group(page)
        for details in page.locator("details").all():
            details.evaluate("element => { element.open = true; }")
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        assert page.evaluate(CONTRAST) == []


def open_group(page: Any) -> None:
    page.locator("#rollouts").scroll_into_view_if_needed()
    page.locator(".groups button").first.click()
    page.wait_for_selector(".completion")


def test_what_a_model_wrote_is_shown_and_never_run(browser: Any, run: WrittenRun, serve: Callable[..., str]) -> None:
    with Opened(browser, serve(run.path)) as page:
        open_group(page)
        assert HOSTILE in page.inner_text(".completion >> nth=0")
        assert page.locator(".detail img, .detail script").count() == 0
        ages = page.locator(".completion >> nth=0").locator("sup").all_inner_texts()
        assert ages == ["0", "0"] or ages == ["0"]


def test_every_control_is_reached_by_the_tab_key_with_a_visible_focus(
    browser: Any, run: WrittenRun, serve: Callable[..., str]
) -> None:
    with Opened(browser, serve(run.path)) as page:
        open_group(page)
        page.evaluate("() => { document.activeElement.blur(); window.scrollTo(0, 0); }")
        wanted = page.evaluate(
            f'() => [...document.querySelectorAll("{CONTROLS}")].filter((e) => e.checkVisibility())'
            ".map((e, i) => { e.dataset.tab = i; return e.outerHTML.slice(0, 60); })"
        )
        reached = set()
        for _ in range(len(wanted) + 5):
            page.keyboard.press("Tab")
            found = page.evaluate(
                "() => [document.activeElement.dataset.tab, getComputedStyle(document.activeElement).outlineStyle]"
            )
            if found[0] is not None:
                assert found[1] != "none", wanted[int(found[0])]
                reached.add(int(found[0]))
        assert [text for number, text in enumerate(wanted) if number not in reached] == []


def test_arrow_keys_read_a_picture_and_its_table_says_the_same(
    browser: Any, run: WrittenRun, serve: Callable[..., str]
) -> None:
    with Opened(browser, serve(run.path)) as page:
        page.focus("#reward .canvas")
        page.keyboard.press("End")
        assert "step 20" in page.inner_text("#reward .readout")
        page.keyboard.press("ArrowLeft")
        assert "step 19" in page.inner_text("#reward .readout")
        page.click("#reward summary")
        # 95% interval of step 10, as written.
        assert "50.0% (40.0% to 60.0%)" in page.inner_text("#reward table")


def test_the_theme_follows_the_system_until_it_is_chosen(
    browser: Any, run: WrittenRun, serve: Callable[..., str]
) -> None:
    def ground(page: Any) -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    url = serve(run.path)
    with Opened(browser, url, scheme="light") as page, Opened(browser, url, scheme="dark") as other:
        light, dark = ground(page), ground(other)
        assert light != dark
        page.click("#theme")
        page.click("#theme")
        assert (page.inner_text("#theme"), ground(page)) == ("Theme: dark", dark)
        page.reload()
        assert ground(page) == dark


def test_runs_side_by_side_are_taken_in_and_out(
    browser: Any, run: WrittenRun, serve: Callable[..., str], tmp_path: Path
) -> None:
    other = WrittenRun(tmp_path / "other")
    other.steps(1, 30)
    with Opened(browser, serve(run.path, other.path)) as page:
        assert page.locator("#flow article").count() == 2
        assert "other: training reward" in page.inner_text("#reward .legend")
        page.uncheck("article[aria-label=other] input")
        assert page.locator("#flow article").count() == 1
        page.select_option("#axis", "hours")
        assert "hour" in page.get_attribute("#reward .canvas", "aria-label")
