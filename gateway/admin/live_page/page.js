// The live page: asks the admin API every two seconds and draws what it says. It changes nothing.
// Words of workers and clients reach the document as text only, never as markup.

const EVERY_MS = 2000;
const WINDOW_MS = 5 * 60 * 1000;
const SHOWN_DECISIONS = 30;

const byId = (id) => document.getElementById(id);
const samples = []; // of counters, oldest first: [{at, counters}]
const opened = new Set(); // decisions whose details stay open

// ------------------------------------------------------------------ asking

class Unauthorized extends Error {}

async function ask(path) {
  const token = sessionStorage.getItem("kvgate-admin-token");
  const answer = await fetch(path, { headers: token ? { authorization: `Bearer ${token}` } : {} });
  if (answer.status === 401) throw new Unauthorized();
  return answer;
}

async function read(path) {
  const answer = await ask(path);
  if (!answer.ok && answer.status !== 503) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

// Prometheus' text format: name -> [{labels, value}]. Labels hold no escaped quotes but in names of models.
function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    if (!line || line[0] === "#") continue;
    const parts = /^(\w+)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!parts) continue;
    const labels = {};
    for (const [, name, value] of (parts[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[name] = value;
    if (!found.has(parts[1])) found.set(parts[1], []);
    found.get(parts[1]).push({ labels, value: Number(parts[3]) });
  }
  return found;
}

function sum(metrics, name, keep = () => true) {
  return (metrics.get(name) ?? []).filter(({ labels }) => keep(labels)).reduce((total, { value }) => total + value, 0);
}

function sumBy(metrics, name, label) {
  const sums = {};
  for (const { labels, value } of metrics.get(name) ?? []) sums[labels[label]] = (sums[labels[label]] ?? 0) + value;
  return sums;
}

function count(metrics) {
  const counters = {};
  for (const name of ["requests", "prompt_tokens", "available_tokens", "predicted_tokens", "delivered_tokens",
    "reported_prompt_tokens", "route_predictions"]) counters[name] = sum(metrics, `kvgate_${name}_total`);
  counters.misses = sumBy(metrics, "kvgate_route_misses_total", "cause");
  counters.ttft = sumBy(metrics, "kvgate_ttft_seconds_bucket", "le");
  return counters;
}

// What has been counted since the oldest sample in the window; a counter that fell back began anew.
function growth(pick) {
  const oldest = samples[0], newest = samples.at(-1);
  const grown = (pick(newest.counters) ?? 0) - (pick(oldest.counters) ?? 0);
  return grown < 0 ? pick(newest.counters) : grown;
}

function quantile(share) {
  const bounds = Object.keys(samples.at(-1).counters.ttft).map((le) => [le === "+Inf" ? Infinity : Number(le), le]);
  bounds.sort((a, b) => a[0] - b[0]);
  const total = bounds.length ? growth((c) => c.ttft[bounds.at(-1)[1]]) : 0;
  if (!total) return null;
  const hit = bounds.find(([, le]) => growth((c) => c.ttft[le]) >= share * total);
  return hit[0] === Infinity ? bounds.at(-2)[0] : hit[0];
}

// ------------------------------------------------------------------ drawing

function element(name, text, attributes = {}, ...children) {
  const made = document.createElement(name);
  if (text !== null && text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const percent = (share) => (Number.isFinite(share) ? `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %` : "–");
const seconds = (s) => (s === null || s === undefined ? "–" : s < 1 ? `${(1000 * s).toFixed(s < 0.01 ? 1 : 0)} ms` : `${s.toFixed(1)} s`);
const number = (n) => (n === null || n === undefined ? "–" : n >= 1e6 ? `${(n / 1e6).toFixed(1)} M` : n >= 1e4 ? `${(n / 1e3).toFixed(0)} k` : `${Math.round(n)}`);
const meter = (share, label) => element("meter", percent(share), { min: 0, max: 1, value: Math.min(1, share || 0), title: label });

function table(place, heads, rows, none) {
  if (!rows.length) return byId(place).replaceChildren(element("tbody", null, {}, element("tr", null, {}, element("td", none, { class: "quiet" }))));
  const head = element("tr", null, {}, ...heads.map((text) => element("th", text, { scope: "col" })));
  const body = rows.map((cells) => element("tr", null, {}, ...cells.map((cell) => cell instanceof Node ? element("td", null, {}, cell) : element("td", cell))));
  byId(place).replaceChildren(element("thead", null, {}, head), element("tbody", null, {}, ...body));
}

function bars(place, rows, none) {
  byId(place).replaceChildren(...(rows.length ? rows : [element("p", none, { class: "quiet" })]).map((row) =>
    row instanceof Node ? row : element("div", null, { class: "row" }, element("span", row.name), meter(row.share, row.name), element("span", percent(row.share)))));
}

const STATE_CLASS = { ready: "good", degraded: "warn", draining: "warn", ejected: "bad", gone: "bad" };

function drawTiles(metrics, workers) {
  const span = (samples.at(-1).at - samples[0].at) / 1000;
  const predictions = growth((c) => c.route_predictions);
  const missed = Object.keys(samples.at(-1).counters.misses).reduce((total, cause) => total + growth((c) => c.misses[cause]), 0);
  const tiles = {
    "requests / s": span ? (growth((c) => c.requests) / span).toFixed(1) : "–",
    "in flight": number(workers.reduce((total, worker) => total + worker.inflight_requests, 0)),
    queued: number(sum(metrics, "kvgate_queue_depth")),
    "hit rate": percent(growth((c) => c.delivered_tokens) / growth((c) => c.reported_prompt_tokens)),
    "route misses": percent(missed / predictions),
    "first token p50": seconds(quantile(0.5)),
    "first token p99": seconds(quantile(0.99)),
  };
  byId("tiles").replaceChildren(...Object.entries(tiles).map(([name, value]) => element("div", null, {}, element("dt", name), element("dd", value))));
}

function drawFunnel() {
  const prompt = growth((c) => c.prompt_tokens);
  const rows = prompt ? [
    { name: "available", share: growth((c) => c.available_tokens) / prompt },
    { name: "predicted", share: growth((c) => c.predicted_tokens) / prompt },
    { name: "delivered", share: growth((c) => c.delivered_tokens) / growth((c) => c.reported_prompt_tokens) },
  ] : [];
  bars("funnel", rows, "No request has ended while this page was open.");
  const predictions = growth((c) => c.route_predictions);
  const causes = Object.keys(samples.at(-1).counters.misses).map((cause) => ({ name: cause, share: growth((c) => c.misses[cause]) / predictions }));
  bars("misses", causes.filter(({ share }) => share > 0).sort((a, b) => b.share - a.share), "None.");
}

function drawFleet(workers) {
  table("fleet", ["worker", "state", "in flight", "waiting", "KV use", "trust", "blocks", "sessions", "slowdown", "findings"], workers.map((worker) => [
    worker.id,
    element("span", worker.state + (worker.reason ? `: ${worker.reason}` : ""), { class: STATE_CLASS[worker.state] ?? "quiet" }),
    number(worker.inflight_requests),
    worker.load ? number(worker.load.waiting) : "–",
    worker.load ? meter(worker.load.kv_usage, "KV use") : "–",
    meter(worker.trust, worker.index_trust.state),
    number(Object.values(worker.index_blocks).reduce((total, blocks) => total + blocks, 0)),
    number(worker.sessions),
    worker.slowdown.toFixed(2),
    worker.findings.length ? element("span", worker.findings.map(({ code }) => code).join(", "), { class: "warn" }) : "",
  ]), "No worker has joined yet.");
}

function drawQueue(metrics) {
  const rows = (metrics.get("kvgate_queue_depth") ?? []).filter(({ value }) => value > 0);
  table("queue", ["pool", "class", "waiting"], rows.map(({ labels, value }) => [labels.pool, labels.class, number(value)]), "Nothing waits.");
}

function drawPrefixes({ applications, prefixes }) {
  // An application's most useful prefix: how much of its prompts is shared, and who holds it.
  const hottest = new Map(prefixes.toReversed().map((prefix) => [prefix.head, prefix]));
  table("prefixes", ["application", "model", "prompts", "usually shared", "lost to drift", "held by"], applications.slice(0, 10).map((seen) => [
    seen.head.slice(0, 8), seen.model, number(seen.prompts), seen.stable_tokens === null ? "–" : `${number(seen.stable_tokens)} tokens`,
    element("span", percent(seen.drift_share), { class: seen.drift_share > 0.1 ? "warn" : null }), hottest.has(seen.head) ? `${hottest.get(seen.head).workers.length} workers` : "–",
  ]), "Nothing to show yet.");
}

const loads = (terms) => terms.decode_s + terms.evict_s + terms.kv_s + terms.repeat_s + terms.adapter_s + terms.regret_s;

// What makes up a candidate's cost, side by side on one scale.
function termsBar(terms, most) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "terms");
  svg.setAttribute("viewBox", "0 0 100 8");
  svg.setAttribute("preserveAspectRatio", "none");
  let at = 0;
  for (const [name, value] of [["own", terms.own_s], ["wait", terms.wait_s], ["rest", loads(terms)]]) {
    const part = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const width = most > 0 ? (100 * Math.max(0, value)) / most : 0;
    for (const [key, given] of Object.entries({ x: at, y: 0, width, height: 8, class: name })) part.setAttribute(key, given);
    svg.append(part);
    at += width;
  }
  return svg;
}

function candidates(decision) {
  const most = Math.max(...decision.candidates.map(({ terms }) => terms.own_s + terms.wait_s + loads(terms)));
  const ordered = [...decision.candidates].sort((a, b) => a.terms.cost - b.terms.cost);
  const heads = ["worker", "overlap", "trust", "cost", "own", "wait", "decode", "evict", "KV", "repeat", "adapter", "regret", "credits", ""];
  const rows = ordered.map(({ worker, overlap_tokens, trust, terms }) => element("tr", null, { class: worker === decision.worker ? "chosen" : null },
    ...[worker, number(overlap_tokens), percent(trust), ...[terms.cost, terms.own_s, terms.wait_s, terms.decode_s, terms.evict_s, terms.kv_s, terms.repeat_s, terms.adapter_s, terms.regret_s].map(seconds),
      terms.affinity_s + terms.idle_s ? `−${seconds(terms.affinity_s + terms.idle_s)}` : ""].map((text) => element("td", text)),
    element("td", null, {}, termsBar(terms, most))));
  const excluded = decision.excluded.map(([worker, why]) => element("tr", null, { class: "quiet" }, element("td", worker), element("td", `not asked: ${why}`, { colspan: 13, class: "words" })));
  return element("div", null, { class: "scroll" }, element("table", null, {},
    element("thead", null, {}, element("tr", null, {}, ...heads.map((text) => element("th", text, { scope: "col" })))),
    element("tbody", null, {}, ...rows, ...excluded)));
}

function outcomeWords(outcome) {
  if (!outcome) return ["running", "quiet"];
  if (outcome.result !== "completed") return [outcome.error_code ?? outcome.result, "bad"];
  if (outcome.miss_cause) return [`miss: ${outcome.miss_cause}`, "warn"];
  return [`${outcome.status} ${seconds(outcome.ttft_s)}`, "good"];
}

function drawDecisions(decisions) {
  const made = decisions.map((decision) => {
    const [words, kind] = outcomeWords(decision.outcome);
    const delivered = decision.outcome?.delivered_tokens;
    const details = element("details", null, {}, element("summary", null, {},
      element("span", seconds(decision.age_s), { class: "quiet" }), element("strong", decision.worker), element("span", decision.model),
      element("span", `${number(decision.predicted_tokens)} of ${number(decision.prompt_tokens)} tokens${delivered === null || delivered === undefined ? "" : `, ${number(delivered)} came`}`),
      element("span", words, { class: kind })));
    details.open = opened.has(decision.request_id);
    if (details.open) details.append(candidates(decision));
    details.addEventListener("toggle", () => {
      if (!details.open) return opened.delete(decision.request_id);
      opened.add(decision.request_id);
      if (!details.querySelector("table")) details.append(candidates(decision));
    });
    return details;
  });
  byId("decisions").replaceChildren(...(made.length ? made : [element("p", "None yet.", { class: "quiet" })]));
  const shown = new Set(decisions.map(({ request_id }) => request_id));
  for (const id of opened) if (!shown.has(id)) opened.delete(id);
}

// ------------------------------------------------------------------ running

function badge(text, kind) {
  byId("ready").textContent = text;
  byId("ready").className = `badge ${kind}`;
}

async function draw() {
  const [ready, workers, decisions, prefixes, text] = await Promise.all([
    read("ready"), read("admin/workers"), read(`admin/decisions?limit=${SHOWN_DECISIONS}`), read("admin/prefixes"), ask("metrics").then((answer) => answer.text()),
  ]);
  const metrics = parseMetrics(text);
  const now = Date.now();
  samples.push({ at: now, counters: count(metrics) });
  while (samples.length > 2 && samples[0].at < now - WINDOW_MS) samples.shift();
  badge(ready.ready ? "ready" : ready.reason ?? "not ready", ready.ready ? "good" : "bad");
  const joining = workers.joining.length ? `, ${workers.joining.length} joining` : "";
  byId("about").textContent = `${workers.workers.length} workers${joining}`;
  drawTiles(metrics, workers.workers);
  drawFunnel();
  drawFleet(workers.workers);
  drawQueue(metrics);
  drawPrefixes(prefixes);
  // A decision under the pointer or the keyboard is not drawn away.
  if (!byId("decisions").matches(":hover, :focus-within") || !byId("decisions").childElementCount) drawDecisions(decisions.decisions);
  byId("ask-token").hidden = true;
  byId("view").hidden = false;
}

async function loop() {
  if (!document.hidden && !byId("paused").checked) {
    try {
      await draw();
    } catch (error) {
      if (error instanceof Unauthorized) {
        byId("token-wrong").hidden = sessionStorage.getItem("kvgate-admin-token") === null;
        byId("ask-token").hidden = false;
        byId("view").hidden = true;
        badge("token needed", "warn");
        return; // until a token is given
      }
      badge("no answer from the gateway", "bad");
    }
  }
  setTimeout(loop, EVERY_MS);
}

byId("ask-token").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("kvgate-admin-token", byId("token").value);
  byId("token").value = "";
  loop();
});

loop();
