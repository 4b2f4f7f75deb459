// State of the swarm from the server's event stream: everything first, then changes.

const EVENTS = "/dashboard/events";
const STATE = "/dashboard/state.json";
const SILENT_S = 15;
const PAUSES_S = [1, 1, 2, 3, 5, 8];
// Sections that only grow; the server does not report which entries it has dropped.
const GROWING = ["series"];

export class Live {
  // `changed(names)` is called with the sections that are new; `status(word)` is live, connecting,
  // lost or denied.
  constructor({ changed, status }) {
    this.sections = new Map();
    this.ahead = 0; // of the server's clock, in seconds
    this.changed = changed;
    this.status = status;
    this.failures = 0;
    this.heard = 0;
    setInterval(() => this.check(), 1000);
    this.open();
  }

  // A section's entries, as a Map since keys are untrusted ("__proto__").
  get(name) {
    return this.sections.get(name) ?? new Map();
  }

  // Time of the server in seconds since the epoch.
  now() {
    return Date.now() / 1000 + this.ahead;
  }

  open() {
    this.status(this.failures ? "lost" : "connecting");
    this.source?.close();
    this.heard = performance.now();
    this.source = new EventSource(EVENTS);
    this.source.addEventListener("clock", (event) => {
      this.heard = performance.now();
      this.ahead = Number(event.data) - Date.now() / 1000;
    });
    this.source.addEventListener("state", (event) => {
      this.failures = 0;
      this.take(JSON.parse(event.data));
      this.status("live");
    });
    this.source.addEventListener("error", () => this.lost());
  }

  // The server sends a heartbeat every few seconds; without one the connection is dead.
  check() {
    if (this.source && performance.now() - this.heard > SILENT_S * 1000) this.lost();
  }

  async lost() {
    this.source?.close();
    this.source = null;
    this.status("lost");
    const pause = PAUSES_S[Math.min(this.failures, PAUSES_S.length - 1)];
    this.failures += 1;
    await new Promise((done) => setTimeout(done, pause * 1000));
    // An EventSource does not report why it failed.
    try {
      const answer = await fetch(STATE, { method: "HEAD", redirect: "manual" });
      if (answer.status === 401 || answer.type === "opaqueredirect") {
        this.status("denied");
        location.assign("/login");
        return;
      }
      this.open();
    } catch {
      this.lost();
    }
  }

  take(news) {
    const names = Object.keys(news.sections);
    if (news.full) {
      for (const name of this.sections.keys()) if (!names.includes(name)) names.push(name);
      this.sections.clear();
    }
    for (const [name, entries] of Object.entries(news.sections)) {
      const section = this.sections.get(name) ?? new Map();
      this.sections.set(name, section);
      for (const [key, value] of Object.entries(entries)) {
        if (value === null) section.delete(key);
        else section.set(key, value);
      }
    }
    const points = this.get("about").get("points") ?? 720;
    for (const name of GROWING) {
      const section = this.get(name);
      for (const key of section.keys()) {
        if (section.size <= points) break;
        section.delete(key);
      }
    }
    this.changed(new Set(names));
  }
}
