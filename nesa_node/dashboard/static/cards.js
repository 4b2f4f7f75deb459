// Nodes as cards above the graph's canvas: buttons, accessible to keyboard and screen readers.

import { CLIENT } from "./layout.js";
import { duration, el, keyed, milliseconds, named, number, percent, rate, setText, shortPeer, span } from "./words.js";

const SHAKY = 0.5;

// `view`: {nodes, links, sessions, chosen, stability, choose} as the graph has them.
export function showCards(list, { places, small }, view, now) {
  list.classList.toggle("small", small);
  const lit = view.sessions.filter((session) => session.lit);
  const inChain = new Set(lit.flatMap((session) => session.hops.map(([peer]) => peer)));
  keyed(list, places.keys(), (key) => make(key, view.choose), (card, key) => {
    const { x, y } = places.get(key);
    card.style.left = `${x}px`;
    card.style.top = `${y}px`;
    if (key !== CLIENT) update(card, key, view, inChain.has(key), now);
  });
}

function make(key, choose) {
  if (key === CLIENT) return el("li.card.here", el("span.title", "this gateway"));
  const button = el("button.face");
  button.type = "button";
  button.append(el("span.title"), el("span.sub"), el("span.load", el("span.bar")), el("span.foot"));
  button.addEventListener("click", () => choose(key));
  return el("li.card", button);
}

function update(card, peer, view, lit, now) {
  const node = view.nodes.get(peer);
  const chosen = peer === view.chosen;
  card.className = `card ${node.state}${node.barred_for ? " barred" : ""}${chosen ? " chosen" : ""}${lit ? " lit" : ""}`;
  const [title, sub, load, foot] = card.firstChild.children;
  const name = node.name || shortPeer(peer);
  if (title.textContent !== name) title.replaceChildren(named(name));
  setText(sub, `${span(node.span)} · ${node.device} · ${precision(node)}`);
  const steady = view.stability?.get(peer) ?? null;
  const share = view.stability ? (steady ?? 0) : Math.min(1, node.load);
  load.firstChild.style.width = `${share * 100}%`;
  load.firstChild.className = `bar${view.stability && share < SHAKY ? " shaky" : ""}`;
  setText(foot, footnote(node, now) ?? asked(peer, view, steady) ?? loadOf(node));
  card.firstChild.setAttribute("aria-pressed", String(chosen));
}

// A state that replaces the figures on the card.
function footnote(node, now) {
  if (node.state === "lost") return `lost ${duration(now - node.lost_at)} ago`;
  if (node.state === "failing") return `no answer for ${duration(now - node.failing_since)}`;
  if (node.state === "joining") return "loading";
  if (node.state === "draining") return node.next_span ? `moves to ${span(node.next_span)}` : "leaving";
  return node.barred_for ? "barred by an audit" : null;
}

function asked(peer, view, steady) {
  if (view.stability) return steady === null ? "stability not known" : `stability ${number(steady, 2)}`;
  if (!view.nodes.has(view.chosen) || peer === view.chosen) return null;
  const link = view.links.get(`${peer}|${view.chosen}`) ?? view.links.get(`${view.chosen}|${peer}`);
  return link ? linkWords(link) : "not measured";
}

function loadOf(node) {
  const held = node.sessions ? ` · ${node.sessions} session${node.sessions === 1 ? "" : "s"}` : "";
  return `load ${percent(node.load)}${held}`;
}

export function linkWords(link) {
  const rates = link.bytes_per_s.filter((each) => each !== null);
  const words = milliseconds(link.rtt_ms);
  return rates.length ? `${words} · ${rate(Math.max(...rates))}` : words;
}

export function precision(node) {
  const weights = node.quantization === "none" ? node.dtype : node.quantization;
  return node.cache_dtype === "auto" ? weights : `${weights}, cache ${node.cache_dtype}`;
}
