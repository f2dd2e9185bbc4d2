"use strict";
// The page of view.py. A step's trajectories are a script that is loaded when they are looked at.

const $ = (id) => document.getElementById(id);
const state = { at: 0, group: 0, row: 0, token: -1, question: null, wanted: null, colour: "advantage" };
const loaded = {}; // key of a step -> its trajectories: records of formats/trajectories.py, and `reward`
const waiting = {}; // key of a step -> what is done once it is loaded
const COLOURS = ["advantage", "ratio", "probability", "surprise"];
const LARGE = [ // title, metrics; "prefix/" is every metric below it
  ["reward", ["reward"]],
  ["exact match", ["em/"]],
  ["share of questions searched for", ["searched/"]],
  ["tokens per trajectory", ["model_tokens", "inserted_tokens"]],
];
const HEALTH = [
  ["terms of the reward", ["reward/"]],
  ["searches per question", ["searches/"]],
  ["fallbacks, rejected and repeated queries", ["fallbacks", "rejected", "repeated"]],
  ["what searches find", ["gold_recall", "search_errors", "failed_rows"]],
  ["faults in what it writes", ["malformed_tags", "truncated"]],
  ["groups of equal rewards, clipped tokens", ["frac_reward_zero_std", "clip_fraction"]],
  ["gradient norm", ["grad_norm"]],
  ["entropy", ["entropy_mc"]],
  ["KL to the reference", ["k1", "k2", "k3"]],
  ["log-probs of sampling and of scoring", ["logprob_gap", "logprob_gap_max"]],
  ["seconds", ["rollout_seconds", "search_seconds", "reward_seconds", "update_seconds"]],
];
let shown = null; // the run: its name and stages
let kinds = []; // of question: their place decides their colour

// ------------------------------------------------------------------------------------- elements
const SVG = ["svg", "path", "line", "rect", "text", "g", "title"];
function el(name, attributes = {}, ...children) {
  const node = SVG.includes(name) ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== false && value !== undefined) node.setAttribute(key, value);
  }
  for (const child of children.flat()) if (child !== "" && child !== null && child !== undefined) node.append(child);
  return node;
}
const fill = (node, ...children) => node.replaceChildren(...children.flat().filter((child) => child !== "" && child !== null));
// What would move the cursor, ring a bell or turn the line around is shown as a sign.
const plain = (text) => String(text).replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "␦");
const number = (x, digits = 3) => { // 0.0123, 1.5, 100, 1234, 2.5e+6: below a million no digit before the point is lost
  if (x === null || x === undefined) return "–";
  const rounded = Number(Number(x).toPrecision(digits));
  if (Math.abs(x) < 10 ** digits) return String(rounded);
  return Math.abs(x) < 1e6 ? String(Math.round(x)) : rounded.toExponential();
};
const signed = (x, digits = 3) => (x > 0 ? "+" : "") + number(x, digits);
const percent = (x) => `${Math.round(100 * x)}\u00a0%`;
const mean = (values) => values.reduce((sum, x) => sum + x, 0) / values.length;

// ------------------------------------------------------------------------------------------ data
function show(given) { // data/index.js calls it
  shown = given;
  kinds = [...new Set(["em/", "searched/"].flatMap((p) => kindsOf(allMetrics(given), p)))].sort();
  start();
}
function step(key, rows) { // data/RUN-STAGE-STEP.js
  for (const row of rows) row.reward = Number(Object.values(row.rewards).reduce((sum, x) => sum + x, 0).toFixed(4));
  loaded[key] = rows;
  for (const then of waiting[key] ?? []) then();
  delete waiting[key];
}
const run = () => shown;
const places = () => run().stages.flatMap((s, i) => s.steps.map((number) => ({ stage: i, step: number }))); // the steps that are kept
const here = () => places()[state.at] ?? { stage: Math.max(0, run().stages.length - 1), step: -1 };
const stage = () => run().stages[here().stage];
const keyOf = ({ stage, step }) => `${run().stages[stage].name}-${step}`;
const shownStep = () => loaded[keyOf(here())];
const metricsOf = (place) => run().stages[place.stage].metrics.find((m) => m.step === place.step) ?? {};
const allMetrics = (its) => its.stages.flatMap((s) => s.metrics);
const xOf = (place) => run().stages.slice(0, place.stage).reduce((sum, s) => sum + s.metrics.length, 0) + run().stages[place.stage].metrics.findIndex((m) => m.step === place.step);

function withStep(place, then) { // calls `then` once the step's trajectories are there
  const key = keyOf(place);
  if (loaded[key]) return then();
  (waiting[key] ??= []).push(then);
  if (waiting[key].length > 1) return;
  const script = el("script", { src: `data/${encodeURIComponent(key)}.js` });
  script.onerror = () => fill($("groups"), el("p", {}, `the file of step ${place.step} is missing: write the page again`));
  document.body.append(script);
}
const isAt = (group, row) => (its) => its.group === group && its.row === row;
const value = (record, name, n) => { // one number stands for all sampled tokens; π_old is often what sampled
  const its = record[name] ?? (name === "old" ? record.sampled : undefined);
  return Array.isArray(its) ? its[n] ?? null : its === undefined || !record.mask[n] ? null : its;
};

