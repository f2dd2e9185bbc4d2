"""Tests the page of view.py in a real browser: headless Chromium, controlled through a pipe."""

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
from formats.records import append_jsonl
from formats.trajectories import append_trajectories

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt install chromium)")
# Events of an error, or of text that the page wrote to the console.
CONSOLE_EVENTS = {"Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"}
FLAGS = """
--headless=new --no-sandbox --disable-gpu --no-first-run --hide-scrollbars --disable-extensions
--disable-dev-shm-usage --remote-debugging-pipe
""".split()


class Browser:
    """Speaks the DevTools protocol with Chromium: JSON messages that end in a zero byte. Chromium
    reads from descriptor 3 and writes to descriptor 4.
    """

    def __init__(self, profile):
        script = 'exec "$0" "$@" 3<&0 4>&1 >/dev/null 2>&1'
        command = ["bash", "-c", script, CHROMIUM, *FLAGS, f"--user-data-dir={profile}"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        self.process = subprocess.Popen(command, start_new_session=True, **pipes)
        self.numbers, self.events, self.rest, self.session = itertools.count(1), [], b"", {}

    def attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def message(self) -> dict:
        while b"\0" not in self.rest:
            more = self.process.stdout.read(1 << 16)
            assert more, "the browser has ended"
            self.rest += more
        text, _, self.rest = self.rest.partition(b"\0")
        return json.loads(text)

    def call(self, method: str, **params) -> dict:
        request = {"id": next(self.numbers), "method": method, "params": params} | self.session
        self.process.stdin.write(json.dumps(request).encode() + b"\0")
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
        self.call("Page.navigate", url=path.as_uri())
        self.wait("document.querySelectorAll('#groups button').length > 0")

    def press(self, *keys: str) -> None:
        for key in keys:
            for kind in ("keyDown", "keyUp"):
                text = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
                self.call("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def complaints(self) -> list[dict]:
        """Returns errors, and all that the page wrote to the console."""
        self.run("1")
        return [event for event in self.events if event.get("method") in CONSOLE_EVENTS]

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)  # with all renderers
        self.process.communicate()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    try:
        browser.attach()
        yield browser
    finally:
        browser.close()


def metrics_of(step: int, begin: int) -> dict:
    """Returns a row of metrics. In later steps the model searches more for look-ups and less for
    sums; it never repeats itself.
    """
    progress = (begin + step) / 5  # 0 to 1 over two stages of three steps
    return {
        "step": step, "reward": step / 10, "reward/answer": 0.5, "em": 0.1 + 0.8 * progress,
        "em/one_hop": 0.25 + progress / 2, "em/arithmetic": 0.75, "searched/one_hop": progress,
        "searched/arithmetic": 1 - progress, "searches": 2 - abs(progress - 0.4),
        "model_tokens": 30 + step, "grad_norm": 1.0, "k2": 0.1, "entropy_mc": 2.0 - progress,
        "malformed_tags": 0.0,
    }  # fmt: skip


SETTINGS = {
    "recipe": "ur2", "algorithm": "grpo", "clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.1,
    "kl_estimator": "k2", "group_size": 4, "questions_per_step": 8, "model": "", "data": "",
    "corpus": "mine.jsonl", "world_seed": 3,
}  # fmt: skip


def stage(folder, begin: int):
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps(SETTINGS))
    metrics = [metrics_of(step, begin) for step in range(3)]
    metrics[1]["alarms"] = {"truncated": f"cut off, {folder.name}"}
    append_jsonl(folder / "metrics.jsonl", metrics)
    return folder


HOSTILE = "<b>&amp; \u202eabc\u0007 <script>document.title='hacked'</script>"


