"use strict";
// Shows a recording, of which flashsim/page_data.py says how D holds it. A page at step k is a
// function of k alone: `replay` adds up the events until then, the others show what it found.

const LAST = D.steps.length - 1;
const READ = 0, WRITE = 1, EVICT = 4;
const MOST_ROWS = 16; // of a table are shown
const MOST_RUNS = 8; // of rows of a map are told
const $ = (id) => document.getElementById(id);

function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// --- the tables of the recording ---

function whole(rows, kind) { // each was written less the last one with the same first `kind` numbers
  const last = new Map();
  return rows.map((row) => {
    const head = row.slice(0, kind), before = last.get(String(head)) ?? [];
    const rest = row.slice(kind).map((n, at) => n + (before[at] ?? 0));
    last.set(String(head), rest);
    return [...head, ...rest];
  });
}

function groups(numbers, size) {
  return Array.from({ length: numbers.length / size }, (_, n) => numbers.slice(n * size, (n + 1) * size));
}

// Of all numbers the first bytes, then the second: such bytes are alike, and deflate better.
const floats = new Float32Array(D.values.length / 4);
const bytes = new Uint8Array(floats.buffer);
D.values.forEach((byte, n) => { bytes[4 * (n % floats.length) + Math.floor(n / floats.length)] = byte; });
let offset = 0;
const arrays = D.shapes.map(([rows, columns]) => {
  const kept = columns === undefined ? 1 : Math.min(columns, D.mostColumns);
  const values = floats.subarray(offset, (offset += rows * kept));
  return { rows, columns, kept, at: (r, c = 0) => (r < rows && c < kept ? values[r * kept + c] : undefined) };
});

const allEvents = whole(D.events, 2).map(([kind, name, elements, r0, r1, c0, c1]) => ({ kind, name, elements, r0, r1, c0, c1 }));
const places = whole(D.places, 0).map(([name, row0, column0, ofQueries]) => ({ name, row0, column0, ofQueries }));
const steps = whole(D.steps, 2).map(([fn, line, chip, many, ...rest]) => ({
  fn, line,
  events: rest.slice(0, many).map((n) => allEvents[n]),
  changed: groups(rest.slice(many), 3).map(([place, value, right]) => ({
    ...places[place], text: D.texts[~value], array: arrays[value], right: arrays[right], // one of text and array
  })),
  held: D.chips[chip].map((n) => D.held[n]), // [name, size] of each tile
}));
const turns = whole(D.turns, 0).map(([first, stop, label, ...cells]) => ({ first, stop, label: D.texts[label], cells: groups(cells, 4) }));

const size = (step) => step.held.reduce((sum, [, n]) => sum + n, 0);
const peak = Math.max(0, ...steps.map(size));

// An HBM array that is read, or written, has a panel; its cells are rows, or elements where tiles
// cut both sides.
const panels = [READ, WRITE].flatMap((kind) =>
  D.hbm.map(([name, rows, columns, ofQueries]) => {
    const events = allEvents.filter((e) => e.name === name && e.r1 !== undefined);
    const cut = events.some((e) => e.c1 - e.c0 < columns);
    return { kind, name, rows, columns, ofQueries, cut, wide: cut ? columns : 1, used: events.some((e) => e.kind === kind) };
  }).filter((p) => p.used));

function replay(k) {
  const now = { read: 0, written: 0, loads: [], before: new Map() };
  for (const p of panels) (p.counts = new Uint16Array(p.rows * p.wide)), (p.elements = 0), (p.touched = []);
  for (let n = 0; n <= k; n++) {
    for (const e of steps[n].events) {
      if (e.kind === READ) (now.read += e.elements), now.loads.push(e);
      if (e.kind === WRITE) now.written += e.elements;
      if (e.kind === EVICT) {
        const last = now.loads.findLastIndex((load) => load.name === e.name);
        if (last >= 0) now.loads.splice(last, 1);
      }
      const p = panels.find((panel) => panel.kind === e.kind && panel.name === e.name);
      if (!p) continue;
      p.elements += e.elements;
      if (n === k) p.touched.push(e);
      if (!e.elements) continue; // a first touch that costs nothing
      const [from, to] = p.cut ? [e.c0, e.c1] : [0, 1];
      for (let r = e.r0; r < e.r1; r++)
        for (let c = from; c < to; c++) p.counts[r * p.wide + c]++;
    }
    if (n < k) for (const x of steps[n].changed) now.before.set(x.name, x);
  }
  return now;
}

