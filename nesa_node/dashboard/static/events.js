// List of events, the newest first.

import { clock, el, keyed, named, shortPeer } from "./words.js";

const SHOWN = 150;

export class EventList {
  constructor(list) {
    this.list = list;
  }

  show(events) {
    const newest = [...events.keys()].map(Number).sort((a, b) => b - a).slice(0, SHOWN);
    keyed(this.list, newest.map(String), (key) => item(events.get(key)), () => {});
    // Screen readers announce only later events.
    const log = this.list.parentElement;
    if (events.size && log.getAttribute("aria-live") === "off") {
      requestAnimationFrame(() => log.setAttribute("aria-live", "polite"));
    }
  }
}

function item(event) {
  const time = el("time", clock(event.at));
  time.dateTime = new Date(event.at * 1000).toISOString();
  const words = el("span.words");
  if (event.peer) words.append(named(event.name || shortPeer(event.peer)), " ");
  words.append(event.text);
  if (event.peer) words.firstChild.className = "who";
  return el("li", time, el(`span.badge.${event.kind}`, event.kind), words);
}
