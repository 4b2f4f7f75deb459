// Playground: sends a prompt to the gateway that serves this page.

import { showHops } from "./tables.js";
import { el, number, setText, waitWords } from "./words.js";

const COMPLETIONS = "/v1/chat/completions";
const MODELS = "/v1/models";
const MOST_TEXT = 200000;
const CLOCKS_DIFFER_S = 0.25;

export class Playground {
  constructor(root) {
    this.root = root;
    this.form = root.querySelector("form");
    this.prompt = root.querySelector("#play-prompt");
    this.send = root.querySelector("#play-send");
    this.stop = root.querySelector("#play-stop");
    this.answer = root.querySelector("#play-answer");
    this.figures = root.querySelector("#play-figures");
    this.hops = root.querySelector("#play-hops");
    this.waiting = root.querySelector("#play-wait");
    this.began = Infinity; // by the server's clock
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
    });
    this.stop.addEventListener("click", () => this.asking?.abort());
  }

  // `model`: the one that the page shows; `now`: the server's clock.
  update(model, now) {
    this.model = model;
    this.now = now;
  }

  // Whether a session is that of this prompt: the first that began after it was sent.
  owns(session) {
    return session.id === this.session;
  }

  recognise(sessions) {
    if (this.session !== undefined) return;
    const later = sessions.filter((session) => session.began_at >= this.began - CLOCKS_DIFFER_S);
    this.session = later.sort((a, b) => a.began_at - b.began_at)[0]?.id;
  }

  showChain(sessions, nodes, now) {
    const mine = sessions.find((session) => this.owns(session));
    if (mine?.hops.length) showHops(this.hops, mine.hops, nodes);
    const wait = this.send.disabled ? mine?.waits_for : null;
    this.waiting.hidden = !wait;
    setText(this.waiting, wait ? waitWords(wait, nodes, now) : "");
  }

  async ask() {
    this.asking?.abort();
    const asking = new AbortController();
    this.asking = asking;
    this.answer.replaceChildren();
    this.answer.classList.remove("failed");
    this.hops.replaceChildren();
    delete this.hops.dataset.hops;
    this.session = undefined;
    this.began = this.now();
    this.send.disabled = true;
    this.stop.disabled = false;
    this.answer.setAttribute("aria-busy", "true");
    setText(this.figures, "waiting …");
    try {
      await this.stream(asking.signal);
    } catch (error) {
      if (!asking.signal.aborted) this.fail(error.message);
      else setText(this.figures, `${this.figures.textContent} · stopped`);
    } finally {
      this.send.disabled = false;
      this.stop.disabled = true;
      this.answer.setAttribute("aria-busy", "false");
    }
  }

  async stream(signal) {
    const body = {
      model: await this.modelName(signal),
      messages: [{ role: "user", content: this.prompt.value }],
      max_tokens: Number(this.form.querySelector("#play-tokens").value) || 96,
      temperature: Number(this.form.querySelector("#play-heat").value) || 0,
      stream: true,
      stream_options: { include_usage: true },
    };
    const began = performance.now();
    const answer = await fetch(COMPLETIONS, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
    if (!answer.ok) throw new Error(await reason(answer));
    let first = null;
    let pieces = 0;
    for await (const chunk of chunks(answer.body)) {
      if (chunk.error) throw new Error(chunk.error.message ?? "the gateway gave up");
      const text = chunk.choices?.[0]?.delta?.content;
      if (text) {
        first ??= performance.now();
        pieces += 1;
        this.append(text);
      }
      const tokens = chunk.usage?.completion_tokens ?? pieces;
      if (first !== null) this.tell(tokens, first - began, performance.now() - first);
    }
  }

  append(text) {
    if (this.answer.textContent.length > MOST_TEXT) return;
    const atEnd = this.answer.scrollHeight - this.answer.scrollTop - this.answer.clientHeight < 30;
    this.answer.append(el("span.token", text));
    if (atEnd) this.answer.scrollTop = this.answer.scrollHeight;
  }

  tell(tokens, firstMs, restMs) {
    const speed = tokens > 1 && restMs > 0 ? ` · ${number(((tokens - 1) * 1000) / restMs)}/s` : "";
    setText(this.figures, `${tokens} tokens${speed} · first after ${number(firstMs)} ms`);
  }

  fail(message) {
    this.answer.classList.add("failed");
    this.answer.append(el("p", message));
    setText(this.figures, "failed");
  }

  // The gateway's name of the model that the page shows.
  async modelName(signal) {
    const answer = await fetch(MODELS, { signal });
    if (!answer.ok) throw new Error(await reason(answer));
    const ids = (await answer.json()).data.map((model) => model.id);
    const { id, name } = this.model() ?? {};
    const found = ids.find((each) => each === id || each === name || each.split("/").at(-1) === name);
    if (!(found ?? ids[0])) throw new Error("the gateway serves no model");
    return found ?? ids[0];
  }
}

async function reason(answer) {
  if (answer.status === 401) location.assign("/login");
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the gateway answers with ${answer.status}`;
  }
}

// Yields the JSON of each event of a stream.
async function* chunks(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
