// The page of a profile: a timeline on a canvas, and a table; each shows what is chosen in the other.

const rows = data.rows;
const blocks = data.timeline;
const end = Math.max(1, ...blocks.map((b) => Math.max(b.cpu_start + b.cpu, b.gpu_start + b.gpu)));

function microseconds(value) {
  return value.toLocaleString("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
}

function percent(value) {
  return (100 * value).toFixed(1) + "%";
}

// ---- what the page says at its top

byId("where").textContent = data.simulated
  ? "Simulated driver: these times are not a device's."
  : `${data.device}; ${data.iterations} replays timed in each way, ${data.replays} made in all.`;
byId("sum").textContent =
  `A replay takes ${microseconds(data.replay_us)} µs: ${microseconds(data.gpu_us)} µs of work and ` +
  `${microseconds(data.gap_us)} µs of gaps. Profiling added ${microseconds(data.overhead_us)} µs ` +
  `(${percent(data.overhead_us / data.replay_us)}), which is taken out of the table, not of the timeline. ` +
  `replay() keeps the host ${microseconds(data.cpu_us)} µs.`;

// ---- the timeline

const canvas = byId("timeline");
const pen = canvas.getContext("2d");
const tracks = { host: 34, stream: 88, height: 36, left: 64 };
const view = { start: 0, length: end };
let chosen = { block: -1, row: -1 };

function width() {
  return Math.max(50, canvas.clientWidth - tracks.left);
}

function toX(time) {
  return tracks.left + ((time - view.start) / view.length) * width();
}

function setView(start, length) {
  view.length = Math.min(end, Math.max(length, end / 1e5, 0.05));
  view.start = Math.min(Math.max(0, start), end - view.length);
  paint();
}

function zoom(factor, at = view.start + view.length / 2) {
  const length = view.length * factor;
  setView(at - (at - view.start) * (length / view.length), length);
}

const paint = oncePerFrame(() => {
  const scale = window.devicePixelRatio || 1;
  canvas.width = canvas.clientWidth * scale;
  canvas.height = canvas.clientHeight * scale;
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  const colours = getComputedStyle(document.documentElement);
  const colour = (name) => colours.getPropertyValue(`--${name}`);
  pen.clearRect(0, 0, canvas.clientWidth, canvas.clientHeight);
  pen.font = '12px system-ui, "DejaVu Sans", sans-serif';
  pen.textBaseline = "middle";
  ruler(colour);
  pen.save();
  pen.beginPath();
  pen.rect(tracks.left, 0, width(), canvas.clientHeight);
  pen.clip();
  blocks.forEach((block, number) => paintBlock(block, number, colour));
  pen.restore();
  pen.fillStyle = colour("text");
  pen.fillText("host", 8, tracks.host + tracks.height / 2);
  pen.fillText("stream", 8, tracks.stream + tracks.height / 2);
});

function ruler(colour) {
  const rough = view.length / Math.max(2, width() / 110);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  pen.strokeStyle = colour("line");
  pen.fillStyle = colour("quiet");
  pen.lineWidth = 1;
  for (let time = Math.ceil(view.start / step) * step; time <= view.start + view.length; time += step) {
    const x = Math.round(toX(time)) + 0.5;
    pen.beginPath();
    pen.moveTo(x, 20);
    pen.lineTo(x, canvas.clientHeight);
    pen.stroke();
    const digits = Math.max(0, -Math.floor(Math.log10(step)));
    const options = { minimumFractionDigits: digits, maximumFractionDigits: digits };
    pen.fillText(`${time.toLocaleString("en", options)} µs`, x + 3, 11);
  }
}

function paintBlock(block, number, colour) {
  const row = rows[block.unit];
  const fill = colour(row.kind === "break" ? "break" : "graph");
  const gap = block.gpu - block.work;
  bar(block.cpu_start, block.cpu, tracks.host, fill, row.label, colour);
  bar(block.gpu_start, gap, tracks.stream, colour("gap"), "", colour);
  bar(block.gpu_start + gap, block.work, tracks.stream, fill, row.label, colour);
  if (number === chosen.block) {
    outline(block.cpu_start, block.cpu, tracks.host, colour);
    outline(block.gpu_start, block.gpu, tracks.stream, colour);
  }
}

function bar(start, length, top, fill, label, colour) {
  const left = toX(start);
  const wide = Math.max((length / view.length) * width(), length > 0 ? 0.6 : 0);
  if (left + wide < tracks.left || left > canvas.clientWidth) return;
  pen.fillStyle = fill;
  pen.fillRect(left, top, Math.max(wide - (wide > 3 ? 1 : 0), 0.4), tracks.height);
  const shownLeft = Math.max(left, tracks.left);
  const room = Math.min(left + wide, canvas.clientWidth) - shownLeft - 8;
  if (label && room > 24) {
    pen.fillStyle = colour("ground");
    pen.fillText(fitted(label, room), shownLeft + 4, top + tracks.height / 2);
  }
}

/** As much of a text as there is room for: its end says more than its start. */
function fitted(text, room) {
  if (pen.measureText(text).width <= room) return text;
  let from = 1;
  while (from < text.length && pen.measureText("…" + text.slice(from)).width > room) from += 1;
  return from < text.length ? "…" + text.slice(from) : "";
}

function outline(start, length, top, colour) {
  pen.strokeStyle = colour("text");
  pen.lineWidth = 2;
  pen.strokeRect(toX(start), top, Math.max((length / view.length) * width(), 2), tracks.height);
}

function blockAt(x, y) {
  const time = view.start + ((x - tracks.left) / width()) * view.length;
  const onHost = y >= tracks.host && y < tracks.host + tracks.height;
  const onStream = y >= tracks.stream && y < tracks.stream + tracks.height;
  return blocks.findIndex(
    (b) =>
      (onHost && time >= b.cpu_start && time < b.cpu_start + b.cpu) ||
      (onStream && time >= b.gpu_start && time < b.gpu_start + b.gpu),
  );
}

/** Choose a unit: -1 for none; `show` brings it into view. */
function choose(row, block, show) {
  chosen = { row, block };
  for (const line of byId("table").tBodies[0].rows) {
    const is = Number(line.dataset.row) === row;
    line.classList.toggle("chosen", is);
    line.setAttribute("aria-selected", is);
  }
  const shown = blocks[block];
  if (shown && show) {
    const first = Math.min(shown.cpu_start, shown.gpu_start);
    const last = Math.max(shown.cpu_start + shown.cpu, shown.gpu_start + shown.gpu);
    if (first < view.start || last > view.start + view.length) {
      setView(first - (last - first) * 0.5, Math.max(view.length, (last - first) * 2));
    }
  }
  byId("said").textContent = row < 0 ? "" : inWords(rows[row]);
  paint();
}

function inWords(row) {
  const where = row.line ? ` at ${shortLine(row.line)}` : "";
  const waits = row.waits ? "; it waits for the device" : "";
  return (
    `${row.label}${where}: ${microseconds(row.gpu_us)} µs of work, ${microseconds(row.gap_us)} µs of gap, ` +
    `${microseconds(row.cpu_us)} µs of the host, ${percent(row.share)} of the replay${waits}.`
  );
}

function chooseRow(row, show = true) {
  choose(row, blocks.findIndex((b) => b.unit === row), show);
}

function step(by) {
  const next = Math.min(Math.max(0, chosen.block + by), blocks.length - 1);
  if (blocks[next]) choose(blocks[next].unit, next, true);
}

const keys = {
  ArrowLeft: () => setView(view.start - view.length / 8, view.length),
  ArrowRight: () => setView(view.start + view.length / 8, view.length),
  "+": () => zoom(0.6),
  "=": () => zoom(0.6),
  "-": () => zoom(1 / 0.6),
  0: () => setView(0, end),
  n: () => step(1),
  p: () => step(-1),
  Escape: () => choose(-1, -1, false),
};

canvas.addEventListener("keydown", (event) => {
  const act = keys[event.key];
  if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  act();
});

canvas.addEventListener(
  "wheel",
  (event) => {
    event.preventDefault();
    const at = view.start + ((event.offsetX - tracks.left) / width()) * view.length;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      setView(view.start + ((event.deltaX || event.deltaY) / width()) * view.length, view.length);
    } else {
      zoom(event.deltaY > 0 ? 1.2 : 1 / 1.2, at);
    }
  },
  { passive: false },
);

