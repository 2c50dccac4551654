// The graph: Cytoscape draws and picks, dagre lays each scope out by itself; scopes are boxes or folded nodes.

const CHARACTER = 6.6, LINE = 15, PAD = 22, HEAD = 20; // pixels: of a label, a box's border, a box's title
const FAN = 8; // readers of a node whose edges are all laid out
const START = 48, MOST = 1500; // nodes and folded scopes that are shown at first, and at most
let cy;
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const list = () => V[state.graph];
const open = () => state.open[state.graph];
const short = (s, n = 30) => (s.length > n ? `${s.slice(0, n - 1)}…` : s);

/** Unfold scopes from the outside, those with the fewest members first, while so many nodes have room. */
function unfoldSome(most) {
  const size = (s) => membersOf(s).length;
  open().clear();
  open().add(0);
  let shown = size(0);
  for (let ring = V.children[0]; ring.length; ) {
    const next = [];
    for (const [n, s] of ring.map((s) => [size(s), s]).filter(([n]) => n).sort((a, b) => a[0] - b[0])) {
      if (shown + n - 1 > most) continue;
      shown += n - 1;
      open().add(s);
      next.push(...V.children[s]);
    }
    ring = next;
  }
}

/** The members of a scope in this graph: scopes, [true, number], and nodes. A scope of one node is that node. */
function membersOf(s) {
  const found = V.inside[state.graph][s].map((k) => [false, k]);
  for (const c of V.children[s]) {
    const inner = everything(state.graph, c);
    if (inner.length === 1) found.push([false, inner[0]]);
    else if (inner.length) found.push(...(V.inside[state.graph][c].length || membersOf(c).length > 1 ? [[true, c]] : membersOf(c)));
  }
  return found;
}

/** The scopes and nodes that are shown, each with its box, from the outside. */
function shownTree() {
  const box = new Map(), members = new Map();
  const visit = (s) => {
    members.set(s, membersOf(s).map(([scope, k]) => (!scope ? `n${k}` : open().has(k) ? `b${k}` : `s${k}`)));
    for (const id of members.get(s)) {
      box.set(id, s);
      if (id[0] === "b") visit(+id.slice(1));
    }
  };
  visit(0);
  return { box, members };
}

function label(x, k) {
  if (state.graph === "nodes") return [x.op, short(x.name.split("/").pop(), 26)];
  const t = time(x);
  return [short(x.name, 30), t === undefined ? short(x.loc.split(" (")[0].split("/").slice(-2).join("/"), 28) : `${seconds(t)}, ${percent(t / V.total)}`];
}

function scopeLabel(s) {
  const members = everything(state.graph, s);
  const spent = state.graph === "steps" ? members.reduce((sum, k) => sum + (time(V.steps[k]) ?? 0), 0) : 0;
  const what = plural(members.length, state.graph === "steps" ? "kernel" : "node");
  return [short(V.scopes[s][0] || V.title), spent ? `${what}, ${seconds(spent)}, ${percent(spent / V.total)}` : what];
}

const sizeOf = (lines) => ({ width: Math.max(54, Math.max(...lines.map((l) => l.length)) * CHARACTER + 16), height: lines.length * LINE + 12 });

function fill(spent, kind) {
  if (state.colour === "time" && state.graph === "steps") {
    const share = V.total && spent ? Math.min(1, Math.sqrt(spent / V.total) * 1.8) : 0;
    return `color-mix(in srgb, ${colour("hot")} ${Math.round(share * 100)}%, ${colour("cool")})`;
  }
  return colour(kind) || colour("other");
}

/** A colour that Canvas takes, whatever CSS it is written in. */
function plain(css) {
  const probe = $("tip");
  probe.style.color = css;
  const found = getComputedStyle(probe).color;
  probe.style.color = "";
  const parts = found.match(/[\d.]+/g).map(Number);
  const scale = found.startsWith("color(") ? 255 : 1;
  return `rgb(${parts.slice(0, 3).map((x) => Math.round(x * scale)).join(",")})`;
}

/** Elements with places: scopes inside out, each laid out by dagre with its members as they were laid out.
 *  An edge that leaves or enters a box passes a point at its lower or upper border, "out" or "in". */
