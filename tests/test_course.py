"""Tests docs/index.html in headless Chromium: the formulas, the rewards and all controls."""

import re
from random import Random

import pytest
from test_page import CONTRAST, browser, pytestmark

import kl
from lab import golden
from rewards import REWARDS, example, reward_terms
from trajectory import trajectory_from_text

PAGE = golden.PAGE.absolute()
TEXT = PAGE.read_text("utf-8")
DATA = TEXT.split(golden.MARK)[3]
QUESTION = example("arena").question
WRONG = "[...new Set(DATA.cases.filter((x) => !(difference(...x) < 1e-9)).map((x) => x[0]))]"


@pytest.fixture
def viewer(browser):
    browser.open(PAGE)
    yield browser
    assert browser.complaints() == []


def test_the_data_of_the_page_is_up_to_date():
    assert golden.with_new_data(TEXT) == TEXT


def test_the_formulas_of_the_page_agree_with_ours(viewer):
    assert viewer.run(f"DATA.cases.length >= 300 && {WRONG}") == []


@pytest.mark.parametrize("epsilon", [0.05, 0.5, 4.0])
def test_the_kl_estimators_of_the_page_agree_with_ours(viewer, epsilon):
    logits, reference = kl.categorical(epsilon)
    for name in ("k1", "k2", "k3"):
        call_arguments = f"({logits.tolist()}, {reference.tolist()}, '{name}')"
        row = viewer.run(f"estimator_row{call_arguments}")
        expected = kl.estimator_row(logits, reference, name)
        assert row == pytest.approx({key: expected[key] for key in row}, abs=1e-9)
        values = kl.ESTIMATORS[name](logits, reference)
        assert viewer.run(f"{name}{call_arguments}") == pytest.approx(values.tolist(), abs=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_the_rewards_belong_to_the_transcript_on_the_page(viewer, seed):
    for tick in Random(seed).sample(range(17), 8):
        viewer.run(f"$('ticks').querySelectorAll('input')[{tick}].click()")
    for protocol in viewer.run("Object.keys(TRANSCRIPTS)"):
        text = viewer.run(f"pieces_at('{protocol}').join(' ')")
        fallbacks = [0] * viewer.run("positions.fallback")  # only the rewards of UR² read them
        trajectory = trajectory_from_text(QUESTION, text, protocol, fallbacks)
        outside = {"step": 0, "reader_answer": trajectory.evidence}
        for name in (name for name in REWARDS if name.startswith(protocol)):
            terms = reward_terms(name, trajectory, outside)
            assert viewer.run(f"looked_up('{name}')") == pytest.approx(terms), name
    assert set(viewer.run("Object.keys(DATA.rewards)")) == set(REWARDS)


HELPERS = """
const COLUMN = {GRPO: 5, plain: 6, eq5: 7, DAPO: 8}, rows = () => $("group").tBodies[0].rows;
const state = (n, name) => rows()[n - 1].cells[COLUMN[name]].className.split(" ")[0];
const all = (n, what, ...names) => names.every((name) => state(n, name) === what);
const send = (id, value, kind) => { $(id).value = value; $(id).dispatchEvent(new Event(kind)); };
const set = (id, value) => send(id, value, "input"), ask = (what) => send("asked", what, "change");
const example = (name) => [...$("presets").children].find((x) => x.textContent === name).click();
const field = (name) => fields.find((one) => one.dataset.control === name);
const tick = (name, n = 0) => field(name).querySelectorAll("input")[n].click();
const total = (reward) => sum(Object.values(looked_up(reward)));
const near = (a, b) => Math.abs(a - b) < 1e-8;
const fall = (reward, ...ticked) => total(reward) - (tick(...ticked), total(reward));
const count = (id, what) => $(id).querySelectorAll(what).length;
const pills = (i) => $("three").children[i].querySelectorAll(".pill").length;
const hear = (id, what) => $(id).textContent.includes(what);
"""
# Claims of the sentences beside the controls: an action, then a condition that holds after it.
CLAIMS = """
DATA.cases.length >= 300
dual_clip([5, 1, -3, 0], [-1, -1, 1, 0], 2).join() === "2,1,-3,0"
set("size", 1), state(1, "GRPO") === "silent" && state(1, "plain") === "down"
set("size", 3), !rows()[2].hidden && rows()[3].hidden
state(8, "GRPO") === "clipped" && state(8, "DAPO") === "up"
set("high", 0.2), state(8, "DAPO") === "clipped"
set("low", 0.5), state(8, "GRPO") === "up" && state(7, "GRPO") === "down"
set("dual", 2), state(7, "GRPO") === "clipped" && state(1, "GRPO") === "down"
set("other", "same"), advantages_of(8)["REINFORCE++"][2] < 1
set("other", "same"), advantages_of(8)["UR² eq. 5"][2] > 1.4
example("all equal"), all(1, "silent", "GRPO", "eq5", "DAPO")
example("all wrong"), state(1, "DAPO") === "silent" && state(1, "GRPO") === "down"
example("one in eight"), near(advantages_of(8).GRPO[0], -0.125 / (Math.sqrt(0.125) + 1e-6))
example("a failed search"), all(3, "silent", "GRPO", "plain", "eq5", "DAPO")
near(fall("when_to_search_stage2", "searches", 0), -0.6)
near(fall("arena", "cites", 3), 10.5)
fall("ur2_stage1", "two") === 2
fall("r1_searcher_stage2", "two") === 2
fall("ur2_stage1", "unopened") > 0 && hear("paid", "−")
tick("searches", 1), fall("when_to_search_stage1", "sentence") === 1
near(fall("when_to_search_stage1", "same"), 1) && total("ur2_stage1") === 5
fall("ur2_stage2", "fallback") === 0.5
near(fall("r_search", "missing"), 1.2)
fall("arena", "missing") === 11
tick("searches", 1), looked_up("r_search").evidence === 0
tick("answer", 1), near(looked_up("ur2_stage2").answer, 4 / 3) && total("search_r1") === 0
$("protocols").lastElementChild.click(), hear("transcript", "[1, 3]")
ask("what is 2 + 8 ?"), !pills(0) && pills(1) && !pills(2)
count("three", ".environment") > 0 && ($("own").click(), count("three", ".environment") === 0)
count("words", ".pushed.environment") === 0 && hear("mask-says", " 0 % of it")
$("mask-off").click(), count("words", ".environment") === count("words", ".pushed.environment")
$("bad").click(), hear("mask-says", "rarer")
$("draw").click(), count("estimators", "circle") === 60
$("draw").click(), set("epsilon", 4), count("estimators", "circle") === 0
set("epsilon", 4), estimator_row(policy(), REFERENCE, "k2").bias > 0.05
$("check").click(), hear("checked", "cases, largest difference")
document.images[0].decode().then(() => document.images[0].naturalWidth > 0)
"""


@pytest.mark.parametrize("claim", CLAIMS.strip().splitlines())
def test_a_control_does_what_its_sentence_says(viewer, claim):
    assert viewer.run(f"{{ {HELPERS} {claim} }}")


# The number of controls without a name or out of the tab key's reach.
BARE = """[...document.querySelectorAll('button, select, input')].filter((node) => node.tabIndex < 0
  || !(node.textContent.trim() || node.labels?.length || node.ariaLabel)).length"""


# The whole picture is seen, at a scale at which its smallest text, of 12 units, has 10 pixels.
WHOLE = """document.images[0].decode().then(() => {
  const [image, box] = [document.images[0], document.images[0].getBoundingClientRect()];
  return box.left >= 0 && box.right <= innerWidth && 12 * box.width / image.naturalWidth >= 10;
})"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 390, 650, 1400])
def test_the_page_can_be_read_at_each_width_in_both_themes(viewer, theme, width):
    feature = {"name": "prefers-color-scheme", "value": theme}
    viewer.call("Emulation.setEmulatedMedia", features=[feature])
    viewer.open(PAGE, width)
    assert viewer.run("document.documentElement.scrollWidth") <= width and viewer.run(WHOLE)
    assert viewer.run(BARE) == 0
    ratio, where = viewer.run(CONTRAST)
    assert ratio >= 4.5, where


def test_the_page_is_one_small_file_that_needs_no_network():
    without_data = TEXT.replace(DATA, "")
    assert len(without_data.encode()) <= 40_000 and len(DATA.encode()) <= 120_000
    assert not re.search(r"https?:|@import|url\(", without_data)
    for link in re.findall('(?:src|href)="([^#"]+)"', without_data):
        assert (PAGE.parent / link).exists()
