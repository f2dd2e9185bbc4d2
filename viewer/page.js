"use strict";
// The page of view.py. A step's trajectories are a script that is added when somebody looks;
// of a group the JSON is parsed when one of its trajectories is opened.

const $ = (id) => document.getElementById(id);
const state = { run: 0, stage: 0, step: 0, group: 0, row: 0, token: -1, question: null, colour: "advantage" };
const known = {}; // key -> {rows, groups} of a step that is loaded
const COLOURS = ["advantage", "ratio", "probability", "surprise"];
const STROKES = Array.from({ length: 8 }, (_, i) => `var(--s${i})`);
const PANELS = [ // title, metrics; "prefix/" takes all below it
  ["reward", ["reward", "reward/"]],
  ["exact match", ["em/"]],
  ["searches per question", ["searches/"]],
  ["fallbacks, refused", ["fallbacks", "rejected", "repeated"]],
  ["what searches find", ["gold_recall", "documents_seen", "search_errors", "failed_rows"]],
  ["faults in what it writes", ["repetition", "malformed_tags", "truncated"]],
  ["tokens per trajectory", ["model_tokens", "inserted_tokens"]],
  ["groups of equal rewards, clipped", ["frac_reward_zero_std", "clip_fraction"]],
  ["gradient norm", ["grad_norm"]],
  ["entropy_mc", ["entropy_mc"]],
  ["KL to the reference", ["k1", "k2", "k3"]],
  ["seconds", ["rollout_seconds", "search_seconds", "reward_seconds", "update_seconds"]],
];
let all = [];

// ------------------------------------------------------------------------------------- elements
function el(name, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "title"].includes(name);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== false && value !== undefined) node.setAttribute(key, value);
  }
  for (const child of children.flat()) if (child !== "" && child !== null) node.append(child);
  return node;
}
const fill = (node, ...children) => node.replaceChildren(...children.filter((child) => child !== ""));
// What would move the cursor, ring a bell or turn the line around is shown as a sign.
const plain = (text) => String(text).replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "␦");
const number = (x, digits = 3) => (x === null || x === undefined ? "–" : Number(x).toPrecision(digits).replace(/\.?0+(e|$)/, "$1"));
const signed = (x) => (x > 0 ? "+" : "") + number(x);

// ------------------------------------------------------------------------------------------ data
function runs(told) { // data/index.js calls it
  all = told;
  start();
}
function step(key, rows, groups) { // data/RUN-STAGE-STEP.js
  known[key] = { rows, groups, parsed: {} };
  if (all.length && key === keyOf(state.step)) showStep();
}
const run = () => all[state.run];
const stage = () => run().stages[state.stage];
const keyOf = (number) => `${stage().key}-${number}`;

function load(number) {
  state.step = number;
  if (known[keyOf(number)]) return showStep();
  fill($("groups"), el("p", { class: "pale" }, "loading"));
  const script = el("script", { src: `data/${encodeURIComponent(keyOf(number))}.js` });
  script.onerror = () => fill($("groups"), el("p", {}, `the file of step ${number} is missing: write the page again`));
  document.body.append(script);
}
function trajectories(group) {
  const step = known[keyOf(state.step)];
  return (step.parsed[group] ??= JSON.parse(step.groups[group]));
}
const value = (record, name, n) => { // one number stands for all sampled tokens; π_old is often what sampled
  const its = record[name] ?? (name === "old" ? record.sampled : undefined);
  return Array.isArray(its) ? its[n] ?? null : its === undefined || !record.mask[n] ? null : its;
};

