// The live page of a pool: connects the stream of snapshots with what shows them.

import { call, hasKey, onKeyChange, startAccess } from "./access.js";
import { Charts } from "./charts.js";
import { Chat } from "./chat.js";
import { byId, setAttribute, setText } from "./dom.js";
import { ExplanationDialog } from "./explain.js";
import { showFigures } from "./figures.js";
import { Picture } from "./picture.js";
import { startPlanner } from "./planner.js";
import { Requests } from "./requests.js";
import { Stream } from "./stream.js";

const STORE_EVERY_MS = 5000; // how often an admin's page asks for the store's fill

const dialog = new ExplanationDialog();
const explain = (id, opener) => dialog.open(id, opener);
const picture = new Picture();
const charts = new Charts();
const requests = new Requests(explain);
const chat = new Chat(explain);
const showPlanner = startPlanner();
let store = null;
let storeAt = -Infinity;

function show(snapshot) {
  setText(byId("title"), snapshot.pool);
  setText(byId("model"), snapshot.model ?? "no model yet");
  document.title = `${snapshot.pool} – Baton`;
  chat.model = snapshot.model;
  showViewer(snapshot.viewer);
  charts.add(snapshot);
  showFigures(snapshot, charts.latest());
  picture.show(snapshot, store);
  requests.show(snapshot);
  showPlanner(snapshot);
  if (snapshot.viewer.admin && performance.now() - storeAt > STORE_EVERY_MS) askForStore();
}

function showViewer(viewer) {
  setAttribute(byId("viewer"), "hidden", !hasKey());
  setText(byId("viewer-name"), viewer.admin ? "admin" : `tenant ${viewer.tenant}`);
}

async function askForStore() {
  storeAt = performance.now();
  try {
    const response = await call("pool");
    if (response.ok) store = (await response.json()).store;
  } catch {
    // The stream of snapshots says that the router does not answer.
  }
}

startAccess();
const stream = new Stream(show);
onKeyChange(() => {
  store = null;
  storeAt = -Infinity;
  charts.clear();
  requests.clear();
  setAttribute(byId("viewer"), "hidden", true);
  stream.restart();
});
stream.restart();
