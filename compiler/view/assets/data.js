"use strict";
// The data of the page, and what everything else needs: elements, numbers for people, what is chosen.

const $ = (id) => document.getElementById(id);
const unpacked = (text) =>
  new Response(
    new Blob([Uint8Array.from(atob(text), (c) => c.charCodeAt(0))]).stream().pipeThrough(new DecompressionStream("gzip")),
  ).text();
const TEXTS = $("texts").textContent.trim().split("\n");
const text = (number) => unpacked(TEXTS[number]);

let V; // the view: see dnnc.view.collect
const state = { graph: "steps", colour: "kind", tab: "graph", chosen: null, open: { nodes: new Set(), steps: new Set() } };

/** An element: el("p.dim", {title: ""}, "text", child). Texts are never read as HTML. */
function el(kind, attributes, ...children) {
  const [tag, ...classes] = kind.split(".");
  const made = document.createElement(tag);
  if (classes.length) made.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes ?? {}))
    name.startsWith("on") ? made.addEventListener(name.slice(2), value) : made.setAttribute(name, value);
  made.append(...children.filter((c) => c !== null && c !== undefined && c !== ""));
  return made;
}

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes ?? {}))
    name.startsWith("on") ? made.addEventListener(name.slice(2), value) : made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function scaled(x, step, units) {
  if (typeof x !== "number") return String(x ?? "");
  let k = 0;
  while (Math.abs(x) >= step && k < units.length - 1) [x, k] = [x / step, k + 1];
  return `${k ? Number(x.toPrecision(3)) : x} ${units[k]}`.trim();
}
const bytes = (n) => scaled(n, 1024, ["B", "KB", "MB", "GB", "TB"]);
const count = (n) => scaled(n, 1000, ["", "K", "M", "G", "T"]);
const seconds = (s) =>
  s === undefined || s === null ? "" : s >= 1 ? `${s.toFixed(2)} s` : s >= 1e-3 ? `${Number((s * 1e3).toPrecision(3))} ms` : `${Number((s * 1e6).toPrecision(3))} µs`;
const percent = (x) => (x === undefined || x === null ? "" : `${(x * 100).toFixed(x < 0.1 ? 1 : 0)} %`);
const plural = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;

/** Seconds of a step: its own, or the mean of its kernel's calls. */
function time(step) {
  if (step.seconds !== undefined) return step.seconds;
  const k = V.kernels[step.kernel];
  return k?.seconds === undefined ? undefined : k.seconds / k.calls;
}

/** Numbers by which others are reached, computed once. */
function index() {
  for (const kind of ["nodes", "steps"]) {
    V[kind].forEach((x) => (x.to = []));
    V[kind].forEach((x, k) => x.from.forEach(([source, label]) => V[kind][source]?.to.push([k, label])));
  }
  V.nodes.forEach((n) => ([n.steps, n.changes] = [[], []]));
  V.steps.forEach((s, k) => s.origins?.forEach((n) => V.nodes[n].steps.push(k)));
  V.changes.forEach((c, k) => c.nodes.forEach((n) => V.nodes[n].changes.push(k)));
  V.children = V.scopes.map(() => []);
  V.scopes.forEach(([, outer], k) => outer >= 0 && V.children[outer].push(k));
  V.inside = {};
  for (const kind of ["nodes", "steps"]) {
    const inside = V.scopes.map(() => []);
    V[kind].forEach((x, k) => inside[x.scope].push(k));
    V.inside[kind] = inside;
  }
  V.total = V.steps.reduce((sum, s) => sum + (time(s) ?? 0), 0);
}

/** All members of a scope and of those within it. */
function everything(kind, scope) {
  return [...V.inside[kind][scope], ...V.children[scope].flatMap((c) => everything(kind, c))];
}

const scopeName = (k) => {
  const names = [];
  for (; k > 0; k = V.scopes[k][1]) names.unshift(V.scopes[k][0]);
  return names.join(" / ") || V.title;
};

const link = (label, kind, number) => el("a", { tabindex: "0", role: "link", onclick: () => choose(kind, number), onkeydown: (e) => e.key === "Enter" && choose(kind, number) }, label);
const stepLabel = (k) => `${k} ${V.steps[k].name}`;
const nodeLabel = (k) => `${V.nodes[k].op} ${V.nodes[k].name}`;

const tip = {
  show(e, message) {
    $("tip").textContent = message;
    $("tip").hidden = false;
    $("tip").style.left = `${Math.min(e.clientX + 14, innerWidth - $("tip").offsetWidth - 8)}px`;
    $("tip").style.top = `${Math.min(e.clientY + 14, innerHeight - $("tip").offsetHeight - 8)}px`;
  },
  hide: () => ($("tip").hidden = true),
};
