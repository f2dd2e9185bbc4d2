"""The page of view.py in a real browser: headless Chromium, spoken to through a pipe."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import time

import pytest
from test_trajectories import one

import view
from formats.trajectories import append_trajectories

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt install chromium)")
LOUD = {"Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"}
FLAGS = """
--headless=new --no-sandbox --disable-gpu --no-first-run --hide-scrollbars --disable-extensions
--disable-dev-shm-usage --remote-debugging-pipe
""".split()


class Browser:
    """The DevTools protocol: JSON that ends in a zero byte, in on descriptor 3, out on 4."""

    def __init__(self, profile):
        (theirs_in, self.to), (self.source, theirs_out) = os.pipe(), os.pipe()
        plumbing = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        command = ["bash", "-c", plumbing, CHROMIUM, *FLAGS, f"--user-data-dir={profile}"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        passed = {"pass_fds": (theirs_in, theirs_out), "start_new_session": True}
        self.process = subprocess.Popen([*command, "about:blank"], **quiet, **passed)
        os.close(theirs_in)
        os.close(theirs_out)
        self.numbers, self.events, self.rest, self.session = itertools.count(1), [], b"", {}

    def attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def message(self) -> dict:
        while b"\0" not in self.rest:
            more = os.read(self.source, 1 << 16)
            assert more, "the browser has ended"
            self.rest += more
        text, _, self.rest = self.rest.partition(b"\0")
        return json.loads(text)

    def call(self, method: str, **params) -> dict:
        request = {"id": next(self.numbers), "method": method, "params": params} | self.session
        os.write(self.to, json.dumps(request).encode() + b"\0")
        while (answer := self.message()).get("id") != request["id"]:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def run(self, code: str):
        """Returns the value of an expression of the page."""
        reply = self.call(
            "Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def wait(self, code: str) -> None:
        """Returns when the expression is true; the limit of a test's time ends it otherwise."""
        while not self.run(code):
            time.sleep(0.01)

    def open(self, path, width: int = 1300, height: int = 900) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.go(path.as_uri())

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.querySelectorAll('#groups button').length > 0")

    def press(self, *keys: str) -> None:
        for key in keys:
            for kind in ("keyDown", "keyUp"):
                text = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
                self.call("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def complaints(self) -> list[str]:
        """Returns errors, and all that the page wrote to the console."""
        self.run("1")
        return [json.dumps(event)[:400] for event in self.events if event.get("method") in LOUD]

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)  # its renderers too
        self.process.wait()
        os.close(self.to)
        os.close(self.source)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    try:
        browser.attach()
        yield browser
    finally:
        browser.close()


def metrics_of(step: int, begin: int) -> dict:
    """What a stage logs: look-ups are searched for ever more, sums ever less; nothing repeats."""
    done = (begin + step) / 5  # 0 to 1 over two stages of three steps
    row = {"step": step, "reward": step / 10, "reward/answer": 0.5, "em": 0.1 + 0.8 * done}
    row |= {"em/one_hop": 0.25 + done / 2, "em/arithmetic": 0.75, "searches": 2 - abs(done - 0.4)}
    row |= {"searched/one_hop": done, "searched/arithmetic": 1 - done, "model_tokens": 30 + step}
    return row | {"grad_norm": 1.0, "k2": 0.1, "entropy_mc": 2.0 - done, "repetition": 0.0}


def stage(folder, steps: int, begin: int = 0):
    folder.mkdir(parents=True)
    settings = {"recipe": "ur2", "algorithm": "grpo", "clip_low": 0.2, "clip_high": 0.2}
    settings |= {"model": "", "data": "", "corpus": "mine.jsonl", "world_seed": 3}
    settings |= {"kl_coef": 0.1, "kl_estimator": "k2", "temperature": 1.0, "group_size": 4}
    (folder / "settings.json").write_text(json.dumps(settings))
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(steps):
            file.write(json.dumps(metrics_of(step, begin)) + "\n")
    return folder


ODD = "<b>&amp; \u202eabc\u0007 <script>document.title='hacked'</script>"


