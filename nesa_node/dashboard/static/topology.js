// Topology view: the swarm's shape, its changes, and the resulting placements.

import { Chart } from "./charts.js";
import { barcode, diagram } from "./shapes.js";
import { clock, duration, el, named, number, setText, shortPeer, span } from "./words.js";

const EVERY_S = 15;
export const LEAST_SHAPED = 10; // nodes: the shape of fewer says nothing that their links do not
const RECENT_S = 600;
const NAMES = {
  round_trips: "round trips",
  network: "a step: half a round trip and compute",
  geography: "geography",
};

export class Topology {
  constructor(root) {
    this.$ = (id) => root.querySelector(`#${id}`);
    this.chart = new Chart(this.$("chart-distance"), "Distance to the reference", [
      { label: "distance", shade: "accent" },
      { label: "threshold", shade: "warn", dash: [6, 4] },
      { label: "fired", shade: "bad", points: true },
    ]);
    for (const id of ["filtration", "trigger"]) this.$(id).addEventListener("change", () => this.draw());
    setInterval(() => this.fetch(), EVERY_S * 1000);
  }

  visible(shown) {
    this.shown = shown;
    this.fetch();
  }

  update(model) {
    if (model === this.model) return;
    this.model = model;
    this.report = null;
    this.fetch();
  }

  restyle() {
    this.chart.restyle();
    if (this.report) this.draw();
  }

  // Stability of each node, for the graph; fetched from the first call on.
  stability() {
    if (!this.wanted) {
      this.wanted = true;
      this.fetch();
    }
    return new Map((this.report?.nodes ?? []).map((node) => [node.peer, node.stability]));
  }

  async fetch() {
    if (!(this.shown || this.wanted) || !this.model) return;
    const model = this.model;
    try {
      const answer = await fetch(`/topology.json?model=${encodeURIComponent(model)}`);
      const report = answer.ok ? await answer.json() : null;
      if (model !== this.model) return;
      this.report = report && !report.starting ? report : null;
    } catch {
      return; // the page shows that the connection is lost
    }
    if (this.report) this.draw();
    else {
      for (const id of ["shape-words", "conclusion"]) {
        setText(this.$(id), "Nothing has been measured yet; a first look takes half a minute.");
      }
    }
  }

  draw() {
    const report = this.report;
    if (!report) return;
    setText(this.$("conclusion"), conclusion(report));
    this.drawShape(report);
    this.drawDistance(report);
    this.drawActive(report);
    this.drawCost(report);
    this.drawStability(report);
  }

  drawShape(report) {
    const select = this.$("filtration");
    options(select, Object.keys(report.shapes), (key) => NAMES[key] ?? key);
    const shape = report.shapes[select.value];
    if (!shape) return;
    this.$("barcode").replaceChildren(barcode(shape));
    this.$("diagram").replaceChildren(diagram(shape));
    const [groups, rings] = shape.betti.at_median_edge;
    const words = [
      `${report.nodes.length} nodes at ${clock(report.taken_at)}`,
      `median distance ${number(shape.median_edge)} ${shape.unit}`,
      `within it ${groups} connected group${groups === 1 ? "" : "s"} and ${rings} ring${rings === 1 ? "" : "s"}`,
    ];
    if (shape.h1_nodes < shape.nodes.length) words.push(`rings of ${shape.h1_nodes} landmarks`);
    if (shape.ring_nodes < shape.h1_nodes) words.push(`their cycles through ${shape.ring_nodes} landmarks`);
    setText(this.$("shape-words"), words.join(" · "));
  }

  drawDistance(report) {
    const { at, triggers } = report.history;
    const select = this.$("trigger");
    options(select, Object.keys(triggers), (key) => (key === "shift" ? "shift: distance to the reference" : key));
    const trigger = triggers[select.value] ?? { figure: [], threshold: [], fired: [] };
    const marks = trigger.fired.map((fired, index) => (fired ? (trigger.figure[index] ?? trigger.threshold[index]) : null));
    this.chart.show(at.length ? [at, trigger.figure, trigger.threshold, marks] : [[], [], [], []]);
    const events = report.events.slice(-50).reverse();
    this.$("fired").replaceChildren(
      ...(events.length ? events : [null]).map((event) =>
        event ? el("li", el("time", clock(event.at)), el("span.badge.draining", event.trigger), el("span.words", event.reason)) : el("li.note", "No trigger has fired."),
      ),
    );
  }