// ---------------------------------------------------------------------------------------- curves
function series(metrics, wanted) {
  const names = new Set(metrics.flatMap(Object.keys));
  return [...names].filter((name) => wanted.some((w) => (w.endsWith("/") ? name.startsWith(w) : name === w))).sort();
}
function curve([title, wanted]) {
  const chosen = all.length > 1 ? all : [run()];
  const lines = [];
  let [low, high, length] = [Infinity, -Infinity, 1];
  chosen.forEach((its, i) => {
    const metrics = its.stages.flatMap((s) => s.metrics);
    for (const name of series(metrics, all.length > 1 ? wanted.slice(0, 1) : wanted)) {
      const points = metrics.map((m, x) => [x, m[name]]).filter(([, y]) => Number.isFinite(y));
      for (const [, y] of points) [low, high] = [Math.min(low, y), Math.max(high, y)];
      lines.push({ label: all.length > 1 ? `${its.name} ${name}` : name.split("/").pop(), points, colour: STROKES[lines.length % STROKES.length] });
    }
    length = Math.max(length, metrics.length);
  });
  if (!lines.length) return null;
  const height = high - low || 1;
  const at = ([x, y]) => `${((x / Math.max(1, length - 1)) * 200).toFixed(1)},${(86 - ((y - low) / height) * 82).toFixed(1)}`;
  const paths = lines.map((line) => el("path", { d: "M" + line.points.map(at).join("L"), fill: "none", style: `stroke:${line.colour}`, "stroke-width": 1.5, "vector-effect": "non-scaling-stroke" }, el("title", {}, line.label)));
  const upright = (x, look) => el("line", { x1: (x / Math.max(1, length - 1)) * 200, x2: (x / Math.max(1, length - 1)) * 200, y1: 0, y2: 90, class: look, "vector-effect": "non-scaling-stroke" });
  const begins = run().stages.map((_, i) => before(i)).slice(1);
  const svg = el("svg", { viewBox: "0 0 200 90", preserveAspectRatio: "none", role: "img", "aria-label": `${title}, from ${number(low)} to ${number(high)}`,
    onclick: (event) => jump(Math.round((event.offsetX / svg.clientWidth) * (length - 1))) }, ...paths, ...begins.map((x) => upright(x, "begins")), upright(before(state.stage) + place(), "here"));
  const legend = lines.slice(0, 8).map((line) => el("span", { class: "legend" }, el("span", { style: `color:${line.colour}` }, "■ "), line.label));
  return el("figure", {}, svg, el("figcaption", {}, `${title} (${number(low)} to ${number(high)})`, ...legend));
}
const before = (i) => run().stages.slice(0, i).reduce((sum, s) => sum + s.metrics.length, 0); // steps of earlier stages
const place = () => stage().metrics.findIndex((m) => m.step === state.step);
function jump(x) { // to the kept step that is nearest
  let number = x;
  const i = run().stages.findIndex((s) => (number < s.metrics.length ? true : ((number -= s.metrics.length), false)));
  if (i < 0) return;
  state.stage = i;
  $("stage").value = i;
  const steps = stage().steps;
  if (steps.length) go(steps.reduce((a, b) => (Math.abs(b - number) < Math.abs(a - number) ? b : a)));
}
function showCurves() {
  fill($("curves"), ...PANELS.map(curve).filter(Boolean));
  fill($("alarms"), ...alarms(run().stages).map(([x, where, said]) =>
    el("li", {}, el("button", { onclick: () => jump(x) }, where), ` ${plain(said)}`)));
}
function alarms(stages) { // [place among all steps, its name, what is said]
  const steps = stages.flatMap((s) => s.metrics.map((m) => [`${s.name}, step ${m.step}`, m.alarms ?? {}]));
  return steps.flatMap(([where, raised], x) => Object.values(raised).map((said) => [x, where, said]));
}

