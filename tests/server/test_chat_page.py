"""The chat page in headless Chromium: streaming, stopping, errors, safety, phones, dark mode."""

import re
import threading

import pytest
from chromium import Browser, find_chromium
from fake_api import CODE, LONG, MARKUP, FakeAPI
from tiny_servers import TEMPLATE, make_run, serving

pytestmark = pytest.mark.slow

IDLE = "!document.body.classList.contains('busy')"
LAST = "document.querySelector('article:last-child .reply').textContent"
ERROR = "document.querySelector('article:last-child .error').textContent"
NOTES = "document.querySelector('article:last-child footer').textContent"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = find_chromium()
    if not program:
        pytest.skip("needs Chromium: apt-get install --no-install-recommends chromium")
    started = Browser(program, tmp_path_factory.mktemp("chromium"))
    try:
        yield started
    finally:
        started.close()


@pytest.fixture
def api():
    server = FakeAPI()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.gate.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def page(browser, api):
    """The browser at the page. The page must neither throw nor break its own policy."""
    browser.events.clear()
    browser.resize(1100, 760)
    browser.open(api.url)
    browser.wait_for("document.title === 'smollm2'")
    yield browser
    browser.evaluate("1")  # reads what has been logged until now
    assert [event for event in browser.events if not is_refusal(event)] == []


def is_refusal(event: dict) -> bool:
    """Chromium logs every answer with an error's status."""
    return event.get("entry", {}).get("source") == "network"


def start(page: Browser, text: str) -> None:
    page.click("#text")
    page.type(text)
    page.press("Enter")


def ask(page: Browser, text: str) -> str:
    """Send a message; returns the answer."""
    turns = page.evaluate("document.querySelectorAll('article').length")
    start(page, text)
    page.wait_for(f"document.querySelectorAll('article').length === {turns + 1} && {IDLE}")
    return page.evaluate(LAST)


