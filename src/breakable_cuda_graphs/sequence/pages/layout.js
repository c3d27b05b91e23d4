// Where the nodes of a graph go on its drawing.
"use strict";

/** Rows of node numbers, and each node's place; nodes come in topological order. */
function layOut(graph) {
  if (graph.layout) return graph.layout;
  const before = graph.nodes.map(() => []);
  const behind = graph.nodes.map(() => []);
  for (const [source, target] of graph.edges) {
    before[target].push(source);
    behind[source].push(target);
  }
  const row = [];
  const rows = [];
  graph.nodes.forEach((_, number) => {
    row[number] = Math.max(-1, ...before[number].map((n) => row[n])) + 1;
    (rows[row[number]] ||= []).push(number);
  });
  const x = [];
  const stride = box.width + box.across;
  for (const line of rows) {
    const wanted = new Map(
      line.map((n, place) => [n, mean(before[n].map((p) => x[p])) ?? place * stride]),
    );
    line.sort((a, b) => wanted.get(a) - wanted.get(b) || a - b);
    const middle = mean([...wanted.values()]);
    let left = -Infinity;
    for (const number of line) {
      x[number] = Math.max(wanted.get(number), left);
      left = x[number] + stride;
    }
    const shift = middle - mean(line.map((n) => x[n]));
    for (const number of line) x[number] += shift;
  }
  const least = graph.nodes.length ? x.reduce((a, b) => Math.min(a, b)) : 0;
  const most = graph.nodes.length ? x.reduce((a, b) => Math.max(a, b)) : 0;
  const bulge = Math.min(graph.edges.filter(([a, b]) => row[b] - row[a] > 1).length, 6) * 8;
  graph.layout = {
    rows, row, before, behind,
    x: x.map((each) => each - least + box.margin),
    width: most - least + box.width + 2 * box.margin + bulge,
    height: rows.length * (box.height + box.down) + 2 * box.margin,
  };
  return graph.layout;
}

function mean(values) {
  return values.length ? values.reduce((a, b) => a + b, 0) / values.length : undefined;
}