// ------------------------------------------------------------------------------------- a step
function go(number) {
  const i = Math.max(0, stage().steps.indexOf(number));
  $("slider").max = Math.max(0, stage().steps.length - 1);
  $("slider").value = i;
  state.step = stage().steps[i] ?? state.step;
  showCurves();
  $("missing").textContent = stage().missing.join("; ");
  if (stage().steps.length) return load(stage().steps[i]);
  fill($("groups"), el("p", {}, "no trajectories were kept here: train with --groups_kept"));
  fill($("one"));
}
function neighbour(by) {
  const steps = stage().steps;
  const next = steps[steps.indexOf(state.step) + by];
  if (next !== undefined) go(next);
}
function showStep() {
  const metrics = stage().metrics[place()] || {};
  const told = ["reward", "em", "searched", "searches", "fallbacks", "frac_reward_zero_std", "grad_norm", "clip_fraction", "entropy_mc"];
  $("step-numbers").textContent = `${stage().name}, step ${state.step}: ` + told.filter((n) => Number.isFinite(metrics[n])).map((n) => `${n} ${number(metrics[n])}`).join("  ·  ");
  const rows = known[keyOf(state.step)].rows; // the question that was asked for, or a group that teaches something
  const its = rows.find((row) => row.question === state.question) ?? rows.find((row) => rows.some((r) => r.group === row.group && r.reward !== row.reward)) ?? rows[0];
  [state.group, state.row, state.token, state.question] = [its.group, its.row, -1, null];
  showGroups();
  showOne();
}
function passes(row) {
  const form = $("filters").elements;
  const words = form.text.value.toLowerCase();
  const text = `${row.question} ${row.answer ?? ""}`.toLowerCase();
  return (!form.wrong.checked || !row.correct) && (!form.fallback.checked || row.fallback) && (!form.silent.checked || !row.searches)
    && (!form.fault.checked || row.fault) && (!form.repeated.checked || row.repeated) && (!words || text.includes(words));
}
function showGroups() {
  const rows = known[keyOf(state.step)].rows;
  const shown = rows.filter(passes);
  $("found").textContent = shown.length === rows.length ? `${rows.length} trajectories` : `${shown.length} of ${rows.length} trajectories`;
  const groups = Map.groupBy ? Map.groupBy(shown, (row) => row.group) : grouped(shown);
  fill($("groups"), ...[...groups].map(([group, some]) => el("div", { class: "group" },
    el("div", {}, plain(some[0].question)),
    el("div", { class: "pale" }, `gold ${plain(some[0].golds)}${some[0].kind ? `, ${some[0].kind}` : ""}${some[0].trained ? "" : ", not trained on"}`),
    el("div", { class: "rows" }, ...some.map((row) => el("button", {
      class: row.correct ? "right" : "", "aria-current": group === state.group && row.row === state.row,
      title: `answer ${plain(row.answer ?? "none")}, ${row.searches} searches, ended by ${row.stop_reason}`,
      onclick: () => choose(group, row.row),
    }, `${Object.keys(row.rewards).length ? signed(row.reward) : plain(row.answer ?? "none")}${"⌕".repeat(Math.min(4, row.searches))}`))))));
}
function grouped(rows) {
  const found = new Map();
  for (const row of rows) found.set(row.group, [...(found.get(row.group) || []), row]);
  return found;
}
function choose(group, row) {
  [state.group, state.row, state.token] = [group, row, -1];
  showGroups();
  showOne();
}
function walk(by) { // to the next trajectory that passes the filters
  const rows = known[keyOf(state.step)]?.rows.filter(passes) ?? [];
  const i = rows.findIndex((row) => row.group === state.group && row.row === state.row);
  const next = rows[i + by];
  if (!next) return;
  choose(next.group, next.row);
  document.querySelector("#groups [aria-current=true]").scrollIntoView({ block: "nearest" });
}

