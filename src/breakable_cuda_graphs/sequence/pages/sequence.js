// The page of a sequence, or of two side by side: a list of parts, their graphs drawn, details of a node.
//
// Graphs have thousands of nodes, so only the rows that can be seen are in the document; they are made
// anew when a graph is scrolled. The layout is a row for each step of the longest way to a node.

const box = { width: 236, height: 42, across: 28, down: 30, margin: 24 };
const two = data.sides.length === 2;
const many = Math.max(...data.sides.map((side) => side.parts.length));

/** What differs, by the place of the part; addresses differ between any two captures. */
function changesShown() {
  const all = data.changes || [];
  if (byId("addresses").checked) return all;
  return all.map((found) => found.filter((change) => !change.address));
}

let changes = changesShown();

// ---- one drawing

class Side {
  constructor(number) {
    this.number = number;
    this.data = data.sides[number];
    this.path = []; // the graphs that are open, from the segment's own in
    this.chosen = -1;
    this.bar = make("p");
    this.scroll = make("div", { className: "scroll", tabIndex: -1 });
    this.element = make(
      "section",
      { className: "side", "aria-label": two ? ["Left", "Right"][number] : "Graph" },
      this.bar,
      this.scroll,
    );
    this.paint = oncePerFrame(() => this.paintNow());
    this.scroll.addEventListener("scroll", this.paint);
    new ResizeObserver(this.paint).observe(this.scroll);
  }

  get ids() {
    this.known ??= changedIds(this.number);
    return this.known;
  }

  get graph() {
    return this.path.length ? this.path[this.path.length - 1].graph : null;
  }

  /** Show a part of the sequence. */
  open(part) {
    this.part = part;
    this.chosen = -1;
    this.path = part && part.kind === "graph" && part.nodes.length ? [{ title: part.name, graph: part }] : [];
    this.begin();
  }

  enter(title, graph) {
    this.path.push({ title, graph, from: this.chosen });
    this.chosen = -1;
    this.begin();
    this.choose(0, true);
  }

  leave() {
    if (this.path.length < 2) return false;
    const { from } = this.path.pop();
    this.begin();
    this.choose(from, true);
    return true;
  }

  /** A new graph: an empty drawing of the right size. */
  begin() {
    const titles = this.path.map(({ title }, depth) =>
      depth === this.path.length - 1
        ? make("span", {}, title)
        : make("button", { type: "button", onclick: () => this.up(depth) }, title),
    );
    const graph = this.graph;
    const count = graph ? counted(graph.nodes.length) : "";
    this.bar.replaceChildren(...titles, make("span", { className: "quiet" }, count));
    this.scroll.scrollTo(0, 0);
    if (!graph) {
      this.svg = null;
      this.scroll.replaceChildren(this.note());
      return;
    }
    const { width, height } = layOut(graph);
    this.edges = draw("g");
    this.nodes = draw("g");
    const frame = { width, height, role: "group", "aria-label": "Nodes and edges" };
    this.svg = draw("svg", frame, arrowHead(this.number), this.edges, this.nodes);
    this.scroll.replaceChildren(this.svg);
    this.scroll.scrollLeft = Math.max(0, (width - this.scroll.clientWidth) / 2);
    this.paintNow();
  }

  up(depth) {
    while (this.path.length > depth + 1) this.leave();
  }

  note() {
    const { part } = this;
    if (!part) return make("p", { className: "note quiet" }, "This side has no such part.");
    if (part.kind === "graph") {
      return make("p", { className: "note quiet" }, "Nothing was captured here; nothing is launched.");
    }
    return make("div", { className: "note" }, ...aboutBreak(part));
  }

  top(row) {
    return box.margin + row * (box.height + box.down);
  }