// ------------------------------------------------------------------------------------- headline
const T = { 95: [4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306], 99: [9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355] }; // Student's t, two-sided, for 2 to 8 degrees of freedom
const variance = (values) => values.reduce((sum, x) => sum + (x - mean(values)) ** 2, 0) / (values.length - 1);
const readableKind = (kind) => kind.replaceAll("_", " ");
const ends = (steps) => { // the first five steps and the last five, or each half of a shorter run
  const some = Math.min(5, Math.floor(steps.length / 2));
  return [steps.slice(0, some), steps.slice(steps.length - some)];
};
function change(metrics, numberOf, sure = 95) { // means over both ends, or null where the interval of their difference holds 0
  const [a, b] = ends(metrics).map((steps) => steps.map(numberOf).filter(Number.isFinite));
  if (a.length < 2 || b.length < 2) return null;
  const freedom = a.length + b.length - 2;
  const pooled = ((a.length - 1) * variance(a) + (b.length - 1) * variance(b)) / freedom;
  const half = T[sure][freedom - 2] * Math.sqrt(pooled / a.length + pooled / b.length);
  return Math.abs(mean(b) - mean(a)) > half ? [mean(a), mean(b)] : null;
}
function changes(its) { // what changed in training, as phrases; all of them compare the same steps
  const metrics = allMetrics(its);
  const kindsAt = ends(metrics).map((steps) => kindsOf(steps, "em/"));
  const both = kindsAt[0].filter((kind) => kindsAt[1].includes(kind));
  const same = both.length === Math.max(...kindsAt.map((some) => some.length)); // else only the kinds of both ends compare
  const em = change(metrics, same ? (m) => m.em : (m) => mean(both.map((kind) => m[`em/${kind}`]).filter(Number.isFinite)));
  // At 95 %, one of several kinds would often seem to change.
  const searched = kindsOf(metrics, "searched/").map((kind) => [kind, change(metrics, (m) => m[`searched/${kind}`], 99)]).filter(([, found]) => found);
  searched.sort(([, a], [, b]) => b[1] - b[0] - (a[1] - a[0]));
  const extreme = searched.length > 1 ? [searched[0], searched.at(-1)] : searched;
  const parts = extreme.map(([kind, [a, b]]) => `${readableKind(kind)} questions ${percent(a)} → ${percent(b)}`);
  const phrases = parts.length ? [`searches for ${parts.join(", for ")}`] : [];
  if (em) phrases.push(`exact match${same ? "" : ` of ${both.map(readableKind).join(", ")} questions`} ${number(em[0], 2)} → ${number(em[1], 2)}`);
  const reward = its.stages.length === 1 && !phrases.length && change(metrics, (m) => m.reward); // stages have different rewards
  return reward ? [`reward ${number(reward[0])} → ${number(reward[1])}`] : phrases;
}
function sentence(its) {
  const asked = ends(its.stages.flatMap((s) => s.metrics.map((m) => s.settings.questions_per_step * (1 + (m.resampled ?? 0)))));
  const [n, later] = asked.map((counts) => counts.reduce((sum, x) => sum + x, 0));
  const found = changes(its);
  const steps = `${allMetrics(its).length} steps on training questions`;
  if (!found.length) return asked[0].length < 2 ? steps : `${steps}: no change beyond chance`;
  return `On training questions${n ? ` (n = ${n === later ? n : `${n}, then ${later}`})` : ""}: ${found.join("; ")}`;
}
function basis(its) {
  const some = ends(allMetrics(its))[0].length;
  return some < 2 ? "" : `The first ${some} steps are compared with the last ${some}; n counts their questions. A change is named only where the 95 % interval of the difference leaves out 0 (for searches, which are compared by kind of question: 99 %). For held-out questions, run eval.py.`;
}
const factsOf = (its) => {
  const about = its.stages.at(-1)?.settings ?? {};
  const world = about.recipe && `built-in world ${about.world_seed}`;
  return [about.recipe, about.algorithm, about.recipe && (about.model || "built-in model"), about.data || world, about.corpus].filter(Boolean);
};
function showHeadline() {
  $("about").textContent = factsOf(run()).join(" · ");
  $("headline").textContent = allMetrics(run()).length ? sentence(run()) : "Trajectories";
  $("basis").textContent = basis(run());
}
const kindsOf = (metrics, prefix) => [...new Set(metrics.flatMap(Object.keys))].filter((name) => name.startsWith(prefix)).map((name) => name.slice(prefix.length)).sort();

