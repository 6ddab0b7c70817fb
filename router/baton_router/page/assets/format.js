// Numbers, times and bytes as short text. A missing figure is a dash.

export const MISSING = "–";

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

export function count(value) {
  if (!known(value)) return MISSING;
  return Math.round(value).toLocaleString("en");
}

/** A rate: one decimal below 10. */
export function rate(value) {
  if (!known(value)) return MISSING;
  return value > 0 && value < 10 ? value.toFixed(1) : count(value);
}

/** Milliseconds: "3.2 ms", "420 ms", "1.25 s", "2 min 5 s". */
export function duration(ms) {
  if (!known(ms)) return MISSING;
  const size = Math.abs(ms);
  if (size < 10) return `${ms.toFixed(1)} ms`;
  if (size < 1000) return `${Math.round(ms)} ms`;
  if (size < 10000) return `${(ms / 1000).toFixed(2)} s`;
  if (size < 100000) return `${(ms / 1000).toFixed(1)} s`;
  const seconds = Math.round(ms / 1000);
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

export function share(value) {
  return known(value) ? `${Math.round(value * 100)} %` : MISSING;
}

export function bytes(value) {
  if (!known(value)) return MISSING;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let size = value;
  let unit = 0;
  while (size >= 999.5 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${unit > 0 && size < 10 ? size.toFixed(1) : Math.round(size)} ${units[unit]}`;
}

export function clock(ms) {
  return new Date(ms).toLocaleTimeString("en-GB");
}

/** "1 request", "2 requests". */
export function plural(value, word) {
  return `${count(value)} ${word}${value === 1 ? "" : "s"}`;
}

/** The first characters of a request's id and its last ones, which differ between requests. */
export function shortId(id) {
  return id.length > 16 ? `${id.slice(0, 4)}…${id.slice(-8)}` : id;
}
