"""The page in Chromium against a real daemon with the stub engine, as a user walks it. What it must not do is looked at after each test."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from playwright.sync_api import BrowserContext, Locator, Page, Route, expect

from sparkd.__main__ import exit_code
from sparkd.bench.result import BenchStore
from sparkd.checkpoint.source import name_of
from tests.support.daemon_process import DaemonProcess
from tests.support.waiting import until
from tests.web.benches import BENCHES, write_benches
from tests.web.browser import HEIGHT, NARROW, WIDTH, Tab
from tests.web.conftest import ADMIN, GATE, GIB, INFERENCE, LOAD_GATE, settings

# Of the files and of the admin API's answers that the first page needs.
MOST_TRANSFERRED_BYTES = 120_000
PAGES = ("Overview", "Models", "Requests", "Playground", "Plan", "Bench", "Disk", "Fabric", "Doctor", "Events")
# name of the picture: address, and what stands there once the page has its content.
WALK: dict[str, tuple[tuple[str, ...], str]] = {
    "overview": ((), "text=Findings and incidents"),
    "models": (("models",), "role=button[name='Load crash']"),
    "model-live": (("models", "quick", "live"), "figcaption:has-text('KV cache use')"),
    "model-load": (("models", "quick", "load"), ".waterfall rect"),
    "model-settings": (("models", "quick", "settings"), "role=table[name='Settings'] >> tbody tr"),
    "model-layers": (("models", "quick", "layers"), "text=tensors,"),
    "model-log": (("models", "quick", "log"), ".log div"),
    "model-failed": (("models", "crash", "load"), ".error"),
    "requests": (("requests",), "role=table[name='Finished requests'] >> tbody tr"),
    "playground": (("playground",), "role=button[name='Send']"),
    "plan": (("plan",), "role=button[name='Plan']"),
    "bench": (("bench",), "role=table[name='Earlier benches'] >> tbody tr"),
    "bench-one": (("bench", BENCHES[0]), ".charts figure >> nth=1"),
    "bench-two": (("bench", *BENCHES[:2]), "role=table[name='Changes'] >> tbody tr"),
    "disk": (("disk",), "role=table[name='On the disk']"),
    "fabric": (("fabric",), "role=heading[name='Rates']"),
    "doctor": (("doctor",), "text=swappiness"),
    "events": (("events",), "role=table[name='Events'] >> tbody tr"),
}

PROGRESS = "document.querySelector('progress')?.value"
# The bar of the running phase is measured in a picture 1,000 wide.
RUNNING_WIDTH = "document.querySelector('.waterfall .running')?.getAttribute('width')"
# The cell of a bench that has the most requests and the most context.
LARGEST = r"pp2048 tg128 @ d4096 \(c4"
# Pixels of the curves that are not empty.
INKED = """[...document.querySelectorAll(".charts canvas")].map((one) => one.getContext("2d").getImageData(0, 0, one.width, one.height).data
  .filter((value, place) => place % 4 === 3 && value > 0).length).reduce((a, b) => Math.min(a, b))"""
COLOUR = "getComputedStyle(document.querySelector('dd.figure')).color"


def badge(page: Page) -> Locator:
    return page.locator(".badge")


def row(page: Page, table: str, name: str) -> Locator:
    head = page.get_by_role("rowheader", name=re.compile(rf"^{name}\b"))
    return page.get_by_role("table", name=table).get_by_role("row").filter(has=head)


def ask(page: Page, text: str, **fields: str) -> None:
    for label, value in fields.items():
        page.get_by_label(label.replace("_", " "), exact=True).fill(value)
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send", exact=True).click()


def test_a_browser_is_led_to_the_page_and_fetches_little(tab: Tab) -> None:
    page = tab.page
    network = page.context.new_cdp_session(page)
    network.send("Network.enable")
    sizes: list[float] = []
    network.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
    page.goto(f"{tab.url}/")
    expect(page).to_have_url(f"{tab.url}/ui/")
    expect(badge(page)).to_have_text("live")
    expect(page.get_by_role("article")).to_have_count(1)
    page.wait_for_function("() => performance.getEntriesByType('resource').length > 20")
    network.detach()
    assert len(sizes) > 20
    assert sum(sizes) < MOST_TRANSFERRED_BYTES
    expect(page.get_by_role("navigation", name="Pages").get_by_role("link")).to_have_text(list(PAGES))


def test_a_key_opens_what_it_may(context: BrowserContext, served: DaemonProcess) -> None:
    tab = Tab(context, served.url)
    page = tab.page
    tab.open("models")
    field = page.get_by_label("API key")
    expect(field).to_be_visible()
    expect(page.get_by_role("alert").filter(has_text="key")).to_have_count(0)
    expect(page.get_by_role("navigation")).to_have_count(0)
    assert tab.serious() == []
    tab.picture("key")
    field.fill("a-wrong-key-of-some-length")
    page.get_by_role("button", name="Open").click()
    wrong = served.client.get("/admin/v1/status", headers={"authorization": "Bearer a-wrong-key-of-some-length"}).json()
    expect(page.get_by_role("alert").filter(has_text=wrong["error"]["message"])).to_be_visible()

    # What the key opens is asked again after a failure of the network.
    page.route("**/v1/models", lambda route: route.abort(), times=1)
    field.fill(INFERENCE)
    page.get_by_role("button", name="Open").click()
    expect(badge(page)).to_have_text("inference key")
    expect(page.get_by_role("navigation", name="Pages").get_by_role("link")).to_have_text(["Models", "Playground"])
    expect(page.get_by_role("rowheader", name="quick")).to_be_visible()
    assert tab.serious() == []
    tab.picture("models-inference-key")
    page.get_by_role("link", name="Playground").click()
    expect(page.get_by_label("Model", exact=True)).to_be_visible()
    page.evaluate("location.hash = '#/events'")
    expect(page.get_by_role("heading", name="No such page")).to_be_visible()

    page.get_by_role("button", name="Change key").click()
    page.get_by_label("API key").fill(ADMIN)
    page.get_by_role("button", name="Open").click()
    expect(badge(page)).to_have_text("live")
    expect(page.get_by_role("navigation", name="Pages").get_by_role("link")).to_have_count(len(PAGES))
    assert page.context.cookies() == []
    assert all(ADMIN not in url for url in page.evaluate("performance.getEntriesByType('resource').map((one) => one.name)"))
    assert {line.partition(" ")[0] for line in tab.refused} <= {"Failed"}
    assert (tab.faults, tab.foreign) == ([], [])
    page.close()


def test_a_plan_is_asked_for_by_a_form(tab: Tab, served: DaemonProcess) -> None:
    page = tab.page
    # No vLLM is started beside the tests.
    page.route("**/admin/v1/plan", lambda route: route.continue_(post_data={**route.request.post_data_json, "quick": True}))
    tab.open("plan")
    page.get_by_label("Model", exact=True).fill(str(served.folder / "checkpoint"))
    page.get_by_label("Context, tokens").fill("2K")
    page.get_by_role("button", name="Plan", exact=True).click()
    answer = page.get_by_role("region", name="Answer")
    expect(answer.get_by_role("table", name="What fits")).to_be_visible()
    assert tab.serious() == []
    tab.picture("plan-answer")
    page.get_by_label("Hardware").select_option("two Sparks")
    page.get_by_role("button", name="Plan", exact=True).click()
    expect(answer).to_contain_text("On 2 x spark with")
    page.get_by_label("Format").fill("no-such-format")
    with page.expect_response("**/admin/v1/plan") as answered:
        page.get_by_role("button", name="Plan", exact=True).click()
    expect(at_field(page, "Format")).to_have_text(answered.value.json()["error"]["message"])
    page.get_by_label("Format").fill("")


def test_a_plan_is_drawn_again_once_vllm_has_answered(tab: Tab, served: DaemonProcess) -> None:
    page = tab.page
    guess = served.client.post("/admin/v1/plan", json={"model": str(served.folder / "checkpoint"), "quick": True}).json()
    plans = iter([{**guess, "operation": "p1"}, {**guess, "notes": ["vLLM has answered."]}])
    held: list[Route] = []
    page.route("**/admin/v1/plan", lambda route: route.fulfill(json=next(plans)))
    page.route("**/admin/v1/operations/p1?*", lambda route: held.append(route))  # playwright marks a function of ours
    tab.open("plan")
    page.get_by_label("Model", exact=True).fill(str(served.folder / "checkpoint"))
    with page.expect_request("**/admin/v1/operations/p1?*"):
        page.get_by_role("button", name="Plan", exact=True).click()
    progress, answer = page.get_by_role("status").filter(has_text="asks vLLM"), page.get_by_role("region", name="Answer")
    expect(progress).to_be_visible()
    expect(answer.get_by_role("table", name="What fits")).to_be_visible()
    expect(answer).not_to_contain_text("vLLM has answered.")
    held.pop().fulfill(json={"state": "SUCCEEDED"})
    expect(answer).to_contain_text("vLLM has answered.")
    expect(progress).to_have_count(0)


def at_field(page: Page, label: str) -> Locator:
    """The sentence at a field, which screen readers read with it."""
    return page.locator(".field").filter(has=page.get_by_label(label, exact=True)).get_by_role("alert")


def test_bad_input_gets_the_command_lines_sentence_at_its_field(
    tab: Tab, served: DaemonProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPARKD_ADMIN_KEY", ADMIN)
    page = tab.page
    tab.open("models")
    page.get_by_role("button", name="Add model").click()
    source = page.get_by_label("Hub id, folder or recipe")
    for wrong in (str(tmp_path), "owner/nmae", "owner/na me"):
        source.fill(wrong)
        with page.expect_response("**/admin/v1/plan") as answered:
            page.get_by_role("button", name="Check whether it fits").click()
        sentence = answered.value.json()["error"]["message"]
        expect(at_field(page, "Hub id, folder or recipe")).to_have_text(sentence)
        # The entry is about the model that was asked about last.
        expect(page.get_by_label("Name", exact=True)).to_have_value(name_of(wrong))
        expect(page.get_by_label("Value", exact=True).first).to_have_value(wrong)
    assert exit_code(["plan", wrong]) == 2
    assert " ".join("".join(capsys.readouterr()).split()) == f"error: {sentence}"
    tab.picture("models-add-refused")
    # sparkd refuses it too, also where it is not to be loaded yet.
    page.get_by_role("checkbox", name="Load it now").uncheck()
    page.get_by_label("Value", exact=True).first.fill(str(tmp_path / "absent"))
    page.get_by_role("button", name="Add", exact=True).click()
    expect(at_field(page, "Value")).to_contain_text("absent")
    page.get_by_label("Value", exact=True).first.fill(str(served.folder / "checkpoint"))
    page.get_by_label("Name", exact=True).fill("quick")
    page.get_by_role("button", name="Add", exact=True).click()
    expect(at_field(page, "Name")).to_contain_text("quick")
    page.get_by_label("Name", exact=True).fill("added")
    page.get_by_role("button", name="Add key").click()
    page.get_by_label("Key", exact=True).last.fill("max_modle_len")
    page.get_by_label("Value", exact=True).last.fill("4096")
    page.get_by_role("button", name="Add", exact=True).click()
    faulty = tmp_path / "sparkd.yaml"
    faulty.write_text(yaml.safe_dump({"models": {"added": {"model": str(served.folder / "checkpoint"), "max_modle_len": 4096}}}))
    assert exit_code(["check", str(faulty)]) == 2
    said = re.sub(r"\s+", " ", "".join(capsys.readouterr()))
    refusal = at_field(page, "Key")
    expect(refusal).to_contain_text("max_modle_len")
    assert refusal.inner_text().removesuffix(".") in said
    assert tab.serious() == []
    tab.picture("models-add")
    page.get_by_role("button", name="Remove key max_modle_len").click()
    page.get_by_role("button", name="Add", exact=True).click()
    expect(page.get_by_role("heading", name="added")).to_be_visible()
    page.get_by_role("button", name="Remove added").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove", exact=True).click()
    expect(page.get_by_role("heading", name="Models")).to_be_visible()
    expect(row(page, "Known models", "quick")).to_be_visible()
    expect(row(page, "Known models", "added")).to_have_count(0)
    expect(page.locator(".toast").filter(has_text="added was removed.")).to_be_visible()
    assert len(tab.refused) == 6


def test_a_recipe_is_one_before_the_list_of_recipes_has_come(tab: Tab, served: DaemonProcess) -> None:
    page = tab.page
    page.route("**/admin/v1/recipes", lambda _: None)
    tab.open("models")
    page.get_by_role("button", name="Add model").click()
    page.get_by_label("Hub id, folder or recipe").fill("gpt-oss-120b")
    with page.expect_response("**/admin/v1/plan"):
        page.get_by_role("button", name="Check whether it fits").click()

    expect(page.get_by_label("Key", exact=True)).to_have_value("recipe")
    expect(page.get_by_label("Value", exact=True)).to_have_value("gpt-oss-120b")
    tab.picture("models-add-recipe")


def test_a_name_that_no_model_has_gets_one_sentence_and_no_tabs(tab: Tab) -> None:
    tab.open("models", "nobody")
    expect(tab.page.get_by_role("alert").filter(has_text="no model of this name")).to_be_visible()
    expect(tab.page.get_by_role("navigation", name="Parts of nobody")).to_have_count(0)


def test_a_load_is_followed_from_its_button_to_its_waterfall(tab: Tab, served: DaemonProcess) -> None:
    page = tab.page
    tab.open("models")
    page.get_by_role("button", name="Load slow").click()
    bar = page.get_by_role("progressbar", name="Progress of slow")
    expect(bar).to_be_visible()
    expect(row(page, "Known models", "slow")).to_contain_text(re.compile(r"loading \d+% as .*, [\d.]+ of 4\.0 GiB"))
    until(lambda: (page.evaluate(PROGRESS) or 0) > 0, "half of the weights are loaded")
    tab.picture("models-loading")
    tab.open()
    expect(page.get_by_role("region", name="Resident models")).to_contain_text("slow")
    expect(page.get_by_role("heading", name="Waiting")).to_be_visible()
    tab.picture("overview-loading")
    tab.open("models", "slow")
    expect(page.get_by_role("heading", name="slow")).to_be_visible()
    tab.open("models", "slow", "load")
    expect(page.get_by_role("main")).to_contain_text(re.compile(r"goes on: [\d.]+ m?s so far, [\w ]+ for [\d.]+ m?s"))
    until(lambda: float(page.evaluate(RUNNING_WIDTH) or 0) > 20, "the bar of the running phase has a length")
    tab.picture("model-load-running")
    (served.folder / LOAD_GATE).touch()
    expect(page.locator(".page-head .word")).to_have_text("READY")
    expect(page.locator(".waterfall rect").nth(1)).to_be_visible()
    expect(row(page, "Phases of the start", "quantize")).to_contain_text(re.compile(r"\d m?s"))
    page.get_by_role("button", name="Unload slow").click()
    expect(page.locator(".page-head .word")).to_have_text("STOPPED")
    assert tab.refused == []


def test_where_no_model_is_loaded_the_overview_offers_some_and_foretells_no_end(tab: Tab, served: DaemonProcess) -> None:
    with served.client.stream("GET", "/admin/v1/live") as stream:
        document = json.loads(next(line for line in stream.iter_lines() if line.startswith("data: ")).removeprefix("data: "))
    for model in document["models"].values():
        model |= {"state": "STOPPED", "want": "STOPPED", "ranks": [], "operation": None, "message": None, "reason": None}
    for node in document["nodes"].values():
        node["reading"] |= {"level": "ok", "floor_in_s": 75.0, "slope_bytes_per_s": -4.0e9}
    event = f"event: snapshot\ndata: {json.dumps(document)}\n\n"
    tab.page.route("**/admin/v1/live", lambda route: route.fulfill(body=event, content_type="text/event-stream"))
    tab.open()

    resident = tab.page.locator(".table-block").filter(has=tab.page.get_by_role("region", name="Resident models"))
    expect(resident).to_contain_text("No model is loaded.")
    expect(resident.get_by_role("button", name="Load quick")).to_be_visible()
    expect(tab.page.locator("dt", has_text="to the floor").locator("+ dd")).to_have_text("-")
    expect(tab.page.locator("dt", has_text="slope").locator("+ dd")).to_have_text("-")
    assert tab.serious() == []
    tab.picture("overview-none-loaded")


def test_a_failed_model_says_why(tab: Tab, served: DaemonProcess) -> None:
    page = tab.page
    tab.open("models", "crash")
    page.get_by_role("button", name="Load crash", exact=True).click()
    expect(page.locator(".toast.bad")).to_contain_text("load crash: ")
    expect(page.get_by_text("FAILED", exact=True)).to_be_visible()
    message = served.wait_for("crash", "FAILED")["message"]
    expect(page.locator("p.error").first).to_contain_text(message[:40])
    assert (page.locator(".toast.bad").inner_text()).lower().count("failed") == 1
    page.locator(".toast.bad").get_by_role("button", name="Dismiss").click()
    expect(page.locator(".toast.bad")).to_have_count(0)
    tab.open()
    expect(page.get_by_role("region", name="Resident models")).to_contain_text("crash")
    waits = page.locator("section").filter(has=page.get_by_role("heading", name="Waiting")).last
    expect(waits).to_contain_text("It failed at")
    expect(waits).to_contain_text("Next try in")
    tab.picture("overview-failed")
    expect(page.get_by_role("link", name="All known models (4)")).to_be_visible()


def test_a_chat_streams_while_its_model_is_loaded_for_it(tab: Tab, served: DaemonProcess) -> None:
    served.unload("quick")
    served.wait_for("quick", "STOPPED")
    (served.folder / GATE).unlink()
    page = tab.page
    tab.open("playground")
    page.get_by_label("Model", exact=True).select_option("quick")
    ask(page, "What is the capital of France?")
    answer = page.get_by_role("article", name="assistant")
    expect(answer).to_contain_text("The capital")
    first = len(answer.inner_text())
    (served.folder / GATE).touch()
    expect(page.locator(".speed")).to_contain_text("tokens/s")
    expect(page.locator(".speed .word")).to_have_text("done")
    assert len(answer.inner_text()) > first
    assert "Paris" in answer.inner_text()
    tab.picture("playground-answer")
    page.get_by_label("Compare with").select_option("endless")
    ask(page, "And now both of you.", Streams_at_once="3")
    both = page.locator(".sides > section")
    expect(both.nth(0)).to_contain_text("3 of 3 ended")
    expect(both.nth(1).locator(".stream").first).to_contain_text("Paris")
    expect(both.nth(1)).to_contain_text(re.compile(r"[\d.]+ tokens/s together"))
    tab.picture("playground-compare")
    page.get_by_role("button", name="Stop").click()
    expect(both.nth(1).get_by_text("stopped")).to_have_count(3)


def test_a_question_that_was_refused_is_not_asked_again(tab: Tab) -> None:
    page = tab.page
    chats = "**/v1/chat/completions"
    tab.open("playground")
    page.route(chats, lambda route: route.fulfill(status=400, json={"error": {"message": "No such picture."}}), times=1)
    page.get_by_label("Model", exact=True).select_option("quick")
    ask(page, "What is in this picture?")
    expect(page.get_by_role("alert").filter(has_text="No such picture.")).to_be_visible()
    with page.expect_request(chats) as asked:
        ask(page, "What is the capital of France?")
    assert [message["content"] for message in asked.value.post_data_json["messages"]] == ["What is the capital of France?"]
    expect(page.locator(".speed .word")).to_have_text("done")


def test_a_request_is_seen_and_cancelled(tab: Tab, served: DaemonProcess) -> None:
    page = tab.page
    tab.open("playground")
    page.get_by_label("Model", exact=True).select_option("endless")
    ask(page, "Do not stop.", Most_tokens="100000")
    expect(page.get_by_role("article", name="assistant")).to_contain_text("Paris")
    tab.open("requests")
    flying = page.get_by_role("table", name="Requests in flight")
    expect(flying).to_contain_text("streaming")
    expect(flying).to_contain_text("desk")
    tab.picture("requests-in-flight")
    page.get_by_role("button", name=re.compile("^Cancel ")).click()
    expect(page.get_by_text("No request is in flight.")).to_be_visible()
    finished = page.get_by_role("table", name="Finished requests")
    expect(finished.locator("tbody tr").first).to_contain_text("request_cancelled")
    outcome = page.get_by_label("Outcome")
    outcome.select_option("failed")
    expect(finished).to_contain_text("request_cancelled")
    outcome.select_option("answered")
    expect(finished).not_to_contain_text("request_cancelled")
    outcome.select_option("")
    expect(finished).not_to_contain_text("capital of France")
    # A client chooses the id of its request.
    for _ in range(2):
        served.client.post("/v1/embeddings", json={"model": "no-such-model", "input": ""}, headers={"x-request-id": "twice"})
    expect(finished.get_by_role("row").filter(has_text="twice")).to_have_count(2)
    tab.open("playground")
    expect(page.get_by_role("alert").filter(has_text="cancelled")).to_be_visible()


def test_earlier_benches_are_opened_compared_and_removed(tab: Tab, served: DaemonProcess) -> None:
    page = tab.page
    store = BenchStore(served.state_dir)
    for result in store.all():
        store.remove(result.id)
    tab.open("bench")
    expect(page.get_by_text("Nothing was measured yet.")).to_be_visible()
    expect(page.get_by_label("Profile", exact=True)).to_have_value("quick")
    write_benches(served.state_dir)
    page.get_by_role("button", name="Look again").click()
    slower, faster, broken = BENCHES
    expect(row(page, "Earlier benches", slower)).to_contain_text("6 of 6")
    expect(row(page, "Earlier benches", broken)).to_contain_text("5 of 6")

    page.get_by_role("link", name=slower).click()
    cells = page.get_by_role("table", name="Cells")
    expect(cells.locator("tbody tr")).to_have_count(6)
    expect(row(page, "Cells", LARGEST)).to_contain_text("72.0 ± 1.0")
    curves = page.locator(".charts figure")
    expect(curves).to_have_count(2)
    lines: list[str | re.Pattern[str]] = [re.compile(r"depth 0\s+80\.0"), re.compile(r"depth 4,096\s+72\.0"), "4 requests"]
    expect(curves.nth(0).locator(".legend li")).to_have_text(lines)
    expect(curves.nth(1).locator(".legend li").last).to_have_text("depth 4,096")
    assert page.evaluate(INKED) > 1000
    page.get_by_label("Figure of the curves").select_option("First token")
    expect(curves.nth(0).locator(".legend li").first).to_have_text(re.compile(r"depth 0\s+2\.30 s"))
    page.get_by_role("link", name="All benches").click()

    compare = page.get_by_role("button", name="Compare", exact=True)
    expect(compare).to_be_disabled()
    for bench in (faster, slower):
        page.get_by_role("checkbox", name=f"Compare {bench}").check()
    compare.click()
    changes = page.get_by_role("table", name="Changes")
    rates = changes.get_by_role("row").filter(has=page.get_by_role("rowheader", name=re.compile("^output pp")))
    expect(rates.first).to_contain_text(re.compile(r"\+10\.0%\s*within spread"))
    expect(rates.last).to_contain_text(re.compile(r"\+10\.0%\s*better"))
    expect(changes.get_by_role("row").filter(has_text="peak power").first).to_contain_text(re.compile(r"\+20\.0%\s*worse"))
    page.get_by_role("link", name="Swap A and B").click()
    expect(rates.last).to_contain_text(re.compile(r"\b9\.1%\s*worse"))

    tab.open("bench", broken)
    failed = row(page, "Cells", LARGEST)
    expect(failed).to_contain_text("failed")
    expect(failed).to_contain_text("quick failed: EngineExited")
    # Seconds of the weights as measured and as planned; no plan was asked of the other model of a swap.
    for model, texts in (("quick", ["11.0 s", "12.0 s"]), ("slow", ["5.00 s", "-"])):
        load = page.get_by_role("table", name="Loads").get_by_role("row").filter(has_text=model)
        assert load.get_by_role("cell").all_inner_texts()[3:5] == texts
    tab.picture("bench-failed-cell")
    asked: list[dict[str, Any]] = []

    def taken(route: Route) -> None:
        if route.request.method == "POST":
            asked.append(route.request.post_data_json)
            route.fulfill(status=202, json={})
        else:
            route.continue_()

    page.route("**/admin/v1/bench", taken)
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_role("heading", name="Bench", exact=True)).to_be_visible()
    page.unroute("**/admin/v1/bench", taken)
    assert asked == [{"model": "quick", "kind": "speed", "profile": "quick", "resume": broken, "force": False}]
    tab.open("bench", broken)
    page.get_by_role("button", name="Remove", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Remove", exact=True).click()
    expect(page.get_by_role("heading", name="Bench", exact=True)).to_be_visible()
    expect(row(page, "Earlier benches", slower)).to_be_visible()
    expect(row(page, "Earlier benches", broken)).to_have_count(0)
    assert broken not in [result.id for result in store.all()]
    assert tab.refused == []


def test_a_bench_is_refused_beside_others_and_else_followed_and_cancelled(tab: Tab, served: DaemonProcess) -> None:
    page = tab.page
    tab.open("playground")
    page.get_by_label("Model", exact=True).select_option("endless")
    ask(page, "Do not stop.", Most_tokens="100000")
    expect(page.get_by_role("article", name="assistant")).to_contain_text("Paris")
    tab.open("bench")
    page.get_by_label("Model", exact=True).select_option("quick")
    start = page.get_by_role("button", name="Start", exact=True)
    with page.expect_response(lambda response: response.request.method == "POST") as answered:
        start.click()
    sentence = answered.value.json()["error"]["message"]
    assert "endless" in sentence
    expect(page.get_by_role("form", name="Start a bench").get_by_role("alert")).to_have_text(sentence)
    tab.picture("bench-refused")
    assert tab.serious() == []

    (served.folder / GATE).unlink()  # no cell ends
    page.get_by_role("checkbox", name="Measure although others use a model").check()
    start.click()
    running = page.get_by_role("region", name="Under way")
    expect(running.get_by_role("table", name="Cells").locator("tbody tr")).to_have_count(4)
    expect(running.get_by_role("progressbar", name="Progress of bench quick")).to_be_visible()
    expect(running).to_contain_text("waiting")
    tab.picture("bench-running")
    running.get_by_role("button", name="Cancel bench quick").click()
    expect(running).to_have_count(0)
    ended = page.get_by_role("table", name="Earlier benches").get_by_role("row").filter(has_text="cancelled")
    expect(ended).to_contain_text("0 of 4")
    ended.get_by_role("link").click()
    page.get_by_role("checkbox", name="Measure although others use a model").check()
    page.get_by_role("button", name="Resume").click()
    running.get_by_role("button", name="Cancel bench quick").click()
    expect(running).to_have_count(0)
    # It is the same bench.
    expect(ended).to_have_count(1)
    assert len(tab.refused) == 1


def test_each_kind_of_bench_has_its_own_fields(tab: Tab) -> None:
    page = tab.page
    tab.open("bench")
    form = page.get_by_role("form", name="Start a bench")
    form.get_by_label("Measure", exact=True).select_option("load")
    expect(form.get_by_label("Loads of each way")).to_have_value("3")
    expect(form.get_by_label("Swap with")).to_be_visible()
    expect(form.get_by_label("Profile", exact=True)).to_have_count(0)
    tab.picture("bench-loads-form")
    assert tab.serious() == []

    form.get_by_label("Measure", exact=True).select_option("speed")
    form.get_by_label("Profile", exact=True).select_option("own")
    form.get_by_label("Profile in sparkrun's YAML").fill("args: {pp: 0}")
    with page.expect_response(lambda response: response.request.method == "POST") as answered:
        form.get_by_role("button", name="Start", exact=True).click()
    assert answered.value.status == 422
    expect(form.get_by_role("alert")).to_have_text(answered.value.json()["error"]["message"])
    assert len(tab.refused) == 1


def test_a_finding_has_a_button_for_its_command_only(tab: Tab) -> None:
    with tab.page.expect_response("**/admin/v1/doctor") as answered:
        tab.open("doctor")
    findings = answered.value.json()["findings"]
    expect(tab.page.locator(".finding")).to_have_count(len(findings))
    expect(tab.page.locator(".finding button")).to_have_count(sum(bool(one["cure"] and one.get("command")) for one in findings))
    expect(tab.page.get_by_role("main")).not_to_contain_text("`")


def test_what_cannot_be_pulled_is_refused_where_it_was_asked_for(tab: Tab) -> None:
    page = tab.page
    tab.open("disk")
    source, pull = page.get_by_label("Pull a model"), page.get_by_role("button", name="Pull", exact=True)
    source.fill("/no/such/folder")
    pull.click()
    expect(at_field(page, "Pull a model")).to_contain_text("/no/such/folder is a folder")
    source.fill("qwne")
    pull.click()
    dialog = page.get_by_role("dialog")
    with page.expect_response("**/pull") as answered:
        dialog.get_by_role("button", name="Pull", exact=True).click()
    expect(dialog.get_by_role("alert")).to_have_text(answered.value.json()["error"]["message"])
    expect(at_field(page, "Revision")).to_have_count(0)
    dialog.get_by_role("button", name="Close").click()
    expect(at_field(page, "Pull a model")).to_have_count(0)


def test_a_measurement_of_one_node_says_why_there_is_none(tab: Tab) -> None:
    tab.open("fabric")
    expect(tab.page.get_by_text("A rate is measured between two nodes")).to_be_visible()
    expect(tab.page.get_by_role("button", name="Measure")).to_have_count(0)


def document(served: DaemonProcess) -> dict[str, Any]:
    """The live document as it is now."""
    with served.client.stream("GET", "/admin/v1/live") as stream:
        return dict(json.loads(next(line for line in stream.iter_lines() if line.startswith("data:")).removeprefix("data:")))


# Bytes and bytes per second. While memory is tight the guard takes the steeper of two slopes for its time, and
# a card shows that one.
@pytest.mark.parametrize(
    ("slope", "floor_in_s", "shown"),
    [
        (-0.25 * GIB, 8.0, ["\N{MINUS SIGN}1.00 GiB/s", "8s"]),
        (0.5 * GIB, 8.0, ["\N{MINUS SIGN}1.00 GiB/s", "8s"]),
        (0.5 * GIB, None, ["+512.0 MiB/s", "-"]),
        (-0.5 * GIB, 0.0, ["\N{MINUS SIGN}512.0 MiB/s", "0s"]),
    ],
)
def test_a_card_tells_the_slope_that_its_time_to_the_floor_is_of(
    slope: float, floor_in_s: float | None, shown: list[str], context: BrowserContext, served: DaemonProcess
) -> None:
    now = document(served)
    (node,) = now["nodes"].values()
    node["limits"]["floor"] = 2 * GIB
    node["reading"] |= {"level": "tight", "mem_available_bytes": 10 * GIB, "slope_bytes_per_s": slope, "floor_in_s": floor_in_s}
    tab = Tab(context, served.url, ADMIN)
    body = f"event: snapshot\ndata: {json.dumps(now)}\n\n"
    tab.page.route("**/admin/v1/live", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    tab.open()
    figures = tab.page.get_by_role("article").locator("dl > div")
    expect(figures.filter(has_text=re.compile("^slope|^to the floor")).locator("dd")).to_have_text(shown)
    tab.page.close()


# The legend of a chart, and whether a colour of its series is on the canvas.
DRAWN = """([title, colour]) => {
  const figure = [...document.querySelectorAll("figure")].find((one) => one.querySelector("figcaption").textContent === title);
  const canvas = figure?.querySelector("canvas");
  if (!canvas?.width) return false;
  const dot = document.createElement("canvas").getContext("2d");
  dot.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(colour).trim();
  dot.fillRect(0, 0, 1, 1);
  const [red, green, blue] = dot.getImageData(0, 0, 1, 1).data;
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  for (let at = 0; at < pixels.length; at += 4) if (pixels[at] === red && pixels[at + 1] === green && pixels[at + 2] === blue) return true;
  return false;
}"""


def test_a_models_memory_is_drawn_on_what_is_reserved_for_it(tab: Tab, served: DaemonProcess) -> None:
    page = tab.page
    tab.open("models", "quick", "live")
    chart = page.get_by_role("figure").filter(has_text=re.compile("^Memory"))
    legend = chart.get_by_role("listitem")
    expect(legend.filter(has_text="reserved")).to_contain_text("2.0 GiB")

    def used_bytes() -> int:
        engines = document(served)["nodes"]["127.0.0.1"]["engines"]
        return sum(engine["host_bytes"] + engine["device_bytes"] for engine in engines if engine["model"] == "quick")

    until(lambda: f"{used_bytes() / GIB:.1f} GiB" in legend.filter(has_text="in use").inner_text(), "the memory in use is shown")
    assert used_bytes() > 0
    for colour in ("--series-4", "--series-1"):
        until(lambda colour=colour: page.evaluate(DRAWN, ["Memory", colour]), f"{colour} is drawn")


def test_charts_of_a_gpu_are_there_with_figures_only(tab: Tab) -> None:
    page = tab.page
    charts = page.get_by_role("figure")
    power = "node.127.0.0.1.gpu_power_w"

    def answer(route: Route) -> None:
        route.fulfill(json={"step_s": 1.0, "end_s": time.time(), "series": {power: [41.0] * 60}})

    tab.open("models", "quick", "live")
    expect(charts.filter(has_text="KV cache use").locator("canvas")).to_be_visible()
    expect(charts.filter(has_text="GPU")).to_have_count(0)
    page.route(f"**/admin/v1/history?series={power}*", answer)
    try:
        tab.open("models", "quick", "load")
        expect(page.locator(".waterfall rect").first).to_be_visible()
        with page.expect_response(f"**/admin/v1/history?series={power}*"):
            tab.open("models", "quick", "live")
        expect(charts.filter(has_text="GPU")).to_have_count(1)
        expect(charts.filter(has_text="GPU power").locator("canvas")).to_be_visible()
    finally:
        page.unroute(f"**/admin/v1/history?series={power}*")


# Keeps what is written on canvases, with its alignment.
WRITTEN = """() => {
  const fill = CanvasRenderingContext2D.prototype.fillText;
  window.written = [];
  CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
    window.written.push(`${text} ${this.textAlign}`);
    return fill.call(this, text, ...place);
  };
}"""


def test_the_curve_of_an_incident_ends_with_its_kill(tab: Tab) -> None:
    """Readings have the time of a clock that begins with the machine."""
    page = tab.page
    at_s, columns = 1_700_000_000.0, ["at_s", "available", "free", "cached", "unaccounted"]
    readings = [[5000.0 + number, (20 - number) * GIB, 10 * GIB, 3 * GIB, GIB] for number in range(10)]
    incident = {"id": "made-up", "at_s": at_s, "node": "127.0.0.1", "model": "quick", "why": "it was short", "level": "critical"}
    limits = {"soft_bytes": 6 * GIB, "hard_bytes": 4 * GIB, "floor_bytes": 2 * GIB}
    answer = incident | {"columns": columns, "readings": readings, "limits": limits, "freed_bytes": GIB}
    tab.open("doctor")
    page.evaluate(WRITTEN)
    page.route("**/admin/v1/incidents/made-up", lambda route: route.fulfill(json=answer))
    tab.open("doctor", "made-up")
    chart = page.get_by_role("figure")
    shown = time.strftime("%H:%M:%S", time.localtime(at_s))
    expect(chart.get_by_role("listitem").last).to_have_text(shown)
    expect(chart.get_by_role("listitem").filter(has_text="available")).to_contain_text("11.0 GiB")
    heights = [label.bounding_box() for label in chart.locator(".legend-label").all()]
    assert len({box["height"] for box in heights if box}) == 1, "no label is broken into two lines"
    written = set(page.evaluate("window.written"))
    assert {"soft left", "hard left", "floor left"} <= written, "each limit's name begins at its line"
    assert f"{shown} center" in written, "ticks within a minute have seconds"
    tab.picture("incident")
    assert tab.serious() == []
    page.unroute("**/admin/v1/incidents/made-up")


def test_an_auto_that_became_a_value_is_no_difference(tab: Tab, served: DaemonProcess) -> None:
    tab.open("models", "quick", "settings")
    table = tab.page.get_by_role("table", name="Settings")
    expect(table.locator("tbody tr").first).to_be_visible()
    settings = served.client.get("/admin/v1/models/quick/settings").json()
    chosen = [key for key, value in settings["resolved"].items() if value == "auto"]
    assert chosen
    for key in chosen:
        expect(row(tab.page, "Settings", key)).not_to_contain_text("differs")


def test_a_default_that_the_engine_has_otherwise_is_no_difference(tab: Tab) -> None:
    engine = {"rank": 0, "node": "n", "command": None, "engine": {"enforce_eager": True, "max_num_seqs": 4}}
    answer = {
        "configured": {"max_num_seqs": 8}, "resolved": {"max_num_seqs": 8, "enforce_eager": False}, "keys": [], "ranks": [engine]
    }  # fmt: skip
    tab.page.route("**/admin/v1/models/quick/settings", lambda route: route.fulfill(json=answer))
    tab.open("models", "quick", "settings")
    expect(row(tab.page, "Settings", "max_num_seqs")).to_contain_text("differs")
    expect(row(tab.page, "Settings", "enforce_eager")).not_to_contain_text("differs")
    tab.page.unroute("**/admin/v1/models/quick/settings")


def test_a_log_is_followed_paused_and_searched(tab: Tab) -> None:
    page = tab.page
    tab.open("models", "quick", "log")
    log = page.get_by_role("log", name="Log of quick, rank 0")
    expect(log).to_contain_text("Starting to load model")
    page.get_by_label("Search the log").fill("loading weights took")
    lines = log.locator("div:visible")
    expect(lines.filter(has_not_text=re.compile("loading weights took", re.IGNORECASE))).to_have_count(0)
    expect(lines.first).to_be_visible()
    page.get_by_label("Search the log").fill("")
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    page.get_by_role("button", name="Resume").click()


def test_every_page_in_light_in_dark_and_narrow(tab: Tab) -> None:
    found = {name: wrong for name, (address, content) in WALK.items() if (wrong := _wrong_with(tab, name, address, content))}

    assert (found, tab.refused) == ({}, [])


def _wrong_with(tab: Tab, name: str, address: tuple[str, ...], content: str) -> list[str]:
    page = tab.page
    tab.open("nowhere")  # so that what stands there is not the page before's
    expect(page.get_by_role("heading", name="No such page")).to_be_visible()
    tab.open(*address)
    expect(page.locator(content).first).to_be_visible()
    tab.picture(f"{name}-light")
    wrong = tab.serious()
    page.emulate_media(color_scheme="dark")
    # Curves are drawn anew in the other colours.
    page.wait_for_function("matchMedia('(prefers-color-scheme: dark)').matches")
    tab.picture(f"{name}-dark")
    wrong += tab.serious("color-contrast")
    page.set_viewport_size({"width": NARROW, "height": HEIGHT})
    try:
        wrong += tab.too_wide()
        tab.picture(f"{name}-narrow")
        expect(page.get_by_role("button", name="Menu")).to_be_visible()
    finally:
        page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        page.emulate_media(color_scheme="light")
    return wrong


@pytest.fixture
def marked(tab: Tab) -> Iterator[Page]:
    """The tab's page, which must be the same document afterwards."""
    tab.open()
    expect(badge(tab.page)).to_have_text("live")
    tab.page.evaluate("window.mark = 1")
    yield tab.page
    expect(badge(tab.page)).to_have_text("live")
    assert tab.page.evaluate("window.mark") == 1


