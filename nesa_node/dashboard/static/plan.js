// Pieces of a network that is no language model: what each takes, and which have nodes.

import { cell } from "./tables.js";
import { bytes, el, flop, keyed, number, setText } from "./words.js";

export function showPlan({ panel, words, body }, plan, model) {
  panel.hidden = !plan || !model;
  if (panel.hidden) return;
  const { pieces } = plan;
  setText(words, `For ${requestWords(plan)} in ${plan.dtype}; work and bytes of one request`);
  const most = Math.max(...pieces.map(([, work]) => work));
  keyed(body, pieces.map((_, index) => String(index)), row, (element, key) => {
    const [operations, work, weights, received, sent] = pieces[key];
    const nodes = holders(model.runs, Number(key));
    element.className = nodes ? "" : "lost";
    const texts = [key, number(operations), null, bytes(weights), bytes(received), bytes(sent), nodes || "none"];
    texts.forEach((text, index) => text !== null && setText(element.children[index], String(text)));
    const [label, track] = element.children[2].children;
    setText(label, flop(work));
    track.firstChild.style.width = `${most ? (100 * work) / most : 0}%`;
  });
}

function requestWords({ batch, tokens, image_size: pixels }) {
  const item = pixels ? `images of ${pixels} pixels, texts of ${tokens} tokens` : `texts of ${tokens} tokens`;
  return `${batch} ${batch === 1 ? "item" : "items"} (${item})`;
}

function holders(runs, piece) {
  const run = runs.find(([start, end]) => start <= piece && piece < end);
  return run ? run[2] : 0;
}

function row() {
  const head = el("th");
  head.scope = "row";
  const bar = cell("Work");
  bar.append(el("span.words"), el("span.track", el("span.held")));
  return el("tr", head, cell("Operations", "n"), bar, cell("Weights", "n"), cell("Receives", "n"), cell("Sends", "n"), cell("Nodes", "n"));
}
