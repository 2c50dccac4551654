// The details of what is chosen: a node of the model, a kernel call, or a layer.

const rows = (pairs) => el("table", {}, el("tbody", {}, ...pairs.filter(([, v]) => v !== "" && v !== undefined && v !== null).map(([k, v]) => el("tr", {}, el("th", {}, k), el("td", {}, v)))));
const section = (title, ...content) => (content.some((c) => c) ? [el("h3", {}, title), ...content.filter((c) => c)] : []);
const links = (items) => (items.length ? el("ul.links", {}, ...items.slice(0, 60).map((i) => el("li", {}, ...[i].flat())), ...(items.length > 60 ? [el("li.dim", {}, `and ${items.length - 60} more`)] : [])) : null);
const code = (t) => el("pre.code", { tabindex: "0" }, t);

function choose(kind, number, look = true) {
  state.chosen = kind === null ? null : { kind, number };
  if (kind === "nodes" || kind === "steps") {
    if (look && state.tab === "graph") {
      if (state.graph !== kind) setGraph(kind);
      reveal(kind, number);
    }
  } else if (kind === "scope" && look && state.tab === "graph") reveal(kind, number);
  history.replaceState(null, "", kind === null ? `#${state.tab}` : `#${state.tab}/${state.graph}/${kind}/${number}`);
  mark();
  details();
  document.querySelectorAll("svg .on").forEach((x) => x.classList.remove("on"));
  if (kind === "steps") document.querySelectorAll(`svg [data-step="${number}"]`).forEach((x) => x.classList.add("on"));
}

function details() {
  const c = state.chosen, at = $("details");
  const made = !c ? overview() : c.kind === "nodes" ? nodeDetails(c.number) : c.kind === "steps" ? stepDetails(c.number) : scopeDetails(c.number);
  at.replaceChildren(...made.flat(2).filter(Boolean));
  at.scrollTop = 0;
}

function overview() {
  const m = V.memory[0];
  return [
    el("h2", {}, V.title),
    rows([...V.facts, ["nodes as imported", `${V.nodes.length}`], ["steps", `${V.steps.length}, ${plural(V.kernels.length, "unique kernel")}`], ["passes", `${V.passes.filter((p) => p.changed).length} of ${V.passes.length} changed the graph`],
      ["arena", m && `${bytes(m.arena)} (lower bound ${bytes(m.lower)})`], ["constants", m && bytes(m.constants)]]),
    el("p.dim", {}, "Click a node to see its origin, the passes that changed it, its kernel and its code. Double-click a layer to fold or unfold it. Press / to search, ? for all keys."),
    ...section("Longest kernel calls", topSteps(V.steps.map((s, k) => k))),
  ];
}

function topSteps(numbers) {
  const timed = numbers.map((k) => [time(V.steps[k]), k]).filter(([t]) => t !== undefined).sort((a, b) => b[0] - a[0]).slice(0, 12);
  return links(timed.map(([t, k]) => [link(stepLabel(k), "steps", k), ` ${seconds(t)}, ${percent(t / V.total)}`]));
}

function scopeDetails(s) {
  const [nodes, steps] = [everything("nodes", s), everything("steps", s)];
  const spent = steps.reduce((sum, k) => sum + (time(V.steps[k]) ?? 0), 0);
  const ops = new Map();
  nodes.forEach((k) => ops.set(V.nodes[k].op, (ops.get(V.nodes[k].op) ?? 0) + 1));
  const opened = open().has(s);
  return [
    el("h2", {}, V.scopes[s][0] || V.title),
    el("div.dim.small", {}, scopeName(s)),
    rows([["nodes as imported", `${nodes.length}`], ["steps", `${steps.length}`], ["time", spent ? `${seconds(spent)}, ${percent(spent / V.total)}` : ""]]),
    s ? el("p", {}, el("button", { onclick: () => (toggle(elementOf("scope", s)), details()) }, opened ? "Fold" : "Unfold")) : null,
    ...section("Ops", el("p", {}, [...ops].sort((a, b) => b[1] - a[1]).map(([op, n]) => `${n} ${op}`).join(", "))),
    ...section("Longest kernel calls", topSteps(steps)),
    ...section("Steps", links(steps.map((k) => link(stepLabel(k), "steps", k)))),
  ];
}

/** Before and after of the passes that changed nodes of the model. */
function changes(nodes) {
  const found = [...new Set(nodes.flatMap((k) => V.nodes[k].changes))].sort((a, b) => a - b);
  if (!found.length) return [el("p.dim", {}, "No pass changed it.")];
  return found.slice(0, 60).map((k) => change(V.changes[k], found.length < 5));
}

function change(c, opened) {
  const name = V.passes[c.pass]?.name ?? "a pass";
  const what = !c.before.length ? "added" : !c.after.length ? "removed" : "changed";
  return el("details", opened ? { open: "" } : {}, el("summary", {}, `${name} `, el("span.dim", {}, `${what} ${plural(Math.max(c.before.length, c.after.length), "node")}`)),
    c.before.length ? el("pre.minus", {}, c.before.join("\n")) : null, c.after.length ? el("pre.plus", {}, c.after.join("\n")) : null);
}

