// Tables of kernels and passes, memory over the program, and the roofline.

function sortable(columns, data, click) {
  const body = el("tbody", {});
  let [key, down] = [columns.find((c) => c.first) ?? columns[0], true];
  const fillIn = () => {
    const value = (d) => key.by?.(d) ?? key.show(d);
    const order = [...data].sort((a, b) => { const [x, y] = [value(a), value(b)]; return (typeof x === "string" || typeof y === "string" ? String(y ?? "").localeCompare(String(x ?? "")) : (y ?? -1) - (x ?? -1)) * (down ? 1 : -1); });
    body.replaceChildren(...order.map((d) => el("tr", { tabindex: "0", onclick: () => click(d), onkeydown: (e) => e.key === "Enter" && click(d) }, ...columns.map((c) => el(c.by ? "td.n" : c.long ? "td" : "td.k", {}, c.show(d))))));
  };
  const pick = (c) => ([down, key] = [c === key ? !down : true, c], fillIn());
  const head = el("tr", {}, ...columns.map((c) => el(c.by ? "th.n" : "th", { "data-sort": "", tabindex: "0", title: "sort", onclick: () => pick(c), onkeydown: (e) => e.key === "Enter" && pick(c) }, c.name)));
  fillIn();
  return el("table.pick", {}, el("thead", {}, head), body);
}

function showKernels() {
  const steps = new Map();
  V.steps.forEach((s, k) => s.kernel !== undefined && (steps.has(s.kernel) ? steps.get(s.kernel).push(k) : steps.set(s.kernel, [k])));
  const data = V.kernels.map((k, n) => ({ ...k, steps: steps.get(n) ?? [] })).filter((k) => k.steps.length);
  const timed = data.some((k) => k.seconds !== undefined), all = data.reduce((sum, k) => sum + (k.seconds ?? 0), 0);
  const number = (x) => (typeof x === "number" ? x : -1);
  const columns = [
    { name: "kernel", show: (k) => k.name },
    { name: "calls", by: (k) => k.steps.length, show: (k) => `${k.calls ?? k.steps.length}` },
    ...(timed ? [{ name: "time", first: true, by: (k) => k.seconds, show: (k) => seconds(k.seconds) }, { name: "share", by: (k) => k.seconds, show: (k) => percent(k.seconds / all) },
      { name: "of limit", by: (k) => k.reached, show: (k) => percent(k.reached) }, { name: "limit", show: (k) => k.bound ?? "" }] : []),
    { name: "FLOP a call", first: !timed, by: (k) => number(k.flops), show: (k) => count(k.flops) },
    { name: "bytes a call", by: (k) => number(k.bytes), show: (k) => bytes(k.bytes) },
    { name: "schedule", long: true, show: (k) => k.choice },
  ];
  const wide = el("p.dim", {}, timed ? `All kernels take ${seconds(all)}. "of limit": the time that the roofline allows over the measured time; more than 100 % where an algorithm such as Winograd's needs fewer operations than are counted.` : "Not measured: give the page a profile for times.");
  $("kernels").replaceChildren(wide, sortable(columns, data, (k) => choose("steps", k.steps[0])));
}

function showPasses() {
  const made = V.passes.map((p, number) => {
    const found = V.changes.filter((c) => c.pass === number);
    const place = el("td", { colspan: "4" });
    const row = el("tr", {}, el("td.k", { title: p.why }, p.name), el("td.n", {}, seconds(p.seconds)), el("td.n", {}, p.before === p.after ? `${p.before}` : `${p.before} → ${p.after}`), el("td", {}, found.length ? plural(found.length, "change") : p.changed ? "changed" : "", ...p.notes.map((n) => el("div.dim.small", {}, n)), p.why && el("div.dim.small", {}, p.why)));
    const more = el("tr", { hidden: "" }, place);
    if (found.length) {
      const show = () => {
        if (!place.childNodes.length) place.replaceChildren(...found.slice(0, 200).map((c) => el("div", {}, ...c.nodes.slice(0, 6).flatMap((n) => [link(nodeLabel(n), "nodes", n), " "]), change(c, found.length < 12))), found.length > 200 ? el("p.dim", {}, `and ${found.length - 200} more`) : "");
        more.hidden = !more.hidden;
      };
      row.tabIndex = 0;
      row.addEventListener("click", show);
      row.addEventListener("keydown", (e) => e.key === "Enter" && show());
    }
    row.id = `pass${number}`;
    return found.length ? [row, more] : [row];
  });
  const head = el("tr", {}, el("th", {}, "pass"), el("th.n", {}, "time"), el("th.n", {}, "nodes"), el("th", {}, "what it did; click for before and after"));
  $("passes").replaceChildren(el("table.pick", {}, el("thead", {}, head), el("tbody", {}, ...made.flat())));
}