def searching(row: int, **more) -> dict:
    search = {
        "query": "where is Ana ?", "text": "Ana lives in Rom", "fallback": row == 2, "error": None,
        "cut": False, "documents": [["Ana", "Ana lives in Rom"]], "seconds": 0.25,
    }  # fmt: skip
    its = {
        "row": row,
        "correct": row == 0,
        "answer": "Rom" if row == 0 else "Ulm",
        "golds": ["Rom"],
    }
    its |= {"question": f"where does Ana {ODD} live ?", "ref": [-0.7, 0.0, -1.1], **more}
    return one(**its, searches=[search] if row else [])


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Two stages of three steps, four samples of two questions each."""
    root = tmp_path_factory.mktemp("runs") / "ana"
    for folder in (stage(root / "stage1", 3), stage(root / "stage2", 3, 3)):
        for step in range(3):
            rows = [searching(row, step=step, group=group) for group in (0, 5) for row in range(4)]
            rows[3]["searches"] *= 2  # the same query again
            rows[6]["rejected_queries"] = [["direct", "who ?"]]
            for name in ("advantages", "weights", "new"):
                del rows[7][name]  # of a group that is not trained on
            append_trajectories(folder, rows)
    view.main([str(root)])
    return root / "view" / "index.html"


@pytest.fixture
def shown(browser, page):
    browser.open(page)
    yield browser
    assert browser.complaints() == []


BUTTONS = "document.querySelectorAll('#groups button').length"


def test_a_stage_opens_at_its_last_step_with_curves_groups_and_one_trajectory(shown):
    assert shown.run("document.title") == "Trajectories"  # the markup in a question is text
    assert shown.run(BUTTONS) == 8
    assert shown.run("document.getElementById('step-numbers').textContent").startswith(
        "stage2, step 2: reward 0.2"
    )
    assert "<script>" in shown.run("document.querySelector('#one h2').textContent")
    assert "\u202e" not in shown.run("document.body.textContent")


@pytest.mark.parametrize(
    "name, left", [("wrong", 6), ("fallback", 2), ("silent", 2), ("fault", 1), ("repeated", 1)]
)
def test_every_filter_leaves_its_trajectories(shown, name, left):
    box = f"document.getElementById('filters').elements.{name}"
    shown.run(f"{box}.click()")
    assert shown.run(BUTTONS) == left
    assert shown.run("document.getElementById('found').textContent") == f"{left} of 8 trajectories"
    shown.run(f"{box}.click()")
    assert shown.run(BUTTONS) == 8


def test_words_filter_too_and_keys_go_through_what_is_left(shown):
    shown.press("/")
    assert shown.run("document.activeElement.name") == "text"
    shown.press("u", "l", "m")
    assert shown.run(BUTTONS) == 6
    shown.press("Escape", "ArrowDown")  # the first, which was chosen, does not pass
    shown.run("document.getElementById('filters').reset(), showGroups(), choose(0, 0)")
    chosen = "document.querySelectorAll('#groups [aria-current=true]')[0].title"
    before = shown.run(chosen)
    shown.press("ArrowDown")
    assert before != shown.run(chosen)
    assert "answer Ulm" in shown.run(chosen)


def test_keys_change_step_token_colour_and_theme(shown):
    place = "document.getElementById('step-numbers').textContent"
    shown.press("ArrowLeft")
    shown.wait(f"{place}.startsWith('stage2, step 1')")
    shown.press("ArrowRight")
    shown.wait(f"{place}.startsWith('stage2, step 2')")
    shown.press(".", ".")
    its = "document.getElementById('token').textContent"
    assert "“ c”" in shown.run(its) and "ratio r = exp(new − old)" in shown.run(its)
    colours = set()
    for name in ("ratio", "probability", "surprise", "advantage"):
        shown.press("c")
        assert shown.run("document.getElementById('colour').value") == name
        colours.add(
            shown.run("getComputedStyle(document.querySelector('[data-n]')).backgroundColor")
        )
    assert len(colours) == 4 and "rgba(0, 0, 0, 0)" not in colours
    before = shown.run("document.documentElement.dataset.theme")
    shown.press("t")
    assert shown.run("document.documentElement.dataset.theme") != before


def test_the_formula_of_a_token_has_its_numbers(shown):
    shown.run("choose(0, 0), pick(2)")
    told = shown.run("document.getElementById('token').textContent")
    # r = e^(−1.3 + 1) = 0.74082; A = 2; r · k2 = r (−1.1 + 1.3)² / 2 = 0.0148164, times 0.1
    for part in ("= 0.74082", "A = +2 = 1.4816", "0.1 · r · k2 = 0.0014816", "= -0.014802"):
        assert part in told, told
    shown.run("choose(1, 3), pick(2)")
    assert "not trained on" in shown.run("document.getElementById('token').textContent")


def test_what_the_environment_wrote_is_a_block_outside_the_loss(shown):
    shown.run("choose(0, 1)")
    block = shown.run("document.querySelectorAll('#one .outside')[1].textContent")
    assert "search “where is Ana ?” (1 found, 0.25 s): outside the loss" in block
    assert "Ana lives in Rom" in block and block.endswith("bdocuments• Ana: Ana lives in Rom")
    assert shown.run("[...document.querySelectorAll('[data-n]')].map((s) => s.dataset.n)") == [
        "0", "2",
    ]  # fmt: skip


def test_a_click_on_a_curve_goes_to_its_step_also_in_the_stage_before(shown):
    shown.run(
        """document.querySelector('#curves svg').dispatchEvent(
           new MouseEvent('click', {clientX: document.querySelector('#curves svg')
           .getBoundingClientRect().left + 1, bubbles: true}))"""
    )
    shown.wait("document.getElementById('step-numbers').textContent.startsWith('stage1, step 0')")
    place = "Number(document.querySelector('#curves .here').getAttribute('x1'))"
    first = shown.run(place)
    shown.press("ArrowRight")  # the second of six steps
    width = shown.run("document.querySelector('#curves figure').px(5)") - first
    assert shown.run(place) - first == pytest.approx(width / 5)


def test_a_question_that_was_asked_again_links_to_its_other_steps(shown):
    links = "[...document.querySelectorAll('#one .rows button')]"
    both = ["stage1: 0", "stage1: 1", "stage1: 2", "stage2: 0", "stage2: 1"]
    assert shown.run(f"{links}.map((b) => b.textContent)") == both
    shown.run(f"{links}[3].click()")
    shown.wait("document.getElementById('step-numbers').textContent.startsWith('stage2, step 0')")
    assert "where does Ana" in shown.run("document.querySelector('#one h2').textContent")


CONTRAST = """(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const over = ([r, g, b, a = 1], below) => [r, g, b].map((x, i) => x * a + below[i] * (1 - a));
  const linear = (x) => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  const light = (c) => c.map((x) => linear(x / 255))
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => node === null ? [255, 255, 255]
    : over(rgb(getComputedStyle(node).backgroundColor).concat(), ground(node.parentElement));
  const worst = [];
  for (const node of document.querySelectorAll('body *')) {
    const own = [...node.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || !node.getClientRects().length || node.closest('script, svg')) continue;
    const [a, b] = [light(rgb(getComputedStyle(node).color).slice(0, 3)), light(ground(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    worst.push([ratio, node.tagName + '.' + node.className + ': ' + node.textContent.slice(0, 30)]);
  }
  return worst.sort((a, b) => a[0] - b[0])[0];
})()"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("colour", ["advantage", "ratio", "probability", "surprise"])
def test_text_can_be_read_in_both_themes(shown, theme, colour):
    shown.run(f"document.documentElement.dataset.theme = '{theme}', colourBy('{colour}')")
    shown.run("choose(0, 1), pick(0)")
    ratio, where = shown.run(CONTRAST)
    assert ratio >= 4.5, where


def test_everything_is_reached_with_the_tab_key_and_has_a_name(shown):
    bare = """[...document.querySelectorAll('button, select, input')].filter((node) =>
      node.tabIndex < 0 || !(node.textContent.trim() || node.labels?.length || node.ariaLabel
      || node.title)).length"""
    assert shown.run(bare) == 0


def test_at_the_width_of_a_phone_nothing_is_beside_the_screen(browser, page):
    browser.open(page, 380, 760)
    browser.run("choose(0, 1), pick(0)")
    assert browser.run("document.documentElement.scrollWidth") <= 380
    assert browser.complaints() == []


def test_several_runs_share_their_curves_and_one_without_trajectories_says_so(
    browser, page, tmp_path
):
    stage(tmp_path / "bare" / "stage1", 5)
    both = tmp_path / "both"
    view.main([str(page.parent.parent), str(tmp_path / "bare"), "--out", str(both)])
    browser.open(both / "index.html")
    panels = "[...document.querySelectorAll('#curves figure')]"
    drawn = browser.run(f"{panels}.map((figure) => figure.drawn.map((line) => line.label))")
    assert drawn and all(labels == ["ana", "bare"] for labels in drawn)
    browser.run("chooseRun(1)")
    groups = browser.run("document.getElementById('groups').textContent")
    assert "no trajectories were kept" in groups and browser.complaints() == []


def test_a_trajectory_of_a_hundred_thousand_tokens_opens(browser, tmp_path):
    folder, n = stage(tmp_path / "long" / "stage1", 1), 100_000
    tokens = {"ids": [1] * n, "tokens": [" w"] * n, "mask": [1] * n, "writers": []}
    numbers = dict.fromkeys(("sampled", "old", "new", "ref"), -0.5)
    append_trajectories(folder, [searching(0, **tokens, **numbers)])
    view.main([str(folder.parent)])
    browser.open(folder.parent / "view" / "index.html")
    browser.wait(f"document.querySelectorAll('[data-n]').length === {n}")


def test_the_headline_says_what_happened(shown):
    # Means of the first and of the last three of six steps: done is 0, .2, .4 and .6, .8, 1.
    found = shown.run("document.getElementById('headline').textContent")
    searched = "Searches for one hop questions 20 % → 80 %, for arithmetic questions 80 % → 20 %"
    assert found.replace("\N{NO-BREAK SPACE}", " ") == f"{searched}; exact match 0.26 → 0.74"
    about = shown.run("document.getElementById('about').textContent")
    assert about == "ur2 · grpo · built-in model · built-in world 3 · mine.jsonl"


def test_one_question_is_seen_at_three_moments(shown):
    buttons = "[...document.querySelectorAll('#moments .moment')]"
    names = ["Before: stage1, step 0", "Most searches: stage1, step 2", "The end: stage2, step 2"]
    assert shown.run(f"{buttons}.map((b) => b.textContent)") == names
    question = shown.run("document.querySelector('#moments em').textContent")
    for place, name in enumerate(names):
        shown.run(f"{buttons}[{place}].click()")
        where = name.split(": ")[1]
        shown.wait(f"document.getElementById('step-numbers').textContent.startsWith('{where}')")
        assert shown.run("document.querySelector('#one h2').textContent") == question
        assert shown.run(f"{buttons}[{place}].getAttribute('aria-current')") == "true"
    stories = "[...document.querySelectorAll('#moments .story')].map((s) => s.textContent)"
    assert all("⌕ where is Ana ?" in story and "✗ Ulm" in story for story in shown.run(stories))


def test_the_group_s_chain_goes_from_the_reward_to_the_loss(shown):
    shown.run("choose(0, 1), pick(2)")
    links = shown.run("[...document.querySelectorAll('.chain b')].map((b) => b.textContent)")
    rewards = shown.run("shownStep().rows.filter((row) => row.group === 0).map((r) => r.reward)")
    mean = sum(rewards) / 4
    assert links[0] == f"{rewards[1]:g}" and links[1].startswith(f"{rewards[1]:g} − {mean:.3g}")
    assert links[2] == "all rewards are equal: 0"  # in these records
    # As in the formula of the token: A 2, r e^−0.3, w 0.01.
    assert links[3:] == ["+2", "0.7408, clipped to 0.8", "0.01", "-0.0148"]
    strips = "document.querySelectorAll('#group .strip')"
    assert shown.run(f"{strips}.length") == 4
    shown.run(f"{strips}[3].click()")
    assert shown.run("state.row") == 3 and shown.run("location.hash") == "#stage2-2-0-3"


CURVES = """[...document.querySelectorAll('#curves figure')].map((figure) => ({
  title: figure.firstChild.firstChild.data,
  ticks: [...figure.querySelectorAll('.tick')].map((tick) => [Number(tick.lastChild.textContent),
    Number(tick.firstChild.getAttribute('y1'))]),
  steps: [...figure.querySelectorAll('text.x')].map((text) => [Number(text.textContent),
    Number(text.getAttribute('x'))]),
  names: [...figure.querySelectorAll('svg > text:not(.x)')].map((text) => text.textContent),
  stages: [...figure.querySelectorAll('.stage text')].map((text) => text.textContent),
  metrics: figure.drawn.map((line) => line.name),
  raw: [...figure.querySelectorAll('.raw')].map((path) => path.getAttribute('d')),
}))"""


def value_at(place: float, ticks: list) -> float:
    """Returns the value at a place of the screen, by the first and last tick, (value, place)."""
    (low, start), (high, end) = ticks[0], ticks[-1]
    return low + (high - low) * (place - start) / (end - start)


def test_four_curves_have_the_values_of_the_metrics_on_their_axes(shown):
    curves = shown.run(CURVES)
    titles = ["reward", "exact match", "share of questions searched for", "tokens per trajectory"]
    assert [curve["title"] for curve in curves] == titles
    expected = [metrics_of(step, begin) for begin in (0, 3) for step in range(3)]
    for curve in curves:
        assert curve["stages"] == ["stage1", "stage2"]
        labels = {name.split("/")[-1].replace("_", " ") for name in curve["metrics"]}
        assert set(curve["names"]) == labels
        for name, path in zip(curve["metrics"], curve["raw"], strict=True):
            points = [tuple(map(float, point.split(","))) for point in path[1:].split("L")]
            steps = [value_at(x, curve["steps"]) for x, _ in points]
            assert steps == pytest.approx(list(range(6)), abs=0.02)
            values = [value_at(y, curve["ticks"]) for _, y in points]
            near = 0.003 * (curve["ticks"][-1][0] - curve["ticks"][0][0])
            assert values == pytest.approx([row[name] for row in expected], abs=abs(near))


def test_a_metric_has_its_sentence_as_a_tooltip(shown):
    title = "document.querySelector('#curves figcaption').title"
    assert shown.run(title) == "Mean reward."  # as docs/metrics.md has it


def test_the_crosshair_shows_the_values_of_one_step_over_all_curves(shown):
    shown.run("crosshair(1)")
    outputs = "[...document.querySelectorAll('#curves output')].map((o) => o.textContent)"
    assert shown.run(outputs) == [
        "reward 0.1", "arithmetic 0.75, one hop 0.35", "arithmetic 0.8, one hop 0.2",
        "model tokens 31",
    ]  # fmt: skip


def test_health_is_folded_and_what_is_all_zero_is_one_line(shown):
    shown.run("document.getElementById('health').open = true")
    shown.wait("document.querySelectorAll('#health figure').length > 3")
    assert (
        shown.run("document.querySelector('#health .zero').textContent") == "All zero: repetition"
    )
    flat = "[...document.querySelectorAll('#health figure')].find((f) => f.drawn[0].name === 'k2')"
    ys = shown.run(f"{flat}.querySelector('.raw').getAttribute('d').match(/,[\\d.]+/g)")
    assert len(ys) == 6 and len(set(ys)) == 1


def test_a_link_opens_its_trajectory(browser, page):
    browser.call("Page.navigate", url="about:blank")
    browser.go(f"{page.as_uri()}#stage1-1-1-2")
    browser.wait("document.getElementById('step-numbers').textContent.startsWith('stage1, step 1')")
    assert browser.run("[state.group, state.row]") == [1, 2]
    assert browser.complaints() == []