  /** Draw what can be seen, and a little more. */
  paintNow() {
    if (!this.svg) return;
    const { graph, scroll } = this;
    const layout = layOut(graph);
    const stride = box.height + box.down;
    const first = Math.max(0, Math.floor((scroll.scrollTop - box.margin) / stride) - 2);
    const last = Math.min(layout.rows.length - 1, first + Math.ceil(scroll.clientHeight / stride) + 5);
    const left = scroll.scrollLeft - box.width - 40;
    const right = scroll.scrollLeft + scroll.clientWidth + 40;
    const hadFocus = this.nodes.contains(document.activeElement);
    const shown = [];
    for (let row = first; row <= last; row += 1) {
      for (const number of layout.rows[row]) {
        if (layout.x[number] >= left && layout.x[number] <= right) shown.push(number);
      }
    }
    if (this.chosen >= 0 && !shown.includes(this.chosen)) shown.push(this.chosen); // it keeps the focus
    this.nodes.replaceChildren(...shown.map((number) => this.node(number, shown)));
    const seen = graph.edges.filter(
      ([a, b]) => layout.row[b] >= first && layout.row[a] <= last && this.isNear(layout, a, b, left, right),
    );
    this.edges.replaceChildren(...seen.map((edge) => this.edge(edge)));
    if (hadFocus) this.focus();
  }

  isNear(layout, a, b, left, right) {
    return Math.max(layout.x[a], layout.x[b]) >= left && Math.min(layout.x[a], layout.x[b]) <= right;
  }

  node(number, shown) {
    const node = this.graph.nodes[number];
    const { x, row } = layOut(this.graph);
    const classes = ["node", node.kind.replaceAll(" ", "-")];
    if (node.disabled) classes.push("disabled");
    if (this.ids.has(node.id)) classes.push("changed");
    if (number === this.chosen) classes.push("chosen");
    const isStop = this.chosen >= 0 ? number === this.chosen : number === shown[0];
    const second = node.facts.length ? node.facts[0][1] : "";
    const inside = node.inside ? " ▸" : "";
    const made = draw(
      "g",
      {
        class: classes.join(" "), tabindex: isStop ? 0 : -1, role: "button",
        "aria-label": `${node.kind} ${node.name}${this.ids.has(node.id) ? ", differs" : ""}`,
        transform: `translate(${x[number]} ${this.top(row[number])})`,
      },
      draw("title", {}, node.name),
      draw("rect", { width: box.width, height: box.height, rx: 5 }),
      draw("text", { x: 8, y: 17 }, node.short + inside),
      draw("text", { x: 8, y: 33, class: "second" }, clipped(second, 38)),
    );
    made.dataset.number = number;
    made.addEventListener("click", () => this.choose(number, true));
    made.addEventListener("focus", () => {
      if (number !== this.chosen) this.choose(number, false);
    });
    return made;
  }

  edge([source, target, kind]) {
    const { x, row } = layOut(this.graph);
    const [from, to] = [this.top(row[source]) + box.height, this.top(row[target])];
    const [a, b] = [x[source] + box.width / 2, x[target] + box.width / 2];
    let path;
    if (row[target] - row[source] === 1) {
      const middle = (from + to) / 2;
      path = `M${a} ${from}C${a} ${middle} ${b} ${middle} ${b} ${to}`;
    } else {
      // Past the boxes in between: out of one side and into the same side of the other.
      const [y, z] = [from - box.height / 2, to + box.height / 2];
      const [c, d] = [x[source] + box.width, x[target] + box.width];
      const out = Math.max(c, d) + 16 + (8 * ((source * 7 + target) % 4));
      path = `M${c} ${y}C${out} ${y} ${out} ${y} ${out} ${y + 20}L${out} ${z - 20}C${out} ${z} ${out} ${z} ${d} ${z}`;
    }
    const near = source === this.chosen || target === this.chosen ? " near" : "";
    return draw("path", {
      d: path, class: `edge${kind ? " programmatic" : ""}${near}`, "marker-end": `url(#end${this.number})`,
    });
  }

  // ---- choosing

  choose(number, focus) {
    const graph = this.graph;
    if (!graph || number < 0 || number >= graph.nodes.length) return;
    this.chosen = number;
    this.bringIntoView(number);
    this.paintNow();
    showNode(this, graph.nodes[number]);
    if (focus) this.focus();
  }

  focus() {
    const made = this.nodes?.querySelector(`[data-number="${this.chosen}"]`);
    if (made && made !== document.activeElement) made.focus({ preventScroll: true });
  }

  bringIntoView(number) {
    const { x, row } = layOut(this.graph);
    const { scroll } = this;
    const top = this.top(row[number]);
    if (top < scroll.scrollTop + 10) scroll.scrollTop = top - box.margin;
    const over = top + box.height + box.margin - (scroll.scrollTop + scroll.clientHeight);
    if (over > 0) scroll.scrollTop += over;
    if (x[number] < scroll.scrollLeft) scroll.scrollLeft = x[number] - box.margin;
    const right = x[number] + box.width + box.margin - (scroll.scrollLeft + scroll.clientWidth);
    if (right > 0) scroll.scrollLeft += right;
  }