def searching(row: int, **more) -> dict:
    search = {
        "query": "where is Ana ?", "text": "Ana lives in Rom", "fallback": row == 2, "error": None,
        "cut": False, "documents": [["Ana", "Ana lives in Rom"]], "seconds": 0.25,
    }  # fmt: skip
    return one(
        row=row, correct=row == 0, answer="Ulm" if row else "Rom", golds=["Rom"],
        question=f"where does Ana {HOSTILE} live ?", ref=[-0.7, 0.0, -1.1],
        searches=[search] if row else [], **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Returns the page of a run: two stages of three steps, each step with two groups of four."""
    root = tmp_path_factory.mktemp("runs") / "ana"
    for folder in (stage(root / "stage1", 0), stage(root / "stage2", 3)):
        for step in range(3):
            rows = [searching(row, step=step, group=group) for group in (0, 5) for row in range(4)]
            if folder.name == "stage1" and step == 0:  # the middle one by reward, before RL
                rows[2]["searches"] = rows[6]["searches"] = []
            rows[3]["searches"] *= 2  # the same query twice
            rows[6]["rejected_queries"] = [["direct", "who ?"]]
            rows[5]["format"] = False
            for name in ("advantages", "weights", "new"):
                del rows[7][name]  # its group is not trained on
            append_trajectories(folder, rows)
    view.main([str(root)])
    return root / "view" / "index.html"


@pytest.fixture
def viewer(browser, page):
    browser.open(page)
    yield browser
    assert browser.complaints() == []


BELOW = """document.querySelector('nav').getBoundingClientRect().bottom
  <= document.querySelector('h1').getBoundingClientRect().top"""
BUTTONS = "document.querySelectorAll('#groups button').length"


def test_the_page_opens_at_the_last_step_below_the_headline_of_the_run(viewer):
    assert viewer.run("document.title") == "Trajectories"  # markup in a question is shown as text
    assert viewer.run(BUTTONS) == 8 and viewer.run(BELOW)
    step = viewer.run("document.getElementById('step-numbers').textContent")
    assert step.startswith("stage2, step 2: reward 0.2")
    # Means of the first three and of the last three steps: progress is 0, .2, .4 and .6, .8, 1, and
    # exact match is 0.1 + 0.8 progress. With s = 0.16 in both, the interval of its difference is
    # 0.48 ± 2.776 · 0.16 · √(2/3) = ± 0.363. That of searches is, at 99 %, 0.6 ± 0.752: not named.
    headline = viewer.run("document.getElementById('headline').textContent")
    assert headline == "On training questions (n = 24): exact match 0.26 → 0.74"
    about = viewer.run("document.getElementById('about').textContent")
    assert about == "ur2 · grpo · built-in model · built-in world 3 · mine.jsonl"
    assert "<script>" in viewer.run("document.querySelector('#one h2').textContent")
    assert "\u202e" not in viewer.run("document.body.textContent")


@pytest.mark.parametrize(
    "name, count", [("wrong", 6), ("fallback", 2), ("silent", 2), ("fault", 2), ("repeated", 1)]
)
def test_a_filter_leaves_only_its_own_trajectories(viewer, name, count):
    box = f"document.getElementById('filters').elements.{name}"
    viewer.run(f"{box}.click()")
    assert viewer.run(BUTTONS) == count
    found = viewer.run("document.getElementById('found').textContent")
    assert found == f"{count} of 8 trajectories"


def test_an_alarm_leads_to_its_step(viewer):
    alarms = "[...document.querySelectorAll('#alarms li')]"
    expected = [f"{name}, step 1 cut off, {name}" for name in ("stage1", "stage2")]
    assert viewer.run(f"{alarms}.map((li) => li.textContent)") == expected
    viewer.run(f"{alarms}[0].querySelector('button').click()")
    viewer.wait("document.getElementById('step-numbers').textContent.startsWith('stage1, step 1')")


def test_keys_filter_by_words_and_change_trajectory_step_token_colour_and_theme(viewer):
    viewer.press("/", "u", "l", "m")
    assert viewer.run(BUTTONS) == 6
    viewer.press("Escape", "ArrowDown")  # the first trajectory, which was chosen, does not match
    chosen = "document.querySelectorAll('#groups [aria-current=true]')[0].title"
    assert "answer Ulm" in viewer.run(chosen)
    step_text = "document.getElementById('step-numbers').textContent"
    viewer.press("ArrowLeft")
    viewer.wait(f"{step_text}.startsWith('stage2, step 1')")
    viewer.press("ArrowRight")
    viewer.wait(f"{step_text}.startsWith('stage2, step 2')")
    viewer.press(".", ".")
    token_text = viewer.run("document.getElementById('token').textContent")
    assert "“ c”" in token_text and "ratio r = exp(new − old)" in token_text
    before = viewer.run("document.documentElement.dataset.theme")
    viewer.press("c", "t")
    assert viewer.run("document.getElementById('colour').value") == "ratio"
    assert viewer.run("document.documentElement.dataset.theme") != before


def test_the_formula_of_a_token_is_shown_with_the_token_s_numbers(viewer):
    viewer.run("choose(0, 0), pick(2)")
    formula = viewer.run("document.getElementById('token').textContent")
    # r = e^(−1.3 + 1) = 0.74082; A = 2; r · k2 = r (−1.1 + 1.3)² / 2 = 0.0148164, times 0.1
    for part in ("= 0.74082", "A = +2 = 1.4816", "0.1 · r · k2 = 0.0014816", "= -0.014802"):
        assert part in formula, formula
    viewer.run("choose(5, 3), pick(2)")
    assert "not trained on" in viewer.run("document.getElementById('token').textContent")


def test_text_of_the_environment_is_a_block_outside_the_loss(viewer):
    viewer.run("choose(0, 1)")
    block = viewer.run("document.querySelectorAll('#one .outside')[1].textContent")
    assert "search “where is Ana ?” (1 found, 0.25 s): outside the loss" in block
    assert "Ana lives in Rom" in block and block.endswith("bdocuments• Ana: Ana lives in Rom")
    assert viewer.run("[...document.querySelectorAll('[data-n]')].map((s) => s.dataset.n)") == [
        "0", "2",
    ]  # fmt: skip


def test_a_click_on_a_curve_opens_that_step_also_in_an_earlier_stage(viewer):
    viewer.run(
        """document.querySelector('#curves svg').dispatchEvent(
           new MouseEvent('click', {clientX: document.querySelector('#curves svg')
           .getBoundingClientRect().left + 1, bubbles: true}))"""
    )
    viewer.wait("document.getElementById('step-numbers').textContent.startsWith('stage1, step 0')")
    marker_x = "Number(document.querySelector('#curves .here').getAttribute('x1'))"
    viewer.press("ArrowRight")  # the second of six steps
    assert viewer.run(f"{marker_x} === document.querySelector('#curves figure').px(1)")


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
def test_text_can_be_read_in_both_themes(viewer, theme, colour):
    viewer.run(f"document.documentElement.dataset.theme = '{theme}', colourBy('{colour}')")
    viewer.run("choose(0, 1), pick(0)")
    ratio, where = viewer.run(CONTRAST)
    assert ratio >= 4.5, where


def test_every_control_can_be_reached_with_the_tab_key_and_has_a_name(viewer):
    unreachable = """[...document.querySelectorAll('button, select, input')].filter((node) =>
      node.tabIndex < 0 || !(node.textContent.trim() || node.labels?.length || node.ariaLabel
      || node.title)).length"""
    assert viewer.run(unreachable) == 0


def test_at_the_width_of_a_phone_nothing_needs_scrolling_sideways(browser, page):
    browser.open(page, 380, 760)
    browser.run("choose(0, 1), pick(0)")
    assert browser.run("document.documentElement.scrollWidth") <= 380 and browser.run(BELOW)
    assert browser.complaints() == []


def test_the_same_question_is_shown_at_three_moments_of_training(viewer):
    buttons = "[...document.querySelectorAll('#moments .moment')]"
    names = ["Before: stage1, step 0", "Most searches: stage1, step 2", "The end: stage2, step 2"]
    assert viewer.run(f"{buttons}.map((b) => b.textContent)") == names
    viewer.run(f"{buttons}[1].click()")
    viewer.wait("document.getElementById('step-numbers').textContent.startsWith('stage1, step 2')")
    question = viewer.run("document.querySelector('#moments em').textContent")
    assert viewer.run("document.querySelector('#one h2').textContent") == question
    stories = "[...document.querySelectorAll('#moments .story')].map((s) => s.textContent)"
    before, *later = viewer.run(stories)
    assert "⌕" not in before and all("⌕ where is Ana ?" in story for story in later)


def test_the_chain_of_a_group_leads_from_the_reward_to_the_loss(viewer):
    viewer.run("choose(0, 1), pick(2)")
    # Numbers of the token's formula: A = 2, r = e^−0.3, w = 0.01. In these records all rewards are
    # equal.
    assert viewer.run("[...document.querySelectorAll('.chain b')].map((b) => b.textContent)") == [
        "1.5", "1.5 − 1.5 = 0", "all rewards are equal: 0",
        "+2", "0.7408, clipped to 0.8", "0.01", "-0.0148",
    ]  # fmt: skip
    # PPO has no group.
    alone = "stage().settings.algorithm = 'ppo'; showGroup(chosen())"
    assert viewer.run(f"{alone}; document.querySelectorAll('.chain b').length") == 5
    viewer.run("stage().settings.algorithm = 'grpo'")
    viewer.run("document.querySelectorAll('#group .strip')[3].click()")
    assert viewer.run("state.row") == 3 and viewer.run("location.hash") == "#stage2-2-0-3"


# The page of a run whose stages have these columns of metrics, and which kept these questions:
# {name: [right, searches] of each moment}.
SHOW = """
make = (stages, asked = {}) => { shown = { name: 'r', stages: stages.map((columns, i) => ({
  name: `stage${i + 1}`, settings: { questions_per_step: 16 }, missing: [],
  steps: Object.values(asked)[0]?.map((_, step) => step) ?? [],
  asked: Object.fromEntries(Object.entries(asked).map(([question, its]) => [question, { ...its }])),
  metrics: Object.values(columns)[0].map((_, step) => Object.fromEntries([['step', step],
    ...Object.entries(columns).map(([name, its]) => [name, its[step]])])),
})) }; };
says = (text) => text === sentence(run()).replaceAll('\\u00a0', ' ')
  .replace(/ ?on training questions ?/i, '');
em = 'exact match of one hop questions 0.04 → 0.84';
moment = (asked) => (make([{ searches: [0, 2, 1], em: [0, 1, 1] }], asked), moments()?.question);
up = { 'searched/one_hop': [.1, .1, .2, .2, .2, .9], 'em/one_hop': [0, 0, .1, 0, .1, .5], em: [0] };
on = { 'searched/one_hop': [1, 1, 1, 1, 1, 1], 'em/one_hop': [.9, .8, .9, .8, .9, .8] };
sums = { 'searched/arithmetic': [.7, .7, .7, 0, 0, 0], 'em/arithmetic': [.1, .1, .1, .9, .9, .9] };
"""
# One-hop questions are asked from the beginning, sums only in stage 2: not in the headline. Noise:
# 0.91 and 0.97, 0.06 ± 2.306 · √(0.0055 / 5 + 0.002 / 5) = ± 0.089.
HEADLINES = """
make([{em: [.8, 1, .9, .95, .9, .95, 1, .9, 1, 1]}]), says("10 steps: no change beyond chance")
make([{em: [.1, .9]}]), says("2 steps")
make([{em: [.1, .2, .8, .9]}]), says("(n = 32): exact match 0.15 → 0.85")
make([{reward: [1, 1.2, 3, 3.1]}]), says("(n = 32): reward 1.1 → 3.05")
make([{reward: [1, 1.2]}, {reward: [3, 3.1]}]), says("4 steps: no change beyond chance")
make([up, {...on, ...sums}]), says("(n = 80): searches for one hop questions 16 % → 100 %; " + em)
"""
MOMENTS = """
moment({a: [[1, 1], [1, 1], [1, 1]], b: [[0, 0], [1, 2], [1, 1]]}) === "b"
moment({a: [[1, 1], [1, 1], [1, 1]]}) === undefined
moment({a: [[0, 0], [1, 1], [1, 1]], b: [[0, 0], [1, 2], [1, 1]]}) === "b"
moment({a: [[0, 1], [1, 0], [1, 2]], b: [[0, 0], [1, 2], [1, 1]]}) === "b"
"""
NUMBERS = """
[0, 10, 100, 150, 390, 1000, -200].map((x) => number(x)).join() === "0,10,100,150,390,1000,-200"
[1.50, 0.0123, 1234.5, 25e5, 1e-7].map((x) => number(x)).join() === "1.5,0.0123,1235,2.5e+6,1e-7"
[null, "NaN", "Infinity"].map((x) => number(x)).join() === "–,NaN,Infinity"
chart("t", [{name: "a", line: [[0, 0], [1, 400]], label: ""}]).textContent.includes("0200400")
"""


@pytest.mark.parametrize("claim", HEADLINES.strip().splitlines())
def test_the_headline_names_changes_beyond_chance_that_begin_with_the_run(viewer, claim):
    assert viewer.run(SHOW + claim)


@pytest.mark.parametrize("claim", MOMENTS.strip().splitlines())
def test_the_three_moments_are_of_a_question_whose_moments_differ(viewer, claim):
    assert viewer.run(SHOW + claim)


@pytest.mark.parametrize("claim", NUMBERS.strip().splitlines())
def test_numbers_keep_the_zeros_of_whole_numbers(viewer, claim):
    assert viewer.run(claim)


# Texts of a chart that leave its picture of 420 × 220, or that cover another one.
COVERED = """
make([{ reward: [9e5], 'em/x': [1] }, { reward: [-9e4, 0] }, { reward: [0] }]);
for (const kind of 'abcdefghi') run().stages[2].metrics[0][`em/a long name of a kind ${kind}`] = 0;
showCurves();
[...document.querySelectorAll('#curves figure')].flatMap((figure) => {
  const boxes = [...figure.querySelectorAll('text')].map((text) => text.getBBox());
  return boxes.filter((a, i) => a.x < 0 || a.x + a.width > 420 || a.y < 0 || a.y + a.height > 222
    || boxes.some((b, j) => i !== j && a.x < b.x + b.width && b.x < a.x + a.width
      && a.y + 3 < b.y + b.height && b.y + 3 < a.y + a.height))
    .map((a) => [a.x, a.y, a.width, a.height]);
})"""


def test_labels_neither_cover_each_other_nor_leave_the_picture(viewer):
    assert viewer.run(SHOW + COVERED) == []
    assert viewer.run("document.querySelectorAll('#curves .label').length") == 11


# The values of each curve, read from the positions of its points and of the axes' labels.
CURVES = """[...document.querySelectorAll('#curves figure')].map((figure) => {
  const axis = (texts, x) => texts.map((text) => [Number(text.textContent), Number(x(text))]);
  const ticks = axis([...figure.querySelectorAll('.tick')].map((tick) => tick.lastChild),
    (text) => text.parentElement.firstChild.getAttribute('y1'));
  const steps = axis([...figure.querySelectorAll('text.x')], (text) => text.getAttribute('x'));
  const value = (at, [[low, start]], [high, end]) =>
    low + (high - low) * (at - start) / (end - start);
  const lines = [...figure.querySelectorAll('.raw')].map((path, i) => [figure.drawn[i].name,
    path.getAttribute('d').slice(1).split('L').map((point) => point.split(',').map(Number))
      .map(([x, y]) => [value(x, steps, steps.at(-1)), value(y, ticks, ticks.at(-1))])]);
  return { title: figure.firstChild.firstChild.data, lines,
    stages: [...figure.querySelectorAll('.stage text')].map((text) => text.textContent) };
})"""


def test_four_curves_have_the_values_of_the_metrics_on_their_axes(viewer):
    curves = viewer.run(CURVES)
    titles = ["reward", "exact match", "share of questions searched for", "tokens per trajectory"]
    assert [curve["title"] for curve in curves] == titles
    expected = [metrics_of(step, begin) for begin in (0, 3) for step in range(3)]
    for curve in curves:
        assert curve["stages"] == ["stage1", "stage2"] and curve["lines"]
        for name, points in curve["lines"]:
            for step, point in enumerate(points):
                assert point == pytest.approx([step, expected[step][name]], abs=0.02)


def test_health_curves_are_folded_and_all_zero_metrics_are_one_line(viewer):
    viewer.run("document.getElementById('health').open = true")
    viewer.wait("document.querySelectorAll('#health figure').length > 3")
    zero = viewer.run("document.querySelector('#health .zero').textContent")
    assert zero == "All zero: malformed_tags"


ATTACK = """(() => {
  window.blocked = new Set();
  document.addEventListener('securitypolicyviolation', (e) => blocked.add(e.effectiveDirective));
  const box = document.createElement('div');
  document.body.append(box);
  box.innerHTML = `<img src="x.png" onerror="window.ran = 1"><b onclick="window.ran = 1">b</b>
    <iframe src="http://127.0.0.1:9/"></iframe><object data="http://127.0.0.1:9/"></object>
    <form action="http://127.0.0.1:9/"></form><base href="http://127.0.0.1:9/">`;
  box.querySelector('b').click();
  for (const src of ['http://127.0.0.1:9/x.js', 'data:text/javascript,window.ran=1', '']) {
    const script = document.createElement('script');
    if (src) script.src = src; else script.textContent = 'window.ran = 1';
    document.body.append(script);
  }
  fetch('http://127.0.0.1:9/').catch(() => {});
  box.querySelector('form').submit();
})()"""
WALLS = """['script-src-attr', 'script-src-elem', 'img-src', 'frame-src', 'object-src',
  'connect-src', 'form-action', 'base-uri'].every((wall) => blocked.has(wall))"""


@pytest.mark.fault(272)
def test_no_foreign_script_runs_in_a_page_and_nothing_leaves_it(browser, page):
    browser.open(page)
    assert browser.complaints() == []
    try:
        browser.run(ATTACK)
        browser.wait(WALLS)
        assert browser.run("window.ran") is None
    finally:
        browser.events.clear()  # the console reports each blocked attempt as an error
