// Barcode and persistence diagram of one filtration.

import { drawing, svg, ticks } from "./svg.js";
import { number } from "./words.js";

const WIDTH = 520;
const HEIGHT = 300;
const EDGE = { left: 44, right: 16, top: 14, bottom: 38 };
const MOST_BARS = 60;

// The largest finite scale; classes that never die are drawn a little beyond.
function furthest(shape) {
  const ends = [...shape.h0.bars, ...shape.h1.bars].flatMap(([birth, death]) => [birth, death ?? 0]);
  return Math.max(...ends, 0) || 1;
}

function frame(shape, label) {
  const most = furthest(shape) * 1.12;
  const picture = drawing(WIDTH, HEIGHT, label);
  const x = (value) => EDGE.left + ((WIDTH - EDGE.left - EDGE.right) * Math.min(value, most)) / most;
  const y = (value) => HEIGHT - EDGE.bottom - ((HEIGHT - EDGE.top - EDGE.bottom) * Math.min(value, most)) / most;
  for (const tick of ticks(most)) {
    picture.append(
      svg("line", { class: "grid", x1: x(tick), x2: x(tick), y1: EDGE.top, y2: HEIGHT - EDGE.bottom }),
      svg("text", { x: x(tick), y: HEIGHT - EDGE.bottom + 16, "text-anchor": "middle" }, number(tick)),
    );
  }
  picture.append(svg("text", { class: "unit", x: WIDTH - EDGE.right, y: HEIGHT - 6, "text-anchor": "end" }, shape.unit));
  return { picture, x, y, most };
}

export function barcode(shape) {
  const bars = [
    ...shape.h0.bars.map((bar) => ["h0", ...bar]),
    ...shape.h1.bars.map((bar) => ["h1", ...bar]),
  ];
  const words = `${shape.h0.bars.length} bars of connected groups, ${shape.h1.bars.length} of rings`;
  const { picture, x, most } = frame(shape, words);
  const room = (HEIGHT - EDGE.top - EDGE.bottom) / Math.max(Math.min(bars.length, MOST_BARS), 6);
  bars.slice(0, MOST_BARS).forEach(([kind, birth, death], index) => {
    const at = EDGE.top + room * (index + 0.5);
    const end = death ?? most;
    picture.append(svg("line", {
      class: `bar ${kind}${death === null ? " forever" : ""}`,
      x1: x(birth), x2: Math.max(x(end), x(birth) + 1.5), y1: at, y2: at,
      "stroke-width": Math.max(1.5, Math.min(7, room * 0.6)),
    }));
  });
  return picture;
}

export function diagram(shape) {
  const { picture, x, y, most } = frame(shape, "Persistence diagram: birth to the right, death upwards");
  picture.append(svg("line", { class: "diagonal", x1: x(0), y1: y(0), x2: x(most), y2: y(most) }));
  for (const tick of ticks(most).slice(1)) {
    picture.append(svg("text", { x: EDGE.left - 8, y: y(tick) + 4, "text-anchor": "end" }, number(tick)));
  }
  for (const kind of ["h0", "h1"]) {
    for (const [birth, death] of shape[kind].bars) {
      const at = { cx: x(birth), cy: y(death ?? most), r: 4.5 };
      picture.append(svg("circle", { class: `dot ${kind}${death === null ? " forever" : ""}`, ...at }));
    }
  }
  return picture;
}