function elements() {
  const { box, members } = shownTree();
  const stand = new Map(); // node -> what is shown for it
  for (const id of box.keys()) {
    if (id[0] === "n") stand.set(+id.slice(1), id);
    if (id[0] === "s") everything(state.graph, +id.slice(1)).forEach((k) => stand.set(k, id));
  }
  const around = (id) => {
    const found = [id];
    for (let s = box.get(id); s; s = box.get(`b${s}`)) found.push(`b${s}`);
    return [...found, "b0"];
  };
  const edges = new Map();
  list().forEach((x, k) =>
    x.from.forEach(([source, shape]) => {
      const [a, b] = [stand.get(source), stand.get(k)];
      if (a === b || !a || !b) return;
      const key = `${a}>${b}`;
      edges.has(key) ? edges.get(key).shapes.add(shape) : edges.set(key, { a, b, shapes: new Set([shape]) });
    }),
  );
  const readers = new Map(); // of what is read in many places, one edge has a way; the others are faint lines
  for (const e of edges.values()) {
    readers.set(e.a, (readers.get(e.a) ?? 0) + 1);
    e.rank = readers.get(e.a);
  }
  const levels = new Map([...members.keys()].map((s) => [s, new Map()])); // of each box: edges between its members
  for (const e of edges.values()) {
    if (readers.get(e.a) > FAN && e.rank > 1) continue;
    const [p, q] = [around(e.a), around(e.b)];
    while (p.at(-2) === q.at(-2)) p.pop(), q.pop();
    const part = (box, from, to) => (levels.get(+box.slice(1)).set(`${from}>${to}`, [from, to]), [+box.slice(1), from, to]);
    e.route = p.slice(1, -1).map((outer, k) => part(outer, p[k], "out"));
    e.route.push(part(p.at(-1), p.at(-2), q.at(-2)));
    e.route.push(...q.slice(1, -1).map((outer, k) => part(outer, "in", q[k])).reverse());
  }
  const lines = (id) => (id[0] === "n" ? label(list()[+id.slice(1)], +id.slice(1)) : scopeLabel(+id.slice(1)));
  const laid = new Map(); // of each box: what dagre says
  const first = (id) => (id[0] === "n" ? +id.slice(1) : everything(state.graph, +id.slice(1)).reduce((a, b) => Math.min(a, b)));

  function layOut(s) {
    const g = new dagre.graphlib.Graph();
    g.setGraph({ rankdir: "TB", nodesep: 22, ranksep: 30, marginx: PAD, marginy: s ? 6 : PAD });
    g.setDefaultEdgeLabel(() => ({}));
    for (const id of [...members.get(s)].sort((a, b) => first(a) - first(b))) g.setNode(id, id[0] === "b" ? layOut(+id.slice(1)) : sizeOf(lines(id)));
    for (const [a, b] of levels.get(s).values()) {
      for (const end of [a, b]) if (!g.hasNode(end)) g.setNode(end, { width: 1, height: 1 });
      g.setEdge(a, b);
    }
    // what enters comes first, what leaves last
    if (g.hasNode("in")) g.sources().forEach((v) => v !== "in" && g.setEdge("in", v, { weight: 0 }));
    if (g.hasNode("out")) g.sinks().forEach((v) => v !== "out" && g.setEdge(v, "out", { weight: 0 }));
    dagre.layout(g);
    laid.set(s, g);
    const reach = g.edges().flatMap((e) => g.edge(e).points.map((p) => p.x)); // dagre counts nodes alone
    const left = reach.reduce((a, b) => Math.min(a, b), PAD), right = reach.reduce((a, b) => Math.max(a, b), 0);
    const shift = Math.max(0, PAD / 2 - left);
    for (const id of g.nodes()) g.node(id).x += shift;
    for (const e of g.edges()) g.edge(e).points.forEach((p) => (p.x += shift));
    const width = Math.max(g.graph().width + shift, right + shift + PAD / 2), height = g.graph().height;
    const title = (V.scopes[s][0].length + 2) * CHARACTER + 12;
    return { width: Math.max(width, s ? title : 0), height: height + (s ? HEAD : 0), inner: width };
  }

  layOut(0);
  const corner = new Map([[0, [0, 0]]]), made = [], centre = new Map();
  const place = (s) => {
    const g = laid.get(s), [x, y] = corner.get(s);
    for (const id of members.get(s)) {
      const n = g.node(id), at = { x: x + n.x, y: y + n.y }, number = +id.slice(1);
      if (id[0] === "b") {
        corner.set(number, [at.x - n.inner / 2, at.y - n.height / 2 + HEAD]);
        const name = V.scopes[number][0];
        made.push({ data: { id, kind: "box", number, w: n.width, h: n.height, label: name, shift: -n.width / 2 + (name.length * CHARACTER) / 2 + 8 }, position: at, classes: "box" });
        place(number);
        continue;
      }
      const folded = id[0] === "s", inside = folded ? everything(state.graph, number) : [number];
      const spent = inside.reduce((sum, k) => sum + (state.graph === "steps" ? time(V.steps[k]) ?? 0 : 0), 0);
      const group = folded ? "other" : list()[number].kind ?? "other";
      centre.set(id, at);
      made.push({ data: { id, kind: folded ? "scope" : state.graph, number, w: n.width, h: n.height, label: lines(id).join("\n"), fill: plain(fill(spent, group)) }, position: at, classes: folded ? "folded" : "leaf" });
    }
  };
  place(0);
  for (const e of edges.values()) {
    const label = e.shapes.size === 1 ? [...e.shapes][0] : `${e.shapes.size} tensors`;
    const data = { id: `${e.a}>${e.b}`, source: e.a, target: e.b, label };
    if (!e.route) {
      made.push({ data, classes: "faint" });
      continue;
    }
    const points = e.route.flatMap(([s, from, to]) => laid.get(s).edge(from, to).points.map((p) => [p.x + corner.get(s)[0], p.y + corner.get(s)[1]]));
    const way = bends(centre.get(e.a), centre.get(e.b), points);
    made.push({ data: { ...data, ...way }, classes: way.weights ? "bent" : "" });
  }
  return made;
}

