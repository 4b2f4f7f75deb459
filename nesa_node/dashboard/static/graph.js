// The swarm as a graph: Cytoscape draws links and chains on a canvas, below the nodes' cards.

import cytoscape from "./vendor/cytoscape/cytoscape.esm.min.mjs";
import { linkWords, showCards } from "./cards.js";
import { styleSheet } from "./graph_style.js";
import { CLIENT, place } from "./layout.js";

export const CHAIN_COLOURS = ["chain-2", "chain-3", "chain-4", "chain-5", "chain-6", "chain-1"];
const NARROW = 640;
const MOST_CHAINS = 12;
const MOST_LINKS = 150;
// Distance of a chain's return line from the nodes, and between two return lines.
const LANE = { first: 22, next: 7 };
const MARGIN = 2 * 18;
const HEIGHT = { least: 150, most: 620 };
export const ZOOM = { least: 0.2, most: 2, fit: 1.15, step: 1.25 };

export class Graph {
  constructor({ box, edges, cards, empty, choose }) {
    Object.assign(this, { box, cards, empty, choose });
    this.nodes = new Map();
    this.links = new Map();
    this.sessions = [];
    this.allLinks = false;
    this.stability = null; // Map(peer -> 0 to 1), where cards show that instead of load
    this.chosen = null;
    this.shape = "";
    this.cy = cytoscape({
      container: edges,
      style: [],
      autoungrabify: true,
      autounselectify: true,
      boxSelectionEnabled: false,
      userZoomingEnabled: false,
      userPanningEnabled: false,
      minZoom: ZOOM.least,
      maxZoom: ZOOM.most,
    });
    this.cy.on("viewport", () => this.follow());
    this.restyle();
    new ResizeObserver(() => this.resized()).observe(box);
  }

  // `nodes`: Map(peer -> entry) of one model; `links`: Map("a|b" -> entry); `sessions`: with chain.
  show(nodes, links, sessions, now) {
    Object.assign(this, { nodes, links, sessions });
    this.empty.hidden = nodes.size > 0;
    this.arrange();
    showCards(this.cards, this.layout, this, now);
    this.drawEdges();
  }

  resized() {
    this.cy.resize();
    this.shape = "";
    this.arrange();
    // The routes of return lines depend on the places.
    this.drawEdges();
    this.fit();
  }

  zoom(factor) {
    const middle = { x: this.box.clientWidth / 2, y: this.box.clientHeight / 2 };
    this.cy.zoom({ level: this.cy.zoom() * factor, renderedPosition: middle });
    this.cy.userPanningEnabled(true);
    this.box.classList.add("movable");
  }

  fit() {
    this.cy.userPanningEnabled(false);
    this.box.classList.remove("movable");
    const { size, places } = this.layout ?? {};
    if (!places?.size) return;
    const { left, top, right, bottom } = this.edgesOf(places, size);
    const lanes = this.keepsClient ? LANE.first + 3 * LANE.next : 0;
    const width = right - left + (this.tall ? lanes : 0);
    const height = bottom - top + (this.tall ? 0 : lanes);
    const scale = Math.min(
      (this.box.clientWidth - MARGIN) / width,
      (this.box.clientHeight - MARGIN) / height,
      ZOOM.fit,
    );
    this.cy.viewport({
      zoom: scale,
      pan: {
        x: (this.box.clientWidth - width * scale) / 2 - left * scale,
        y: (this.box.clientHeight - height * scale) / 2 - top * scale,
      },
    });
  }

  edgesOf(places, size) {
    const xs = [...places.values()].map((at) => at.x);
    const ys = [...places.values()].map((at) => at.y);
    return {
      left: Math.min(...xs) - size.width / 2,
      top: Math.min(...ys) - size.height / 2,
      right: Math.max(...xs) + size.width / 2,
      bottom: Math.max(...ys) + size.height / 2,
    };
  }