const sources = (x, kind, name) => links(x.from.map(([k, label]) => [link(name(k), kind, k), el("span.dim", {}, ` ${label}`)]));
const readers = (x, kind, name) => links(x.to.map(([k, label]) => [link(name(k), kind, k), el("span.dim", {}, ` ${label}`)]));

function nodeDetails(k) {
  const n = V.nodes[k];
  const pairs = n.pairs ?? [];
  const backward = n.loc.startsWith("derivative of ");
  return [
    el("h2", {}, `${n.op} ${n.name.split("/").pop()}`),
    el("div.dim.small", {}, n.loc || "made by the frontend"),
    el("div.small", {}, "layer ", link(scopeName(n.scope), "scope", n.scope)),
    el("pre", {}, n.line),
    ...section(n.steps.length ? "Kernels that compute it" : "Kernels", n.steps.length ? links(n.steps.map((s) => [link(stepLabel(s), "steps", s), ` ${seconds(time(V.steps[s]))}`])) : el("p.dim", {}, "None: it was folded, merged with an equal node, or is a view of memory.")),
    ...section(backward ? "Forward nodes that it differentiates" : "Backward nodes", links(pairs.map((p) => link(nodeLabel(p), "nodes", p)))),
    ...section("Reads", sources(n, "nodes", nodeLabel), n.inputs && el("p", {}, "inputs: ", n.inputs.join(", ")), n.weights && el("pre", {}, n.weights.join("\n"))),
    ...section("Read by", readers(n, "nodes", nodeLabel)),
    ...section("Passes that changed it", ...changes([k])),
  ];
}

function stepDetails(k) {
  const s = V.steps[k], kernel = V.kernels[s.kernel];
  const t = time(s);
  const head = [
    el("h2", {}, s.name, " ", el("span.dim", {}, `step ${k}`)),
    el("div.dim.small", {}, s.ops.join(" + ")),
    el("div.small", {}, s.loc ? `at ${s.loc}` : "", " layer ", link(scopeName(s.scope), "scope", s.scope)),
  ];
  const model = links((s.origins ?? []).map((n) => link(nodeLabel(n), "nodes", n)));
  const nodes = section("Nodes after the passes", el("pre", {}, s.lines.join("\n")), s.weights && el("details", {}, el("summary", {}, plural(s.weights.length, "weight")), el("pre", {}, s.weights.join("\n"))));
  const ends = [...section("Reads", sources(s, "steps", stepLabel)), ...section("Read by", readers(s, "steps", stepLabel))];
  const passes = section("Passes that changed its nodes", ...changes(s.origins ?? []));
  if (!kernel) return [...head, ...section("From the model", model), ...nodes, ...ends, ...passes];
  const reached = kernel.reached;
  return [
    ...head,
    rows([["time of this call", t === undefined ? "not measured" : `${seconds(t)}, ${percent(t / V.total)} of all kernels`], ["limit", kernel.bound ? `${kernel.bound}; reached ${percent(reached)}` : ""],
      ["operations", `${count(kernel.flops)}FLOP${t && typeof kernel.flops === "number" ? `, ${count(kernel.flops / t)}FLOP/s` : ""}`.replace(/(\d)FLOP/g, "$1 FLOP")], ["memory traffic", `${bytes(kernel.bytes)}${t && typeof kernel.bytes === "number" ? `, ${bytes(kernel.bytes / t)}/s` : ""}`],
      ["schedule", kernel.choice], ["threads", !V.target.startsWith("llvm") ? "" : kernel.parallel ? `all; balance ${percent(kernel.balance) || "not measured"}` : "one"], ["calls of this kernel", kernel.calls && `${kernel.calls}, ${seconds(kernel.seconds)} together`]]),
    kernel.bound ? rooflineOf(k) : null,
    s.refusal || kernel.refusal ? el("p", {}, `First choice of schedule refused: ${s.refusal || kernel.refusal}`) : null,
    ...section("Why it is not fused further",
      s.why ? el("p", {}, "Its result goes to memory: ", s.why, ".") : null,
      links(s.from.filter(([p]) => V.steps[p].why).map(([p]) => [link(stepLabel(p), "steps", p), ` ahead of it: ${V.steps[p].why}.`]))),
    ...section("From the model", model),
    ...nodes,
    ...section("Code", codeTabs(kernel)),
    ...ends,
    ...passes,
  ];
}

/** The texts of a kernel; one is unpacked when it is looked at. */
function codeTabs(kernel) {
  const stages = [["naive", "loop nest"], ["operator", "scheduled"], ...V.stages.map((s) => [s, s === "llvm" ? "LLVM" : s.toUpperCase()])].filter(([s]) => kernel[s] !== undefined);
  const bar = el("span.choice", {}), place = el("div", {});
  const show = async (stage) => {
    state.stage = stage;
    bar.replaceChildren(...stages.map(([s, name]) => el("button", { "aria-pressed": s === stage, onclick: () => show(s) }, name)));
    const found = kernel[stage] < 0 ? "This text was left out to keep the page small; `dnnc inspect` prints it." : await text(kernel[stage]);
    place.replaceChildren(code(found));
  };
  show(stages.some(([s]) => s === state.stage) ? state.stage : stages[0][0]);
  return el("div", {}, bar, place);
}