/** The way of an edge as Cytoscape wants it: along the line between both centres, and beside it. */
function bends(s, t, points) {
  const [dx, dy] = [t.x - s.x, t.y - s.y], long = Math.hypot(dx, dy);
  const inner = points.slice(1, -1).map(([x, y]) => [x - s.x, y - s.y]);
  const beside = inner.map(([px, py]) => (py * dx - px * dy) / long);
  if (long < 1 || !beside.some((d) => Math.abs(d) > 2)) return {};
  return { weights: inner.map(([px, py]) => (px * dx + py * dy) / long / long), distances: beside };
}

const style = () => [
  { selector: "node", style: { shape: "round-rectangle", width: "data(w)", height: "data(h)", label: "data(label)", "text-wrap": "wrap", "text-valign": "center", "text-halign": "center",
    "font-size": 11, "font-family": "system-ui, Segoe UI, Liberation Sans, sans-serif", color: colour("text"), "min-zoomed-font-size": 5, "border-width": 1, "border-color": colour("boxline"), "background-color": colour("other") } },
  { selector: "node.leaf, node.folded", style: { "background-color": "data(fill)" } },
  { selector: "node.folded", style: { "border-width": 3, "border-style": "double", "font-weight": "bold" } },
  { selector: "node.box", style: { "background-color": colour("box"), "background-opacity": 0.55, "text-valign": "top", "text-margin-y": 17, "text-margin-x": "data(shift)", color: colour("dim"), "font-weight": "bold", "z-compound-depth": "bottom" } },
  { selector: "edge", style: { width: 1.3, "line-color": colour("edge"), "target-arrow-color": colour("edge"), "target-arrow-shape": "triangle", "arrow-scale": 0.8, "curve-style": "bezier",
    label: "data(label)", "font-size": 8, color: colour("dim"), "text-background-color": colour("bg"), "text-background-opacity": 0.75, "min-zoomed-font-size": 7, "text-rotation": "none" } },
  { selector: "edge.bent", style: { "curve-style": "round-segments", "segment-distances": "data(distances)", "segment-weights": "data(weights)", "segment-radii": 14, "edge-distances": "node-position" } },
  { selector: "edge.faint", style: { opacity: 0.25, "curve-style": "straight", label: "" } },
  { selector: "node.chosen", style: { "border-width": 4, "border-style": "solid", "border-color": colour("chosen") } },
  { selector: "edge.near", style: { width: 2.6, "line-color": colour("accent"), "target-arrow-color": colour("accent"), opacity: 1 } },
  { selector: "node.pair", style: { "border-width": 3, "border-style": "dashed", "border-color": colour("accent") } },
];

/** Draw the graph anew; `keep` leaves an element where it is on the screen, `stay` all. */
function draw(keep, stay) {
  const before = keep && cy?.getElementById(keep).nonempty() ? cy.getElementById(keep).renderedPosition() : null;
  const made = elements();
  if (!cy) {
    cy = cytoscape({ container: $("canvas"), minZoom: 0.02, maxZoom: 4, boxSelectionEnabled: false, autoungrabify: true, textureOnViewport: true, hideEdgesOnViewport: made.length > 4000 });
    cy.on("tap", "node", (e) => picked(e.target));
    cy.on("dbltap", "node", (e) => toggle(e.target));
    cy.on("tap", (e) => e.target === cy && choose(null));
    cy.on("mouseover", "node", (e) => tip.show(e.originalEvent, hover(e.target.data())));
    cy.on("mouseout", "node", tip.hide);
    cy.on("pan zoom", tip.hide);
  }
  cy.batch(() => {
    cy.elements().remove();
    cy.add(made);
    cy.style(style());
  });
  const after = keep && cy.getElementById(keep).nonempty() ? cy.getElementById(keep).renderedPosition() : null;
  if (before && after) cy.panBy({ x: before.x - after.x, y: before.y - after.y });
  else if (!stay) fit();
  mark();
}

