// Cytoscape style of links and chains, in the theme's colours.

import { CLIENT, CLIENT_CARD } from "./layout.js";
import { colour } from "./theme.js";

// `size`: of the cards, which hide the nodes on the canvas.
export function styleSheet({ width, height }) {
  const surface = colour("surface");
  return [
    { selector: "node", style: { shape: "round-rectangle", width, height, opacity: 0, events: "no" } },
    { selector: `node#${CLIENT}`, style: CLIENT_CARD },
    {
      selector: "edge.link",
      style: {
        width: 1.2,
        "line-color": colour("link"),
        "curve-style": "straight",
        label: "data(label)",
        color: colour("muted"),
        "font-family": "system-ui, sans-serif",
        "font-size": 11,
        "text-wrap": "wrap",
        "text-background-color": surface,
        "text-background-opacity": 1,
        "text-background-padding": 2,
        // Beside the line, so that no chain crosses it.
        "text-margin-x": (edge) => edge.data("aside").x,
        "text-margin-y": (edge) => edge.data("aside").y,
        events: "no",
      },
    },
    { selector: "edge.asked", style: { "line-color": colour("accent"), color: colour("text"), width: 2, "z-index": 5 } },
    {
      selector: "edge.chain",
      style: {
        width: 2.5,
        "line-color": (edge) => colour(edge.data("shade")),
        "target-arrow-color": (edge) => colour(edge.data("shade")),
        "target-arrow-shape": "triangle",
        "arrow-scale": 0.9,
        "curve-style": "bezier",
        "control-point-step-size": 26,
        "z-index": 10,
        events: "no",
      },
    },
    {
      selector: "edge.answer",
      style: {
        "curve-style": "round-segments",
        "edge-distances": "node-position",
        "segment-weights": (edge) => edge.data("way").weights,
        "segment-distances": (edge) => edge.data("way").distances,
        "segment-radii": 14,
        "line-style": "dashed",
        "line-dash-pattern": [5, 5],
        width: 1.5,
      },
    },
    {
      selector: "edge.lit",
      style: {
        width: 4,
        "underlay-color": (edge) => colour(edge.data("shade")),
        "underlay-opacity": 0.22,
        "underlay-padding": 5,
        "z-index": 20,
      },
    },];
}
