// Entry point of the page: passes the server's state to the parts that show it.

import { holesOf, showBlocks } from "./blocks.js";
import { precision } from "./cards.js";
import { Chart } from "./charts.js";
import { EventList } from "./events.js";
import { Graph, ZOOM } from "./graph.js";
import { Live } from "./live.js";
import { Playground } from "./playground.js";
import { showPlan } from "./plan.js";
import { colourOf, showLinks, showLinksOf, showNodes, showPool, showSessions } from "./tables.js";
import { watchTheme } from "./theme.js";
import { LEAST_SHAPED, Topology } from "./topology.js";
import { Trainings } from "./trainings.js";
import { bytes, coverage, duration, el, named, number, percent, setText, span } from "./words.js";

const $ = (id) => document.getElementById(id);
const STATUS = {
  live: "live",
  connecting: "connecting",
  lost: "connection lost, trying again",
  denied: "please log in",
};

let chosenModel = null;
let chosenNode = null;
let waiting = false;

const graph = new Graph({ box: $("graph"), edges: $("edges"), cards: $("cards"), empty: $("graph-empty"), choose: chooseNode });
const events = new EventList($("events"));
const playground = new Playground($("playground"));
const topology = new Topology($("page-topology"));
const rates = new Chart($("chart-rate"), "Tokens per second", [
  { label: "swarm", shade: "accent" },
  { label: "this gateway", shade: "chain-2", dash: [6, 4] },
]);
const latencies = new Chart($("chart-latency"), "Latency in milliseconds", [
  { label: "token, here", shade: "chain-2" },
  { label: "token, fastest chain", shade: "accent", dash: [6, 4] },
  { label: "round trip", shade: "muted", dash: [2, 3] },
]);

const trainings = new Trainings($("trainings"), $("trainings-list"));

const live = new Live({ changed: () => soon(), status: showStatus });

$("zoom-in").addEventListener("click", () => graph.zoom(ZOOM.step));
$("zoom-out").addEventListener("click", () => graph.zoom(1 / ZOOM.step));
$("zoom-fit").addEventListener("click", () => graph.fit());
$("all-links").addEventListener("change", (event) => {
  graph.allLinks = event.target.checked;
  soon();
});
$("figure").addEventListener("change", soon);
$("model").addEventListener("change", (event) => {
  chosenModel = event.target.value;
  chosenNode = null;
  soon();
});
$("details-close").addEventListener("click", () => chooseNode(chosenNode));
addEventListener("hashchange", showPage);
watchTheme($("theme"), () => {
  graph.restyle();
  rates.restyle();
  latencies.restyle();
  trainings.restyle();
  topology.restyle();
});
setInterval(soon, 1000);
showPage();

// Coalesces changes into one redraw.
function soon() {
  if (waiting) return;
  waiting = true;
  setTimeout(() => requestAnimationFrame(() => {
    waiting = false;
    show();
  }), 0);
}

function chooseNode(peer) {
  chosenNode = peer === chosenNode ? null : peer;
  show();
}

function show() {
  const now = live.now();
  const about = live.get("about");
  const models = live.get("models");
  const id = showModels(models);
  const model = models.get(id);
  const nodes = new Map([...live.get("nodes")].filter(([, node]) => node.model === id));
  const links = new Map([...live.get("links")].filter(([key]) => key.split("|").every((peer) => nodes.has(peer))));
  const sessions = sessionsOf(id);

  showTiles(model, sessions);
  graph.chosen = chosenNode;
  graph.stability = $("figure").value === "stability" ? topology.stability() : null;
  graph.show(nodes, links, sessions, now);
  $("graph-empty").textContent = about.get("starting") === false ? "No node serves here yet" : "Looking for nodes …";
  showBlocks($("blocks"), $("blocks-axis"), $("blocks-words"), model);
  showNodes($("nodes"), nodes, model, now, chooseNode);
  setText($("nodes-words"), about.get("nodes_left_out") ? `${about.get("nodes_left_out")} more are not shown` : "");
  showLinks($("links"), $("links-words"), links, nodes);
  showSessions($("sessions-table"), $("sessions"), sessions, live.get("nodes"), now);
  showSessionWords(model, sessions);
  const [swarms, machines] = [live.get("swarms"), live.get("machines")];
  $("pool").hidden = !swarms.size && !machines.size;
  showPool({ table: $("built-table"), built: $("built"), machines: $("machines"), words: $("pool-words") }, swarms, machines);
  showDetails(nodes, links, now);
  events.show(live.get("events"));
  showCharts(model);
  showPlan({ panel: $("plan"), words: $("plan-words"), body: $("pieces") }, live.get("plans").get(id), model);
  trainings.show(live.get("trainings"), now);
  $("playground").hidden = !about.get("playground");
  playground.update(() => ({ id, name: model?.name }), () => live.now());
  playground.showChain(sessions, live.get("nodes"), now);
  topology.update(id);
  $("link-topology").hidden = (model?.nodes ?? 0) < LEAST_SHAPED && location.hash !== "#topology";
  const notice = $("notice");
  notice.hidden = !about.get("cut_off");
  setText(notice, about.get("cut_off") ? "All records have expired: the swarm is gone, or this observer is cut off from it." : "");
}

function showModels(models) {
  const ids = [...models].sort((a, b) => a[1].order - b[1].order).map(([id]) => id);
  if (!ids.includes(chosenModel)) chosenModel = ids[0] ?? null;
  const select = $("model");
  const key = JSON.stringify(ids);
  if (select.dataset.ids !== key && ids.length) {
    select.dataset.ids = key;
    select.disabled = ids.length < 2;
    select.replaceChildren(...ids.map((id) => {
      const option = el("option", models.get(id).name);
      option.value = id;
      option.title = id;
      return option;
    }));
  }
  if (chosenModel !== null && select.value !== chosenModel) select.value = chosenModel;
  return chosenModel;
}