  drawActive(report) {
    const active = report.active;
    facts(this.$("active"), active ? [
      ["Placement", active.name],
      ["Signed by", shortPeer(active.signer)],
      ["Strategy", active.strategy],
      ["Schema", active.schema ?? "none: planned afresh"],
      ["Trigger", active.trigger],
      ["Why", active.reason],
      ["Gain", `${number(active.gain * 100)} %`],
      ["Moves", active.moves.map((move) => `${shortPeer(move.peer)}: ${span(move.was)} to ${span(move.to)}`).join(", ") || "none"],
      ["Age", duration(report.taken_at - active.issued_at)],
    ] : [
      ["Placement", "none in force: every node has chosen its own blocks"],
      ["Strategy", report.strategy ?? "–"],
      ["Orchestrator", report.leads ? "here" : "nobody has published a plan"],
    ]);
  }

  drawCost(report) {
    const now = { ...report.parameters.now, ...(report.active?.parameters ?? {}) };
    const rows = [
      ...Object.entries(report.exponents.now).map(([name, value]) => [name.replaceAll("_", " "), number(value)]),
      ...Object.entries(now).map(([name, value]) => [name.replaceAll("_", " "), number(value)]),
    ];
    facts(this.$("cost"), rows);
    const changes = report.exponents.history.slice(-10).reverse();
    this.$("cost-history").replaceChildren(
      ...changes.map(({ at, values }) => {
        const words = Object.entries(values).map(([name, value]) => `${name.replaceAll("_", " ")} ${number(value)}`);
        return el("li", el("time", clock(at)), el("span.badge", "exponents"), el("span.words", words.join(", ")));
      }),
    );
  }

  drawStability(report) {
    this.$("stable").replaceChildren(
      ...report.nodes.slice(0, 400).map((node) => {
        const head = el("th", named(node.name || "unnamed"), " ", el("span.peer", shortPeer(node.peer)));
        head.scope = "row";
        return el("tr", head, el("td", span(node.span)), meter(node.stability), meter(node.reliability));
      }),
    );
  }
}

// Summary of the view in one sentence.
function conclusion(report) {
  const count = report.nodes.length;
  if (count < LEAST_SHAPED) {
    return `${count} nodes are too few for their shape to say more than their links do: this page is of use from ${LEAST_SHAPED} nodes on.`;
  }
  const shape = report.shapes[Object.keys(report.shapes)[0]];
  const [groups, rings] = shape ? shape.betti.at_median_edge : [1, 0];
  const form = groups === 1 ? "one connected group" : `${groups} groups that are far from one another`;
  const ring = rings ? `, with ${rings} ring${rings === 1 ? "" : "s"} of links around a gap` : "";
  const fired = (report.events ?? []).filter((event) => report.taken_at - event.at < RECENT_S);
  const change = fired.length ? `it changed ${duration(report.taken_at - fired.at(-1).at)} ago (${fired.at(-1).trigger})` : "nothing that matters has changed in the last ten minutes";
  return `The ${count} nodes form ${form}${ring}; ${change}.`;
}

function meter(value) {
  if (value === null) return el("td.note", "no history yet");
  const bar = el("span.fill");
  bar.style.width = `${Math.round(value * 100)}%`;
  return el("td", el("span.meter", bar), ` ${number(value, 2)}`);
}

function options(select, keys, words) {
  const key = keys.join("|");
  if (select.dataset.keys === key) return;
  select.dataset.keys = key;
  const chosen = select.value;
  select.replaceChildren(...keys.map((each) => {
    const option = el("option", words(each));
    option.value = each;
    return option;
  }));
  if (keys.includes(chosen)) select.value = chosen;
}

function facts(list, rows) {
  list.replaceChildren(...rows.map(([label, text]) => el("div", el("dt", label), el("dd", text))));
}
