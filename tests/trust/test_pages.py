"""Damaged runs in the terminal and on the page, and a foreign script on the page."""

import json
import math

import pytest
from conftest import of_fault
from test_page import CHROMIUM, Browser, browser, searching, stage
from test_trajectories import CLIP, one

import view
from errors import InputError
from formats.trajectories import NAME, append_trajectories
from plumbing.page import dumped, write_page

in_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt install chromium)")
TOKEN = "document.getElementById('token').textContent"
ONE = "document.getElementById('one').textContent"


@pytest.fixture
def folder(tmp_path):
    return stage(tmp_path / "run" / "stage1", 1)


# ---------------------------------------------------------------------------------- in the terminal
@pytest.mark.parametrize(
    "settings", [of_fault(263, None), of_fault(264, '{"clip_low": 0.2,'), of_fault(265, "{}")]
)
def test_without_settings_everything_but_the_loss_is_shown(folder, capsys, settings):
    (folder / "settings.json").unlink()
    if settings:
        (folder / "settings.json").write_text(settings)
    append_trajectories(folder, [one()])
    view.main([str(folder), "--text"])
    lines = capsys.readouterr().out.splitlines()
    assert "settings.json cannot be read, so no formulas are shown" in lines[0]
    # e^(−0.5 + 0.6) = 1.105
    assert lines[6].split()[2:] == "1 -0.6 -0.6 -0.5 1.105 2 0.01 -".split()


@pytest.mark.parametrize(
    "odd",  # null: the record lacks this field
    [
        of_fault(266, '{"step": null}'),
        of_fault(267, '{"searches": null}'),
        of_fault(268, '{"mask": [1, 0, 1, 1]}'),
        of_fault(273, '{"step": "../../x"}'),
        of_fault(279, '{"golds": 7}'),
        of_fault(279, '{"old": ["x", "y", "z"]}'),
    ],
)
def test_a_damaged_trajectory_is_named_and_the_others_are_shown(folder, capsys, odd):
    record = one(row=1) | json.loads(odd)
    record = {name: value for name, value in record.items() if value is not None}
    append_trajectories(folder, [record, one(row=2)])
    view.main([str(folder), "--text"])
    output = "".join(capsys.readouterr())
    assert "\nsample 2: 'Ana' right" in output
    assert "damaged" in output or "left out" in output
    view.main([str(folder.parent)])
    script = folder.parent / "view" / "data" / "run-stage1-0.js"
    assert '"row":2' in script.read_text() and len([*script.parent.iterdir()]) == 2


def test_a_file_that_is_not_a_saved_page_is_kept(folder):
    page = folder / "view" / "index.html"
    page.parent.mkdir()
    page.write_text("mine")
    with pytest.raises(InputError, match="not a saved page, and is kept"):
        write_page([folder], page.parent)
    assert [*page.parent.iterdir()] == [page] and page.read_text() == "mine"


@pytest.mark.fault(269)
def test_a_ratio_beyond_every_float_is_infinite():
    token = view.loss_of(one(old=-710.5), 0, CLIP)  # e^710; 0.01 · −min(inf, 1.2 · 2)
    assert token["ratio"] == math.inf and token["loss"] == pytest.approx(-0.024)


# ----------------------------------------------------------------------------------------- the page
@pytest.mark.fault(270)
def test_the_data_of_a_page_is_json_whatever_its_numbers_are():
    assert json.loads(dumped([math.nan, -math.inf])) == ["NaN", "-Infinity"]


@in_chromium
@pytest.mark.fault(264, 268, 270, 271)
def test_damaged_records_are_named_on_the_page_and_the_rest_is_shown(browser, folder):
    """The run has half-written settings, records of another version, a NaN and half a last step."""
    rows = [searching(0, new=[-0.5, 0.0, math.nan]), *(searching(row) for row in (1, 2, 3, 4))]
    del rows[1]["searches"], rows[2]["searches"][0]["documents"]
    rows[3]["mask"] = [1, 0, 1, 1]
    append_trajectories(folder, rows)
    with open(folder / NAME, "ab") as file:
        file.write(b"\x1f\x8b\x08 half a step")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "rew')
    broken = stage(folder.parent / "stage2", 2)
    (broken / "settings.json").write_text('{"clip_low": 0.2,')
    append_trajectories(broken, [searching(0), {"step": 1}])
    view.main([str(folder.parent)])
    browser.open(folder.parent / "view" / "index.html")
    missing = "document.getElementById('missing').textContent"
    assert "settings.json cannot be read" in browser.run(missing)
    assert "1 trajectories are left out" in browser.run(missing)
    browser.run("choose(0, 0), pick(0)")
    assert "not trained on" in browser.run(TOKEN)
    browser.run("go(0)")
    browser.wait("document.querySelectorAll('#groups button').length === 4")
    assert "KeyError('searches')" in browser.run(missing)
    for row, element, text in (
        (0, TOKEN, "exp(NaN − -1) = NaN"),
        (2, ONE, "this trajectory is damaged: "),
        (3, ONE, "tokens and mask differ in length"),
        (4, TOKEN, "= 0.74082"),  # e^(−1.3 + 1)
    ):
        browser.run(f"choose(0, {row}), pick(2)")
        assert text in browser.run(element)
    assert browser.complaints() == []


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


@in_chromium
@pytest.mark.fault(272)
def test_no_foreign_script_runs_in_a_page_and_nothing_leaves_it(browser, folder):
    append_trajectories(folder, [searching(1)])
    view.main([str(folder)])
    browser.open(folder / "view" / "index.html")
    assert browser.complaints() == []
    try:
        browser.run(ATTACK)
        browser.wait(WALLS)
        assert browser.run("window.ran") is None
    finally:
        browser.events.clear()  # the console reports each blocked attempt as an error
