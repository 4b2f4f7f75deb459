// Layout of the nodes from left to right (on a phone from top to bottom) in the order of their
// blocks. It depends on the nodes and their spans only, so that nodes do not jump.

// Widths and heights are those of the style sheet.
const CARD = { width: 168, height: 74, across: 26, along: 92 };
const TALL_CARD = { width: 150, height: 60, across: 22, along: 46 };
const SMALL_CARD = { width: 104, height: 30, across: 12, along: 44 };
export const CLIENT = "client";
export const CLIENT_CARD = { width: 110, height: 36 };
const MOST_ABREAST = { wide: 5, tall: 2 };
const MANY = 36;

// Number of nodes that must come before this one: 0 for those that hold the first blocks.
function levels(nodes) {
  const order = [...nodes].sort((a, b) => a.span[0] - b.span[0] || a.span[1] - b.span[1]);
  const ends = []; // ends[level]: the earliest end of a span on that level
  const level = new Map();
  for (const node of order) {
    let at = 0;
    while (at < ends.length && ends[at] <= node.span[0]) at += 1;
    level.set(node.peer, at);
    ends[at] = Math.min(ends[at] ?? Infinity, node.span[1]);
  }
  return level;
}

// `nodes`: [{peer, span}]. Gives {size, small, places: Map(peer -> {x, y, level})}, centres of cards.
export function place(nodes, tall, withClient) {
  const small = nodes.length > MANY;
  const size = small ? SMALL_CARD : tall ? TALL_CARD : CARD;
  const level = levels(nodes);
  const groups = new Map();
  const order = [...nodes].sort(
    (a, b) =>
      level.get(a.peer) - level.get(b.peer) ||
      a.span[0] - b.span[0] ||
      a.span[1] - b.span[1] ||
      (a.peer < b.peer ? -1 : 1),
  );
  for (const node of order) {
    const at = level.get(node.peer);
    if (!groups.has(at)) groups.set(at, []);
    groups.get(at).push(node.peer);
  }
  const across = (tall ? size.width : size.height) + size.across;
  const along = (tall ? size.height : size.width) + size.along;
  const inside = (tall ? size.height : size.width) + size.across;
  const most = Math.max(tall ? MOST_ABREAST.tall : MOST_ABREAST.wide, small ? 10 : 0);
  const places = new Map();
  let far = withClient ? along : 0;
  for (const [at, peers] of [...groups].sort((a, b) => a[0] - b[0])) {
    const lines = Math.ceil(peers.length / most);
    const abreast = Math.ceil(peers.length / lines);
    peers.forEach((peer, index) => {
      const line = Math.floor(index / abreast);
      const inLine = Math.min(abreast, peers.length - line * abreast);
      const aside = ((index % abreast) - (inLine - 1) / 2) * across;
      const ahead = far + line * inside;
      places.set(peer, { x: tall ? aside : ahead, y: tall ? ahead : aside, level: at });
    });
    far += (lines - 1) * inside + along;
  }
  return { size, small, places };
}
