// Formats numbers and creates elements. Text from the network becomes text, never markup.

export function duration(seconds) {
  const s = Math.max(0, seconds);
  if (s < 120) return `${Math.round(s)} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  if (s < 172800) return `${Math.round(s / 3600)} h`;
  return `${Math.round(s / 86400)} d`;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (Math.abs(value) >= 100) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

export function bytes(value) {
  return scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
}

export function flop(value) {
  return scaled(value, 1000, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"]);
}

function scaled(value, factor, units) {
  if (value === null || value === undefined) return "–";
  let unit = 0;
  while (value >= factor && unit < units.length - 1) {
    value /= factor;
    unit += 1;
  }
  return `${number(value)} ${units[unit]}`;
}

export function rate(bytesPerS) {
  return bytesPerS === null || bytesPerS === undefined ? "–" : `${number(bytesPerS / 1e6)} MB/s`;
}

export function milliseconds(ms) {
  return ms === null || ms === undefined ? "–" : `${number(ms, 2)} ms`;
}

export function percent(share) {
  return `${Math.round(share * 100)} %`;
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString("en-GB");
}

// Describes how many nodes hold each block. `runs`: [start, end, holders].
export function coverage(runs) {
  const held = runs.map((run) => run[2]);
  const [least, most] = [Math.min(...held), Math.max(...held)];
  const nodes = `${most} node${most === 1 ? "" : "s"}`;
  return least === most ? `by ${nodes} each` : `by ${least} to ${nodes} each`;
}

// Describes a session's wait as `nesa_node/core/wait_tracking.py` does, with the nodes' names.
export function waitWords(wait, nodes, now) {
  const named = (word, items) => (items.length ? `${word}${items.length > 1 ? "s" : ""} ${items.join(", ")}` : "");
  const blocks = wait.blocks.map(span).join(", ");
  const waited = Math.max(0, Math.round(now - wait.since));
  const limit = wait.limit_s && waited <= wait.limit_s ? `${waited} s of at most ${wait.limit_s} s` : `${waited} s so far`;
  const details = [blocks && `blocks ${blocks}`, named("node", wait.peers.map((peer) => nameOf(nodes, peer))), limit];
  return `waiting for ${wait.what}: ${details.filter(Boolean).join(", ")}`;
}

export function span([start, end]) {
  return `${start}:${end}`;
}

export function shortPeer(peer) {
  return `…${peer.slice(-6)}`;
}

export function nameOf(nodes, peer) {
  return nodes.get(peer)?.name || shortPeer(peer);
}

// el("td.n", "text", el("b")): creates an element with classes and children.
export function el(what, ...children) {
  const [tag, ...classes] = what.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  element.append(...children);
  return element;
}

// Isolates a name, which may be written from right to left, from the text beside it.
export function named(text) {
  return el("bdi", text);
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Gives `parent` one element per key, in the order of `keys`, and reuses present ones.
export function keyed(parent, keys, make, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let before = null;
  for (const key of keys) {
    let child = old.get(key);
    if (child) old.delete(key);
    else {
      child = make(key);
      child.dataset.key = key;
    }
    update(child, key);
    const place = before ? before.nextSibling : parent.firstChild;
    if (place !== child) parent.insertBefore(child, place);
    before = child;
  }
  for (const gone of old.values()) gone.remove();
}
