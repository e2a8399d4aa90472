// Draws the charts of the report with Vega from the specifications embedded in the page, and sorts and
// copies its tables. Makes no network requests.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  // Of the messages of Vega-Lite, only errors: it warns of layers that share a scale.
  const quiet = { level: () => quiet, error: (...all) => { console.error(...all); return quiet; }, warn: () => quiet, info: () => quiet, debug: () => quiet };
  function html(name, attributes, parent, text) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  }
  class Chart {
    constructor(figure, chart) {
      this.figure = figure;
      figure.chart = this;
      this.chart = chart;
      this.box = { k: 1, x: 0, y: 0 };
      this.holder = figure.querySelector(".plot");
      this.tools = figure.querySelector(".tools");
      const { spec } = vega.compile({ ...chart.spec, width: this.width() }, { config: data.config, logger: quiet });
      this.view = new vega.View(vega.parse(spec, {}, { ast: true }), {
        expr: vega.expressionInterpreter, renderer: "svg", hover: false, tooltip: () => {},
      }).initialize(this.holder, this.tools).run();
      const signals = this.view.getState().signals;
      this.range = "low" in signals ? [signals.low, signals.high] : null;
      this.svg = this.holder.querySelector("svg");
      const attributes = { tabindex: "0", role: "group", "aria-roledescription": "chart",
        "aria-label": `${chart.title}. ${chart.description} Use the arrow keys to move between marks, + and - to zoom, and 0 to reset.` };
      for (const [key, value] of Object.entries(attributes)) this.svg.setAttribute(key, value);
      this.makeTools();
      this.listen();
      this.fit();
    }

    width() { return this.chart.spec.usermeta.is_fixed ? this.chart.spec.width : Math.max(300, this.holder.clientWidth - 4); }

    // The marks with a text, by rows and from the left.
    get marks() {
      const nodes = [...this.svg.querySelectorAll("path, line, rect, text")].filter((node) => node.__data__?.tooltip);
      const placed = nodes.map((node) => [node, node.getBoundingClientRect()]);
      placed.sort(([, a], [, b]) => (Math.abs(a.top - b.top) > 8 ? a.top - b.top : a.left - b.left));
      return placed.map(([node]) => node);
    }

    makeTools() {
      for (const select of this.tools.querySelectorAll("select")) select.addEventListener("change", () => { this.hide(); this.fit(); });
      if (!this.range && !this.chart.is_zoomed) return;
      for (const [sign, title, act] of [["+", "Zoom in", () => this.zoom(1.6)],
        ["\u2212", "Zoom out", () => this.zoom(1 / 1.6)], ["reset", "Reset zoom", () => this.reset()]]) {
        const button = html("button", { type: "button", title, "aria-label": `${title}: ${this.chart.title}` }, this.tools, sign);
        button.addEventListener("click", act);
      }
    }

    listen() {
      const svg = this.svg;
      svg.addEventListener("pointermove", (event) => {
        const text = event.target.__data__?.tooltip;
        if (text) this.show(event.target, event.clientX, event.clientY);
        else if (!this.dragging) this.hide();
      });
      svg.addEventListener("pointerleave", () => this.hide());
      svg.addEventListener("blur", () => this.hide());
      svg.addEventListener("dblclick", () => this.reset());
      svg.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        this.zoom(event.deltaY < 0 ? 1.25 : 0.8, this.place(event));
      }, { passive: false });
      svg.addEventListener("pointerdown", (event) => {
        if (event.button !== 0) return;
        this.dragging = { x: event.clientX, y: event.clientY };
      });
      window.addEventListener("pointerup", () => { this.dragging = null; });
      window.addEventListener("pointermove", (event) => {
        if (!this.dragging) return;
        const box = svg.getBoundingClientRect();
        const scale = this.size[0] / box.width;
        this.pan((this.dragging.x - event.clientX) * scale, (this.dragging.y - event.clientY) * scale);
        this.dragging = { x: event.clientX, y: event.clientY };
      });
      svg.addEventListener("keydown", (event) => this.key(event));
    }

    place(event) {
      const box = this.svg.getBoundingClientRect();
      return { x: (event.clientX - box.left) / box.width, y: (event.clientY - box.top) / box.height };
    }

    key(event) {
      const pans = { ArrowLeft: [-60, 0], ArrowRight: [60, 0], ArrowUp: [0, -60], ArrowDown: [0, 60] };
      if (event.ctrlKey || event.altKey || event.metaKey) return;
      if (event.shiftKey && pans[event.key]) this.pan(...pans[event.key]);
      else if (event.key === "ArrowRight" || event.key === "ArrowDown") this.step(1);
      else if (event.key === "ArrowLeft" || event.key === "ArrowUp") this.step(-1);
      else if (event.key === "Home") this.step(-Infinity);
      else if (event.key === "End") this.step(Infinity);
      else if (event.key === "+" || event.key === "=") this.zoom(1.6);
      else if (event.key === "-") this.zoom(1 / 1.6);
      else if (event.key === "0") this.reset();
      else if (event.key === "Escape") this.hide();
      else return;
      event.preventDefault();
    }

    step(by) {
      const marks = this.marks;
      if (!marks.length) return;
      const now = marks.indexOf(this.last);
      const at = Math.max(0, Math.min(marks.length - 1, now < 0 ? (by > 0 ? 0 : marks.length - 1) : now + by));
      const end = by === Infinity ? marks.length - 1 : by === -Infinity ? 0 : at;
      const box = marks[end].getBoundingClientRect();
      this.show(marks[end], box.left + box.width / 2, box.top + box.height / 2);
    }

    show(mark, x, y) {
      if (this.active) this.active.classList.remove("on");
      this.last = this.active = mark;
      mark.classList.add("on");
      tip.textContent = mark.__data__.tooltip;
      tip.hidden = false;
      const box = tip.getBoundingClientRect();
      const left = Math.min(x + 14, window.innerWidth - box.width - 8);
      const top = y + 18 + box.height > window.innerHeight ? y - box.height - 10 : y + 18;
      tip.style.left = `${Math.max(4, left)}px`;
      tip.style.top = `${Math.max(4, top)}px`;
    }

    hide() {
      if (this.active) this.active.classList.remove("on");
      this.active = null;
      tip.hidden = true;
    }

    // Zooms the range of the x axis, or else into the drawing.
    zoom(factor, at = { x: 0.5, y: 0.5 }) {
      if (this.range) {
        const [a, b] = this.range;
        const center = a + (b - a) * Math.max(0, Math.min(1, at.x));
        const span = Math.min((b - a) / factor, this.chart.spec.params[2].value);
        this.setRange(center - (span * (center - a)) / (b - a), span);
        return;
      }
      if (!this.chart.is_zoomed) return;
      const [box, [w, h]] = [this.box, this.size];
      const k = Math.max(1, Math.min(24, box.k * factor));
      box.x += (at.x * w) / box.k - (at.x * w) / k;
      box.y += (at.y * h) / box.k - (at.y * h) / k;
      box.k = k;
      this.applyBox();
    }

    pan(dx, dy) {
      if (this.range) {
        const [a, b] = this.range;
        this.setRange(a + (dx * (b - a)) / this.size[0], b - a);
        return;
      }
      this.box.x += dx / this.box.k;
      this.box.y += dy / this.box.k;
      this.applyBox();
    }

    setRange(start, span) {
      const end = this.chart.spec.params[2].value;
      const low = Math.max(0, Math.min(start, end - span));
      this.range = [low, low + Math.max(span, end * 1e-7)];
      this.hide();
      this.view.signal("low", this.range[0]).signal("high", this.range[1]).run();
      this.fit();
    }

    reset() {
      this.box = { k: 1, x: 0, y: 0 };
      if (this.range) this.setRange(...[0, this.chart.spec.params[2].value]);
      this.fit();
    }

    applyBox() {
      const { k } = this.box;
      const [w, h] = this.size.map((side) => side / k);
      this.box.x = Math.max(0, Math.min(this.box.x, this.size[0] - w));
      this.box.y = Math.max(0, Math.min(this.box.y, this.size[1] - h));
      this.svg.setAttribute("viewBox", `${this.box.x} ${this.box.y} ${w} ${h}`);
    }

    // Takes over the size of the drawing.
    fit() {
      this.size = ["width", "height"].map((side) => Number(this.svg.getAttribute(side)));
      this.applyBox();
    }

    resize() {
      this.hide();
      if (!this.chart.spec.usermeta.is_fixed) this.view.width(this.width()).run();
      this.fit();
    }
  }

  // ---- tables: sorting by column, copying as TSV
  const valueOf = (cell) => (cell.dataset.v === undefined ? null : Number(cell.dataset.v));
  function compare(a, b) {
    const [x, y] = [valueOf(a), valueOf(b)];
    if (x !== null && y !== null) return x - y;
    if (x !== null || y !== null) return x === null ? 1 : -1;
    return a.textContent.localeCompare(b.textContent, "en", { numeric: true });
  }
  function sortBy(table, column, button) {
    const head = button.closest("th");
    const falling = head.getAttribute("aria-sort") === "ascending";
    for (const th of table.tHead.rows[0].cells) th.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", falling ? "descending" : "ascending");
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => (falling ? -1 : 1) * compare(a.cells[column], b.cells[column]));
    table.tBodies[0].append(...rows);
  }
  // Prefixes an apostrophe to text that a spreadsheet would evaluate as a formula.
  const guarded = (text) => (/^[=+\-@]/.test(text) && !/^-?[\d.,]+( |$)/.test(text) && text !== "-" ? `'${text}` : text);
  function asTsv(table) {
    const cell = (node) => (node.dataset.v === undefined ? guarded(node.textContent.trim().replace(/\s+/g, " ")) : node.dataset.v);
    return [...table.rows].map((row) => [...row.cells].map(cell).join("\t")).join("\n");
  }
  async function copy(text) {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = html("textarea", { "aria-hidden": "true" }, document.body);
      area.value = text;
      area.select();
      document.execCommand("copy");
      area.remove();
    }
  }
  function copyWith(button, text) {
    button.addEventListener("click", async () => {
      await copy(text());
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
  }
  for (const holder of document.querySelectorAll(".command")) {
    copyWith(holder.querySelector(".copy"), () => holder.querySelector("code").textContent);
  }
  for (const holder of document.querySelectorAll(".table")) {
    const table = holder.querySelector("table");
    [...table.tHead.rows[0].cells].forEach((th, column) => {
      const button = th.querySelector("button");
      if (button) button.addEventListener("click", () => sortBy(table, column, button));
    });
    copyWith(holder.querySelector(".copy"), () => asTsv(table));
  }

  // ---- light and dark
  const theme = document.getElementById("theme");
  const themes = ["auto", "light", "dark"];
  const stored = () => { try { return localStorage.getItem("meshscope-theme"); } catch { return null; } };
  function setTheme(name) {
    if (name === "auto") document.documentElement.removeAttribute("data-theme");
    else document.documentElement.setAttribute("data-theme", name);
    theme.textContent = `theme: ${name}`;
    theme.dataset.name = name;
    try { localStorage.setItem("meshscope-theme", name); } catch { /* no storage: the choice is not kept */ }
  }
  const requested = new URLSearchParams(location.hash.slice(1)).get("theme");
  setTheme([requested, stored()].find((name) => themes.includes(name)) || "auto");
  theme.addEventListener("click", () => setTheme(themes[(themes.indexOf(theme.dataset.name) + 1) % themes.length]));
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });

  // ---- charts are drawn when their fold is opened
  const charts = new Map();
  const isShown = (figure) => !figure.parentElement.closest("details:not([open])");
  function drawShown() {
    for (const figure of document.querySelectorAll("figure[data-chart]")) {
      if (!charts.has(figure) && isShown(figure)) charts.set(figure, new Chart(figure, data.charts[Number(figure.dataset.chart)]));
    }
    document.documentElement.dataset.ready = String(charts.size);
  }
  const redraw = () => { for (const [figure, chart] of charts) if (isShown(figure)) chart.resize(); };
  for (const details of document.querySelectorAll("details")) {
    details.addEventListener("toggle", () => { if (details.open) { drawShown(); redraw(); } });
  }
  function openTarget() {
    const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    if (target && target.tagName === "DETAILS") target.open = true;
  }
  window.addEventListener("hashchange", openTarget);
  openTarget();
  drawShown();
  let width = window.innerWidth;
  let waiting = null;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(redraw, 120);
  });
})();
