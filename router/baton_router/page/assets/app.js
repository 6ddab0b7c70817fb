// Shows the snapshots of GET pool/events as they are.
const state = document.getElementById("state");
const shown = document.getElementById("snapshot");
const events = new EventSource("pool/events");
events.addEventListener("snapshot", (event) => {
  state.textContent = "Connected.";
  shown.textContent = JSON.stringify(JSON.parse(event.data), null, 2);
});
events.addEventListener("error", () => {
  state.textContent = "The router does not answer.";
});