function sessionsOf(model) {
  const all = live.get("sessions");
  playground.recognise([...all].map(([id, session]) => ({ id, ...session })));
  return [...all]
    .filter(([, session]) => session.model === model)
    .map(([id, session]) => ({ id, ...session, colour: colourOf(id, all) }))
    .map((session) => ({ ...session, lit: playground.owns(session) }))
    .sort((a, b) => a.began_at - b.began_at);
}

function showTiles(model, sessions) {
  const holes = holesOf(model);
  const held = (model?.runs ?? []).reduce((sum, [start, end, count]) => sum + (count ? end - start : 0), 0);
  setText($("tile-nodes"), model ? String(model.serving) : "–");
  const others = model ? model.nodes - model.serving - model.failing : 0;
  const notes = [
    others > 0 ? `${others} joining or draining` : "",
    model?.failing ? `${model.failing} failing` : "",
    model?.lost ? `${model.lost} lost` : "",
  ];
  setText($("note-nodes"), notes.filter(Boolean).join(", ") || "serving");
  $("note-nodes").classList.toggle("bad", Boolean(model?.lost || model?.failing));
  setText($("tile-blocks"), model ? `${held} / ${model.num_blocks}` : "–");
  setText($("note-blocks"), holes.length ? "some by no node: no answers" : model ? coverage(model.runs) : "\u00a0");
  $("note-blocks").classList.toggle("bad", holes.length > 0);
  const own = sessions.filter((session) => session.state === "decode");
  const here = own.reduce((sum, session) => sum + session.tokens_per_s, 0);
  setText($("tile-tokens"), model ? number(Math.max(model.tokens_per_s, here)) : "–");
  setText($("note-tokens"), here ? `${number(here)} of them here` : "through all blocks");
  const open = sessions.filter((session) => session.state !== "ended");
  setText($("tile-sessions"), model ? String(Math.max(open.length, Math.round(model.sessions))) : "–");
  setText($("note-sessions"), live.get("about").get("playground") ? `${open.length} of this gateway` : "of all clients");
}

function showSessionWords(model, sessions) {
  const open = sessions.filter((session) => session.state !== "ended").length;
  const left = live.get("about").get("sessions_left_out") ?? 0;
  const others = Math.max(0, Math.round(model?.sessions ?? 0) - open - left);
  const own = live.get("about").get("playground")
    ? `${open + left} of this gateway${left ? `, ${left} of them not shown` : ""}; `
    : "";
  setText($("sessions-words"), `${own}about ${others} of other clients. What they say is never shown.`);
}

function showDetails(nodes, links, now) {
  const node = nodes.get(chosenNode);
  $("details").hidden = !node;
  if (!node) return;
  $("h-details").replaceChildren(named(node.name || "Unnamed node"));
  const lost = node.state === "lost";
  const facts = [
    ["Peer", chosenNode],
    ["State", node.state === "failing" ? `failing for ${duration(now - node.failing_since)}; it says ${node.last_state}` : lost ? `lost ${duration(now - node.lost_at)} ago; it was ${node.last_state}` : node.state],
    ["Record", lost ? `its last words are of ${duration(now - node.issued_at)} ago` : `expires in ${duration(node.expires_at - now)} if it is not renewed`],
    ["Blocks", span(node.span) + (node.next_span ? `, then ${span(node.next_span)}` : "")],
    ["Device", `${node.device}, ${bytes(node.memory_free_bytes)} of ${bytes(node.memory_bytes)} free`],
    ["Precision", precision(node)],
    ["Load", percent(node.load)],
    ["Sessions", String(node.sessions)],
    ["Alone it does", `${number(node.decode_tokens_per_s)} tokens/s, ${number(node.prefill_tokens_per_s)} in a prompt`],
    ["Cache", `${node.free_cache_tokens.toLocaleString("en")} of ${node.total_cache_tokens.toLocaleString("en")} tokens free`],
    ["Audits", node.barred_for ? `this machine's clients do not use it: ${node.barred_for}` : node.passed_audits ? `${node.passed_audits} passed by this machine's clients` : "none by this machine's clients"],
    ["Up", duration((lost ? node.issued_at : now) - node.started_at)],
  ];
  const list = $("details-list");
  if (list.children.length !== facts.length) {
    list.replaceChildren(...facts.map(([label]) => el("div", el("dt", label), el("dd"))));
  }
  facts.forEach(([, text], index) => setText(list.children[index].lastChild, text));
  showLinksOf($("details-links"), chosenNode, links, live.get("nodes"));
}

let drawn = "";
function showCharts(model) {
  const series = live.get("series");
  const times = [...series.keys()].map(Number).sort((a, b) => a - b);
  const key = `${times[0]} ${times.at(-1)} ${model?.number}`;
  if (key === drawn) return;
  drawn = key;
  const points = times.map((at) => series.get(String(at)));
  const own = (column) => points.map((point) => point.own[column] ?? null);
  const of = (column) => points.map((point) => point.models[model?.number]?.[column] ?? null);
  rates.show([times, of(0), live.get("about").get("playground") ? own(0) : own(0).map(() => null)]);
  latencies.show([times, own(1), of(1), of(2)]);
}

function showStatus(word) {
  const pill = $("connection");
  pill.dataset.state = word;
  setText(pill, STATUS[word]);
  document.body.classList.toggle("stale", word === "lost");
}

function showPage() {
  const page = location.hash === "#topology" ? "topology" : "swarm";
  $("page-swarm").hidden = page !== "swarm";
  $("page-topology").hidden = page !== "topology";
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.page === page) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  topology.visible(page === "topology");
  soon();
}
