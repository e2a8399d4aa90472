// The table of best plans: sorts, filters, and keeps its state in the address. Data: cells.js, beside this file.
"use strict";
(() => {
  const cells = window.meshscopeBestPlans;
  const home = document.getElementById("best-plans");
  if (!cells || !home) return;
  home.classList.add("drawn"); // site.css hides the static table, which is not parsed yet

  const seconds = (s) =>
    s >= 1 ? `${s.toPrecision(3)} s` : s >= 1e-3 ? `${(s * 1e3).toPrecision(3)} ms` : `${(s * 1e6).toPrecision(3)} us`;
  const bytes = (n) => {
    const units = ["B", "kB", "MB", "GB", "TB"];
    let i = 0;
    for (; n >= 1000 && i < 4; i++) n /= 1000;
    return `${i ? Number(n.toPrecision(3)) : n} ${units[i]}`;
  };
  const rate = (n) => Number(n.toPrecision(3)).toLocaleString("en-US");
  const name = (cell) => cell.model.split("/").pop();
  const source = (cell) => (cell.compiled ? `compiled: ${cell.compiled.verdict}` : "predicted only");
  const communication = (cell) => cell.compiled || cell.predicted;

  // key, header, value to sort by, text, whether a phone shows it
  const columns = [
    ["model", "model", (c) => name(c).toLowerCase(), name, true],
    ["chip", "chip", (c) => c.chip, (c) => c.chip, true],
    ["chips", "chips", (c) => c.chips, (c) => c.chips, false],
    ["plan", "plan", (c) => c.options.plan, (c) => c.options.plan, true],
    ["batch", "batch", (c) => c.options.batch, (c) => c.options.batch, false],
    ["weights", "weights", (c) => c.options.weight_dtype, (c) => c.options.weight_dtype, false],
    ["ttft", "TTFT", (c) => c.ttft_s[0], (c) => seconds(c.ttft_s[0]), false],
    ["tpot", "TPOT", (c) => c.tpot_s[0], (c) => seconds(c.tpot_s[0]), true],
    ["rate", "request tokens/s per chip", (c) => c.tokens_per_s_per_chip, (c) => rate(c.tokens_per_s_per_chip), true],
    ["prefill", "sent, prefill", (c) => communication(c).prefill.wire_bytes, (c) => bytes(communication(c).prefill.wire_bytes), false],
    ["decode", "sent, decode step", (c) => communication(c).decode.wire_bytes, (c) => bytes(communication(c).decode.wire_bytes), false],
    ["exposed", "exposed, decode", (c) => c.exposed_frac.decode, (c) => `${Math.round(c.exposed_frac.decode * 100)}%`, false],
    ["source", "communication", source, source, false],
  ];
  const state = { goal: "throughput", chip: "", filter: "", sort: "model", down: "", cell: "" };
  const identity = (cell) => `${cell.goal}:${cell.chip}:${cell.model}`;

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
      else made.setAttribute(key, value);
    }
    made.append(...children);
    return made;
  }

  function readAddress() {
    const given = new URLSearchParams(location.hash.slice(1));
    for (const key of Object.keys(state)) if (given.has(key)) state[key] = given.get(key);
  }
  function writeAddress() {
    const kept = Object.entries(state).filter(([, value]) => value !== "");
    history.replaceState(null, "", `#${new URLSearchParams(kept)}`);
  }
  function change(changes) {
    Object.assign(state, changes);
    writeAddress();
    draw();
  }

  function shown() {
    const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const column = columns.find(([key]) => key === state.sort) || columns[0];
    const rows = cells.filter(
      (cell) =>
        cell.goal === state.goal &&
        (!state.chip || cell.chip === state.chip) &&
        words.every((word) => `${cell.model} ${cell.options ? cell.options.plan : ""}`.toLowerCase().includes(word)),
    );
    const value = (cell) => (cell.options ? column[2](cell) : null);
    rows.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === null || y === null) return (x === null) - (y === null);
      return (x < y ? -1 : x > y ? 1 : 0) * (state.down ? -1 : 1);
    });
    return rows;
  }

  function details(cell) {
    if (!cell.options) return element("p", {}, cell.refused);
    const range = ([s, low, high]) => `${seconds(s)} (${seconds(low)} to ${seconds(high)})`;
    const kinds = (phase) =>
      Object.entries(communication(cell)[phase].kinds).map(([kind, n]) => `${n} ${kind}`).join(", ") || "none";
    const options = Object.entries(cell.options).map(([key, value]) => `--${key.replace("_", "-")} ${value}`);
    const lines = [
      ["slice", `${cell.options.topology}, ${cell.chips} chips`],
      ["TTFT, prefill", range(cell.ttft_s)],
      ["TPOT, decode", range(cell.tpot_s)],
      ["memory", `${bytes(cell.total_bytes)} of ${bytes(cell.hbm_bytes)} a device`],
      ["prefill", `${kinds("prefill")}; ${cell.why.prefill || ""}`],
      ["decode", `${kinds("decode")}; ${cell.why.decode || ""}`],
      ["times", cell.is_extrapolated ? "predicted, outside the range of published measurements" : "predicted"],
      ["communication", cell.compiled ? `compiled; with the prediction: ${cell.compiled.verdict}; run ${cell.compiled.run}` : "predicted only"],
    ];
    const list = element("dl", {});
    for (const [term, text] of lines) list.append(element("dt", {}, term), element("dd", {}, text));
    const command = `meshscope ${cell.compiled ? "compile" : "predict"} ${cell.model} ${options.join(" ")}`;
    const made = element("div", {}, list, element("pre", {}, element("code", {}, command)));
    const file = `${cell.chip}-${cell.goal}-${cell.model.replaceAll("/", "--")}.zip`;
    const runs = window.meshscopeBestPlanRuns || {};
    if (file in runs) {
      const label = runs[file] ? "its compiled run folder (zip)" : "the run folder of its prediction (zip)";
      made.append(element("p", {}, element("a", { href: `best-plans/runs/${encodeURIComponent(file)}`, download: "" }, label)));
    }
    return made;
  }

  function row(cell) {
    const id = identity(cell);
    const open = state.cell === id;
    const toggle = () => change({ cell: open ? "" : id });
    const made = element("tr", { tabindex: "0", class: open ? "open" : "", onclick: toggle,
      onkeydown: (event) => event.key === "Enter" && toggle() });
    for (const [key, , , text, onPhone] of columns) {
      const plain = key === "model" ? name(cell) : key === "chip" ? cell.chip : cell.options ? String(text(cell)) : "";
      made.append(element("td", { class: onPhone ? key : "wide" }, plain || (key === "plan" && !cell.options ? "none" : "")));
    }
    if (!open) return [made];
    return [made, element("tr", { class: "details" }, element("td", { colspan: String(columns.length) }, details(cell)))];
  }

  function header([key, title, , , onPhone]) {
    const mark = state.sort === key ? (state.down ? " ▼" : " ▲") : "";
    const sort = () => change({ sort: key, down: state.sort === key && !state.down ? "1" : "" });
    return element("th", { class: onPhone ? "" : "wide", "aria-sort": mark ? (state.down ? "descending" : "ascending") : "none" },
      element("button", { type: "button", onclick: sort }, title + mark));
  }

  const select = (key, choices) => {
    const made = element("select", { onchange: (event) => change({ [key]: event.target.value }), "aria-label": key });
    for (const [value, label] of choices) made.append(element("option", { value }, label));
    return made;
  };
  const goal = select("goal", [["throughput", "smallest slice, most throughput"], ["latency", "eight chips, least latency"]]);
  const chip = select("chip", [["", "all generations"], ...[...new Set(cells.map((cell) => cell.chip))].map((c) => [c, c])]);
  const filter = element("input", { type: "search", placeholder: "model or plan", "aria-label": "filter",
    oninput: (event) => change({ filter: event.target.value }) });
  const count = element("span", {});
  const table = element("table", { class: "best-plans" });
  home.append(element("div", { class: "best-plans-controls" }, goal, chip, filter, count), element("div", { class: "best-plans-box" }, table));

  function draw() {
    goal.value = state.goal;
    chip.value = state.chip;
    if (filter.value !== state.filter) filter.value = state.filter;
    const rows = shown();
    count.textContent = `${rows.length} of ${cells.length} cells`;
    table.replaceChildren(
      element("thead", {}, element("tr", {}, ...columns.map(header))),
      element("tbody", {}, ...rows.flatMap(row)),
    );
  }
  window.addEventListener("hashchange", () => { readAddress(); draw(); });
  // The site carries the run folders; a checkout has none, and then there is no link.
  document.head.append(element("script", { src: "best-plans/runs/runs.js", onload: draw }));
  readAddress();
  draw();
  table.querySelector("tr.open")?.scrollIntoView({ block: "center" });
})();