// ------------------------------------------------------------------------------- a trajectory
function chosen() {
  const step = known[keyOf(state.step)];
  return step && step.groups.length ? trajectories(state.group).find((record) => record.row === state.row) : null;
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
    return writers.shift() === "documents" && searches.length ? searchBlock(searches.shift(), text) : outside(text, "written by the environment: outside the loss");
  });
  const terms = Object.entries(record.rewards).map(([name, value]) => el("tr", {}, el("td", {}, name), el("td", {}, signed(value))));
  const total = Object.values(record.rewards).reduce((sum, value) => sum + Number(value), 0); // NaN is a string in JSON
  const others = (Object.hasOwn(stage().asked, record.question) ? stage().asked[record.question] : []).filter((number) => number !== state.step);
  const link = (number) => el("button", { onclick: () => ((state.question = record.question), go(number)) }, number);
  const cut = record.mask.length === record.tokens.length ? "" : "tokens and mask differ in length: only the tokens that have a mask are shown";
  return [
    el("h2", {}, plain(record.question)),
    cut && el("p", { class: "bad" }, cut),
    others.length ? el("p", { class: "pale rows" }, "also asked in step ", ...others.map(link)) : "",
    el("p", {}, "gold ", el("b", {}, plain(record.golds.join(" | ") || "unknown")), ", answer ",
      el("b", { class: record.correct ? "good" : "bad" }, plain(record.answer ?? "none")),
      el("span", { class: "pale" }, `, ended by ${record.stop_reason}${record.may_search ? "" : ", may not search"}`)),
    el("div", { class: "tokens", onclick: (event) => event.target.dataset.n && pick(Number(event.target.dataset.n)) }, outside(record.prompt, "prompt: outside the loss", false), ...body),
    terms.length ? el("table", {}, ...terms, el("tr", {}, el("th", {}, "reward"), el("th", {}, signed(total)))) : "",
    ...record.rejected_queries.map(([reason, query]) => el("p", { class: "pale" }, `a query that was not run (${reason}): ${plain(query)}`)),
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
// Of a token: ratio, clip, surrogate, KL and its share of the loss. view.py --text has the same.
function lossOf(record, n, s) {
  const [old, now, ref, advantage, weight] = ["old", "new", "ref", "advantages", "weights"].map((name) => value(record, name, n));
  if ([old, now, advantage, weight].includes(null) || s.clip_low === undefined) return null;
  const ratio = Math.exp(now - old);
  const clipped = Math.min(Math.max(ratio, 1 - s.clip_low), 1 + s.clip_high);
  const surrogate = Math.min(ratio * advantage, clipped * advantage);
  const gap = ref === null ? 0 : ref - now;
  const kl = { k1: -gap, k2: ratio * 0.5 * gap * gap, k3: Math.exp(gap) - gap - 1 }[s.kl_estimator] ?? 0;
  const inLoss = s.kl_coef && s.kl_estimator !== "k1" && ref !== null ? s.kl_coef * kl : 0; // k1 is in the reward
  return { old, now, ratio, clipped, advantage, weight, surrogate, kl: inLoss, loss: weight * (inLoss - surrogate) };
}
function showToken() {
  const record = chosen();
  const n = state.token;
  $("token").hidden = !record || n < 0 || !record.mask[n];
  if ($("token").hidden) return;
  const s = stage().settings;
  const its = lossOf(record, n, s);
  const head = el("div", {}, el("b", {}, `“${plain(record.tokens[n])}”`), ` token ${n}, id ${record.ids[n]}, log p when sampled ${number(value(record, "sampled", n), 5)}`);
  if (!its) return fill($("token"), head, el("p", { class: "pale" }, "not trained on"));
  const lines = [
    `ratio r = exp(new − old) = exp(${number(its.now, 5)} − ${number(its.old, 5)}) = ${number(its.ratio, 5)}`,
    `clipped to [${number(1 - s.clip_low)}, ${number(1 + s.clip_high)}] = ${number(its.clipped, 5)}`,
    `min(r·A, clip(r)·A) with A = ${signed(its.advantage)} = ${number(its.surrogate, 5)}`,
    ...(its.kl ? [`KL ${s.kl_coef} · ${s.kl_estimator === "k2" ? "r · k2" : s.kl_estimator} = ${number(its.kl, 5)}`] : []),
    `loss: weight · (${its.kl ? "KL " : ""}− min) = ${number(its.weight, 4)} · ${number(its.kl - its.surrogate, 5)} = ${number(its.loss, 5)}`,
  ];
  fill($("token"), head, ...lines.map((line) => el("div", {}, el("code", {}, line))));
}

// --------------------------------------------------------------------------------- the beginning
function choice(select, names, chosen, changed) {
  fill(select, ...names.map((name, i) => el("option", { value: i }, name)));
  select.value = chosen;
  select.onchange = () => changed(Number(select.value));
}
function chooseRun(i) {
  [state.run, state.stage] = [i, 0];
  choice($("stage"), run().stages.map((s) => s.name), 0, chooseStage);
  chooseStage(run().stages.length - 1);
}
function chooseStage(i) {
  state.stage = i;
  $("stage").value = i;
  if (run().stages.length) go(stage().steps.at(-1));
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
  ArrowLeft: () => neighbour(-1), ArrowRight: () => neighbour(1), ArrowUp: () => walk(-1), ArrowDown: () => walk(1),
  ",": () => nextToken(-1), ".": () => nextToken(1), t: () => theme(true), "?": () => $("keys").click(), "/": () => $("filters").elements.text.focus(),
  c: () => colourBy(COLOURS[(COLOURS.indexOf(state.colour) + 1) % COLOURS.length]),
};
function start() {
  theme(false);
  choice($("run"), all.map((its) => its.name), 0, chooseRun);
  $("before").onclick = () => neighbour(-1);
  $("after").onclick = () => neighbour(1);
  $("slider").oninput = () => go(stage().steps[Number($("slider").value)]);
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
  if (all.length) chooseRun(0);
}
