// The chat: streams /v1/chat/completions, and shows which nodes served each answer, its longest
// pause, and what the loss of a node did to it.

import { call, problem } from "./access.js";
import { byId, element, setAttribute, setText } from "./dom.js";
import { events } from "./events.js";
import { explanationOf, takeovers } from "./explain.js";
import { duration, plural } from "./format.js";
import { nodesText } from "./requests.js";

const LONG_PAUSE_MS = 1000; // from here on the chat says that it waits
const TICK_MS = 200;
const AT_END = 40; // pixels from the end of the messages at which they follow the answer
// The explanation of a call that has ended is complete a moment after its stream.
const EXPLAIN_TRIES = 5;
const EXPLAIN_PAUSE_MS = 200;

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export class Chat {
  #history = [];
  #abort = null;
  #model = null;
  #explain;

  /** `explain(id, button)` opens the explanation. */
  constructor(explain) {
    this.#explain = explain;
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    byId("question").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    byId("stop").addEventListener("click", () => this.#abort?.abort());
    byId("restart").addEventListener("click", () => this.#restart());
    this.#showEmpty();
  }

  /** `model`: what the pool serves now. */
  set model(model) {
    this.#model = model;
  }

  #showEmpty() {
    byId("messages").replaceChildren(element("p", { class: "muted empty" }, "Ask the pool something. Each answer says which nodes served it."));
  }

  #restart() {
    this.#abort?.abort();
    this.#history = [];
    this.#showEmpty();
    byId("question").focus();
  }

  #send() {
    const field = byId("question");
    const text = field.value.trim();
    if (text === "" || this.#abort !== null) return;
    field.value = "";
    if (this.#history.length === 0) byId("messages").replaceChildren();
    this.#history.push({ role: "user", content: text });
    append(element("article", { class: "message user", "aria-label": "You" }, element("p", { class: "text" }, text)));
    this.#answer();
  }

  async #answer() {
    const history = this.#history;
    const abort = (this.#abort = new AbortController());
    const answer = new Answer();
    append(answer.holder);
    this.#showBusy(true);
    const timer = setInterval(() => setText(byId("progress"), answer.progress()), TICK_MS);
    try {
      await answer.read(await this.#ask(abort.signal), abort.signal);
    } catch (error) {
      answer.fail(abort.signal.aborted ? null : error);
    }
    clearInterval(timer);
    setText(byId("progress"), answer.failed ? "The answer failed." : "");
    // After "New chat" there is another history.
    if (history === this.#history) {
      if (answer.text !== "") history.push({ role: "assistant", content: answer.text });
      if (answer.failed) answer.offerRetry(() => this.#retry(answer));
    }
    this.#abort = null;
    this.#showBusy(false);
    await answer.explain(this.#explain);
  }

  #ask(signal) {
    const system = byId("system").value.trim();
    const messages = system === "" ? this.#history : [{ role: "system", content: system }, ...this.#history];
    const body = {
      messages,
      stream: true,
      stream_options: { include_usage: true },
      max_tokens: Number(byId("length").value) || 256,
    };
    if (this.#model !== null) body.model = this.#model;
    const headers = { "Content-Type": "application/json" };
    return call("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  }

  #retry(answer) {
    if (this.#abort !== null) return;
    answer.holder.remove();
    if (this.#history.at(-1)?.role === "assistant") this.#history.pop();
    this.#answer();
  }

  #showBusy(busy) {
    const focused = document.activeElement === byId("stop");
    setAttribute(byId("stop"), "hidden", !busy);
    setAttribute(byId("send"), "disabled", busy);
    if (!busy && focused) byId("question").focus();
  }
}

/** One answer: its text as it comes, and what happened to it. */
class Answer {
  text = "";
  failed = false;
  #id = null;
  #began = performance.now();
  #lastAt = null;
  #firstMs = null;
  #longestMs = 0;
  #tokens = null;
  #finished = false;
  #stopped = false;
  #nodes = "";
  #body = element("p", { class: "text" });
  #thought = element("p", { class: "text thought", hidden: true });
  #events = element("div");
  #meta = element("p", { class: "meta muted" });
  holder = element("article", { class: "message answer", "aria-label": "Answer", "aria-busy": "true" }, this.#thought, this.#body, this.#events, this.#meta);

  async read(response, signal) {
    this.#id = response.headers.get("x-baton-request-id");
    if (!response.ok) throw new Error(await problem(response));
    this.#nodes = placedNodes(response.headers.get("x-baton-placement"));
    this.#showMeta();
    for await (const event of events(response)) {
      if (event.data === "[DONE]") break;
      this.#take(JSON.parse(event.data));
    }
    signal.throwIfAborted();
    if (!this.#finished) throw new Error("The stream ended before the answer did.");
    this.#end();
  }

  #take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) this.#tokens = chunk.usage.completion_tokens;
    const choice = chunk.choices?.[0];
    if (choice === undefined) return;
    const thought = choice.delta?.reasoning ?? choice.delta?.reasoning_content ?? "";
    const text = choice.delta?.content ?? "";
    if (text !== "" || thought !== "") this.#note();
    this.#thought.append(thought);
    if (thought !== "") this.#thought.hidden = false;
    this.text += text;
    following(() => this.#body.append(text));
    if (choice.finish_reason) this.#finished = true;
  }

  #note() {
    const now = performance.now();
    if (this.#lastAt === null) {
      this.#firstMs = now - this.#began;
      this.#showMeta();
    } else this.#longestMs = Math.max(this.#longestMs, now - this.#lastAt);
    this.#lastAt = now;
  }

  /** What the answer waits for now, "" if its tokens come. */
  progress() {
    const silent = performance.now() - (this.#lastAt ?? this.#began);
    if (this.#finished || silent < LONG_PAUSE_MS) return this.#lastAt === null ? "Waiting for the first token" : "Answering";
    const what = this.#lastAt === null ? "first" : "next";
    return `Waiting for the ${what} token since ${duration(silent)}`;
  }

  #end() {
    setAttribute(this.holder, "aria-busy", null);
    this.#body.normalize();
    this.#showMeta();
  }

  /** `error`: null if the user stopped the answer. */
  fail(error) {
    this.#stopped = error === null;
    this.failed = error !== null;
    if (error !== null) {
      const text = error instanceof TypeError ? "The router does not answer." : error.message;
      this.#events.append(element("p", { class: "problem", role: "alert" }, text));
    }
    this.#end();
  }

  offerRetry(retry) {
    const button = element("button", { type: "button" }, "Try again");
    button.addEventListener("click", retry);
    this.#events.append(button);
  }

  #showMeta() {
    const parts = [this.#nodes, this.#tokens === null ? "" : plural(this.#tokens, "token")];
    if (this.#firstMs !== null) parts.push(`first token ${duration(this.#firstMs)}`);
    if (this.#longestMs > 0) parts.push(`longest pause ${duration(this.#longestMs)}`);
    if (this.#stopped) parts.push("stopped");
    following(() => setText(this.#meta, parts.filter((part) => part !== "").join(" · ")));
  }

  /** Show what the router knows of the finished call. */
  async explain(open) {
    if (this.#id === null) return;
    let explanation = null;
    try {
      for (let tries = 0; tries < EXPLAIN_TRIES; tries += 1) {
        explanation = await explanationOf(this.#id);
        if (explanation.state !== "running") break;
        await sleep(EXPLAIN_PAUSE_MS);
      }
    } catch {
      return; // another router behind the same address has served the call
    }
    const attempts = explanation.requests.flatMap((request) => request.attempts);
    const last = attempts.at(-1);
    if (last !== undefined) this.#nodes = nodesText(last.prefill, last.decode);
    this.#tokens = explanation.completion_tokens;
    this.#showMeta();
    const sentences = takeovers(explanation, this.#finished);
    const button = element("button", { type: "button", class: "link", "data-request": this.#id }, "Why there?");
    button.addEventListener("click", () => open(this.#id, button));
    following(() => {
      this.#events.prepend(...sentences.map((text) => element("p", { class: "takeover" }, text)));
      this.#meta.append(" · ", button);
    });
  }
}

/** The nodes in x-baton-placement: "prefill=NODE decode=NODE reason=...". */
function placedNodes(header) {
  const found = /^prefill=(\S+) decode=(\S+) /.exec(header ?? "");
  if (found === null) return "";
  const [prefill, decode] = found.slice(1).map((node) => (node === "-" ? null : node));
  return nodesText(prefill, decode);
}

function append(message) {
  following(() => byId("messages").append(message));
}

/** Change the messages, and keep their end in view if it was. */
function following(change) {
  const list = byId("messages");
  const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < AT_END;
  change();
  if (atEnd) list.scrollTop = list.scrollHeight;
}
