// Tabs, search, keyboard, theme; and the start of the page.

const TABS = { graph: "Graph", kernels: "Kernels", memory: "Memory", roofline: "Roofline", passes: "Passes" };
const SHOW = { graph: () => (cy ? (cy.resize(), mark()) : setGraph(state.graph)), kernels: showKernels, memory: showMemory, roofline: showRoofline, passes: showPasses };
const KEYS = [["/", "search; arrow keys and Enter choose"], ["1 to 5", "the tabs"], ["g", "graph as imported, as fused"], ["↑ ↓", "to what a node reads, to what reads it"], ["← →", "to its neighbours in order"],
  ["Enter", "fold or unfold a layer"], ["f", "fit"], ["t", "light, dark, as the system says"], ["Escape", "choose nothing"], ["?", "this list"]];

function showTab(tab) {
  state.tab = tab;
  for (const t of Object.keys(TABS)) $(t).hidden = t !== tab;
  $("tabs").replaceChildren(...Object.entries(TABS).map(([t, name]) => el("button", { role: "tab", "aria-selected": t === tab, onclick: () => showTab(t) }, name)));
  SHOW[tab]();
  if (tab === "graph" && state.chosen && state.chosen.kind === state.graph) reveal(state.chosen.kind, state.chosen.number);
  const c = state.chosen;
  history.replaceState(null, "", c ? `#${tab}/${state.graph}/${c.kind}/${c.number}` : `#${tab}`);
}

// --- search ---

let hits = [], at = 0;

function search(words) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  const found = [];
  const look = (name, small, act) => found.length < 200 && wanted.every((w) => name.toLowerCase().includes(w) || small.toLowerCase().includes(w)) && found.push([name, small, act]);
  if (wanted.length) {
    V.scopes.forEach(([name], k) => k && look(name, `layer, ${scopeName(k)}`, () => (graphTab(), choose("scope", k))));
    V.nodes.forEach((n, k) => look(`${n.op} ${n.name}`, `node, ${n.made.join(" ")}`, () => (graphTab(), choose("nodes", k))));
    V.steps.forEach((s, k) => look(stepLabel(k), `step, ${s.ops.join(" + ")}, ${s.loc}`, () => (graphTab(), choose("steps", k))));
    V.passes.forEach((p, k) => look(p.name, "pass", () => (showTab("passes"), $(`pass${k}`).scrollIntoView({ block: "center" }), $(`pass${k}`).focus())));
  }
  [hits, at] = [found, 0];
  $("hits").replaceChildren(...hits.slice(0, 60).map(([name, small, act], k) => el("li", { "aria-selected": k === 0, onmousedown: (e) => (e.preventDefault(), take(k)) }, name, " ", el("small", {}, small))), ...(wanted.length && !hits.length ? [el("li.dim", {}, "nothing")] : []));
  $("hits").hidden = !wanted.length;
}

const graphTab = () => state.tab !== "graph" && showTab("graph");

function take(k) {
  if (!hits[k]) return;
  const act = hits[k][2];
  $("hits").hidden = true;
  $("search").blur();
  act();
}

function searchKey(e) {
  const last = Math.min(hits.length, 60) - 1;
  if (e.key === "ArrowDown") at = Math.min(at + 1, last);
  else if (e.key === "ArrowUp") at = Math.max(at - 1, 0);
  else if (e.key === "Enter") return take(at);
  else if (e.key === "Escape") return ($("search").value = ""), search(""), $("search").blur();
  else return;
  e.preventDefault();
  [...$("hits").children].forEach((li, k) => li.setAttribute("aria-selected", k === at));
  $("hits").children[at]?.scrollIntoView({ block: "nearest" });
}

// --- keyboard ---

function walk(key) {
  const c = state.chosen;
  if (!c || (c.kind !== "nodes" && c.kind !== "steps")) return choose(state.graph, 0);
  const x = V[c.kind][c.number], last = V[c.kind].length - 1;
  const next = { ArrowUp: x.from[0]?.[0], ArrowDown: x.to[0]?.[0], ArrowLeft: Math.max(c.number - 1, 0), ArrowRight: Math.min(c.number + 1, last) }[key];
  if (next !== undefined) choose(c.kind, next);
}

