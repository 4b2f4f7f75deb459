// Tables of nodes, links and sessions: the content of the graph in accessible form, and more.

import { precision } from "./cards.js";
import { CHAIN_COLOURS } from "./graph.js";
import { bytes, duration, el, keyed, milliseconds, named, nameOf, number, percent, rate, setText, shortPeer, span, waitWords } from "./words.js";

const MOST_LINKS = 200;

export function cell(label, ...classes) {
  const td = el(["td", ...classes].join("."));
  td.dataset.label = label;
  return td;
}

// The graph's order: by blocks, lost nodes last.
export function inOrder(nodes) {
  const rank = (node) => (node.state === "lost" ? 1 : 0);
  return [...nodes].sort(
    ([a, one], [b, other]) =>
      rank(one) - rank(other) ||
      one.span[0] - other.span[0] ||
      one.span[1] - other.span[1] ||
      (a < b ? -1 : 1),
  );
}

export function showNodes(body, nodes, model, now, choose) {
  keyed(body, inOrder(nodes).map(([peer]) => peer), (peer) => nodeRow(peer, choose), (row, peer) =>
    updateNode(row, peer, nodes.get(peer), model, now),
  );
}

function nodeRow(peer, choose) {
  const head = el("th");
  head.scope = "row";
  const button = el("button.name", el("bdi"));
  button.type = "button";
  button.addEventListener("click", () => choose(peer));
  head.append(button, el("span.peer", shortPeer(peer)));
  const blocks = cell("Blocks");
  blocks.append(el("span.words"), el("span.track", el("span.held")));
  const load = cell("Load", "n");
  return el(
    "tr", head, stateCell(), blocks, cell("Device"), cell("Precision"), load,
    cell("Sessions", "n"), cell("Tokens/s", "n"), cell("Cache free", "n"), cell("Audits", "n"), cell("Up", "n"), cell("Record", "n"),
  );
}

function stateCell() {
  const state = cell("State");
  state.append(el("span.badge"));
  return state;
}

function updateNode(row, peer, node, model, now) {
  const [head, state, blocks, device, weights, load, sessions, tokens, cache, audits, up, record] = row.children;
  const lost = node.state === "lost";
  row.className = node.state;
  row.dataset.state = node.state;
  setText(head.querySelector("bdi"), node.name || "unnamed");
  state.firstChild.className = `badge ${node.state}`;
  setText(state.firstChild, node.state);
  setText(blocks.firstChild, span(node.span));
  const held = blocks.lastChild.firstChild;
  const total = model?.num_blocks || 1;
  held.style.left = `${(100 * node.span[0]) / total}%`;
  held.style.width = `${(100 * (node.span[1] - node.span[0])) / total}%`;
  setText(device, `${node.device} ${bytes(node.memory_bytes)}`);
  setText(weights, precision(node));
  setText(load, percent(node.load));
  setText(sessions, String(node.sessions));
  setText(tokens, lost ? "–" : number(node.tokens_per_s));
  setText(cache, node.total_cache_tokens ? percent(node.free_cache_tokens / node.total_cache_tokens) : "–");
  setText(audits, node.barred_for ? "barred" : node.passed_audits ? `${node.passed_audits} passed` : "–");
  audits.classList.toggle("bad", Boolean(node.barred_for));
  setText(up, duration((lost ? node.issued_at : now) - node.started_at));
  setText(record, lost ? `expired ${duration(now - node.expires_at)} ago` : `expires in ${duration(node.expires_at - now)}`);
}

export function showLinks(body, words, links, nodes) {
  const shown = [...links].sort((one, other) => one[1].rtt_ms - other[1].rtt_ms).slice(0, MOST_LINKS);
  setText(words, links.size === 1 ? "1 measured" : `${links.size} measured`);
  keyed(body, shown.map(([key]) => key), () => el("tr", el("td", el("bdi")), el("td", el("bdi")), ...numbers(4)), (row, key) => {
    const [a, b] = key.split("|");
    const link = links.get(key);
    setText(row.children[0].firstChild, nameOf(nodes, a));
    setText(row.children[1].firstChild, nameOf(nodes, b));
    fill(row, 2, [milliseconds(link.rtt_ms), rate(link.bytes_per_s[0]), rate(link.bytes_per_s[1]), ago(link.age_min)]);
  });
}

// Links of one node.
export function showLinksOf(body, peer, links, nodes) {
  const mine = [...links].filter(([key]) => key.split("|").includes(peer));
  mine.sort((one, other) => one[1].rtt_ms - other[1].rtt_ms);
  const of = new Map(mine);
  keyed(body, mine.map(([key]) => key), () => el("tr", el("td", el("bdi")), ...numbers(4)), (row, key) => {
    const [a, b] = key.split("|");
    const link = of.get(key);
    const [there, back] = a === peer ? link.bytes_per_s : [...link.bytes_per_s].reverse();
    setText(row.children[0].firstChild, nameOf(nodes, a === peer ? b : a));
    fill(row, 1, [milliseconds(link.rtt_ms), rate(there), rate(back), ago(link.age_min)]);
  });
}

