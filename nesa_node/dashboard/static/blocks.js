// Block map: the number of serving nodes that hold each block.

import { coverage, el, setText } from "./words.js";

const MOST_CELLS = 64;
const DEEPEST = 4;
const LEAST_LABELLED = 15; // pixels

export function showBlocks(strip, axis, words, model) {
  const runs = model?.runs ?? [];
  const blocks = model?.num_blocks ?? 0;
  const room = Math.floor(strip.clientWidth / 50) * 50;
  const key = JSON.stringify([room, runs]);
  if (strip.dataset.runs !== key) {
    strip.dataset.runs = key;
    strip.replaceChildren(...cells(runs, blocks).map((cell) => draw(cell, blocks, room)));
    axis.replaceChildren(...marks(blocks).map((at) => mark(at, blocks)));
  }
  setText(words, inWords(runs, blocks));
}

// One cell per block for small models, one per run of equal holders for deep ones.
function cells(runs, blocks) {
  if (blocks > MOST_CELLS) return runs;
  return runs.flatMap(([start, end, held]) =>
    Array.from({ length: end - start }, (_, index) => [start + index, start + index + 1, held]),
  );
}

function draw([start, end, held], blocks, room) {
  const cell = el(`div.cell.held-${Math.min(held, DEEPEST)}`);
  cell.style.flexGrow = end - start;
  const which = end - start === 1 ? `block ${start}` : `blocks ${start}:${end}`;
  cell.title = `${which}: ${held === 0 ? "no" : held} ${held === 1 ? "node" : "nodes"}`;
  if (((end - start) / blocks) * room > LEAST_LABELLED) cell.append(String(held));
  return cell;
}

function marks(blocks) {
  if (!blocks) return [];
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000].find((each) => blocks / each <= 8);
  const all = [];
  for (let at = 0; at < blocks; at += step) all.push(at);
  return all;
}

function mark(at, blocks) {
  const element = el("span", String(at));
  element.style.left = `${(100 * at) / blocks}%`;
  return element;
}

export function holesOf(model) {
  return (model?.runs ?? []).filter(([, , held]) => held === 0);
}

function inWords(runs, blocks) {
  if (!runs.length) return "";
  const holes = runs.filter(([, , held]) => held === 0).map(([start, end]) => `${start}:${end}`);
  if (holes.length) {
    const more = holes.length > 4 ? ` and ${holes.length - 4} more` : "";
    return `No node holds blocks ${holes.slice(0, 4).join(", ")}${more}`;
  }
  return `All ${blocks} blocks are held, ${coverage(runs)}`;
}