replay(LAST);
const most = [READ, WRITE].map((kind) =>
  Math.max(1, ...panels.filter((p) => p.kind === kind).map((p) => p.counts.reduce((a, b) => Math.max(a, b), 0))));

// --- numbers and names ---

function short(x, digits = 4) {
  if (x === undefined) return "none";
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x < 0 ? "−∞" : "∞";
  const size = Math.abs(x);
  const text = x === 0 ? "0" : size < 1e-3 || size >= 1e5 ? x.toExponential(2) : String(Number(x.toPrecision(digits)));
  return text.replaceAll("-", "−");
}
const exact = (x) => (x === undefined ? "none" : Number.isFinite(x) && x !== 0 ? x.toPrecision(9) : String(x));
const count = (n) => n.toLocaleString("en");
const often = (n) => ["never", "once", "twice"][n] ?? `${n} times`;
const rowsFrom = (first, stop) => (stop - first === 1 ? `row ${first}` : `rows ${first} to ${stop - 1}`);
const close = (x, right) => Object.is(x, right) || x === right || Math.abs(x - right) <= D.close * Math.abs(right);

function fillNumber(cell, x, right, isCompared) {
  cell.title = exact(x);
  cell.append(short(x));
  if (isCompared && !close(x, right)) {
    cell.classList.add("wrong");
    cell.title += `; right: ${exact(right)}`;
    cell.append(element("small", {}, `right ${short(right)}`));
  }
  return cell;
}

function region(e) {
  const name = D.names[e.name];
  if (e.r1 === undefined) return name;
  const [, rows, columns] = D.hbm.find(([array]) => array === e.name);
  const all = e.c1 - e.c0 === columns;
  if (all && e.r1 - e.r0 === rows) return name;
  return all ? `${name}[${e.r0}:${e.r1}]` : `${name}[${e.r0}:${e.r1}, ${e.c0}:${e.c1}]`;
}

// --- the parts of the page ---

