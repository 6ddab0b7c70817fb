// Makes and updates elements. Text is always a text node, so names, prompts and answers of others
// are never read as HTML.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** A new HTML element. `attributes` sets properties that start with "on" as listeners. */
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** A new SVG element. */
export function shape(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else setAttribute(node, name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Set an attribute if it differs; null removes it. */
export function setAttribute(node, name, value) {
  if (value === null || value === undefined || value === false) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
  } else if (node.getAttribute(name) !== String(value)) {
    node.setAttribute(name, value === true ? "" : value);
  }
}

/** Set the text if it differs, so that selections and screen readers are not disturbed. */
export function setText(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

/**
 * Make `parent` have one child per item, in order. A child is kept for as long as its item's key
 * stays: `make(item)` makes it, `update(child, item)` brings it up to date.
 */
export function keyed(parent, items, keyOf, make, update) {
  const children = (parent.keyedChildren ??= new Map());
  const keys = new Set(items.map(keyOf));
  for (const [key, child] of children) {
    if (!keys.has(key)) {
      child.remove();
      children.delete(key);
    }
  }
  let next = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    let child = children.get(key);
    if (child === undefined) children.set(key, (child = make(item)));
    if (child === next) next = next.nextSibling;
    else parent.insertBefore(child, next);
    update(child, item);
  }
}

/**
 * A table that is updated in place. `columns`: {title, number, cell(item), only()}; a cell is text,
 * or an element if the column has `make(item)`, which is called once per row.
 */
export function table(parent, caption, columns, keyOf, empty) {
  const head = element("tr");
  const body = element("tbody");
  const note = element("p", { class: "muted empty" }, empty);
  const whole = element(
    "table", {}, element("caption", { class: "unseen" }, caption), element("thead", {}, head), body,
  );
  parent.append(whole, note);
  let shown = "";
  const make = () => element("tr");
  return (items, visible = columns) => {
    const titles = visible.map((column) => column.title).join("|");
    if (titles !== shown) {
      shown = titles;
      head.replaceChildren(...visible.map(heading));
      body.replaceChildren();
      body.keyedChildren = new Map();
    }
    setAttribute(whole, "hidden", items.length === 0);
    setAttribute(note, "hidden", items.length > 0);
    keyed(body, items, keyOf, make, (row, item) => updateRow(row, item, visible));
  };
}

function heading(column) {
  return element("th", { scope: "col", class: column.number ? "number" : null }, column.title);
}

function updateRow(row, item, columns) {
  columns.forEach((column, place) => {
    let cell = row.children[place];
    if (cell === undefined) {
      cell = element("td", { class: column.number ? "number" : null });
      if (column.make) cell.append(column.make(item));
      row.append(cell);
    }
    if (column.update) column.update(cell, item);
    else if (!column.make) setText(cell, column.cell(item));
  });
}