const PALETTE = ["#3f6a99", "#b8621b", "#3f7d38", "#8a5680", "#3b7f7a", "#8d6f14", "#7d5c49", "#b73d40"];

function showMemory() {
  const made = V.memory.map((m, number) => {
    const [left, top, bottom, right] = [64, 12, 40, 12], steps = m.alive.length;
    const width = Math.max($("stage").clientWidth - 60, 400), height = Math.max($("stage").clientHeight - 170, 260);
    const x = (step) => left + ((width - left - right) * step) / Math.max(steps, 1);
    const y = (at) => height - bottom - ((height - top - bottom) * at) / Math.max(m.arena, 1);
    const chart = svg("svg", { width, height, role: "img", "aria-label": "Memory over the program" });
    for (let k = 0; k <= 4; k++) {
      const at = (m.arena * k) / 4;
      chart.append(svg("line", { x1: left, x2: width - right, y1: y(at), y2: y(at), class: "axis" }), svg("text", { x: left - 6, y: y(at) + 4, "text-anchor": "end" }, bytes(Math.round(at))));
    }
    const every = Math.max(1, Math.ceil(steps / Math.max((width - left) / 70, 1)));
    for (let s = 0; s < steps; s += every) chart.append(svg("text", { x: x(s) + 2, y: height - bottom + 15, class: "dimtext" }, `${s}`));
    chart.append(svg("text", { x: (left + width) / 2, y: height - 6, "text-anchor": "middle", class: "dimtext" }, "step of the program"));
    m.slots.forEach(([names, n, first, last, at], k) => {
      const step = m.steps[first] ?? -1;
      const place = { x: x(first), y: y(at + n), width: Math.max(x(last + 1) - x(first), 1), height: Math.max(y(at) - y(at + n), 0.5) };
      const message = `${names.join("\n")}\n${bytes(n)} at byte ${at}, steps ${first} to ${last}${V.steps[step] ? `\nmade by ${stepLabel(step)}` : ""}`;
      chart.append(svg("rect", { ...place, fill: PALETTE[k % PALETTE.length], "fill-opacity": 0.8, stroke: "var(--bg)", "stroke-width": 0.5, "data-step": step, onmousemove: (e) => tip.show(e, message), onmouseout: tip.hide, onclick: () => V.steps[step] && choose("steps", step, false) }));
      const label = names[0].split(":")[0], room = Math.floor((place.width - 6) / 6.2);
      if (place.height > 13 && room >= 6) chart.append(svg("text", { x: place.x + 3, y: place.y + Math.min(place.height / 2 + 4, 16), "pointer-events": "none", style: "fill: #fff; stroke: none" }, short(label, room)));
    });
    let line = "";
    m.alive.forEach((n, s) => (line += `${line ? "L" : "M"}${x(s)},${y(n)}L${x(s + 1)},${y(n)}`));
    chart.append(svg("path", { d: line, fill: "none", stroke: "var(--text)", "stroke-width": 1.5, "pointer-events": "none" }));
    const over = m.lower ? ` (${((m.arena / m.lower - 1) * 100).toFixed(1)} % larger)` : "";
    return el("div", {}, el("h3", {}, V.memory.length > 1 ? `Program ${number + 1}` : "Memory over the program"),
      el("p.dim", {}, `Arena ${bytes(m.arena)}, lower bound ${bytes(m.lower)}${over}; constants ${bytes(m.constants)}. Boxes are tensors at their offsets; the line is the memory in use. Inputs and outputs belong to the caller.`), chart);
  });
  $("memory").replaceChildren(...(made.length ? made : [el("p.dim", {}, "There are no intermediate values in memory, or sizes are symbolic.")]));
}

const LEAST = 0.02; // FLOP per byte