  follow() {
    const { x, y } = this.cy.pan();
    this.cards.style.transform = `translate(${x}px, ${y}px) scale(${this.cy.zoom()})`;
  }

  // Computes places again if nodes, spans or the window's shape have changed.
  arrange() {
    const tall = this.box.clientWidth < NARROW;
    const client = this.sessions.length > 0 || this.keepsClient;
    this.keepsClient = client;
    const spans = [...this.nodes].map(([peer, node]) => ({ peer, span: node.span }));
    const shape = JSON.stringify([tall, client, spans.map((each) => [each.peer, each.span]).sort()]);
    if (shape === this.shape) return;
    this.shape = shape;
    this.layout = place(spans, tall, client);
    this.tall = tall;
    if (client) this.layout.places.set(CLIENT, { x: 0, y: 0, level: -1 });
    this.box.classList.toggle("tall", tall);
    const wanted = new Set(this.layout.places.keys());
    this.cy.batch(() => {
      this.cy.nodes().filter((node) => !wanted.has(node.id())).remove();
      for (const [id, { x, y }] of this.layout.places) {
        const known = this.cy.getElementById(id);
        if (known.length) known.position({ x, y });
        else this.cy.add({ group: "nodes", data: { id }, position: { x, y } });
      }
    });
    this.restyle();
    this.setHeight();
    this.fit();
  }

  // Sets the height that the nodes need, at most that of the screen.
  setHeight() {
    const { size, places } = this.layout;
    if (!places.size) return;
    const { left, top, right, bottom } = this.edgesOf(places, size);
    const lanes = this.keepsClient ? LANE.first + 3 * LANE.next : 0;
    const width = right - left + (this.tall ? lanes : 0);
    const scale = Math.min((this.box.clientWidth - MARGIN) / width, ZOOM.fit);
    const wanted = (bottom - top + (this.tall ? 0 : lanes)) * scale + MARGIN;
    this.box.style.height = `${Math.round(Math.max(HEIGHT.least, Math.min(wanted, HEIGHT.most)))}px`;
    this.cy.resize();
  }

  drawEdges() {
    const wanted = new Map([...this.linkEdges(), ...this.chainEdges()].map((edge) => [edge.data.id, edge]));
    this.cy.batch(() => {
      this.cy.edges().filter((edge) => !wanted.has(edge.id())).remove();
      for (const [id, edge] of wanted) {
        const known = this.cy.getElementById(id);
        if (known.length) {
          known.data(edge.data);
          known.classes(edge.classes);
        } else this.cy.add({ group: "edges", ...edge });
      }
    });
  }

  *linkEdges() {
    const there = (peer) => this.nodes.has(peer) && !["lost", "failing"].includes(this.nodes.get(peer).state);
    const shown = [];
    for (const [key, link] of this.links) {
      const [a, b] = key.split("|");
      if (!there(a) || !there(b)) continue;
      const ofChosen = this.chosen === a || this.chosen === b;
      if (ofChosen || this.allLinks || follows(this.nodes.get(a).span, this.nodes.get(b).span)) {
        shown.push({ key, a, b, link, ofChosen });
      }
    }
    shown.sort((one, other) => other.ofChosen - one.ofChosen || one.link.rtt_ms - other.link.rtt_ms);
    const roomy = this.roomForLabels(shown);
    const crossed = this.linksOfChains();
    for (const each of shown.slice(0, MOST_LINKS)) {
      const { key, a, b, link, ofChosen } = each;
      const [from, to] = this.nodes.get(a).span[0] <= this.nodes.get(b).span[0] ? [a, b] : [b, a];
      // Round trips from the chosen node are on the other nodes' cards.
      const free = roomy(each) && !crossed.has(key);
      const label = !this.chosen && free && !this.layout.small && !this.allLinks;
      yield {
        data: {
          id: `link ${key}`, source: from, target: to, aside: this.aside(from, to),
          label: label ? linkWords(link).replace(" · ", "\n") : "",
        },
        classes: `link${ofChosen ? " asked" : ""}`,
      };
    }
  }