def test_text_streams_in_and_the_conversation_is_sent_again(page, api):
    api.gate.clear()
    start(page, "one")
    page.wait_for(f"{LAST}.includes('Answer 1 to')")
    assert "second" not in page.evaluate(LAST) and not page.evaluate(IDLE)
    assert page.evaluate("document.querySelector('#go').ariaLabel") == "Stop"
    assert page.evaluate("document.querySelector('#log').ariaBusy") == "true"
    api.gate.set()
    page.wait_for(IDLE)
    assert page.evaluate(LAST) == "Answer 1 to one: first half, second half."
    notes = page.evaluate(NOTES)
    assert "token limit reached · 12 tokens" in notes and "seed 7" in notes
    page.click("#text")
    page.type("two")
    page.press("Enter", shift=True)
    page.type("lines")
    page.press("Enter")
    page.wait_for(f"{LAST}.includes('second half.')")
    sent = api.bodies[-1]["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "user"]
    assert sent[1]["content"] == "Answer 1 to one: first half, second half."
    assert sent[2]["content"] == "two\nlines"
    assert api.bodies[-1].keys() == {"model", "stream", "stream_options", "messages"}
    page.click("#fresh")
    assert page.evaluate("document.querySelectorAll('article').length") == 0
    ask(page, "three")
    assert [message["content"] for message in api.bodies[-1]["messages"]] == ["three"]


@pytest.mark.parametrize("how", ["button", "key"])
def test_stop_keeps_what_was_written_and_retry_replaces_it(page, api, how):
    api.gate.clear()
    start(page, "one")
    page.wait_for(f"{LAST}.includes('Answer 1 to')")
    page.click("#go") if how == "button" else page.press("Escape")
    page.wait_for(IDLE)
    assert page.evaluate(LAST).startswith("Answer 1 to")
    assert "stopped" in page.evaluate(NOTES) and "second" not in page.evaluate(LAST)
    assert page.evaluate("document.querySelectorAll('.error').length") == 0
    api.gate.set()
    page.click("footer button")
    page.wait_for(f"{LAST}.includes('Answer 2 to one: first half, second half.') && {IDLE}")
    assert "Answer 1" not in page.evaluate(LAST)
    assert [message["content"] for message in api.bodies[-1]["messages"]] == ["one"]


def test_a_new_conversation_ends_the_running_answer(page, api):
    api.gate.clear()
    start(page, "one")
    page.wait_for(f"{LAST}.includes('Answer 1 to')")
    page.click("#fresh")
    assert page.evaluate(IDLE) and not page.evaluate("document.querySelector('article')")
    api.gate.set()
    assert ask(page, "two") == "Answer 2 to two: first half, second half."
    assert [message["content"] for message in api.bodies[-1]["messages"]] == ["two"]


@pytest.mark.parametrize(
    ("asked", "shown", "answer"),
    [
        ("refuse", "The server says: a prompt of 900 tokens and 200 new ones exceed", ""),
        ("busy", "The server says: the queue is full. Try again in 3 s.", ""),
        ("broken", "The server says: the device failed", "Answer 2 to "),
        ("lost", "The connection ended before the answer was complete.", "Answer 2 to "),
    ],
)
def test_errors_are_shown_in_plain_words(page, api, asked, shown, answer):
    ask(page, "before")
    assert ask(page, asked) == answer
    assert page.evaluate("document.querySelector('.error').textContent").startswith(shown)
    ask(page, "after")  # a message without answer is not sent again
    roles = [message["role"] for message in api.bodies[-1]["messages"]]
    assert roles == ["user", "assistant"] * (2 if answer else 1) + ["user"]


def test_html_in_an_answer_stays_text(page):
    assert ask(page, "markup") == MARKUP
    start(page, MARKUP)
    page.wait_for(f"{LAST}.includes('second half')")
    assert page.evaluate("document.querySelectorAll('article img, article b').length") == 0
    assert page.evaluate("document.title") == "smollm2"


def test_code_is_a_block(page):
    assert ask(page, "code") == re.sub(r"```(python)?\n?|`", "", CODE.replace("\n```\n", ""))
    blocks = "[...document.querySelectorAll('article pre')].map(pre => pre.textContent)"
    assert page.evaluate(blocks) == ["for i in range(3):\n    print(i, '<b>')"]
    assert page.evaluate("document.querySelector('article code').textContent") == "range"


def test_it_scrolls_along_only_at_the_end(page, api):
    distance = (
        "(v => v.scrollHeight - v.scrollTop - v.clientHeight)(document.querySelector('main'))"
    )
    assert ask(page, "long") == LONG
    assert page.evaluate(distance) < 2
    api.gate.clear()
    start(page, "long")
    page.wait_for(f"{LAST}.includes('line 39')")
    page.evaluate("document.querySelector('main').scrollTop = 100")
    api.gate.set()
    page.wait_for(IDLE)
    assert page.evaluate("document.querySelector('main').scrollTop") == 100


def test_settings_are_sent_when_set(page, api):
    page.click("[popovertarget]")
    fields = {"temperature": "0.5", "max_tokens": "9", "seed": "3", "system": "Be brief."}
    for name, text in fields.items():
        page.click(f"#{name}")
        page.type(text)
    page.press("Escape")
    ask(page, "one")
    body = api.bodies[-1]
    assert (body["temperature"], body["max_tokens"], body["seed"]) == (0.5, 9, 3)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}


def test_the_settings_of_the_model_are_those_of_the_page(browser, api):
    api.generation = {"temperature": 0.6, "top_p": 0.95}
    browser.open(api.url)
    browser.wait_for("document.querySelector('#empty').textContent.includes('context of 2,048')")
    assert ask(browser, "one") in browser.evaluate("document.body.textContent")
    assert (api.bodies[-1]["temperature"], api.bodies[-1]["top_p"]) == (0.6, 0.95)
    assert browser.evaluate("document.querySelector('.copy').textContent") == "Copy"


def test_a_model_without_chat_template_continues_text(browser, api):
    api.template = False
    browser.open(api.url)
    browser.wait_for("document.body.innerText.includes('it continues your text')")
    assert ask(browser, "Once") == "Answer 1 to Once: first half, second half."
    assert api.bodies[-1]["prompt"] == "Once" and api.bodies[-1]["max_tokens"] == 200
    assert ask(browser, "refuse") == ""