// Swarms that were asked for, and machines without a model of their own.
export function showPool(parts, swarms, machines) {
  parts.table.hidden = swarms.size === 0;
  const free = [...machines.values()].filter((machine) => machine.state === "free").length;
  setText(parts.words, `${machines.size} machine${machines.size === 1 ? "" : "s"} on offer, ${free} free`);
  keyed(parts.built, [...swarms.keys()].sort(), swarmRow, (row, model) => {
    const swarm = swarms.get(model);
    const [head, state, replicas, count, speed, reason] = row.children;
    row.dataset.state = swarm.state;
    setText(head.firstChild, swarm.model);
    showBadge(state, swarm.state);
    setText(replicas, `${swarm.replicas} of ${swarm.wanted}`);
    setText(count, String(swarm.machines));
    setText(speed, swarm.predicted_tokens_per_s ? number(swarm.predicted_tokens_per_s) : "–");
    setText(reason, swarm.reason);
  });
  keyed(parts.machines, [...machines.keys()].sort(), machineRow, (row, peer) => {
    const machine = machines.get(peer);
    const [head, state, device, memory, held] = row.children;
    row.dataset.state = machine.state;
    setText(head.firstChild, machine.name || shortPeer(peer));
    showBadge(state, machine.state);
    setText(device, machine.device);
    setText(memory, `${bytes(machine.memory_free_bytes)} of ${bytes(machine.memory_total_bytes)}`);
    setText(held, [...machine.held.map(heldWords), machine.away_reason].filter(Boolean).join("; "));
  });
}

function heldWords(held) {
  const words = `${held.model} ${span(held.span)}, ${held.state}`;
  return held.reason ? `${words}: ${held.reason}` : words;
}

function swarmRow() {
  const head = el("th", el("bdi"));
  head.scope = "row";
  return el("tr", head, stateCell(), cell("Replicas", "n"), cell("Machines", "n"), cell("Predicted tokens/s", "n"), cell("Why"));
}

function machineRow() {
  const head = el("th", el("bdi"));
  head.scope = "row";
  return el("tr", head, stateCell(), cell("Device"), cell("Memory free", "n"), cell("Holds"));
}

function showBadge(state, word) {
  state.firstChild.className = `badge ${word}`;
  setText(state.firstChild, word);
}

function numbers(count) {
  return Array.from({ length: count }, () => el("td.n"));
}

function fill(row, from, texts) {
  texts.forEach((text, index) => setText(row.children[from + index], text));
}

function ago(minutes) {
  return minutes < 1 ? "just now" : `${minutes} min ago`;
}

export function showSessions(table, body, sessions, nodes, now) {
  table.hidden = sessions.length === 0;
  const of = new Map(sessions.map((session) => [session.id, session]));
  keyed(body, [...of.keys()], sessionRow, (row, id) => {
    const session = of.get(id);
    row.className = `${session.state}${session.lit ? " lit" : ""}`;
    const [, state, chain, prompt, generated, speed, failovers, age] = row.children;
    row.querySelector(".swatch").className = `swatch ${session.colour}`;
    state.firstChild.className = `badge ${session.state}`;
    setText(state.firstChild, session.state);
    showHops(chain.firstChild, session.hops, nodes);
    chain.lastChild.hidden = !session.waits_for;
    setText(chain.lastChild, session.waits_for ? waitWords(session.waits_for, nodes, now) : "");
    setText(prompt, String(session.prompt_tokens));
    setText(generated, String(session.generated_tokens));
    setText(speed, number(session.tokens_per_s));
    setText(failovers, String(session.failovers));
    setText(age, duration((session.ended_at ?? now) - session.began_at));
  });
}

function sessionRow(id) {
  const head = el("th", el("span.swatch"), el("span.peer", id.slice(0, 8)));
  head.scope = "row";
  const chain = cell("Chain");
  chain.append(el("ol.hops"), el("p.wait"));
  return el(
    "tr", head, stateCell(), chain, cell("Prompt", "n"), cell("Generated", "n"), cell("Tokens/s", "n"),
    cell("Failovers", "n"), cell("Age", "n"),
  );
}

// Shows a chain as a list of nodes, each with its blocks.
export function showHops(list, hops, nodes) {
  const key = JSON.stringify([hops, hops.map(([peer]) => nodeKey(nodes, peer))]);
  if (list.dataset.hops === key) return;
  list.dataset.hops = key;
  list.replaceChildren(
    ...hops.map(([peer, start, end]) => {
      const hop = el("li", named(nameOf(nodes, peer)), el("span.peer", ` ${start}:${end}`));
      if (["lost", "failing"].includes(nodes.get(peer)?.state)) hop.className = "lost";
      return hop;
    }),
  );
}

function nodeKey(nodes, peer) {
  const node = nodes.get(peer);
  return [node?.name, node?.state];
}

const colours = new Map();

// A colour for each session, kept while it lives: the one that is used least.
export function colourOf(id, all) {
  for (const old of colours.keys()) if (!all.has(old)) colours.delete(old);
  if (!colours.has(id)) {
    const used = [...colours.values()];
    const count = (shade) => used.filter((each) => each === shade).length;
    colours.set(id, [...CHAIN_COLOURS].sort((a, b) => count(a) - count(b))[0]);
  }
  return colours.get(id);
}