// ------------------------------------------------------------------------- one question, three moments
function moments() { // the kept steps where one question is seen before, when most is searched, and at the end
  const kept = places();
  if (kept.length < 3) return null;
  const searches = kept.map((place) => metricsOf(place).searches ?? 0);
  const wanted = [0, searches.indexOf(Math.max(...searches)), kept.length - 1];
  const when = new Map(); // question -> where it is asked: [place, right, searches, group, row] of a middle trajectory
  kept.forEach(({ stage, step }, i) => {
    for (const [question, steps] of Object.entries(run().stages[stage].asked)) if (step in steps) when.set(question, [...(when.get(question) ?? []), [i, ...steps[step]]]);
  });
  let best = null;
  for (const [question, seen] of when) {
    const at = wanted.map((x) => seen.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a)));
    const alike = 3 - new Set(at.map(([, right, count]) => `${right} ${count}`)).size;
    if (alike === 2 || new Set(at.map(([x]) => x)).size < 3) continue; // all three look alike: nothing to see
    // Near in time, right where most answers of its step are, three different looks, most searches when the run has most.
    const odd = at.map(([x, right], i) => (2 * Math.abs(x - wanted[i])) / kept.length + Math.abs(Number(right) - Math.round(metricsOf(kept[x]).em ?? right)));
    const far = odd.reduce((sum, x) => sum + x, alike) + (at[1][2] < Math.max(at[0][2], at[2][2]) ? 1 : 0);
    if (!best || far < best.far) best = { question, at, far };
  }
  return best;
}
function showMoments() {
  const found = moments();
  $("moments").hidden = !found;
  if (!found) return fill($("moments"));
  const names = ["Before", "Most searches", "The end"];
  const cards = found.at.map(([at, , , group, row], i) => {
    const place = places()[at];
    const body = el("div", { class: "story" }, "loading");
    withStep(place, () => fill(body, ...story(place, group, row)));
    const title = `${names[i]}: ${run().stages[place.stage].name}, step ${place.step}`;
    return el("article", {}, el("button", { class: "moment", "data-at": at, onclick: () => ((state.question = found.question), go(at)) }, title), body);
  });
  fill($("moments"), el("h2", {}, "One question at three moments: ", el("em", {}, plain(found.question))), el("div", { class: "cards" }, ...cards));
}
function story(place, group, row) { // the middle trajectory of a group, by reward
  const record = loaded[keyOf(place)].find(isAt(group, row));
  if (!record) return [el("p", { class: "pale" }, "not kept")];
  const verdict = el("p", { class: record.correct ? "good" : "bad" }, `${record.correct ? "✓" : "✗"} ${plain(record.answer ?? "no answer")}, reward ${signed(record.reward)}`);
  return [el("div", { class: "text" }, ...readable(record)), verdict];
}
function readBy(writers, searches) { // is the next block of the environment a search? A fallback has a notice in its block
  const found = writers.shift() === "documents" && searches.length > 0;
  if (found && searches[0].fallback && writers[0] === "notice") writers.shift();
  return found;
}
const TAG = /<\/?\|?[a-z_]+\|?>|\\boxed\{|\}/;
function readable(record) { // the response for reading: queries as pills, documents as cards, tags pale
  const searches = [...record.searches];
  const writers = [...record.writers];
  return pieces(record).flatMap(({ mask, from, to }) => {
    let text = record.tokens.slice(from, to).join("");
    const query = searches[0] ? text.lastIndexOf(searches[0].query) : -1;
    if (mask && query >= 0) text = text.slice(0, query).replace(/<[^<>]*>\s*$/, ""); // it is the pill that follows
    if (!mask) return readBy(writers, searches) ? documentCards(searches.shift()) : el("p", { class: "pale" }, plain(text).trim());
    return plain(text).replace(/\s*\n\s*/g, "\n").split(new RegExp(`(${TAG.source})`)).map((part) => (TAG.test(part) ? el("span", { class: "tag" }, part) : part));
  });
}
function documentCards(search) {
  const state = search.error ? `failed: ${search.error}` : search.fallback ? "fallback" : "";
  const cards = search.documents.slice(0, 2).map(([title, body]) => el("div", { class: "document" }, title ? el("b", {}, plain(title)) : "", ` ${plain(body).slice(0, 160)}`));
  return el("div", {}, el("span", { class: "pill" }, `⌕ ${plain(search.query)}`), state ? el("span", { class: "pale" }, ` ${plain(state)}`) : "", ...cards);
}