/** Kernels by intensity and rate under the limits of the machine; `only` marks one kernel. */
function roofline(width, height, only) {
  const c = V.ceilings;
  const data = V.kernels.map((k, n) => ({ k, n, t: k.seconds && k.seconds / k.calls })).filter(({ k, t }) => t && typeof k.flops === "number" && typeof k.bytes === "number" && k.bytes > 0).map(({ k, n, t }) => {
    const i = Math.max(k.flops / k.bytes, LEAST); // kernels that only move data stand at the left, by their bandwidth
    return { k, n, i, r: (i * k.bytes) / t };
  });
  if (!c || !data.length) return null;
  const [left, bottom] = [52, 32], log = Math.log10;
  const [x0, x1] = [log(LEAST) - 0.1, Math.ceil(Math.max(2.4, ...data.map((d) => log(d.i))))];
  const y1 = Math.max(log(c.flops), ...data.map((d) => log(d.r))) + 0.15;
  const y0 = Math.max(Math.min(y1 - 2, ...data.map((d) => log(d.r) - 0.2)), y1 - 6);
  const x = (i) => left + ((width - left - 8) * (log(i) - x0)) / (x1 - x0), y = (r) => Math.min(height - bottom, height - bottom - ((height - bottom - 8) * (log(r) - y0)) / (y1 - y0));
  const chart = svg("svg", { width, height, role: "img", "aria-label": "Roofline" });
  for (let k = Math.ceil(y0); k <= y1; k++) chart.append(svg("line", { x1: left, x2: width - 8, y1: y(10 ** k), y2: y(10 ** k), class: "axis" }), svg("text", { x: left - 5, y: y(10 ** k) + 4, "text-anchor": "end" }, count(10 ** k)));
  for (let k = Math.ceil(x0); k <= x1; k++) chart.append(svg("text", { x: x(10 ** k), y: height - bottom + 14, "text-anchor": k === x1 ? "end" : "middle" }, `${10 ** k}`));
  chart.append(svg("text", { x: (left + width) / 2, y: height - 3, "text-anchor": "middle", class: "dimtext" }, "FLOP per byte"), svg("text", { x: left + 4, y: 10, class: "dimtext" }, "FLOP/s"));
  for (const [name, rate] of c.levels) {
    const knee = Math.min(c.flops / rate, 10 ** x1), from = Math.max(10 ** x0, 10 ** y0 / rate);
    if (from >= knee) continue;
    chart.append(svg("line", { x1: x(from), y1: y(from * rate), x2: x(knee), y2: y(knee * rate), stroke: "var(--dim)", "stroke-dasharray": "4 3" }));
    const mx = (x(from) + x(knee)) / 2, my = (y(from * rate) + y(knee * rate)) / 2; // the label runs along the line
    const angle = (Math.atan2(y(knee * rate) - y(from * rate), x(knee) - x(from)) * 180) / Math.PI;
    chart.append(svg("text", { x: mx, y: my - 5, "text-anchor": "middle", class: "dimtext", transform: `rotate(${angle} ${mx} ${my})` }, `${name} ${bytes(rate)}/s`));
  }
  chart.append(svg("line", { x1: x(Math.max(10 ** x0, c.flops / Math.max(...c.levels.map((v) => v[1])))), x2: width - 8, y1: y(c.flops), y2: y(c.flops), stroke: "var(--text)" }), svg("text", { x: width - 10, y: y(c.flops) - 4, "text-anchor": "end" }, `${count(c.flops)}FLOP/s`.replace("FLOP", " FLOP").replace("  ", " ")));
  const most = Math.max(...data.map((d) => d.k.seconds));
  for (const d of data.sort((a, b) => b.k.seconds - a.k.seconds)) {
    const step = V.steps.findIndex((s) => s.kernel === d.n);
    const message = `${d.k.name}\n${seconds(d.k.seconds)} in ${plural(d.k.calls, "call")}, ${percent(d.k.reached)} of the limit (${d.k.bound})`;
    const faint = only !== undefined && only !== d.n;
    chart.append(svg("circle", { cx: x(d.i), cy: y(d.r), r: only === d.n ? 6 : 3 + 9 * Math.sqrt(d.k.seconds / most) * (only === undefined ? 1 : 0.4), fill: only === d.n ? "var(--hot)" : "var(--accent)", "fill-opacity": faint ? 0.15 : 0.6, stroke: "var(--bg)", "data-step": step, onmousemove: (e) => tip.show(e, message), onmouseout: tip.hide, onclick: () => choose("steps", step, false) }));
  }
  return chart;
}

const rooflineOf = (step) => roofline($("details").clientWidth - 40, 190, V.steps[step].kernel);

function showRoofline() {
  const chart = roofline(Math.max($("stage").clientWidth - 50, 400), Math.max($("stage").clientHeight - 110, 260));
  $("roofline").replaceChildren(...(chart ? [el("p.dim", {}, `Each circle is a kernel; its area is its time. Lines are the limits of this machine with ${plural(V.ceilings.threads, "thread")}.`), chart] : [el("p.dim", {}, "Not measured: give the page a profile for times.")]));
}