def test_a_key_is_asked_for_when_the_server_wants_one(browser, api):
    api.key = "secret"
    browser.open(api.url)
    for key, answer in [("wrong", "The API key is wrong."), ("secret", "Enter sends")]:
        browser.wait_for("!document.querySelector('#access').hidden")
        browser.click("#key")
        browser.evaluate("document.querySelector('#key').value = ''")
        browser.type(key)
        browser.press("Enter")
        browser.wait_for(f"document.body.innerText.includes('{answer}')")
    assert browser.evaluate("document.querySelector('#access').hidden")
    assert ask(browser, "one").endswith("second half.")
    api.key = "other"  # asked for again in a conversation, which then goes on
    assert ask(browser, "two") == ""
    browser.click("#key")
    browser.evaluate("document.querySelector('#key').value = ''")
    browser.type("other")
    browser.press("Enter")
    browser.wait_for(f"{LAST}.includes('second half') && {IDLE}")
    browser.evaluate("sessionStorage.clear()")


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_phone(page, api, dark, tmp_path):
    ask(page, "x" * 300)
    for text in ("code", "markup", "refuse"):
        ask(page, text)
    page.resize(360, 740, dark, phone=True)
    for each in ("document.documentElement", "document.querySelector('main')"):
        assert page.evaluate(f"{each}.scrollWidth <= {each}.clientWidth"), each
    page.click("[popovertarget]")
    assert page.evaluate("document.querySelector('#settings').getBoundingClientRect().left") >= 0
    page.press("Escape")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(14, 16, 19)" if dark else "rgb(244, 245, 248)")


def test_keyboard_alone_is_enough_and_everything_has_a_name(page):
    assert page.evaluate("document.activeElement.id") == "text"
    names = {page.evaluate("document.activeElement.id")}
    for _ in range(8):
        page.press("Tab")
        names.add(page.evaluate("document.activeElement.id || document.activeElement.innerText"))
    assert {"text", "go", "fresh", "Settings", "view"} <= names
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "textbox", "log", "status", "main"}
    named = {
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if node.get("role", {}).get("value") in roles
    }
    assert {("button", "Send"), ("textbox", "Message"), ("button", "New conversation")} <= named
    assert {("button", "Settings"), ("main", "Conversation")} <= named
    assert all(name for role, name in named if role in ("button", "textbox"))


@pytest.mark.parametrize("template", [TEMPLATE, ""], ids=["chat", "text"])
def test_a_real_server_answers_the_page(browser, tmp_path, template):
    browser.events.clear()
    with serving(make_run(tmp_path, template), "--api_key=secret") as server:
        browser.resize(1100, 760)
        browser.open(server.url)
        browser.wait_for("!document.querySelector('#access').hidden")
        browser.click("#key")
        browser.type("secret")
        browser.press("Enter")
        browser.wait_for("document.title === 'tiny'")
        browser.evaluate("document.querySelector('#max_tokens').value = 60")
        browser.evaluate("document.querySelector('#seed').value = 3")
        first = ask(browser, "Hello")
        notes = browser.evaluate(NOTES)
        assert first and re.search(r"\d+ tokens, the first after .*seed 3$", notes), notes
        browser.click("footer button")
        browser.wait_for(IDLE)
        assert browser.evaluate(LAST) == first  # the same seed
        browser.evaluate("document.querySelector('#max_tokens').value = 200")
        start(browser, "again")
        browser.wait_for(f"{LAST}.length > 5 || {IDLE}")
        browser.press("Escape")
        browser.wait_for(IDLE)
        browser.evaluate("document.querySelector('#max_tokens').value = 5000")
        ask(browser, "too long")
        assert "5000" in browser.evaluate(ERROR)
    ask(browser, "gone")
    assert browser.evaluate(ERROR) == "The server does not answer. Is it running?"
    browser.evaluate("sessionStorage.clear()")
    assert [event for event in browser.events if not is_refusal(event)] == []