// ---------------------------------------------------------------------------------------- curves
function named(metrics, wanted) {
  const names = new Set(metrics.flatMap(Object.keys));
  return [...names].filter((name) => wanted.some((w) => (w.endsWith("/") ? name.startsWith(w) : name === w))).sort();
}
const points = (metrics, name) => metrics.map((m, x) => [x, m[name]]).filter(([, y]) => Number.isFinite(y));
const smooth = (line) => line.map(([x], i) => [x, mean(line.slice(Math.max(0, i - 4), i + 1).map(([, y]) => y))]);
function colourOf(name) {
  const [prefix, kind] = name.split("/");
  if (["em", "searched", "searches"].includes(prefix) && kind) {
    return `var(--s${kinds.indexOf(kind) % 8})`;
  }
  return null;
}
const shortName = (name) => readableKind(name.split("/").pop());
function linesOf(wanted) {
  const metrics = allMetrics(run());
  return named(metrics, wanted).map((name, i) => ({ name, label: shortName(name), line: points(metrics, name), colour: colourOf(name) ?? `var(--s${i % 8})` }));
}
function ticks(low, high) { // about four round numbers
  const rough = (high - low) / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((x) => x * power).find((x) => x >= rough * 0.999);
  const first = Math.ceil(low / size - 1e-9);
  return Array.from({ length: Math.floor(high / size + 1e-9) - first + 1 }, (_, i) => (first + i) * size);
}
const [WIDE, HIGH, LEFT, RIGHT, TOP, BOTTOM] = [420, 220, 54, 118, 18, 24];
function chart(title, lines) {
  const drawn = lines.filter(({ line }) => line.length);
  if (!drawn.length) return null;
  const ys = drawn.flatMap(({ line }) => line.map(([, y]) => y));
  let [low, high] = [Math.min(...ys), Math.max(...ys)];
  const size = Math.max(Math.abs(low), Math.abs(high)) || 1;
  if (high - low < 0.01 * size) [low, high] = [low - size / 2, high + size / 2]; // nothing moves: a flat line
  const length = Math.max(2, allMetrics(run()).length);
  const px = (x) => LEFT + (x / (length - 1)) * (WIDE - LEFT - RIGHT);
  const py = (y) => HIGH - BOTTOM - ((y - low) / (high - low)) * (HIGH - TOP - BOTTOM);
  const path = (line) => "M" + line.map(([x, y]) => `${px(x).toFixed(1)},${py(y).toFixed(1)}`).join("L");
  const grid = ticks(low, high).map((y) => el("g", { class: "tick" }, el("line", { x1: LEFT, x2: WIDE - RIGHT, y1: py(y), y2: py(y) }), el("text", { x: LEFT - 5, y: py(y) + 4, "text-anchor": "end" }, number(y))));
  const below = ticks(0, length - 1).filter(Number.isInteger).map((x) => el("text", { class: "x", x: px(x), y: HIGH - 8, "text-anchor": "middle" }, x));
  const labels = spread(drawn.map(({ label, line, colour }) => ({ text: label, colour, y: py(smooth(line).at(-1)[1]) + 4 })), TOP + 10, HIGH - 4);
  const svg = el("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": `${title}, from ${number(Math.min(...ys))} to ${number(Math.max(...ys))}`,
    onclick: (event) => jump(xAt(event, svg, length)), onmousemove: (event) => crosshair(xAt(event, svg, length)), onmouseleave: () => crosshair(null) },
    ...shades(px), ...grid, ...below,
    ...drawn.map(({ line, colour }) => el("path", { class: "raw", d: path(line), style: `stroke:${colour}` })),
    ...drawn.map(({ name, line, colour }) => el("path", { class: "smooth", "data-metric": name, d: path(smooth(line)), style: `stroke:${colour}` })),
    ...labels.map(({ text, colour, y }) => el("text", { class: "label", x: WIDE - RIGHT + 6, y, style: `fill:${colour}` }, text.length > 16 ? `${text.slice(0, 15)}…` : text)),
    el("line", { class: "here", y1: TOP, y2: HIGH - BOTTOM }), el("line", { class: "cross", y1: TOP, y2: HIGH - BOTTOM, visibility: "hidden" }));
  const figure = el("figure", {}, el("figcaption", {}, title, el("output", {})), svg);
  Object.assign(figure, { px, drawn });
  return figure;
}
const APART = 14; // between the base lines of two labels
function spread(labels, low, high) { // moves labels apart: first down, then up those that would leave the picture
  labels.sort((a, b) => a.y - b.y);
  let free = low;
  for (const its of labels) free = (its.y = Math.max(its.y, free)) + APART;
  free = high;
  for (const its of labels.toReversed()) free = (its.y = Math.min(its.y, free)) - APART;
  return labels;
}
function shades(px) { // every second stage is shaded, and each is named
  let [begin, free] = [0, 0]; // the next stage's first step; where the name before ends
  return run().stages.map((s, i) => {
    const [from, to] = [px(begin), px(Math.max(begin, begin + s.metrics.length - 1))];
    begin += s.metrics.length;
    const x = Math.max(from + 3, free);
    free = x + 7 * (s.name.length + 1);
    return el("g", { class: "stage" }, i % 2 ? el("rect", { x: from, y: TOP, width: Math.max(0, to - from), height: HIGH - TOP - BOTTOM }) : "", el("text", { x, y: TOP - 5 }, s.name));
  });
}
const xAt = (event, svg, length) => {
  const box = svg.getBoundingClientRect();
  const x = ((event.clientX - box.left) / box.width) * WIDE;
  return Math.max(0, Math.min(length - 1, Math.round(((x - LEFT) / (WIDE - LEFT - RIGHT)) * (length - 1))));
};
const figures = () => document.querySelectorAll("#curves figure, #health[open] figure");
function crosshair(x) {
  for (const figure of figures()) {
    const cross = figure.querySelector(".cross");
    cross.setAttribute("visibility", x === null ? "hidden" : "visible");
    const values = x === null ? [] : figure.drawn.map(({ label, line }) => [label, line.find(([at]) => at === x)]).filter(([, point]) => point);
    figure.querySelector("output").textContent = values.map(([label, [, y]]) => `${label} ${number(y)}`).join(", ");
    if (x !== null) for (const end of ["x1", "x2"]) cross.setAttribute(end, figure.px(x));
  }
}
function jump(x) { // to the nearest kept step
  const xs = places().map(xOf);
  if (xs.length) go(xs.reduce((best, its, i) => (Math.abs(its - x) < Math.abs(xs[best] - x) ? i : best), 0));
}
function panels(list) {
  return list.map(([title, wanted]) => chart(title, linesOf(wanted))).filter(Boolean);
}
function showCurves() {
  fill($("curves"), ...panels(LARGE));
  $("health").hidden = !allMetrics(run()).length;
  const metrics = allMetrics(run());
  const names = HEALTH.flatMap(([, wanted]) => named(metrics, wanted));
  const zero = names.filter((name) => points(metrics, name).every(([, y]) => y === 0));
  const rest = HEALTH.map(([title, wanted]) => [title, named(metrics, wanted).filter((name) => !zero.includes(name))]);
  const draw = () => (fill($("health").querySelector("div"), zero.length ? el("p", { class: "pale zero" }, `All zero: ${zero.join(", ")}`) : "", el("div", { class: "figures" }, ...panels(rest))), mark());
  $("health").ontoggle = () => $("health").open && draw();
  if ($("health").open) draw();
  fill($("alarms"), ...alarms(run().stages).map(([x, where, message]) =>
    el("li", {}, el("button", { onclick: () => jump(x) }, where), ` ${plain(message)}`)));
}
function alarms(stages) { // [place among all steps, its name, the message]
  const steps = stages.flatMap((s) => s.metrics.map((m) => [`${s.name}, step ${m.step}`, m.alarms ?? {}]));
  return steps.flatMap(([where, raised], x) => Object.values(raised).map((message) => [x, where, message]));
}
function mark() { // marks the step on every curve
  const x = places().length ? xOf(here()) : 0;
  for (const figure of figures()) for (const end of ["x1", "x2"]) figure.querySelector(".here").setAttribute(end, figure.px(Math.max(0, x)));
  return null;
}