  onKey(event) {
    if (!this.graph) return false;
    const layout = layOut(this.graph);
    const at = this.chosen;
    const beside = (by) => {
      const line = layout.rows[layout.row[at]];
      return line[line.indexOf(at) + by];
    };
    const moves = {
      ArrowDown: () => layout.behind[at]?.[0] ?? layout.rows[layout.row[at] + 1]?.[0],
      ArrowUp: () => layout.before[at]?.[0],
      ArrowRight: () => beside(1),
      ArrowLeft: () => beside(-1),
      Home: () => layout.rows[0][0],
      End: () => layout.rows[layout.rows.length - 1][0],
    };
    if (event.key === "Escape") return this.leave();
    if (event.key === "Enter") {
      const inner = this.graph.nodes[at]?.inside;
      if (inner) this.enter(inner[0].title, inner[0]);
      return Boolean(inner);
    }
    if (!moves[event.key]) return false;
    this.choose(at < 0 ? 0 : moves[event.key]() ?? at, true);
    return true;
  }
}

function arrowHead(number) {
  const head = draw("path", { d: "M0 0L8 4L0 8z", fill: "currentColor", opacity: 0.7 });
  const size = { viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 9, markerHeight: 9, orient: "auto" };
  size.markerUnits = "userSpaceOnUse";
  return draw("defs", {}, draw("marker", { id: `end${number}`, ...size }, head));
}

function counted(nodes) {
  return `${nodes} ${nodes === 1 ? "node" : "nodes"}`;
}

function clipped(text, length) {
  return text.length > length ? text.slice(0, length - 1) + "…" : text;
}

// ---- details

function changedIds(side) {
  const key = side === 0 ? "left" : "right";
  return new Set(changes.flat().map((change) => change[key]).filter((id) => id !== undefined && id !== null));
}

function pairs(rows, heads) {
  const table = make("table");
  if (heads) {
    const cells = heads.map((head) => make("th", { scope: "col" }, head));
    table.append(make("thead", {}, make("tr", {}, ...cells)));
  }
  const body = make("tbody");
  for (const row of rows) {
    const cells = row.map((value, place) =>
      make(place || heads ? "td" : "th", { className: place ? "figures" : "" }, String(value)),
    );
    body.append(make("tr", {}, ...cells));
  }
  table.append(body);
  return table;
}

function changeTable(found) {
  if (!found.length) return [];
  const rows = found.map((change) => [change.field, change.old, change.new]);
  return [make("h3", { className: "differs" }, "What differs"), pairs(rows, ["field", "left", "right"])];
}

function aboutBreak(part) {
  const found = [];
  if (part.args?.length) found.push(make("h3", {}, "Arguments"), pairs(part.args));
  else if (part.kind === "break") found.push(make("p", { className: "quiet" }, "It takes no arguments."));
  return found;
}

function showPart(place) {
  const made = [];
  for (const side of sides) {
    const { part } = side;
    if (!part) continue;
    const facts = [["kind", part.kind === "break" ? "break: eager Python" : "captured segment"]];
    if (part.scope) facts.push(["scope", part.scope]);
    if (part.line) facts.push(["captured at", part.line]);
    if (part.kind === "graph") facts.push(["nodes", part.nodes.length], ...kindCounts(part));
    made.push(make("h2", {}, (two ? `${["Left", "Right"][side.number]}: ` : "") + part.name), pairs(facts));
    if (two) made.push(...aboutBreak(part));
  }
  byId("details").replaceChildren(...made, ...changeTable(changes[place] || []));
}

function kindCounts(part) {
  const counts = new Map();
  for (const node of part.nodes) counts.set(node.kind, (counts.get(node.kind) || 0) + 1);
  return [...counts].map(([kind, count]) => [`of kind ${kind}`, count]);
}

