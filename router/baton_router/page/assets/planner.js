// What only an admin sees: the planner's decisions with their reasons, and the calls of tenants.

import { byId, setAttribute, table } from "./dom.js";
import { clock, count } from "./format.js";

export function startPlanner() {
  const number = (title, cell) => ({ title, number: true, cell });
  const holder = (section) => byId(section).querySelector(".scroll");
  const decisions = table(holder("planner"), "Decisions, the newest first", [
    { title: "At", cell: (decision) => clock(decision.at_ms) },
    number("Prefill", (decision) => count(decision.prefill)),
    number("Decode", (decision) => count(decision.decode)),
    { title: "Reason", cell: (decision) => decision.reason },
  ], (decision) => `${decision.at_ms} ${decision.reason}`, "No decision yet.");
  const tenants = table(holder("tenants"), "Calls of each tenant", [
    { title: "Tenant", cell: (tenant) => tenant.name },
    number("With a node", (tenant) => count(tenant.running)),
    number("Waiting", (tenant) => count(tenant.waiting)),
  ], (tenant) => tenant.name, "No tenant has a call.");
  return (snapshot) => {
    const named = snapshot.tenants.filter((tenant) => tenant.name !== "");
    setAttribute(byId("planner"), "hidden", snapshot.decisions.length === 0);
    setAttribute(byId("tenants"), "hidden", named.length === 0);
    decisions(snapshot.decisions);
    tenants(named);
  };
}