// ------------------------------------------------------------------------------------- a step
function go(at) {
  const kept = places();
  state.at = Math.max(0, Math.min(kept.length - 1, at));
  $("slider").max = Math.max(0, kept.length - 1);
  $("slider").value = state.at;
  mark();
  for (const button of document.querySelectorAll(".moment")) button.setAttribute("aria-current", Number(button.dataset.at) === state.at);
  if (!kept.length) {
    for (const id of ["one", "group"]) fill($(id));
    return fill($("groups"), el("p", {}, "no trajectories were kept here"));
  }
  const asked = state.at;
  withStep(here(), () => asked === state.at && showStep());
}
function showStep() {
  const metrics = metricsOf(here());
  const names = ["reward", "em", "searched", "searches", "fallbacks", "frac_reward_zero_std", "grad_norm", "clip_fraction", "entropy_mc"].filter((n) => Number.isFinite(metrics[n]));
  fill($("step-numbers"), `${stage().name}, step ${here().step}: `, names.map((n) => `${n} ${number(metrics[n])}`).join("  ·  "));
  const rows = shownStep(); // the question that was asked for, or a group that teaches something
  const wanted = state.wanted && rows.find(isAt(state.wanted.group, state.wanted.row));
  const its = wanted ?? rows.find((row) => row.question === state.question) ?? rows.find((row) => rows.some((r) => r.group === row.group && r.reward !== row.reward)) ?? rows[0];
  [state.question, state.wanted] = [null, null];
  choose(its.group, its.row);
}
const verdict = (row) => (row.correct ? "right" : "wrong");
const repeated = (row) => new Set(row.searches.map((its) => its.query.toLowerCase().trim().split(/\s+/).join(" "))).size < row.searches.length;
const faulty = (row) => row.rejected_queries.length > 0 || (row.format ?? !(row.rewards.format < 0)) === false;
function passes(row) {
  const form = $("filters").elements;
  const text = `${row.question} ${row.answer ?? ""}`.toLowerCase();
  return (!form.wrong.checked || !row.correct) && (!form.fallback.checked || row.searches.some((its) => its.fallback)) && (!form.silent.checked || !row.searches.length)
    && (!form.fault.checked || faulty(row)) && (!form.repeated.checked || repeated(row)) && text.includes(form.text.value.toLowerCase());
}
function showGroups() {
  const rows = shownStep();
  const shown = rows.filter(passes);
  $("found").textContent = shown.length === rows.length ? `${rows.length} trajectories` : `${shown.length} of ${rows.length} trajectories`;
  const groups = new Map();
  for (const row of shown) groups.set(row.group, [...(groups.get(row.group) ?? []), row]);
  fill($("groups"), ...[...groups].map(([group, some]) => el("div", { class: "group" },
    el("div", {}, plain(some[0].question)),
    el("div", { class: "pale" }, `gold ${plain(some[0].golds.join(" | "))}, ${some[0].kind}${some[0].advantages === undefined ? ", not trained on" : ""}`),
    el("div", { class: "rows" }, ...some.map((row) => el("button", {
      class: verdict(row), "aria-current": group === state.group && row.row === state.row,
      title: `answer ${plain(row.answer ?? "none")}, ${row.searches.length} searches, ended by ${row.stop_reason}`,
      onclick: () => choose(group, row.row),
    }, `${signed(row.reward)}${"⌕".repeat(Math.min(4, row.searches.length))}`))))));
}
function choose(group, row) {
  [state.group, state.row] = [group, row];
  state.token = chosen()?.mask.indexOf(1) ?? -1;
  history.replaceState(null, "", `#${stage().name}-${here().step}-${group}-${row}`);
  showGroups();
  showOne();
}
function walk(by) { // to the next trajectory that passes the filters
  const rows = shownStep()?.filter(passes) ?? [];
  const next = rows[rows.findIndex(isAt(state.group, state.row)) + by];
  if (next) choose(next.group, next.row);
}