  // Keys of links that are part of a chain, with lines that would cross the label.
  linksOfChains() {
    const shown = this.sessions.slice(-MOST_CHAINS);
    const pairs = shown.flatMap(({ hops }) => hops.slice(1).map(([peer], at) => [hops[at][0], peer]));
    return new Set(pairs.flatMap(([a, b]) => [`${a}|${b}`, `${b}|${a}`]));
  }

  // Offset of a link's label from the middle of its line: in the gap between two rows of cards,
  // above a horizontal line, and on the outer side of a vertical one.
  aside(from, to) {
    if (!this.tall) return { x: 0, y: -13 };
    const [a, b] = [this.layout.places.get(from), this.layout.places.get(to)];
    return { x: a.x + b.x < 0 ? -38 : 38, y: 0 };
  }

  // Labels fit on links that leave one node, or meet in one, since those fan out.
  roomForLabels(shown) {
    const level = (peer) => this.layout.places.get(peer).level;
    const gap = ({ a, b }) => [level(a), level(b)].sort().join("-");
    const ends = new Map();
    for (const each of shown) {
      const fan = ends.get(gap(each)) ?? new Map();
      ends.set(gap(each), fan);
      for (const peer of [each.a, each.b]) {
        if (!fan.has(level(peer))) fan.set(level(peer), new Set());
        fan.get(level(peer)).add(peer);
      }
    }
    return (each) => {
      const sizes = [...ends.get(gap(each)).values()].map((peers) => peers.size);
      return sizes.length === 1 ? sizes[0] === 2 : Math.min(...sizes) === 1 && Math.max(...sizes) <= 4;
    };
  }

  *chainEdges() {
    for (const [lane, session] of this.sessions.slice(-MOST_CHAINS).entries()) {
      const stops = [CLIENT, ...session.hops.map(([peer]) => peer), CLIENT];
      const lit = session.lit ? " lit" : "";
      for (let hop = 0; hop + 1 < stops.length; hop += 1) {
        const [source, target] = [stops[hop], stops[hop + 1]];
        if (!this.layout.places.has(source) || !this.layout.places.has(target)) continue;
        if (source === target) continue;
        const id = `chain ${session.id} ${hop} ${source} ${target}`;
        const data = { id, source, target, shade: session.colour };
        const back = hop + 2 === stops.length;
        if (back) data.way = this.wayBack(source, target, lane);
        yield { data, classes: `chain${lit}${back ? " answer" : ""}` };
      }
    }
  }

  // Route below all nodes (on a phone: right of them), as distances from the straight line.
  wayBack(source, target, lane) {
    const { size, places } = this.layout;
    const { right, bottom } = this.edgesOf(places, size);
    const aside = (this.tall ? right : bottom) + LANE.first / 2 + lane * LANE.next;
    const [from, to] = [places.get(source), places.get(target)];
    const corner = (at) => (this.tall ? { x: aside, y: at.y } : { x: at.x, y: aside });
    const [dx, dy] = [to.x - from.x, to.y - from.y];
    const length = Math.hypot(dx, dy) || 1;
    const corners = [corner(from), corner(to)].map(({ x, y }) => ({
      weight: ((x - from.x) * dx + (y - from.y) * dy) / length ** 2,
      distance: ((y - from.y) * dx - (x - from.x) * dy) / length,
    }));
    return {
      weights: corners.map(({ weight }) => weight),
      distances: corners.map(({ distance }) => distance),
    };
  }

  restyle() {
    this.cy.style(styleSheet(this.layout?.size ?? { width: 10, height: 10 }));
  }
}

// Whether a chain could go from one of two spans to the other.
function follows(one, other) {
  const [a, b] = one[0] <= other[0] ? [one, other] : [other, one];
  return a[0] < b[0] && b[0] <= a[1] && a[1] < b[1];
}
