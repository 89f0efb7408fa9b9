// The status page: what is shown, and when the agent is asked for it.
//
// The page asks for one screen of peers a second, for new samples of the graphs every five seconds, and for the rest more
// seldom. Each source has a budget of bytes a second: large answers are asked for less often. A hidden page asks for nothing.

import { AgentTables, PeerView } from "./details.js";
import { Graph, age, bits, classed, count, make, or, plural, set, share, terms, trend, wait } from "./view.js";

const $ = (id) => document.getElementById(id);

// How long an answer may take, and how long the page waits after a failure, at least and at most: milliseconds.
const TIMEOUT = 5000;
const RETRY = { least: 1000, most: 10000 };

// As long as the agent's own history.
const SAMPLES = 120;

// How often the small lines of the rows change, in milliseconds.
const TRENDS = 15000;

// [key, heading, class, first order]
const COLUMNS = [
  ["name", "Peer", "", "asc"],
  ["state", "State", "", "asc"],
  ["since", "Since", "number middle", "desc"],
  ["address", "Address", "wide", "asc"],
  ["rtt", "RTT", "number middle", "desc"],
  ["loss", "Loss", "number middle", "desc"],
  ["up", "Up", "number", "desc"],
  ["down", "Down", "number", "desc"],
  ["flows", "Flows", "number wide", "desc"],
  ["mtu", "MTU", "number wide", "asc"],
  [null, "10 min", "wide"],
];

const STATES = {
  connected: ["●", "good"],
  dialling: ["◐", "warn"],
  waiting: ["○", ""],
};

// What the address of the page says: a bookmark shows the same again.
const DEFAULTS = { sort: "state", order: "asc", show: "all", find: "", rows: "25", skip: "0", peer: "" };

let choice = {};
let secret = sessionStorage.getItem("secret") ?? "";
let host = "";
let lostSince = null;
let failures = 0;
let timer = null;
let trends = new Map();
let trendsAt = -TRENDS;
let trendsOf = "";

const graphs = {
  rate: new Graph("Throughput", [["up", "up"], ["down", "down"]], bits, 1000),
  loss: new Graph("Loss of lane packets", [["lost", "lost"]], share, 0.01),
};
const agentTables = new AgentTables($("more"));
const peerView = new PeerView();

// The samples of all peers, or of one, as far as they have come.
class Samples {
  constructor() {
    this.clear();
  }

  clear() {
    Object.assign(this, { taken: 0, up: [], down: [], loss: [] });
  }

  add(answer) {
    // The agent was started again, and counts anew.
    if (answer.taken < this.taken) this.clear();
    for (const line of ["up", "down", "loss"]) this[line] = [...this[line], ...answer[line]].slice(-SAMPLES);
    this.taken = answer.taken;
  }

  draw(graphs) {
    graphs.rate.draw([this.up, this.down], SAMPLES);
    graphs.loss.draw([this.loss], SAMPLES);
  }
}

const samples = { all: new Samples(), peer: new Samples() };

// What is asked for: how often at most, in milliseconds, and how many bytes a second.
const sources = [
  { url: peersUrl, use: usePeers, every: 1000, budget: () => 2800, due: 0 },
  { url: historyUrl, use: useHistory, every: 5000, budget: () => 250, due: 0, missing: () => {} },
  { url: statusUrl, use: useStatus, every: 2000, budget: () => (choice.peer ? 3000 : 400), due: 0, missing: noPeer },
];

function peersUrl() {
  const { sort, order, show, find, rows, skip, peer } = choice;
  const list = { sort, order, show, find, skip, rows: peer ? "0" : rows };
  const of = JSON.stringify(list);
  const wanted = !peer && (of !== trendsOf || performance.now() - trendsAt > TRENDS);
  if (wanted) [trendsOf, trendsAt] = [of, performance.now()];
  return `api/peers?${new URLSearchParams({ ...list, trends: wanted ? "1" : "0" })}`;
}

function historyUrl() {
  const { peer } = choice;
  const { taken } = peer ? samples.peer : samples.all;
  return `api/history?${new URLSearchParams(peer ? { peer, after: taken } : { after: taken })}`;
}

function statusUrl() {
  return `api/status?${new URLSearchParams(choice.peer ? { peer: choice.peer } : { peers: "none" })}`;
}

// Asking.

// Why there is no answer that can be shown.
class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

async function ask(url) {
  const headers = secret ? { Authorization: `Bearer ${secret}` } : {};
  const response = await fetch(url, { headers, signal: AbortSignal.timeout(TIMEOUT), credentials: "omit" });
  const text = await response.text();
  if (!response.ok) throw new Refused(response.status, text.trim());
  return text;
}