// ------------------------------------------------------------------------------------ the group
function showGroup(record) {
  const rows = shownStep().filter((row) => row.group === state.group);
  const strips = rows.map((its) => {
    const a = value(its, "advantages", its.mask.indexOf(1));
    const strip = pieces(its).flatMap(({ mask, from, to }) => (mask
      ? its.tokens.slice(from, to).map((_, i) => el("i", { style: `background:${shade(its, from + i)}` }))
      : [el("i", { class: "search", style: `flex-grow:${(to - from) / 4}` }, "⌕")]));
    return el("button", { class: `strip ${verdict(its)}`, "aria-current": its.row === state.row, onclick: () => choose(state.group, its.row), title: plain(its.answer ?? "no answer") },
      el("span", { class: "tokens-of" }, ...strip), el("span", { class: "numbers" }, el("b", {}, its.correct ? "✓" : "✗"), ` ${signed(its.reward)}`, a === null ? "" : `  A ${signed(a)}`));
  });
  fill($("group"), rows.length > 1 ? el("h2", {}, `The group: ${rows.length} answers to this question`) : "", chain(record, rows), rows.length > 1 ? el("div", { class: "strips" }, ...strips) : "");
}
function chain(record, rows) { // from the reward to the loss, in numbers
  const its = state.token < 0 ? null : lossOf(record, state.token, stage().settings);
  if (rows.length < 2) return "";
  const { algorithm, group_std } = stage().settings;
  const links = [["reward", number(record.reward)]];
  const known = rows.filter((line) => !line.searches.some((search) => search.error));
  if (["grpo", "dapo", "reinforce_pp_baseline"].includes(algorithm) && known.includes(record)) { // the others have no group
    const centre = mean(known.map((line) => line.reward));
    const deviation = Math.sqrt(known.reduce((sum, line) => sum + (line.reward - centre) ** 2, 0) / Math.max(1, known.length - 1));
    links.push(["minus the group's mean", `${number(record.reward)} − ${number(centre)} = ${signed(record.reward - centre)}`]);
    if (group_std !== false) links.push(["over the deviation", deviation > 1e-6 ? `/ ${number(deviation)} = ${signed((record.reward - centre) / deviation)}` : "all rewards are equal: 0"]);
  }
  if (its) links.push([algorithm?.startsWith("reinforce") ? "over the batch's deviation: A" : "advantage A", signed(its.advantage)], ["ratio r", `${number(its.ratio, 4)}${its.ratio === its.clipped ? "" : `, clipped to ${number(its.clipped, 4)}`}`],
    ["weight", number(its.weight)], ["loss", number(its.loss)]);
  return el("ol", { class: "chain" }, ...links.map(([name, text]) => el("li", {}, el("span", { class: "pale" }, name), el("b", {}, text))));
}

