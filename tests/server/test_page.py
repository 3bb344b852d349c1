"""The page at /: served whole, needs nothing from elsewhere, and works in a browser where there is one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest

from specdec.server.options import ServerOptions
from tests.server.scripted import EOS, scripted_engine
from tests.server.support import live_server, run, serving

PAGE = files("specdec.server.page").joinpath("index.html").read_text(encoding="utf-8")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def test_the_page_is_served_without_a_key_and_may_load_nothing() -> None:
    async def use() -> None:
        async with serving(scripted_engine(), ServerOptions(api_keys=("k",))) as client:
            answer = await client.get("/")
            assert answer.status_code == 200 and answer.text == PAGE
            assert answer.headers["content-type"].startswith("text/html")
            assert "default-src 'none'" in answer.headers["content-security-policy"]

    run(use())


def test_the_page_names_nothing_outside_this_server() -> None:
    assert not re.findall(r"https?://|//[a-z]|src=|@import|url\(|<link", PAGE.replace("// ", ""))


def test_every_field_of_the_page_has_a_name() -> None:
    for field in re.findall(r"<(?:input|textarea|select)[^>]*id=\"([^\"]+)\"", PAGE):
        before = PAGE[: PAGE.index(f'id="{field}"')]
        is_inside = before.rfind("<label") > before.rfind("</label>")
        assert is_inside or f'<label for="{field}"' in PAGE, field


STORY = "Hello <b>world</b> \U0001f600, hello world. " * 4
PROMPT = "<user>hi\n<assistant>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium; where it or its driver is missing, the reason is printed."""
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[browser]'")
    if BROWSER is None:
        pytest.skip("no Chromium on this machine: install the package chromium")
    with driver.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A recitation with drafts of which every third is wrong."""
    story = [256, *PROMPT.encode(), *STORY.encode(), EOS]
    with live_server(scripted_engine(story, seconds=0.005, num_drafts=3, wrong_every=3)) as address:
        yield address


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    """The page, opened; no error may reach its console."""
    opened = browser.new_page(viewport={"width": 1100, "height": 800})
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    opened.goto(url)
    yield opened
    opened.close()
    assert not errors


def test_a_chat_streams_coloured_tokens(page: Any) -> None:
    page.keyboard.type("hi")  # the message has the focus
    page.keyboard.press("Enter")
    page.wait_for_selector(".message.assistant small:has-text('ended by stop')")
    words = page.locator(".message.assistant > div").first
    assert words.text_content() == STORY
    assert {span.get_attribute("data-source") for span in words.locator("span").all()} >= {
        "plain",
        "draft",
        "recovered",
    }
    draft = words.locator("[data-source=draft]").first
    coloured = draft.evaluate("e => getComputedStyle(e).backgroundColor")
    page.get_by_label("Colour tokens by origin").uncheck()
    assert draft.evaluate("e => getComputedStyle(e).backgroundColor") != coloured
    assert float(page.locator("#speed").text_content()) > 0
    assert page.locator("#rate").text_content().endswith("%")


def test_a_race_compares_speed_and_texts(page: Any) -> None:
    page.get_by_role("tab", name="Race").click()
    page.locator("#race-prompt").fill("hi")
    page.get_by_role("button", name="Race", exact=True).click()
    page.wait_for_selector("#verdict:has-text('equal')")
    assert float(page.locator("#verdict").text_content().split()[0]) > 1.5
    lanes = [page.locator(f"#lane-{name} pre").text_content() for name in ("plain", "speculating")]
    assert lanes == [STORY, STORY]
    sources = {s.get_attribute("data-source") for s in page.locator("#lane-plain pre span").all()}
    assert sources == {"plain"}


def test_escape_stops_a_running_answer(page: Any) -> None:
    page.locator("summary").click()
    page.get_by_label("Speculate", exact=True).uncheck()
    page.locator("#prompt").fill("hi")
    page.locator("#prompt").press("Enter")
    page.wait_for_selector(".message.assistant span")
    page.keyboard.press("Escape")
    page.wait_for_selector(".message.assistant small:has-text('Stopped.')")
    assert page.locator("#send").is_enabled()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_everything_without_scrolling_sideways(page: Any, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 360, "height": 700})
    for tab in ("Chat", "Race"):
        page.get_by_role("tab", name=tab).click()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (light == "rgb(246, 246, 243)") is (scheme == "light")


def test_the_settings_reach_the_request(page: Any, url: str) -> None:
    sent: list[Any] = []
    page.on("request", lambda request: sent.append(request))
    page.locator("summary").click()
    values = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "max_tokens": 20, "seed": 7, "num_speculative_tokens": 2}
    for name, value in values.items():
        page.locator(f"#{name}").fill(str(value))
    page.locator("#stop").fill("zebra")
    page.locator("#system").fill("Be brief.")
    page.locator("#prompt").fill("hi")
    page.locator("#send").click()
    page.wait_for_selector(".message.assistant small:has-text('ended by')")
    (body,) = [request.post_data_json for request in sent if request.method == "POST"]
    depth = values.pop("num_speculative_tokens")
    assert body["speculative"] == {"num_speculative_tokens": depth} and body["stop"] == "zebra" and body["stream"]
    assert {name: body[name] for name in values} == values
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert all(request.url.startswith(url) for request in sent)  # nothing is asked of anybody else


def test_all_of_it_works_by_keyboard(page: Any) -> None:
    page.locator("#tab-chat").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#tab-race").get_attribute("aria-selected") == "true"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") in ("light", "dark")
    page.locator("#race-prompt").focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("hi")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("#verdict:has-text('equal')")


def test_on_a_desk_the_message_field_stays_in_sight(page: Any) -> None:
    page.locator("#prompt").fill("hi")
    page.locator("#prompt").press("Enter")
    page.wait_for_selector(".message.assistant small:has-text('ended by')")
    box = page.locator("#send").bounding_box()
    assert box["y"] + box["height"] <= 800


def test_a_server_with_keys_is_asked_with_one(browser: Any) -> None:
    story = [256, *PROMPT.encode(), *STORY.encode(), EOS]
    with live_server(scripted_engine(story), ServerOptions(api_keys=("sesame",))) as address:
        opened = browser.new_page()
        opened.goto(address)
        opened.wait_for_selector("#model:has-text('API key is needed')")
        assert opened.locator("#settings-box").get_attribute("open") is not None
        opened.locator("#key").fill("sesame")
        opened.locator("#prompt").fill("hi")
        opened.locator("#prompt").press("Enter")
        opened.wait_for_selector(".message.assistant small:has-text('ended by stop')")
        opened.close()