async function turn() {
  timer = null;
  if (document.hidden) return;
  for (const source of sources) {
    if (performance.now() < source.due) continue;
    const asked = choice;
    const url = source.url();
    try {
      const text = await ask(url);
      const pause = Math.max(source.every, (text.length / source.budget()) * 1000);
      source.due = performance.now() + pause;
      // The answer to a question that the reader has taken back.
      if (asked === choice) source.use(JSON.parse(text));
      else source.due = 0;
    } catch (error) {
      if (!(error instanceof Refused && error.status === 404 && source.missing)) return failed(error);
      source.due = asked === choice ? performance.now() + source.every : 0;
      if (asked === choice) source.missing();
    }
  }
  found();
  const next = Math.min(...sources.map(({ due }) => due)) - performance.now();
  timer = setTimeout(turn, Math.max(next, 50));
}

// Asks at once for everything that depends on what the reader chose.
function refresh() {
  for (const source of sources) source.due = 0;
  failures = 0;
  if (timer !== null) {
    clearTimeout(timer);
    timer = setTimeout(turn, 0);
  }
}

function alarm(text) {
  set($("alarm"), text);
  $("alarm").hidden = text === "";
}

function failed(error) {
  classed($("figures"), "stale");
  if (error instanceof Refused && error.status === 401) {
    alarm(secret ? "The agent does not accept this secret." : "");
    return askSecret();
  }
  lostSince ??= new Date();
  failures += 1;
  const pause = Math.min(RETRY.least * 2 ** (failures - 1), RETRY.most);
  const since = lostSince.toLocaleTimeString();
  const why = error instanceof Refused ? `refuses to answer: ${error.message.replace(/\.$/, "")}` : "does not answer";
  alarm(`The agent ${why}. What is shown is from ${since}; the page goes on asking.`);
  document.title = `${host || "Culvert"}: no answer`;
  for (const source of sources) source.due = 0;
  timer = setTimeout(turn, pause);
}

function found() {
  [lostSince, failures] = [null, 0];
  alarm("");
  classed($("figures"), "");
}

function askSecret() {
  $("secret").hidden = false;
  $("figures").hidden = true;
  $("token").value = "";
  $("token").focus();
}

$("secret").addEventListener("submit", (event) => {
  event.preventDefault();
  secret = $("token").value.trim();
  sessionStorage.setItem("secret", secret);
  $("secret").hidden = true;
  refresh();
  timer ??= setTimeout(turn, 0);
});

document.addEventListener("visibilitychange", () => {
  if (!document.hidden && timer === null && $("secret").hidden) timer = setTimeout(turn, 0);
});

// Showing.

function usePeers(answer) {
  $("figures").hidden = false;
  const { sums, columns, matching, skipped, readiness, stuck_workers: stuck } = answer;
  health(sums, readiness, stuck);
  terms($("sums"), [
    ["Peers connected", `${count(sums.connected)} of ${count(sums.peers)}`],
    ["Up", bits(sums.up)],
    ["Down", bits(sums.down)],
    ["Loss", share(sums.loss)],
    ["Flows", count(sums.flows)],
    ["TCP streams", count(sums.tcp_streams)],
  ]);
  if (choice.peer) return;
  if (columns.trend.length > 0) trends = new Map(columns.name.map((name, index) => [name, columns.trend[index]]));
  const rows = columns.name.length;
  const end = skipped + rows;
  set($("shown"), rows === 0 ? "No peer" : `${count(skipped + 1)} to ${count(end)} of ${count(matching)}`);
  $("previous").disabled = skipped === 0;
  $("next").disabled = end >= matching;
  choice.skip = String(skipped);
  list(columns);
}

function health(sums, readiness, stuck) {
  const down = sums.peers - sums.connected;
  let [text, name] = ["Healthy: every peer is connected", "good"];
  if (stuck.length > 0) [text, name] = [`Worker ${stuck.join(", ")} makes no progress`, "bad"];
  else if (readiness !== "ready") [text, name] = [`The agent is ${readiness}`, "bad"];
  else if (sums.peers === 0) [text, name] = ["Running: there is no peer yet", "warn"];
  else if (sums.failed > 0) [text, name] = [`${plural(sums.failed, "peer")} failed`, "bad"];
  else if (down > 0) [text, name] = [`Running: ${plural(down, "peer is", "peers are")} not connected`, "warn"];
  set($("health-text"), text);
  classed($("health"), name);
  $("which").hidden = sums.failed === 0 || choice.show === "failed" || choice.peer !== "";
  document.title = `${host || "Culvert"}: ${text}`;
}

// Rows belong to peers, so that a link keeps its focus when the order changes.
const rowsByName = new Map();

function list(columns) {
  const body = $("peers").tBodies[0];
  const focused = document.activeElement;
  const names = new Set(columns.name);
  for (const [name, row] of rowsByName) {
    if (!names.has(name)) {
      row.remove();
      rowsByName.delete(name);
    }
  }
  columns.name.forEach((name, index) => {
    let row = rowsByName.get(name);
    if (!row) {
      row = newRow(name);
      rowsByName.set(name, row);
    }
    if (body.rows[index] !== row) body.insertBefore(row, body.rows[index] ?? null);
    fillRow(row, columns, index);
  });
  if (focused !== document.activeElement && focused?.isConnected) focused.focus({ preventScroll: true });
}