// ------------------------------------------------------------------------------- a trajectory
function chosen() {
  return shownStep()?.find(isAt(state.group, state.row));
}
function shade(record, n) {
  const [a, old, now] = ["advantages", "old", "new"].map((name) => value(record, name, n));
  const p = now ?? old ?? value(record, "sampled", n);
  const [plus, minus, scale] = ["plus", "minus", "scale"].map((name) => `var(--${name})`);
  const tint = (colour, strength) => `rgba(${colour}, ${Math.min(0.55, strength).toFixed(3)})`;
  if (state.colour === "advantage") return a ? tint(a > 0 ? plus : minus, Math.abs(a) * 0.35) : "";
  if (state.colour === "ratio") return p === null || old === null ? "" : tint(p > old ? plus : minus, Math.abs(p - old) * 2);
  if (p === null) return "";
  return state.colour === "probability" ? tint(scale, Math.exp(p) * 0.5) : tint(minus, -p * 0.2);
}
const SCALES = { advantage: ["minus", "plus", "made less likely", "made more likely"], ratio: ["minus", "plus", "became less likely", "became more likely"], probability: [null, "scale", "probability 0", "1"], surprise: [null, "minus", "expected", "a surprise"] };
function showScale() {
  const [from, to, left, right] = SCALES[state.colour];
  const ends = [from ? `rgba(var(--${from}), .55)` : "transparent", "transparent", `rgba(var(--${to}), .55)`];
  fill($("scale"), el("span", {}, left), el("i", { style: `background:linear-gradient(to right, ${ends.join(",")})` }), el("span", {}, right));
}
function pieces(record) { // runs of tokens by one writer
  const found = [];
  record.mask.forEach((mask, n) => {
    if (!found.length || found.at(-1).mask !== mask) found.push({ mask, from: n, to: n });
    found.at(-1).to = n + 1;
  });
  return found;
}
function outside(text, title, open = true) {
  return el("details", { class: "outside", open: open ? "" : false }, el("summary", {}, el("b", {}, title)), plain(text).trim());
}
function searchBlock(search, text) {
  const found = search.documents.map(([title, body]) => `• ${title ? `${title}: ` : ""}${body}`).join("\n");
  const state = search.error ? `failed: ${search.error}` : search.fallback ? "fallback" : `${search.documents.length} found`;
  const block = outside(text, `search “${plain(search.query)}” (${state}, ${number(search.seconds)} s): outside the loss`);
  if (found) block.append(el("details", {}, el("summary", {}, "documents"), plain(found)));
  return block;
}
function showOne() {
  try {
    const record = chosen();
    fill($("one"), ...(record ? partsOf(record) : []));
    showScale();
    showToken();
  } catch (error) { // fields that are missing, or of another type
    fill($("one"), el("p", { class: "bad" }, plain(`this trajectory is damaged: ${error.message}`)));
  }
}
function partsOf(record) {
  const searches = [...record.searches];
  const writers = [...record.writers];
  const body = pieces(record).map(({ mask, from, to }) => {
    if (mask) return el("span", {}, record.tokens.slice(from, to).map((text, i) => tokenSpan(record, text, from + i)));
    const text = record.tokens.slice(from, to).join("");
    return readBy(writers, searches) ? searchBlock(searches.shift(), text) : outside(text, "written by the environment: outside the loss");
  });
  const terms = Object.entries(record.rewards).map(([name, value]) => el("tr", {}, el("td", {}, name), el("td", {}, signed(value))));
  const others = run().stages.flatMap((s, i) => (Object.hasOwn(s.asked, record.question) ? Object.keys(s.asked[record.question]) : []).map((step) => ({ stage: i, step: Number(step) })));
  const link = ({ stage, step }) => el("button", { onclick: () => ((state.question = record.question), go(places().findIndex((p) => p.stage === stage && p.step === step))) }, others.some((o) => o.stage !== stage) ? `${run().stages[stage].name}: ${step}` : step);
  const elsewhere = others.filter((o) => o.stage !== here().stage || o.step !== here().step);
  const cut = record.mask.length === record.tokens.length ? "" : "tokens and mask differ in length: only the tokens that have a mask are shown";
  return [
    el("h2", {}, plain(record.question)),
    cut && el("p", { class: "bad" }, cut),
    el("p", {}, "gold ", el("b", {}, plain(record.golds.join(" | "))), ", answer ",
      el("b", { class: record.correct ? "good" : "bad" }, plain(record.answer ?? "none")),
      el("span", { class: "pale" }, `, ended by ${record.stop_reason}${record.may_search ? "" : ", may not search"}`)),
    el("div", { class: "tokens", onclick: (event) => event.target.dataset.n && pick(Number(event.target.dataset.n)) }, outside(record.prompt, "prompt: outside the loss", false), ...body),
    el("table", {}, ...terms, el("tr", {}, el("th", {}, "reward"), el("th", {}, signed(record.reward)))),
    ...record.rejected_queries.map(([reason, query]) => el("p", { class: "pale" }, `a query that was not run (${reason}): ${plain(query)}`)),
    elsewhere.length ? el("p", { class: "pale rows" }, "also asked in step ", ...elsewhere.map(link)) : "",
  ];
}
function tokenSpan(record, text, n) {
  return el("span", { "data-n": n, style: `background:${shade(record, n)}`, class: n === state.token ? "chosen" : false }, plain(text));
}