let drag = null;
canvas.addEventListener("pointerdown", (event) => {
  drag = { x: event.offsetX, start: view.start, moved: false };
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointermove", (event) => {
  if (!drag) return;
  if (Math.abs(event.offsetX - drag.x) > 3) drag.moved = true;
  if (drag.moved) setView(drag.start - ((event.offsetX - drag.x) / width()) * view.length, view.length);
});
canvas.addEventListener("pointerup", (event) => {
  if (drag && !drag.moved) {
    const block = blockAt(event.offsetX, event.offsetY);
    choose(block < 0 ? -1 : blocks[block].unit, block, false);
  }
  drag = null;
});

byId("closer").onclick = () => zoom(0.5);
byId("wider").onclick = () => zoom(2);
byId("whole").onclick = () => setView(0, end);
new ResizeObserver(paint).observe(canvas);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);

// ---- what is worth removing

if (!data.worth_removing.length) byId("worth-section").hidden = true;
for (const worth of data.worth_removing.slice(0, 10)) {
  const row = rows[worth.row];
  const link = make("button", { type: "button", onclick: () => chooseRow(worth.row) }, row.label);
  const text = ` at ${shortLine(row.line)}: ${microseconds(worth.gain_us)} µs (${percent(worth.gain_us / data.replay_us)})`;
  byId("worth").append(make("li", {}, link, text));
}