function newRow(name) {
  const link = make("a", { href: `#${new URLSearchParams({ peer: name })}` }, name);
  const cells = COLUMNS.map(([, , style], place) =>
    place === 0 ? make("th", { scope: "row", class: style }, link) : make("td", { class: style }));
  const why = make("span", { class: "why" });
  cells[1].append(make("span", { class: "dot", "aria-hidden": "true" }), make("span"), why);
  return make("tr", {}, ...cells);
}

function fillRow(row, columns, index) {
  const state = columns.state[index];
  const failure = columns.failure[index];
  const [, stateCell, since, address, rtt, loss, up, down, flows, mtu, line] = row.cells;
  const [dot, word, why] = stateCell.children;
  const [sign, style] = failure ? ["✕", "bad"] : STATES[state];
  set(dot, sign);
  classed(dot, `dot ${style}`);
  set(word, failure ? `failed, ${state}` : state);
  set(why, failure ?? "");
  set(since, age(columns.since_seconds[index]));
  set(address, or(columns.address[index]));
  set(rtt, or(columns.rtt_micros[index], (micros) => wait(micros / 1e6)));
  set(loss, share(columns.loss[index]));
  classed(loss, `${COLUMNS[5][2]} ${columns.loss[index] > 0.01 ? "bad" : ""}`.trim());
  set(up, bits(columns.up[index]));
  set(down, bits(columns.down[index]));
  set(flows, count(columns.flows[index]));
  set(mtu, or(columns.mtu[index]));
  trend(line, trends.get(columns.name[index]) ?? "");
}

function useHistory(answer) {
  if (choice.peer) {
    samples.peer.add(answer);
    samples.peer.draw(peerView.graphs);
  } else {
    samples.all.add(answer);
    samples.all.draw(graphs);
  }
}

function useStatus({ status }) {
  const { software, commit, uptime_seconds: up, workers, public_key: key } = status;
  host = status.host;
  set($("name"), host ? `Culvert on ${host}` : "Culvert");
  set($("agent"), `version ${software}${commit ? ` (${commit})` : ""}, up ${age(up)}, ${plural(workers, "worker")}, key ${key}`);
  agentTables.fill(status);
  if (choice.peer) peerView.show(status.peers[0], status.meanings);
}

function noPeer() {
  if (choice.peer) peerView.missing(choice.peer);
}

// What the reader chooses.

function heads() {
  const row = $("peers").tHead.rows[0];
  row.replaceChildren(...COLUMNS.map(([key, head, style, first]) => {
    if (!key) return make("th", { scope: "col", class: style }, head);
    const button = make("button", { type: "button" }, head);
    button.addEventListener("click", () => {
      const order = choice.sort !== key ? first : choice.order === "asc" ? "desc" : "asc";
      choose({ sort: key, order, skip: "0" });
    });
    return make("th", { scope: "col", class: style, "data-key": key }, button);
  }));
}

function choose(change) {
  const said = Object.entries({ ...choice, ...change }).filter(([key, value]) => value !== DEFAULTS[key]);
  const hash = new URLSearchParams(said).toString();
  history.replaceState(null, "", `${location.pathname}${hash ? `#${hash}` : ""}`);
  follow();
}

// Follows the address of the page.
function follow() {
  const said = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const before = choice;
  const known = Object.keys(DEFAULTS).map((key) => [key, said[key] ?? DEFAULTS[key]]);
  choice = Object.fromEntries(known);
  if (choice.peer) {
    // The list as it was, for the way back.
    const { peer, ...back } = { ...before, peer: "" };
    const kept = Object.entries(back).filter(([key, value]) => value !== DEFAULTS[key]);
    $("back").setAttribute("href", `#${new URLSearchParams(kept)}`);
  }
  for (const head of $("peers").tHead.rows[0].cells) {
    const sorted = head.dataset.key === choice.sort;
    if (sorted) head.setAttribute("aria-sort", choice.order === "desc" ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  }
  if ($("find") !== document.activeElement) $("find").value = choice.find;
  $("show").value = choice.show;
  $("rows").value = choice.rows;
  $("list").hidden = choice.peer !== "";
  $("peer").hidden = choice.peer === "";
  if (choice.peer !== before.peer) {
    samples.peer.clear();
    samples.peer.draw(peerView.graphs);
    if (choice.peer) peerView.begin(choice.peer);
    else if (before.peer) rowsByName.get(before.peer)?.querySelector("a").focus();
  }
  refresh();
}

heads();
$("graphs").append(graphs.rate.node, graphs.loss.node);
samples.all.draw(graphs);
$("find").addEventListener("input", () => choose({ find: $("find").value.trim(), skip: "0" }));
$("show").addEventListener("change", () => choose({ show: $("show").value, skip: "0" }));
$("rows").addEventListener("change", () => choose({ rows: $("rows").value, skip: "0" }));
$("choice").addEventListener("submit", (event) => event.preventDefault());
$("previous").addEventListener("click", () => page(-1));
$("next").addEventListener("click", () => page(1));
window.addEventListener("hashchange", follow);

function page(by) {
  choose({ skip: String(Math.max(Number(choice.skip) + by * Number(choice.rows), 0)) });
}

follow();
turn();
