// The pool's snapshots, one per second. Connects again with growing pauses, says so, and pauses
// while nobody sees the tab.

import { call, problem } from "./access.js";
import { byId, setAttribute, setText } from "./dom.js";
import { events } from "./events.js";

const FIRST_PAUSE_S = 0.5;
const LONGEST_PAUSE_S = 15;
// The router sends one snapshot per second: after this time without one the connection is dead.
const SILENCE_MS = 6000;

export class Stream {
  #onSnapshot;
  #abort = null;
  #timer = null;
  #pause = FIRST_PAUSE_S;

  constructor(onSnapshot) {
    this.#onSnapshot = onSnapshot;
    document.addEventListener("visibilitychange", () => this.restart());
  }

  /** Connect now, unless the tab is hidden. */
  restart() {
    this.#abort?.abort();
    clearInterval(this.#timer);
    setText(byId("countdown"), "");
    if (document.visibilityState === "hidden") {
      show("paused", "Paused");
      return;
    }
    this.#run(new AbortController());
  }

  async #run(abort) {
    this.#abort = abort;
    let reason;
    let silence;
    const expectMore = () => {
      clearTimeout(silence);
      silence = setTimeout(() => abort.abort("silent"), SILENCE_MS);
    };
    try {
      expectMore();
      const response = await call("pool/events", { signal: abort.signal });
      if (response.status === 401) {
        show("locked", "Waiting for a key");
        return;
      }
      if (!response.ok) throw new Error(await problem(response));
      for await (const event of events(response)) {
        expectMore();
        if (event.name !== "snapshot") continue;
        this.#onSnapshot(JSON.parse(event.data));
        this.#pause = FIRST_PAUSE_S;
        show("live", "Live");
      }
      reason = "The router ended the stream.";
    } catch (error) {
      if (abort.signal.aborted && abort.signal.reason !== "silent") return;
      reason = error instanceof TypeError || error === "silent"
        ? "The router does not answer."
        : error.message;
    } finally {
      clearTimeout(silence);
    }
    if (this.#abort === abort) this.#reconnectLater(reason);
  }

  #reconnectLater(reason) {
    const seconds = this.#pause * (0.75 + Math.random() / 2);
    this.#pause = Math.min(this.#pause * 2, LONGEST_PAUSE_S);
    show("lost", `Reconnecting. ${reason}`);
    const until = performance.now() + seconds * 1000;
    const tick = () => {
      const left = until - performance.now();
      if (left <= 0) this.restart();
      else setText(byId("countdown"), `in ${Math.ceil(left / 1000)} s`);
    };
    this.#timer = setInterval(tick, 250);
    tick();
  }
}

function show(state, text) {
  setAttribute(byId("connection"), "data-state", state);
  setText(byId("connection-text"), text);
}