// ---- the table

const columns = [
  { head: "#", of: (row, number) => number, number: true },
  { head: "unit", of: (row) => row.label + (row.waits ? " (waits)" : "") },
  { head: "captured at", of: (row) => shortLine(row.line), title: (row) => row.line },
  { head: "GPU µs", of: (row) => row.gpu_us, show: microseconds, number: true },
  { head: "gap µs", of: (row) => row.gap_us, show: microseconds, number: true },
  { head: "CPU µs", of: (row) => row.cpu_us, show: microseconds, number: true },
  { head: "launches", of: (row) => row.launches, number: true },
  { head: "nodes", of: (row) => row.nodes, number: true },
  { head: "share", of: (row) => row.share, show: percent, number: true },
];

const order = { column: 0, down: false };

function fillHead() {
  const line = make("tr");
  columns.forEach((column, number) => {
    const sorted = order.column === number;
    const arrow = sorted ? (order.down ? " ▾" : " ▴") : "";
    const button = make("button", { type: "button", onclick: () => sortBy(number) }, column.head + arrow);
    const cell = make("th", { scope: "col", className: column.number ? "number" : "" }, button);
    cell.setAttribute("aria-sort", sorted ? (order.down ? "descending" : "ascending") : "none");
    line.append(cell);
  });
  byId("table").tHead.replaceChildren(line);
}

function sortBy(number) {
  order.down = order.column === number ? !order.down : Boolean(columns[number].number && number);
  order.column = number;
  fillHead();
  fillBody();
  byId("table").tHead.rows[0].cells[number].firstChild.focus();
}

function fillBody() {
  const { of } = columns[order.column];
  const value = (number) => of(rows[number], number) ?? -1;
  const numbers = rows.map((_, number) => number).sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    const way = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
    return order.down ? -way : way;
  });
  byId("table").tBodies[0].replaceChildren(...numbers.map(tableRow));
}

function tableRow(number) {
  const row = rows[number];
  const line = make("tr", { tabIndex: 0, onclick: () => chooseRow(number) });
  line.dataset.row = number;
  line.setAttribute("aria-selected", number === chosen.row);
  line.classList.toggle("chosen", number === chosen.row);
  line.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") chooseRow(number);
    else if (event.key === "ArrowDown") line.nextElementSibling?.focus();
    else if (event.key === "ArrowUp") line.previousElementSibling?.focus();
    else return;
    event.preventDefault();
  });
  for (const column of columns) {
    const value = column.of(row, number);
    const text = value === null ? "–" : column.show ? column.show(value) : String(value);
    const cell = make("td", { className: column.number ? "number figures" : "" }, text);
    if (column.title) cell.title = column.title(row);
    line.append(cell);
  }
  return line;
}

fillHead();
fillBody();
paint();