function showNode(side, node) {
  const key = side.number === 0 ? "left" : "right";
  const made = [make("h2", {}, node.name)];
  const facts = [["kind", node.kind + (node.disabled ? ", disabled" : "")], ...node.facts];
  if (node.scope) facts.push(["scope", node.scope]);
  made.push(pairs(facts));
  for (const inner of node.inside || []) {
    const open = () => side.enter(inner.title, inner);
    const text = `Open ${inner.title}: ${counted(inner.nodes.length)}`;
    made.push(make("p", {}, make("button", { type: "button", onclick: open }, text)));
  }
  made.push(...changeTable(changes.flat().filter((change) => change[key] === node.id)));
  if (node.args?.length) {
    const rows = node.args.map(([size, value, what], index) => [index, size, value, what]);
    made.push(make("h3", {}, "Arguments"), pairs(rows, ["#", "bytes", "value", "address of"]));
  }
  if (node.stack) {
    made.push(make("h3", {}, "Captured by"));
    made.push(make("ol", {}, ...node.stack.map((line) => make("li", {}, make("code", {}, line)))));
  }
  byId("details").replaceChildren(...made);
}

// ---- the list of parts

const sides = data.sides.map((_, number) => new Side(number));
byId("sides").append(...sides.map((side) => side.element));
byId("comparing").hidden = !two;
let current = -1;

function partAt(place) {
  return data.sides.map((side) => side.parts[place]).find(Boolean);
}

function differs(place) {
  return Boolean(changes[place]?.length);
}

/** What a filter is looked for in. */
function textOf(place) {
  return data.sides
    .map((side) => side.parts[place])
    .filter(Boolean)
    .flatMap((part) => [part.name, part.scope, part.line, ...(part.nodes || []).flatMap((n) => [n.name, n.scope])])
    .join("\n")
    .toLowerCase();
}

const texts = [];

function fillList() {
  const wanted = byId("filter").value.trim().toLowerCase();
  const shown = [];
  for (let place = 0; place < many; place += 1) {
    if (byId("only-changed").checked && !differs(place)) continue;
    if (wanted && !(texts[place] ??= textOf(place)).includes(wanted)) continue;
    shown.push(place);
  }
  byId("parts").replaceChildren(...shown.map(listItem));
  byId("counted").textContent = `${shown.length} of ${many}` + (two ? `, ${countChanged()} differ` : "");
  mark();
}

function countChanged() {
  return changes.filter((found) => found.length).length;
}

function listItem(place) {
  const part = partAt(place);
  const scope = part.scope ? `${part.scope}/` : "";
  const count = part.kind === "graph" ? String(part.nodes.length) : "";
  const kind = part.kind === "break" ? "break" : part.nodes.length ? "graph" : "empty";
  const label = `${place} ${scope}${part.kind === "break" ? part.name : "graph"}`;
  const item = make(
    "li",
    { className: kind, id: `part${place}`, role: "option", title: part.line || "", onclick: () => select(place) },
    make("span", { className: differs(place) ? "name differs" : "name" }, label + (differs(place) ? " ≠" : "")),
    make("span", { className: "count" }, count),
  );
  item.dataset.place = place;
  return item;
}

function mark() {
  for (const item of byId("parts").children) {
    item.setAttribute("aria-selected", Number(item.dataset.place) === current);
  }
  const item = byId(`part${current}`);
  byId("parts").setAttribute("aria-activedescendant", item ? item.id : "");
  item?.scrollIntoView({ block: "nearest" });
}

function select(place) {
  current = place;
  for (const side of sides) side.open(side.data.parts[place]);
  showPart(place);
  mark();
}

function selectBeside(by) {
  const places = [...byId("parts").children].map((item) => Number(item.dataset.place));
  if (!places.length) return;
  const at = places.indexOf(current);
  const next = by === Infinity ? places.length - 1 : by === -Infinity ? 0 : at + by;
  select(places[Math.min(Math.max(0, next), places.length - 1)]);
}

byId("parts").addEventListener("keydown", (event) => {
  const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };
  if (event.key in moves) selectBeside(moves[event.key]);
  else if (event.key === "Enter") sides[0].choose(0, true);
  else return;
  event.preventDefault();
});

for (const side of sides) {
  side.element.addEventListener("keydown", (event) => {
    if (event.target.tagName === "BUTTON") return;
    if (side.onKey(event)) event.preventDefault();
    else if (event.key === "Escape") byId("parts").focus();
  });
}

byId("filter").addEventListener("input", fillList);
byId("only-changed").addEventListener("change", fillList);
byId("addresses").addEventListener("change", () => {
  changes = changesShown();
  for (const side of sides) side.known = null;
  fillList();
  select(current);
});
fillList();
if (many) select(two ? Math.max(0, changes.findIndex((found) => found.length)) : 0);
