// The API key: requests carry it, and the form appears when the router answers 401.
// The key is kept in sessionStorage only, which the browser forgets with the tab.

import { byId, setText } from "./dom.js";

const STORED = "baton-api-key";
const listeners = [];

export const hasKey = () => sessionStorage.getItem(STORED) !== null;

/** Call `listener` when the key changes. */
export function onKeyChange(listener) {
  listeners.push(listener);
}

/** A request to the router, at a path relative to the page. Shows the form if the key is wrong. */
export async function call(path, options = {}) {
  const key = sessionStorage.getItem(STORED);
  const headers = { ...options.headers };
  if (key !== null) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (response.status === 401) askForKey(key !== null);
  return response;
}

/** The router's error message, and when to try again. */
export async function problem(response) {
  const body = await response.json().catch(() => null);
  const message = body?.error?.message;
  const text = typeof message === "string" ? message : `The router answered ${response.status}.`;
  const wait = response.headers.get("retry-after");
  return wait === null ? text : `${text} (try again in ${wait} s)`;
}

function askForKey(wrong) {
  const form = byId("access");
  setText(byId("access-problem"), wrong ? "The router does not know this key." : "");
  if (!form.hidden) return;
  form.hidden = false;
  byId("key").focus();
}

function changed() {
  for (const listener of listeners) listener();
}

export function startAccess() {
  byId("access").addEventListener("submit", (event) => {
    event.preventDefault();
    const field = byId("key");
    sessionStorage.setItem(STORED, field.value.trim());
    field.value = "";
    byId("access").hidden = true;
    byId("pool").focus({ preventScroll: true });
    changed();
  });
  byId("forget").addEventListener("click", () => {
    sessionStorage.removeItem(STORED);
    changed();
  });
}