function key(e) {
  if (e.ctrlKey || e.metaKey || e.altKey || ["INPUT", "SELECT"].includes(e.target.tagName) || $("help").open) return;
  if (e.key === "/") e.preventDefault(), $("search").focus(), $("search").select();
  else if (e.key === "?") help();
  else if (e.key === "t") nextTheme();
  else if (e.key >= "1" && e.key <= "5") showTab(Object.keys(TABS)[e.key - 1]);
  else if (e.key === "Escape") choose(null);
  else if (state.tab !== "graph") return;
  else if (e.key === "g") setGraph(state.graph === "nodes" ? "steps" : "nodes");
  else if (e.key === "f") fit();
  else if (e.key.startsWith("Arrow") && !$("details").contains(e.target)) e.preventDefault(), walk(e.key);
  else if (e.key === "Enter" && state.chosen?.kind === "scope" && !e.target.closest("a, button")) toggle(elementOf("scope", state.chosen.number)), details();
}

function help() {
  $("help").replaceChildren(el("h2", {}, "Keyboard"), el("table", {}, el("tbody", {}, ...KEYS.map(([k, what]) => el("tr", {}, el("td.k", {}, el("kbd", {}, k)), el("td", {}, what))))), el("p", {}, el("button", { onclick: () => $("help").close() }, "Close")));
  $("help").showModal();
}

// --- theme ---

const dark = matchMedia("(prefers-color-scheme: dark)");
let theme = "system";

function setTheme(name) {
  theme = name;
  document.documentElement.dataset.theme = name === "system" ? (dark.matches ? "dark" : "light") : name;
  $("theme").textContent = { system: "◐", light: "☀", dark: "☾" }[name];
  if (cy) draw(null, true);
}
const nextTheme = () => setTheme({ system: "light", light: "dark", dark: "system" }[theme]);

// --- start ---

function grip() {
  $("grip").addEventListener("pointerdown", (e) => {
    $("grip").setPointerCapture(e.pointerId);
    const move = (m) => ($("details").style.flexBasis = `${Math.min(Math.max(innerWidth - m.clientX, 240), innerWidth - 320)}px`, cy?.resize());
    $("grip").addEventListener("pointermove", move);
    $("grip").addEventListener("pointerup", () => ($("grip").removeEventListener("pointermove", move), SHOW[state.tab]()), { once: true });
  });
}

async function start() {
  V = JSON.parse(await unpacked($("data").textContent.trim()));
  index();
  document.title = `${V.title} - dnnc`;
  $("title").textContent = V.title;
  $("facts").textContent = V.facts.map(([k, v]) => (k === "target" ? v : `${k} ${v}`)).join(" · ");
  $("facts").title = $("facts").textContent;
  if (!V.steps.length) state.graph = "nodes";
  if (V.kernels.some((k) => k.seconds !== undefined)) state.colour = "time";
  const [tab, graph, kind, number, look] = location.hash.slice(1).split("/");
  setTheme(new URLSearchParams(location.search).get("theme") ?? "system");
  dark.addEventListener("change", () => theme === "system" && setTheme("system"));
  $("theme").onclick = nextTheme;
  $("keys").onclick = help;
  $("fold").onclick = () => (open().clear(), open().add(0), draw());
  $("unfold").onclick = () => (unfoldSome(MOST), draw());
  $("fit").onclick = fit;
  $("search").oninput = () => search($("search").value);
  $("search").onkeydown = searchKey;
  $("search").onblur = () => ($("hits").hidden = true);
  $("search").onfocus = () => search($("search").value);
  addEventListener("keydown", key);
  addEventListener("resize", () => SHOW[state.tab]());
  grip();
  if (V[graph]) state.graph = graph;
  showTab(TABS[tab] ? tab : "graph");
  kind && (V[kind] || kind === "scope") ? choose(kind, +number) : details();
  document.documentElement.dataset.ready = "yes";
}

start();
