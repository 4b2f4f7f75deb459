// SVG drawings: axes, bars and points.

const SPACE = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SPACE, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Ticks at round numbers from 0 to `most`.
export function ticks(most, about = 5) {
  if (!(most > 0)) return [0];
  const rough = most / about;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const all = [];
  for (let at = 0; at <= most * 1.0001; at += step) all.push(Number(at.toPrecision(12)));
  return all;
}

export function drawing(width, height, label) {
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
}