// ------------------------------------------------------------------------------------- a token
function pick(n) {
  state.token = n;
  document.querySelector(".tokens .chosen")?.classList.remove("chosen");
  document.querySelector(`.tokens [data-n="${n}"]`)?.classList.add("chosen");
  showToken();
}
function nextToken(by) {
  const record = chosen();
  if (!record) return;
  const sampled = record.mask.map((mask, n) => (mask ? n : -1)).filter((n) => n >= 0);
  const i = sampled.indexOf(state.token);
  pick(sampled[i < 0 ? 0 : Math.max(0, Math.min(sampled.length - 1, i + by))]);
}
// Of a token: ratio, clip, surrogate, KL and its share of the loss, by the formula at the top of view.py.
function lossOf(record, n, s) {
  const [old, now, ref, advantage, weight] = ["old", "new", "ref", "advantages", "weights"].map((name) => value(record, name, n));
  if ([old, now, advantage, weight].includes(null) || s.clip_low === undefined) return null;
  const ratio = Math.exp(now - old);
  const clipped = Math.min(Math.max(ratio, 1 - s.clip_low), 1 + s.clip_high);
  const surrogate = Math.min(ratio * advantage, clipped * advantage);
  const gap = ref === null ? 0 : ref - now;
  // k1 is in the reward, and "log" is only logged. Without a reference the gap is 0, and so are both.
  const kl = { k2: ratio * 0.5 * gap * gap, k3: Math.exp(gap) - gap - 1 }[s.kl_estimator] ?? 0;
  const inLoss = s.kl_coef ? s.kl_coef * kl : 0;
  return { old, now, ratio, clipped, advantage, weight, surrogate, kl: inLoss, loss: weight * (inLoss - surrogate) };
}
function showToken() {
  const record = chosen();
  if (record) showGroup(record);
  const n = state.token;
  $("token").hidden = !record || n < 0 || !record.mask[n];
  if ($("token").hidden) return;
  const s = stage().settings;
  const its = lossOf(record, n, s);
  const head = el("div", {}, el("b", {}, `“${plain(record.tokens[n])}”`), ` token ${n}, id ${record.ids[n]}, log p when sampled ${number(value(record, "sampled", n), 5)}`);
  if (!its) return fill($("token"), el("h2", {}, "This token"), head, el("p", { class: "pale" }, "not trained on"));
  const lines = [
    `ratio r = exp(new − old) = exp(${number(its.now, 5)} − ${number(its.old, 5)}) = ${number(its.ratio, 5)}`,
    `clipped to [${number(1 - s.clip_low)}, ${number(1 + s.clip_high)}] = ${number(its.clipped, 5)}`,
    `min(r·A, clip(r)·A) with A = ${signed(its.advantage)} = ${number(its.surrogate, 5)}`,
    ...(its.kl ? [`KL ${s.kl_coef} · ${s.kl_estimator === "k2" ? "r · k2" : s.kl_estimator} = ${number(its.kl, 5)}`] : []),
    `loss: weight · (${its.kl ? "KL " : ""}− min) = ${number(its.weight, 4)} · ${number(its.kl - its.surrogate, 5)} = ${number(its.loss, 5)}`,
  ];
  fill($("token"), el("h2", {}, "This token"), head, ...lines.map((line) => el("div", {}, el("code", {}, line))));
}

// --------------------------------------------------------------------------------- the beginning
function openRun() {
  showHeadline();
  showMoments();
  showCurves();
  const [, name, step, group, row] = location.hash.match(/^#(.+)-(\d+)-(\d+)-(\d+)$/) ?? [];
  const linked = places().findIndex((place) => run().stages[place.stage].name === name && place.step === Number(step));
  if (linked >= 0) state.wanted = { group: Number(group), row: Number(row) };
  go(linked >= 0 ? linked : places().length - 1);
}
function theme(flip) {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme || (dark ? "dark" : "light");
  document.documentElement.dataset.theme = flip ? (now === "dark" ? "light" : "dark") : now;
}
function colourBy(name) {
  state.colour = $("colour").value = name;
  showOne();
}
const KEYS = {
  ArrowLeft: () => go(state.at - 1), ArrowRight: () => go(state.at + 1), ArrowUp: () => walk(-1), ArrowDown: () => walk(1),
  ",": () => nextToken(-1), ".": () => nextToken(1), t: () => theme(true), "?": () => $("keys").click(), "/": () => $("filters").elements.text.focus(),
  c: () => colourBy(COLOURS[(COLOURS.indexOf(state.colour) + 1) % COLOURS.length]),
};
function start() {
  theme(false);
  $("before").onclick = () => go(state.at - 1);
  $("after").onclick = () => go(state.at + 1);
  $("slider").oninput = () => go(Number($("slider").value));
  $("colour").onchange = () => colourBy($("colour").value);
  $("theme").onclick = () => theme(true);
  $("keys").onclick = () => ($("help").hidden = !$("help").hidden);
  $("filters").oninput = () => showGroups();
  $("filters").onsubmit = (event) => event.preventDefault();
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (typing && event.key === "Escape") return event.target.blur();
    if (typing || event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  openRun();
}