const lines = new Map(); // "function line": its row in the source
function buildSource() {
  const words = /\b(def|for|in|if|elif|else|return|while|try|except|raise|with|break|continue|None)\b/;
  D.source.forEach(([name, first, texts], fn) => {
    if (fn) $("source").append(element("div", { className: "line" }, element("span"), element("span", {}, " ")));
    let inDocstring = false;
    texts.forEach((text, n) => {
      const code = element("span", { style: `--indent: ${text.length - text.trimStart().length}` });
      const quotes = text.split('"""').length - 1;
      if (inDocstring || quotes) code.append(element("i", {}, text || " "));
      else {
        const comment = text.search(/(^|\s)#/);
        const body = comment < 0 ? text : text.slice(0, comment);
        body.split(words).forEach((part, odd) => code.append(odd % 2 ? element("b", {}, part) : part));
        if (comment >= 0) code.append(element("i", {}, text.slice(comment)));
        if (!text) code.append(" ");
      }
      if (quotes % 2) inDocstring = !inDocstring;
      const row = element("div", { className: "line" }, element("span", {}, String(first + n)), code);
      const right = D.rightLines.find(([f, line]) => f === name && line === first + n);
      lines.set(`${fn} ${first + n}`, row);
      $("source").append(row);
      if (right) {
        row.classList.add("fault");
        $("source").append(element("div", { className: "line right" }, element("span", {}, "right"),
          element("span", { style: code.getAttribute("style") }, right[2])));
      }
    });
  });
}

function showSource(step) {
  document.querySelector(".line.on")?.classList.remove("on");
  document.querySelector(".line[aria-current]")?.removeAttribute("aria-current");
  const row = lines.get(`${step.fn} ${step.line}`), box = $("source");
  row.classList.add("on");
  row.setAttribute("aria-current", "step");
  const above = row.offsetTop - box.scrollTop, below = above + row.offsetHeight - box.clientHeight;
  const spare = box.clientHeight / 4;
  if (above < spare || below > -spare) box.scrollTop = row.offsetTop - 2 * spare;
}

function showDeed(k) {
  const verbs = ["Reads", "Writes", "Places", "Replaces", "Evicts"], step = steps[k];
  const box = $("did");
  const [, first, texts] = D.source[step.fn]; // the text, for those who do not see the marked line
  box.replaceChildren(`Step ${k}, line ${step.line}`, element("span", { className: "unseen" }, `: ${texts[step.line - first].trim()}`), ". ");
  verbs.forEach((verb, kind) => {
    const events = step.events.filter((e) => e.kind === kind);
    if (!events.length) return;
    const elements = events.reduce((sum, e) => sum + e.elements, 0);
    const amount = kind === EVICT ? "" : `, ${count(elements)} element${elements === 1 ? "" : "s"}`;
    box.append(`${verb} `, element("b", {}, events.map(region).join(", ")), `${amount}. `);
  });
  const changed = step.changed.map((x) => D.names[x.name]);
  if (changed.length) box.append("Changes ", element("b", {}, changed.join(", ")), ".");
  else if (!step.events.length) box.append("Changes no array or number.");
}

function ink(colour) { // black or white, whichever reads better on it
  const [r, g, b] = [1, 3, 5].map((n) => (parseInt(colour.slice(n, n + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#000" : "#fff";
}

function showChip(step) {
  const full = D.budget ?? peak, used = size(step);
  const fresh = new Set(step.events.filter((e) => e.kind < EVICT && e.kind !== WRITE).map((e) => e.name));
  const amount = D.budget === null ? `${count(used)} ${D.unit}; no budget, peak ${count(peak)}` : `${count(used)} of ${count(full)} ${D.unit}`;
  $("used").textContent = amount;
  const tiles = step.held;
  $("sram").setAttribute("aria-label", `On chip: ${amount}`);
  $("sram").replaceChildren(...tiles.map(([name, n]) => {
    const colour = D.colours[name];
    return element("span", {
      className: fresh.has(name) ? "new" : "", title: `${D.names[name]}: ${n} ${D.unit}`,
      style: `width: ${(100 * n) / full}%; background: ${colour}; color: ${ink(colour)}`,
    }, D.names[name]);
  }));
  $("tiles").replaceChildren(...tiles.map(([name, n]) =>
    element("li", {}, element("span", { className: "swatch", style: `background: ${D.colours[name]}` }), `${D.names[name]} ${count(n)}`)));
}

function showTraffic(now) {
  const total = now.read + now.written, whole = D.closedForm ?? total;
  const standard = D.standard ? D.standard[0] + D.standard[1] : 0;
  const full = Math.max(whole, standard, total, 1);
  const bar = (label, read, written, outline, sum) => element("div", { className: "bar" },
    element("p", {}, element("b", {}, label), element("span", {}, `${count(read)} read + ${count(written)} written = `, element("b", {}, sum))),
    element("div", { className: "track", "aria-hidden": "true" },
      element("span", { className: "reads", style: `width: ${(100 * read) / full}%` }),
      element("span", { className: "writes", style: `width: ${(100 * written) / full}%` }),
      element("span", { className: "all", style: `width: ${(100 * outline) / full}%` })));
  const goal = D.closedForm === null ? "" : total === D.closedForm ? ", as the closed form says" : ` of ${count(D.closedForm)}`;
  const bars = [bar("So far", now.read, now.written, whole, count(total) + goal)];
  if (D.standard) bars.push(bar("Standard attention", ...D.standard, standard, count(standard)));
  $("traffic").replaceChildren(...bars);
}

// --- the memory map ---

const tall = Math.max(1, ...panels.map((p) => p.rows));
const cell = Math.max(tall > 96 ? 1 : 2, Math.min(16, Math.floor(104 / tall)));
const MARGIN = 12; // for the marks beside the rows

function buildMap() {
  for (const p of panels) {
    p.width = p.cut ? p.columns * cell : Math.max(10, Math.min(44, p.columns * cell));
    p.canvas = element("canvas", { role: "img" });
    p.caption = element("figcaption");
    const ratio = window.devicePixelRatio || 1, width = MARGIN + p.width + 2, height = p.rows * cell + 4;
    Object.assign(p.canvas, { width: width * ratio, height: height * ratio });
    Object.assign(p.canvas.style, { width: `${width}px`, height: `${height}px` });
    const rowAt = (event) => Math.max(0, Math.min(p.rows - 1, Math.floor((event.offsetY - 2) / cell)));
    p.canvas.addEventListener("pointermove", (event) => {
      const r = rowAt(event), times = p.counts[r * p.wide + (p.cut ? Math.max(0, Math.min(p.wide - 1, Math.floor((event.offsetX - MARGIN) / cell))) : 0)];
      p.canvas.title = `${D.names[p.name]}, row ${r}: ${p.kind === READ ? "read" : "written"} ${times} time${times === 1 ? "" : "s"}`;
    });
    if (p.ofQueries && D.rows) {
      p.canvas.classList.add("pick");
      p.canvas.addEventListener("click", (event) => follow(rowAt(event)));
    }
    $(p.kind === READ ? "map-read" : "map-write").append(element("figure", {}, p.canvas, p.caption));
  }
}

function mixed(from, to, share) {
  const parts = [from, to].map((c) => [1, 3, 5].map((n) => parseInt(c.slice(n, n + 2), 16)));
  return `rgb(${parts[0].map((x, n) => Math.round(x + (parts[1][n] - x) * share)).join(" ")})`;
}

function colours() {
  const style = getComputedStyle(document.documentElement), get = (name) => style.getPropertyValue(`--${name}`).trim();
  const heat = (kind, times) => {
    const name = kind === READ ? "read" : "write";
    if (!times) return get("untouched");
    return mixed(get(`${name}-few`), get(`${name}-most`), most[kind] === 1 ? 1 : (times - 1) / (most[kind] - 1));
  };
  return { ink: get("ink"), row: get("mark-edge"), page: get("card"), heat: [READ, WRITE].map((kind) => Array.from({ length: most[kind] + 1 }, (_, times) => heat(kind, times))) };
}

function inWords(p) { // what the map shows: each row counts as its part that was touched most often
  const times = Array.from({ length: p.rows }, (_, r) => p.counts.subarray(r * p.wide, (r + 1) * p.wide).reduce((a, b) => Math.max(a, b), 0));
  const starts = times.flatMap((n, r) => (n === times[r - 1] ? [] : [r]));
  const runs = starts.map((r, n) => `${rowsFrom(r, starts[n + 1] ?? p.rows)} ${often(times[r])}`);
  const shown = runs.length > MOST_RUNS ? [...runs.slice(0, MOST_RUNS), `and so on, at most ${often(Math.max(...times))}`] : runs;
  const touched = p.touched.map((e) => `; in this step ${rowsFrom(e.r0, e.r1)}`);
  return `${D.names[p.name]}, ${p.kind === READ ? "read" : "written"} so far: ${[...shown, `${p.elements} elements`].join(", ")}${touched.join("")}`;
}

function showMap(now) {
  const colour = colours();
  for (const p of panels) {
    const paper = p.canvas.getContext("2d"), ratio = p.canvas.width / parseFloat(p.canvas.style.width);
    const gap = cell >= 5 ? 1 : 0, across = p.width / p.wide, rowsOf = (e) => [2 + e.r0 * cell, (e.r1 - e.r0) * cell - gap];
    paper.setTransform(ratio, 0, 0, ratio, 0, 0);
    paper.clearRect(0, 0, p.canvas.width, p.canvas.height);
    for (let r = 0; r < p.rows; r++)
      for (let c = 0; c < p.wide; c++) {
        paper.fillStyle = colour.heat[p.kind][p.counts[r * p.wide + c]];
        paper.fillRect(MARGIN + c * across, 2 + r * cell, across - (p.cut ? gap : 0), cell - gap);
      }
    paper.fillStyle = colour.ink;
    for (const e of now.loads.filter((load) => load.name === p.name)) {
      const [top, height] = rowsOf(e);
      paper.fillRect(MARGIN - 5, top, 3, height);
    }
    paper.strokeStyle = colour.ink;
    paper.lineWidth = 2;
    for (const e of p.touched) {
      const [top, height] = rowsOf(e), left = p.cut ? e.c0 * across : 0, right = p.cut ? e.c1 * across - gap : p.width;
      paper.strokeRect(MARGIN + left, top, right - left, height);
    }
    if (p.ofQueries && D.rows) {
      const middle = 2 + (row + 0.5) * cell;
      paper.fillStyle = colour.row;
      paper.beginPath();
      paper.moveTo(0, middle - 5), paper.lineTo(7, middle), paper.lineTo(0, middle + 5);
      paper.fill();
    }
    p.canvas.setAttribute("aria-label", inWords(p));
    p.caption.replaceChildren(element("b", {}, D.names[p.name]), ` ${count(p.elements)}`);
  }
  for (const [kind, id] of [[READ, "reads"], [WRITE, "writes"]]) {
    const shown = most[kind] <= 7 ? [...Array(most[kind] + 1).keys()] : [0, 1, ...[2, 3, 4, 5].map((n) => Math.round((most[kind] * n) / 5))];
    $(id).replaceChildren(`${kind === READ ? "read" : "written"}: 0 `, element("span", { className: "scale", "aria-hidden": "true" },
      ...shown.map((times) => element("span", { style: `background: ${colour.heat[kind][times]}` }))),
      element("span", { className: "unseen" }, "to "), `${most[kind]} time${most[kind] === 1 ? "" : "s"}`);
  }
}

// --- the followed row ---

let row = D.row;
let twoLines = false; // a turn has: what it made of O is below, where there is no room beside
const BESIDE = ["m_old", "m_new", "factor", "tile's factor", "l"];

function follow(chosen) {
  row = Math.max(0, Math.min(D.rows - 1, Math.round(chosen) || 0));
  $("followed").value = row;
  fitRow();
  show();
}

function fitRow() {
  twoLines = false;
  showRow(LAST); // when it has all its numbers
  twoLines = $("turns").scrollWidth > $("turns").clientWidth;
}

function stateCell(tag, [, step, x, y], r, k) { // of row r of array x, beside which y is right
  const values = arrays[x], right = arrays[y];
  const cell = element(tag, step === k ? { className: "new-value" } : {});
  if (values.columns === undefined) return fillNumber(cell, values.at(r), right?.at(r), right !== undefined);
  const some = [...Array(Math.min(4, values.kept)).keys()];
  cell.title = some.map((c) => exact(values.at(r, c))).join(" ");
  cell.append(some.map((c) => short(values.at(r, c), 3)).join("  ") + (values.columns > some.length ? " …" : ""));
  if (right !== undefined && some.some((c) => !close(values.at(r, c), right.at(r, c)))) {
    cell.classList.add("wrong");
    cell.append(element("small", {}, `right ${some.map((c) => short(right.at(r, c), 3)).join("  ")}`));
  }
  return cell;
}

function showTurn({ first, label, cells }, beside, below, k) {
  const last = (column) => cells.findLast(([c, step]) => c === column && step <= k);
  const shown = (tag, column) => (last(column) ? stateCell(tag, last(column), row - first, k) : element(tag, { className: "none" }, "·"));
  const line = (...all) => element("tr", cells.some(([, step]) => step === k) ? { className: "mine", "aria-current": "true" } : {}, ...all);
  const has = (column) => cells.some(([c]) => c === column);
  const lines = !twoLines || beside.some(has) ? [beside.map((column) => shown("td", column))] : [];
  if (below.some(has)) {
    const named = below.filter(has).map((column) => element("span", {}, element("small", {}, D.columns[column]), " ", shown("span", column)));
    lines.push([element("td", { className: "below", colSpan: beside.length || 1 }, ...named)]);
  }
  const name = label.split(/(?<=_)/).flatMap((part) => [part, element("wbr")]);
  return lines.map((tds, n) => line(...(n ? [] : [element("th", { scope: "row", rowSpan: lines.length }, ...name)]), ...tds));
}

function showRow(k) {
  const isBeside = (column) => !twoLines || BESIDE.includes(D.columns[column]);
  const beside = [...D.columns.keys()].filter(isBeside), below = [...D.columns.keys()].filter((column) => !isBeside(column));
  const head = element("tr", {}, ...["tile", ...beside.map((column) => D.columns[column])].map((name) => element("th", { scope: "col" }, name)));
  const body = turns.filter(({ first, stop }) => first <= row && row < stop).flatMap((turn) => showTurn(turn, beside, below, k));
  $("turns").replaceChildren(element("table", { className: twoLines ? "two-lines" : "" }, element("thead", {}, head), element("tbody", {}, ...body)));
}

// --- the values that changed ---

function valueTable(x, before) {
  const { rows, columns, kept } = x.array;
  const same = before?.array && before.row0 === x.row0 && before.array.rows === rows && before.array.columns === columns;
  const isNew = (r, c) => same && !Object.is(x.array.at(r, c), before.array.at(r, c));
  let changes = 0;
  for (let r = 0; r < rows; r++) for (let c = 0; c < kept; c++) changes += isNew(r, c);
  const marked = changes > 0 && changes < rows * kept;
  const mine = x.ofQueries ? row - Math.max(0, x.row0) : -1;
  const first = Math.max(0, Math.min(rows - MOST_ROWS, mine < 0 || mine >= rows ? 0 : mine - MOST_ROWS / 2));
  const shown = [...Array(Math.min(rows, MOST_ROWS)).keys()].map((r) => first + r);
  const label = (start, n) => element("th", { scope: start === "col" ? "col" : "row" }, String(n));
  const value = (r, c) => fillNumber(element("td", { className: marked && isNew(r, c) ? "new-value" : "" }), x.array.at(r, c), x.right?.at(r, c), x.right !== undefined);
  const table = element("table");
  const rowLabel = (r) => Math.max(0, x.row0) + r;
  if (columns === undefined) { // a vector lies down, its places are its head
    table.append(element("thead", {}, element("tr", {}, ...shown.map((r) => label("col", rowLabel(r))))),
      element("tbody", {}, element("tr", {}, ...shown.map((r) => { const cell = value(r, 0); if (r === mine) cell.classList.add("mine"); return cell; }))));
  } else {
    const across = [...Array(kept).keys()];
    table.append(element("thead", {}, element("tr", {}, element("td"), ...across.map((c) => label("col", Math.max(0, x.column0) + c)))),
      element("tbody", {}, ...shown.map((r) => element("tr", { className: r === mine ? "mine" : "" }, label("row", rowLabel(r)), ...across.map((c) => value(r, c))))));
  }
  const shape = columns === undefined ? `${rows}` : `${rows} × ${columns}`;
  const parts = [shape];
  if (shown.length < rows) parts.push(`rows ${rowLabel(first)} to ${rowLabel(first + shown.length - 1)} shown`);
  if (kept < columns) parts.push(kept === 1 ? "first column shown" : `first ${kept} columns shown`);
  if (changes) parts.push(`${marked ? `${changes} of ${rows * kept}` : "all"} differ from before`);
  return [element("small", {}, ` ${parts.join(", ")}`), element("div", { className: "scroll", tabIndex: 0, role: "group", "aria-label": `Values of ${D.names[x.name]}` }, table)];
}

function showValues(step, now) {
  const shown = step.changed.map((x) => {
    const name = element("code", {}, D.names[x.name]);
    if (x.text !== undefined) return element("div", { className: "value" }, element("p", {}, name, ` = ${x.text}`));
    const [about, table] = valueTable(x, now.before.get(x.name));
    return element("div", { className: "value" }, element("p", {}, name, about), table);
  });
  $("changed").replaceChildren(...(shown.length ? shown : [element("p", { className: "none" }, "No array or number.")]));
}

// --- playing ---

let k = 0, timer = 0;

function show() {
  const step = steps[k], now = replay(k);
  showSource(step), showDeed(k), showChip(step), showTraffic(now), showMap(now), showRow(k), showValues(step, now);
  $("slider").value = k;
  $("slider").setAttribute("aria-valuetext", `step ${k} of ${LAST}, line ${step.line}`);
  $("position").textContent = `${k} / ${LAST}`;
  $("back").setAttribute("aria-disabled", k === 0); // not disabled: that would lose the focus
  $("forward").setAttribute("aria-disabled", k === LAST);
}

function go(to) {
  k = Math.max(0, Math.min(LAST, to));
  show();
  if (k === LAST) pause();
}

function pause() {
  clearTimeout(timer);
  timer = 0;
  document.body.classList.remove("playing");
  $("play").setAttribute("aria-label", "Play");
  $("did").setAttribute("aria-live", "polite");
}

function play() {
  document.body.classList.add("playing");
  $("play").setAttribute("aria-label", "Pause");
  $("did").setAttribute("aria-live", "off"); // or a reader would never be done
  const tick = () => { timer = setTimeout(() => { tick(); go(k + 1); }, 1000 / Number($("speed").value)); };
  if (k === LAST) go(0);
  tick();
}

const toggle = () => (timer ? pause() : play());
const step = (by) => { pause(); go(k + by); };

$("back").addEventListener("click", () => step(-1));
$("forward").addEventListener("click", () => step(1));
$("play").addEventListener("click", toggle);
$("slider").addEventListener("input", () => { pause(); go(Number($("slider").value)); });
$("followed").addEventListener("change", () => follow(Number($("followed").value)));

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const on = event.target, isField = on.matches("select, input[type=number]");
  if (event.key === " ") {
    if (isField || on.matches("button, summary")) return; // it has a use for it
  } else if (isField) return;
  const deeds = { ArrowRight: () => step(1), ArrowLeft: () => step(-1), Home: () => step(-k), End: () => step(LAST), " ": toggle };
  if (!deeds[event.key]) return;
  event.preventDefault();
  deeds[event.key]();
});

let touch = null;
$("code").addEventListener("touchstart", (event) => { touch = event.changedTouches[0]; }, { passive: true });
$("code").addEventListener("touchend", (event) => {
  const end = event.changedTouches[0], x = end.clientX - touch.clientX, y = end.clientY - touch.clientY;
  if (Math.abs(x) > 40 && Math.abs(x) > 2 * Math.abs(y)) step(x < 0 ? 1 : -1);
});

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
addEventListener("resize", () => { fitRow(); showRow(k); });

$("subtitle").textContent = D.subtitle;
$("note").textContent = D.note;
$("note").hidden = !D.note;
$("slider").max = LAST;
$("followed").max = D.rows - 1;
$("followed").value = row;
$("row").hidden = !D.rows;
$("memory").hidden = !D.hbm.length;
buildSource();
buildMap();
fitRow();
go(0);
