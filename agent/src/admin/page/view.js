// How figures read, and how they become elements. Nothing here asks the agent.
//
// Every text goes into the document as text: names, reasons and program names of peers are never markup.

const SVG = "http://www.w3.org/2000/svg";

export const dash = "–";

export function bits(bytes) {
  let value = bytes * 8;
  for (const unit of ["bit/s", "kbit/s", "Mbit/s"]) {
    if (value < 1000) return `${short(value, unit === "bit/s" ? 0 : 1)} ${unit}`;
    value /= 1000;
  }
  return `${short(value, 2)} Gbit/s`;
}

export function bytes(count) {
  let value = count;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024) return `${short(value, unit === "B" ? 0 : 1)} ${unit}`;
    value /= 1024;
  }
  return `${short(value, 1)} TiB`;
}

function short(value, decimals) {
  return value.toFixed(value < 100 ? decimals : 0);
}

export function count(number) {
  return number.toLocaleString("en");
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

export function share(part) {
  if (part === null || part === undefined) return dash;
  const percent = part * 100;
  return `${percent === 0 ? "0" : percent < 0.01 ? "< 0.01" : percent.toFixed(percent < 10 ? 2 : 1)} %`;
}

// A time that passed: two units are enough.
export function age(seconds) {
  if (seconds === null || seconds === undefined) return dash;
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = units.findIndex(([, size]) => seconds >= size);
  if (first < 0) return "0 s";
  const [unit, size] = units[first];
  const text = `${Math.floor(seconds / size)} ${unit}`;
  const rest = units[first + 1];
  const more = rest ? Math.floor((seconds % size) / rest[1]) : 0;
  return more > 0 ? `${text} ${more} ${rest[0]}` : text;
}

// A time on the wire.
export function wait(seconds) {
  if (seconds === null || seconds === undefined) return dash;
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(seconds < 0.1 ? 1 : 0)} ms`;
  return age(seconds);
}

export function or(value, text = String) {
  return value === null || value === undefined ? dash : text(value);
}

export function make(tag, attributes = {}, ...content) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...content);
  return node;
}

// Sets a text only where it is another one, so that nothing is drawn or read out again.
export function set(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function classed(node, name) {
  if (node.className !== name) node.className = name;
}

// A list of terms: [term, text] or [term, text, class].
export function terms(list, pairs) {
  while (list.children.length > pairs.length) list.lastChild.remove();
  pairs.forEach(([term, text, name = ""], index) => {
    if (!list.children[index]) list.append(make("div", {}, make("dt"), make("dd")));
    const [dt, dd] = list.children[index].children;
    set(dt, term);
    set(dd, text);
    classed(dd, name);
  });
}

// A table that can be filled again: columns are [heading, class].
export class Table {
  constructor(title, columns, open = null) {
    this.columns = columns;
    this.body = make("tbody");
    const heads = columns.map(([head, name]) => make("th", { scope: "col", class: name ?? "" }, head));
    const table = make("table", {}, make("thead", {}, make("tr", {}, ...heads)), this.body);
    const scroll = make("div", { class: "scroll", role: "region", "aria-label": title, tabindex: "0" }, table);
    this.none = make("p", { hidden: "" }, "None.");
    if (open === null) {
      this.node = make("div", {}, make("h3", {}, title), scroll, this.none);
    } else {
      this.node = make("details", open ? { open: "" } : {}, make("summary", {}, title), scroll, this.none);
    }
    this.scroll = scroll;
  }

  // Cells are texts, or [text, class].
  fill(rows) {
    this.scroll.hidden = rows.length === 0;
    this.none.hidden = rows.length > 0;
    while (this.body.rows.length > rows.length) this.body.lastChild.remove();
    rows.forEach((cells, index) => {
      if (!this.body.rows[index]) {
        const cell = ([, name], place) => place === 0
          ? make("th", { scope: "row", class: name ?? "" }) : make("td", { class: name ?? "" });
        this.body.append(make("tr", {}, ...this.columns.map(cell)));
      }
      cells.forEach((cell, place) => {
        const [text, name = ""] = Array.isArray(cell) ? cell : [cell];
        const node = this.body.rows[index].cells[place];
        set(node, text);
        classed(node, `${this.columns[place][1] ?? ""} ${name}`.trim());
      });
    });
  }
}

function svg(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

// The way of a line over `values`, scaled to `most`; a gap where nothing is known.
function way(values, most, width, height) {
  const step = values.length > 1 ? width / (values.length - 1) : 0;
  let path = "";
  let pen = "M";
  values.forEach((value, index) => {
    if (value === null) {
      pen = "M";
      return;
    }
    const y = height - 1 - Math.min(value / most, 1) * (height - 2);
    path += `${pen}${(index * step).toFixed(1)} ${y.toFixed(1)}`;
    pen = "L";
  });
  return path;
}

// Ten minutes of one or two lines. `lines` are [name, class]; `text` says how a value reads.
export class Graph {
  constructor(title, lines, text, least) {
    Object.assign(this, { title, lines, text, least });
    this.image = svg("svg", { class: "graph", viewBox: "0 0 600 100", preserveAspectRatio: "none", role: "img" });
    for (const y of [1, 50, 99]) this.image.append(svg("path", { class: "grid", d: `M0 ${y}H600` }));
    this.paths = lines.map(([, name]) => svg("path", { class: name }));
    this.image.append(...this.paths);
    this.top = make("span");
    const names = lines.map(([line, name]) => make("span", { class: name }, line, " "));
    this.legend = make("span", {}, ...(lines.length > 1 ? names : []));
    this.node = make("figure", {},
      make("figcaption", {}, make("span", {}, title), this.legend, this.top), this.image,
      make("figcaption", { "aria-hidden": "true" }, make("span", {}, "10 min ago"), make("span", {}, "now")));
  }

  // `series` are as many lists as there are lines, each of at most `samples` values, the newest last.
  draw(series, samples) {
    const known = series.flat().filter((value) => value !== null);
    const peak = known.reduce((most, value) => Math.max(most, value), 0);
    const most = Math.max(peak, this.least);
    series.forEach((values, index) => {
      const padded = [...Array(samples - values.length).fill(null), ...values];
      this.paths[index].setAttribute("d", way(padded, most, 600, 100));
    });
    set(this.top, `top ${this.text(most)}`);
    const now = series.map((values, index) => {
      const value = values.at(-1);
      return `${this.lines[index][0]} ${value === undefined || value === null ? "unknown" : this.text(value)}`;
    });
    const label = `${this.title} of the last ten minutes: now ${now.join(", ")}; at most ${this.text(peak)}`;
    this.image.setAttribute("aria-label", label);
  }
}

// The small line in a row: digits of base 36, relative to the row's own peak.
export function trend(cell, digits) {
  if (cell.dataset.trend === digits) return;
  cell.dataset.trend = digits;
  cell.replaceChildren();
  if (!digits) return;
  const values = Array.from(digits, (digit) => parseInt(digit, 36));
  const padded = [...Array(40 - values.length).fill(null), ...values];
  const image = svg("svg", { class: "trend", viewBox: "0 0 96 20", preserveAspectRatio: "none", "aria-hidden": "true" });
  image.append(svg("path", { d: way(padded, 35, 96, 20) }));
  cell.append(image);
}