def test_a_stalled_stream_is_told(marked: Page, tab: Tab, served: DaemonProcess) -> None:
    assert served.process
    fresh = marked.evaluate(COLOUR)
    served.process.send_signal(signal.SIGSTOP)
    try:
        expect(badge(marked)).to_contain_text(re.compile(r"not live.*figures are \d+s old", re.DOTALL))
        assert marked.evaluate(COLOUR) != fresh
        tab.picture("overview-stalled")
        assert tab.serious() == []
    finally:
        served.process.send_signal(signal.SIGCONT)
    expect(badge(marked)).to_have_text("live")
    assert marked.evaluate(COLOUR) == fresh


def test_a_killed_daemon_is_missed_and_its_successor_taken_without_a_reload(marked: Page, tab: Tab, served: DaemonProcess) -> None:
    before = served.status()["version"]
    tab.open("playground")
    marked.get_by_label("Model", exact=True).select_option("endless")
    ask(marked, "Do not stop.", Most_tokens="100000")
    expect(marked.get_by_role("article", name="assistant")).to_contain_text("Paris")
    known: list[str] = []
    marked.on("requestfinished", lambda request: known.append(request.url) if "/history?series=model.quick." in request.url else None)
    tab.open("models", "quick", "live")
    charts = marked.get_by_role("figure")
    expect(charts.locator("canvas")).to_have_count(7)
    # A curve that has no figures yet when the daemon is killed says so in its place.
    while len(known) < 7:
        marked.wait_for_event("requestfinished")
    navigation = marked.get_by_role("navigation", name="Pages")
    place = navigation.bounding_box()
    served.kill()
    expect(badge(marked)).to_contain_text("not live")
    expect(badge(marked)).to_contain_text("sparkd does not answer.")
    # The curves stay, and nothing moves.
    expect(charts.locator("canvas")).to_have_count(7)
    expect(charts).to_have_count(7)
    assert navigation.bounding_box() == place
    tab.picture("model-live-killed")
    tab.open("playground")
    expect(marked.get_by_role("alert").filter(has_text="the connection to sparkd was lost")).to_be_visible()
    served.start()
    expect(badge(marked)).to_have_text("live")
    assert served.status()["version"] == before
    tab.open()
    expect(marked.get_by_role("article")).to_have_count(1)
    expect(marked.get_by_role("region", name="Resident models")).to_contain_text("quick")


def test_without_keys_it_opens_at_once(context: BrowserContext, served: DaemonProcess) -> None:
    configured: dict[str, Any] = settings(served.folder)
    del configured["keys"]
    served.configure(configured)
    served.client.post("/admin/v1/reload").raise_for_status()
    tab = Tab(context, served.url)
    try:
        tab.open()
        expect(badge(tab.page)).to_have_text("live")
        assert (tab.faults, tab.refused, tab.foreign) == ([], [], [])
    finally:
        tab.page.close()
        served.configure(settings(served.folder))
        served.client.post("/admin/v1/reload").raise_for_status()