function fit() {
  cy.resize();
  const box = cy.elements().boundingBox();
  if (!box.w) return;
  const whole = Math.min(cy.width() / (box.w + 40), cy.height() / (box.h + 40));
  const wide = Math.min(cy.width() / (box.w + 40), 1.1);
  const zoom = whole > 0.55 ? Math.min(whole, 1.2) : Math.max(Math.min(wide, 0.9), whole); // tall graphs begin at their top
  cy.zoom(zoom);
  cy.pan({ x: cy.width() / 2 - ((box.x1 + box.x2) / 2) * zoom, y: whole > 0.55 ? cy.height() / 2 - ((box.y1 + box.y2) / 2) * zoom : 12 - box.y1 * zoom });
}

function hover({ kind, number }) {
  if (kind === "scope" || kind === "box") return `${scopeName(number)}\n${scopeLabel(number)[1]}`;
  const x = list()[number];
  return kind === "nodes" ? `${x.op} ${x.name}\n${x.made.join("\n")}` : `${x.name}: ${x.ops.join(" + ")}\n${x.loc}\n${x.made.join("\n")}`;
}

function picked(target) {
  const { kind, number } = target.data();
  choose(kind === "box" ? "scope" : kind, number, false);
}

function toggle(target) {
  const { kind, number } = target.data();
  if (kind === "scope") open().add(number);
  else if (kind === "box") [number, ...within(number)].forEach((s) => open().delete(s));
  else return;
  draw(kind === "scope" ? `b${number}` : `s${number}`);
  if (kind === "scope" && cy.getElementById(`b${number}`).nonempty()) cy.center(cy.getElementById(`b${number}`));
}

const within = (s) => V.children[s].flatMap((c) => [c, ...within(c)]);

/** Show a node or scope: unfold what is around it, and bring it into sight. */
function reveal(kind, number) {
  let s = kind === "scope" ? V.scopes[number][1] : list()[number].scope, hidden = false;
  for (; s >= 0; s = V.scopes[s][1]) if (!open().has(s)) (hidden = true), open().add(s);
  if (hidden || !cy) draw();
  const at = elementOf(kind, number);
  if (!at?.nonempty()) return;
  const seen = cy.extent(), p = at.position();
  if (cy.zoom() < 0.45) cy.zoom(0.8);
  if (hidden || p.x < seen.x1 || p.x > seen.x2 || p.y < seen.y1 || p.y > seen.y2 || cy.zoom() === 0.8) cy.center(at);
}

const elementOf = (kind, number) => {
  if (kind !== "scope") return cy.getElementById(`n${number}`);
  return cy.getElementById(open().has(number) ? `b${number}` : `s${number}`);
};

/** Mark what is chosen, its edges, and the nodes of its gradient. */
function mark() {
  if (!cy) return;
  cy.elements().removeClass("chosen near pair");
  const c = state.chosen;
  if (!c || !["nodes", "steps", "scope"].includes(c.kind) || (c.kind !== "scope" && c.kind !== state.graph)) return;
  const at = elementOf(c.kind, c.number);
  at.addClass("chosen");
  at.connectedEdges().addClass("near");
  if (c.kind === "nodes") for (const k of V.nodes[c.number].pairs ?? []) cy.getElementById(`n${k}`).addClass("pair");
}

function showGraph() {
  choice("which", [["nodes", "Imported"], ["steps", "Fused"]], state.graph, (g) => setGraph(g));
  const timed = V.kernels.some((k) => k.seconds !== undefined) && state.graph === "steps";
  $("colour").hidden = !timed;
  choice("colour", [["time", "Time"], ["kind", "Kind"]], state.colour, (c) => ((state.colour = c), showGraph(), draw(null, true)));
  const kinds = [...new Set(list().map((x) => x.kind ?? "other"))];
  $("legend").replaceChildren(
    ...(timed && state.colour === "time"
      ? [el("span", {}, swatch("cool"), "short"), el("span", {}, swatch("hot"), "long")]
      : kinds.map((k) => el("span", {}, swatch(k), k))),
  );
}

const swatch = (k) => el("i", { style: `background: var(--${k}, var(--other))` });

function setGraph(g) {
  state.graph = g;
  if (!open().size) unfoldSome(START);
  showGraph();
  draw();
}

function choice(id, options, now, then) {
  $(id).replaceChildren(...options.map(([value, name]) => el("button", { "aria-pressed": value === now, onclick: () => then(value) }, name)));
}
