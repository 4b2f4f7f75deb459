// Line charts over time, or over steps, drawn by uPlot in the theme's colours.

import uPlot from "./vendor/uplot/uPlot.esm.js";
import { colour } from "./theme.js";
import { el, number, setText } from "./words.js";

const HEIGHT = 190;
const FONT = "12px system-ui, sans-serif";

// Shows seconds only if ticks differ by them.
function timeOf(at, apart) {
  const seconds = apart < 60 ? { second: "2-digit" } : {};
  return new Date(at * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", ...seconds });
}

export class Chart {
  // `lines`: [{label, shade, dash, points}]; `title` is the label for screen readers. `steps`: the
  // axis has plain numbers in place of times.
  constructor(box, title, lines, { steps = false } = {}) {
    Object.assign(this, { box, title, lines, steps });
    this.data = [[], ...lines.map(() => [])];
    this.values = lines.map(() => el("b"));
    this.legend = el("p.legend");
    lines.forEach((line, index) => {
      const key = el("span.line", el(`span.swatch.${line.shade}${line.dash ? ".dashed" : ""}`), `${line.label} `, this.values[index]);
      this.legend.append(key);
    });
    this.canvas = el("div.canvas");
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", `${title}. Nothing yet`);
    this.empty = el("p.empty", "Nothing to draw yet");
    box.append(this.canvas, this.empty, this.legend);
    new ResizeObserver(() => this.plot?.setSize({ width: this.canvas.clientWidth, height: HEIGHT })).observe(this.canvas);
    this.restyle();
  }

  show(data) {
    this.data = data;
    const drawn = data.slice(1).some((column) => column.some((value) => value !== null));
    this.empty.hidden = drawn;
    this.plot.setData(data);
    const last = data.slice(1).map((column) => column.findLast((value) => value !== null) ?? null);
    this.values.forEach((value, index) => setText(value, number(last[index])));
    const now = this.lines.map((line, index) => `${line.label} ${number(last[index])}`);
    this.canvas.setAttribute("aria-label", `${this.title}. Last: ${now.join(", ")}`);
  }

  restyle() {
    this.plot?.destroy();
    const axis = {
      stroke: colour("muted"),
      font: FONT,
      grid: { stroke: colour("line"), width: 1 },
      ticks: { show: false },
    };
    this.plot = new uPlot(
      {
        width: this.canvas.clientWidth || 300,
        height: HEIGHT,
        // Room for half a label at the last tick.
        padding: [null, 24, null, null],
        legend: { show: false },
        cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
        scales: { x: { time: !this.steps }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.15 : 1] } },
        axes: [
          { ...axis, size: 30, space: 76, values: (_, places) => places.map((at) => (this.steps ? number(at, 6) : timeOf(at, places[1] - places[0]))) },
          { ...axis, size: 46, values: (_, ticks) => ticks.map((tick) => number(tick)) },
        ],
        series: [
          {},
          ...this.lines.map((line) => ({
            label: line.label,
            stroke: colour(line.shade),
            width: 2,
            dash: line.dash,
            points: { show: Boolean(line.points), size: 7, fill: colour(line.shade) },
            paths: line.points ? () => null : undefined,
            spanGaps: false,
          })),
        ],
      },
      this.data,
      this.canvas,
    );
  }
}
