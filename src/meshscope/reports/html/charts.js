// Draws the charts of the report as SVG from the JSON embedded in the page. Makes no network requests.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const SVG = "http://www.w3.org/2000/svg";
  const AXIS_COLORS = ["ax0", "ax1", "ax2", "ax3", "ax4", "ax5"];
  const FIXED = new Map([
    ["compute", "c-compute"], ["waiting for memory", "c-memory"], ["copy", "c-idle"],
    ["waiting for stages", "c-stages"], ["idle", "c-idle"], ["collectives, hidden or not", "ax0"],
    ["weights", "c-compute"], ["KV cache", "ax1"], ["temporaries", "c-stages"], ["other", "c-idle"],
    ["attn", "p0"], ["mlp", "p1"], ["moe.experts", "p2"], ["moe.shared", "p3"], ["moe.router", "p4"],
    ["moe.dispatch", "p5"], ["moe.combine", "p6"], ["lm_head", "p3"], ["embed", "p4"], ["sample", "p2"],
    ["between parts", "c-between"], ["stage", "c-stages"], ["no breakdown", "c-idle"],
  ]);
  const MAX_CHANGES = 9;  // named rows of a waterfall
  const ZOOMED = ["timeline", "matrix", "torus", "roofline", "front"];  // kinds with buttons to zoom
  const axes = [];
  // The CSS class of a name. A name keeps its class in every chart of the page.
  function classOf(name) {
    if (FIXED.has(name)) return FIXED.get(name);
    const axis = name.replace(/^exposed over /, "");
    if (!axes.includes(axis)) axes.push(axis);
    return AXIS_COLORS[axes.indexOf(axis) % AXIS_COLORS.length];
  }

  // ---- number formatting, the same as in meshscope.units
  const three = (v) => (Math.abs(v) < 100 ? String(Number(v.toPrecision(3))) : v.toFixed(0));
  function scaled(v, units, base = 1) {
    let power = 0;
    let value = v / base;
    while (Math.abs(value) >= 999.5 && power < units.length - 1) { value /= 1000; power += 1; }
    return `${three(value)} ${units[power]}`;
  }
  function format(v, unit) {
    if (v === null || v === undefined) return "unknown";
    if (unit === "s") return v === 0 ? "0 s" : scaled(v, ["us", "ms", "s"], 1e-6);
    if (unit === "B") return scaled(v, ["B", "kB", "MB", "GB", "TB"]);
    if (unit === "GiB") return `${(v / 2 ** 30).toFixed(2)} GiB`;
    if (unit === "FLOP/s") return scaled(v, ["FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"]);
    const whole = Number.isInteger(v) ? v.toLocaleString("en") : three(v);
    return unit ? `${whole} ${unit}` : whole;
  }
  const percent = (part, whole) => `${((100 * part) / whole).toFixed(part / whole < 0.1 ? 1 : 0)}%`;
  const share = (part, whole) => (whole ? ` (${percent(part, whole)})` : "");

  // ---- SVG
  function make(name, attributes, parent, text) {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes || {})) {
      node.setAttribute(key, typeof value === "number" ? Number(value.toFixed(3)) : value);
    }
    if (text !== undefined) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  }
  // ---- label placement
  const boxAt = (x, y, width, height) => ({ x, y, right: x + width, bottom: y + height });
  const overlaps = (a, b) => a.x < b.right && b.x < a.right && a.y < b.bottom && b.y < a.bottom;
  const isInside = (a, b) => a.x >= b.x && a.right <= b.right && a.y >= b.y && a.bottom <= b.bottom;
  const textWidth = (text) => 7 * text.length;
  function html(name, attributes, parent, text) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  }
  function niceTicks(low, high, n) {
    const span = high - low;
    if (!(span > 0)) return [low];
    const rough = span / Math.max(1, n);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
    const ticks = [];
    for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-6; t += step) ticks.push(t);
    return ticks;
  }

  // Ticks at 1, 2 and 5 times powers of ten; more of them on a short scale.
  function logTicks(low, high) {
    const steps = high / low > 4 ? [1, 2, 5] : [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9];
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power += 1) {
      ticks.push(...steps.map((step) => Number((step * 10 ** power).toPrecision(6))).filter((t) => t >= low && t <= high));
    }
    return ticks;
  }

  class Chart {
    constructor(figure, spec) {
      this.figure = figure;
      this.spec = spec;
      this.data = spec.data;
      this.kind = KINDS[spec.kind];
      this.view = { k: 1, x: 0, y: 0 };
      this.range = this.data.range ? [...this.data.range] : null;
      this.holder = figure.querySelector(".plot");
      this.tools = figure.querySelector(".tools");
      this.makeTools();
      this.svg = make("svg", { tabindex: "0", role: "group", "aria-roledescription": "chart",
        "aria-label": `${spec.title}. ${spec.description} Use the arrow keys to move between marks, + and - to zoom, and 0 to reset.` });
      this.holder.append(this.svg);
      this.listen();
      this.draw();
    }

    makeTools() {
      const items = this.data.items || [];
      const selects = this.data.selects || (items.length > 1 ? [{ label: "show", options: items.map((item) => item.name), at: 0 }] : []);
      this.picked = selects.map((select) => select.at);
      selects.forEach(({ label, options, at }, i) => {
        const pick = html("select", {}, html("label", { class: "pick" }, this.tools, `${label} `));
        options.forEach((option, j) => html("option", { value: String(j) }, pick, option));
        pick.value = String(at);
        pick.addEventListener("change", () => { this.picked[i] = Number(pick.value); this.reset(); });
      });
      if (!ZOOMED.includes(this.spec.kind)) return;
      for (const [sign, title, act] of [["+", "Zoom in", () => this.zoom(1.6)],
        ["\u2212", "Zoom out", () => this.zoom(1 / 1.6)], ["reset", "Reset zoom", () => this.reset()]]) {
        const button = html("button", { type: "button", title, "aria-label": `${title}: ${this.spec.title}` }, this.tools, sign);
        button.addEventListener("click", act);
      }
    }

    listen() {
      const svg = this.svg;
      svg.addEventListener("pointermove", (event) => {
        const mark = event.target.closest("[data-i]");
        if (mark) this.show(Number(mark.dataset.i), event.clientX, event.clientY);
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
        const scale = this.width / box.width;
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
      if (!this.marks.length) return;
      const next = this.at === undefined || this.at < 0 ? (by > 0 ? 0 : this.marks.length - 1) : this.at + by;
      const at = Math.max(0, Math.min(this.marks.length - 1, next));
      const box = this.marks[at].node.getBoundingClientRect();
      this.show(at, box.left + box.width / 2, box.top + box.height / 2);
    }

    show(at, x, y) {
      if (this.active) this.active.classList.remove("on");
      const mark = this.marks[at];
      if (!mark) return;
      this.at = at;
      this.active = mark.node;
      mark.node.classList.add("on");
      tip.textContent = mark.text;
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

    zoom(factor, at = { x: 0.5, y: 0.5 }) {
      if (this.range) {
        const [a, b] = this.range;
        const inner = (at.x * this.width - this.left) / (this.right - this.left);
        const center = a + (b - a) * Math.max(0, Math.min(1, inner));
        const span = Math.min((b - a) / factor, this.data.end);
        this.setRange(center - (span * (center - a)) / (b - a), span);
        return;
      }
      const view = this.view;
      const k = Math.max(1, Math.min(24, view.k * factor));
      const [w, h] = [this.width, this.height];
      view.x += (at.x * w) / view.k - (at.x * w) / k;
      view.y += (at.y * h) / view.k - (at.y * h) / k;
      view.k = k;
      this.applyView();
    }

    pan(dx, dy) {
      if (this.range) {
        const [a, b] = this.range;
        this.setRange(a + (dx * (b - a)) / (this.right - this.left), b - a);
        return;
      }
      this.view.x += dx / this.view.k;
      this.view.y += dy / this.view.k;
      this.applyView();
    }

    setRange(start, span) {
      const low = Math.max(0, Math.min(start, this.data.end - span));
      this.range = [low, low + Math.max(span, this.data.end * 1e-7)];
      this.draw();
    }

    reset() {
      this.view = { k: 1, x: 0, y: 0 };
      if (this.range) this.range = [...(this.data.whole || this.data.range)];
      this.draw();
    }

    applyView() {
      const { k } = this.view;
      const [w, h] = [this.width / k, this.height / k];
      this.view.x = Math.max(0, Math.min(this.view.x, this.width - w));
      this.view.y = Math.max(0, Math.min(this.view.y, this.height - h));
      this.svg.setAttribute("viewBox", `${this.view.x} ${this.view.y} ${w} ${h}`);
    }

    draw() {
      this.hide();
      this.width = Math.max(300, this.holder.clientWidth);
      this.marks = [];
      this.at = -1;
      this.svg.replaceChildren();
      this.left = 0;
      this.right = this.width;
      this.height = this.kind(this, this.data.items ? this.data.items[this.picked[0] || 0] : this.data);
      this.applyView();
    }

    mark(node, text) {
      node.setAttribute("data-i", String(this.marks.length));
      node.classList.add("mark");
      this.marks.push({ node, text });
      return node;
    }

    // Adds a text. Centered text is kept inside the drawing.
    text(x, y, text, attributes = {}) {
      const half = attributes["text-anchor"] === "middle" ? textWidth(text) / 2 : 0;
      const inside = half ? Math.max(half, Math.min(x, this.width - half)) : x;
      return make("text", { x: inside, y, ...attributes }, this.svg, text);
    }

    // Labels [text, x, y] go to the first free position around their mark; one without room is only in the tooltip.
    labels(marks, field) {
      const taken = marks.map(([, x, y]) => boxAt(x - 8, y - 8, 16, 16));
      const labeled = [];
      for (const [text, x, y] of marks) {
        const wide = textWidth(text);
        if (labeled.some(([name, u, v]) => name === text && Math.hypot(u - x, v - y) < 30)) continue;
        const places = [[x + 11, y - 7], [x - 11 - wide, y - 7], [x - wide / 2, y - 24], [x - wide / 2, y + 9], [x + 9, y - 20], [x + 9, y + 6], [x - 9 - wide, y - 20], [x - 9 - wide, y + 6]];
        const box = places.map(([a, b]) => boxAt(a, b, wide, 14)).find((one) => isInside(one, field) && !taken.some((other) => overlaps(one, other)));
        if (!box) continue;
        taken.push(box);
        labeled.push([text, x, y]);
        this.text(box.x, box.y + 11, text, { class: "value" });
      }
    }

    // Draws the x axis with ticks in `unit`.
    scaleX(low, high, y, unit, toX, top) {
      const size = unit === "GiB" ? 2 ** 30 : 1;
      for (const tick of niceTicks(low / size, high / size, (this.right - this.left) / 90).map((t) => t * size)) {
        const x = toX(tick);
        make("line", { x1: x, x2: x, y1: top, y2: y, class: "grid" }, this.svg);
        this.text(x, y + 15, unit === "GiB" ? `${Number((tick / size).toPrecision(6))} GiB` : format(Number(tick.toPrecision(12)), unit), { class: "tick", "text-anchor": "middle" });
      }
    }

    legend(names, y, toClass = classOf) {
      let x = this.left;
      let line = y;
      for (const name of names) {
        const width = 36 + name.length * 7.1;
        if (x + width > this.width && x > this.left) { x = this.left; line += 20; }
        make("rect", { x, y: line - 9, width: 11, height: 11, rx: 2, class: toClass(name) }, this.svg);
        this.text(x + 16, line, name, { class: "legend" });
        x += width;
      }
      return line + 12;
    }
  }

  const KINDS = {
    // Stacked bars: the breakdown of a step. Values stand in a column at the right, beyond all whiskers.
    bars(chart, { unit, bars }) {
      const narrow = chart.width < 480;
      const hasInterval = (bar) => Boolean(bar.low && bar.high);
      const value = (bar) => format(bar.total, unit);
      const interval = (bar) => (hasInterval(bar) ? ` (${format(bar.low, unit)} to ${format(bar.high, unit)})` : "");
      const longest = (texts) => Math.max(...texts.map((text) => text.length));
      chart.left = narrow ? 2 : Math.min(230, 14 + longest(bars.map((bar) => bar.name)) * 6.9);
      const column = 18 + longest(bars.map(value)) * 7.6 + longest(bars.map(interval)) * 6.5;
      chart.right = chart.width - (narrow ? 14 : column);
      const most = Math.max(...bars.map((bar) => Math.max(bar.total, bar.high || 0)));
      const toX = (v) => chart.left + ((chart.right - chart.left) * v) / most;
      const pitch = narrow ? 54 : 38;
      const bottom = 6 + bars.length * pitch;
      chart.scaleX(0, most, bottom, unit, toX, 4);
      const names = [];
      bars.forEach((bar, i) => {
        const y = 6 + i * pitch + (narrow ? 18 : 0);
        if (narrow) chart.text(chart.left, y - 5, `${bar.name}: ${value(bar)}${interval(bar)}`, { class: "name" });
        else {
          chart.text(chart.left - 9, y + 17, bar.name, { class: "name", "text-anchor": "end" });
          const text = chart.text(chart.right + 12, y + 17, "", { class: "value" });
          make("tspan", { class: "strong" }, text, value(bar));
          make("tspan", {}, text, interval(bar));
        }
        let at = 0;
        for (const [name, seconds] of bar.segments) {
          const x = toX(at);
          const width = Math.max(0.5, toX(at + seconds) - x);
          if (width >= 1 && !names.includes(name)) names.push(name);
          const node = make("rect", { x, y, width, height: 26, class: classOf(name) }, chart.svg);
          chart.mark(node, `${bar.name}\n${name}: ${format(seconds, unit)}${share(seconds, bar.total)}`);
          at += seconds;
        }
        if (hasInterval(bar)) {
          const node = make("path", { class: "whisker",
            d: `M${toX(bar.low)} ${y + 8}v10m0 -5H${toX(bar.high)}m0 -5v10` }, chart.svg);
          chart.mark(node, `${bar.name}\ninterval: ${format(bar.low, unit)} to ${format(bar.high, unit)}`);
        }
      });
      return chart.legend(names, bottom + 40);
    },

    // From the time of a baseline to that of another run, one step for each part or axis.
    waterfall(chart, { unit, spans, selects }) {
      const [span, from, to] = chart.picked;
      const [before, after] = [spans[span][from], spans[span][to]];
      const [first, last] = [from, to].map((i) => selects[1].options[i]);
      const sum = (parts) => Object.values(parts).reduce((a, b) => a + b, 0);
      const least = 0.01 * Math.max(sum(before), sum(after));
      const changes = [...new Set([...Object.keys(before), ...Object.keys(after)])]
        .map((name) => [name, (after[name] || 0) - (before[name] || 0)])
        .sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]));
      const shown = changes.slice(0, MAX_CHANGES).filter(([, change]) => Math.abs(change) >= least);
      const rest = changes.filter((change) => !shown.includes(change)).reduce((a, [, change]) => a + change, 0);
      if (Math.abs(rest) >= least / 10) shown.push(["other", rest]);
      const signed = (v) => `${v > 0 ? "+" : ""}${v < 0 ? "\u2212" : ""}${format(Math.abs(v), unit)}`;
      const rows = [[first, 0, sum(before), format(sum(before), unit), "c-total"]];
      let at = sum(before);
      for (const [name, change] of shown) {
        rows.push([name, Math.min(at, at + change), Math.abs(change), signed(change), change > 0 ? "c-slower" : "c-faster"]);
        at += change;
      }
      const factor = sum(before) ? `, ${three(sum(after) / sum(before))} x` : "";
      rows.push([last, 0, sum(after), `${format(sum(after), unit)}${factor}`, "c-total"]);
      const narrow = chart.width < 480;
      chart.left = narrow ? 2 : Math.min(260, 14 + Math.max(...rows.map(([name]) => name.length)) * 6.9);
      chart.right = chart.width - (narrow ? 14 : 130);
      const most = Math.max(...rows.map(([, start, length]) => start + length));
      // The axis starts near the shortest bar where the differences are small beside it.
      const lowest = Math.min(sum(before), sum(after), ...rows.slice(1, -1).map(([, start]) => start));
      const low = Math.max(0, lowest > 0.5 * most ? lowest - 0.3 * (most - lowest) : 0);
      const toX = (v) => chart.left + ((chart.right - chart.left) * (Math.max(v, low) - low)) / (most - low || 1);
      const pitch = narrow ? 42 : 28;
      const bottom = 6 + rows.length * pitch + (low ? 16 : 0);
      chart.scaleX(low, most, bottom, unit, toX, 4);
      if (low) chart.text(chart.left, bottom - 4, `The axis starts at ${format(low, unit)}.`, { class: "tick" });
      rows.forEach(([name, start, length, label, style], i) => {
        const y = 6 + i * pitch + (narrow ? 18 : 0);
        if (narrow) chart.text(chart.left, y - 4, `${name}: ${label}`, { class: "name" });
        else {
          chart.text(chart.left - 9, y + 15, name, { class: "name", "text-anchor": "end" });
          chart.text(chart.right + 12, y + 15, label, { class: "value" });
        }
        const node = make("rect", { x: toX(start), y, width: Math.max(1, toX(start + length) - toX(start)), height: 20, class: style }, chart.svg);
        chart.mark(node, `${name}\n${label}`);
      });
      return bottom + 24;
    },

    // Traffic matrix: bytes from each device to each other device.
    matrix(chart, { n, fold, values, cells, devices }) {
      const margin = 38;
      const side = Math.min(chart.width - margin - 8, 460);
      const cell = side / n;
      chart.left = margin;
      const most = Math.max(...values);
      make("rect", { x: margin, y: margin, width: side, height: side, class: "frame" }, chart.svg);
      const every = Math.max(1, Math.ceil(26 / cell / (n > 40 ? 8 : 1))) * (n > 40 ? 8 : 1);
      for (let i = 0; i < n; i += every) {
        chart.text(margin + (i + 0.5) * cell, margin - 6, String(i * fold), { class: "tick", "text-anchor": "middle" });
        chart.text(margin - 6, margin + (i + 0.5) * cell + 4, String(i * fold), { class: "tick", "text-anchor": "end" });
      }
      chart.text(margin + side / 2, 12, "to device", { class: "tick", "text-anchor": "middle" });
      chart.text(2, margin - 6, "from", { class: "tick" });
      const deviceRange = (i) => (fold === 1 ? String(i) : `${i * fold} to ${Math.min(devices, (i + 1) * fold) - 1}`);
      const gap = cell > 8 ? 1 : 0;
      for (let i = 0; i < cells.length; i += 3) {
        const [from, to, value] = [cells[i], cells[i + 1], values[cells[i + 2]]];
        const node = make("rect", { x: margin + to * cell, y: margin + from * cell, width: cell - gap, height: cell - gap, class: "heat" }, chart.svg);
        node.style.setProperty("--load", `${Math.round(15 + (85 * value) / most)}%`);
        chart.mark(node, `device ${deviceRange(from)} to device ${deviceRange(to)}\n${format(value, "B")} per step`);
      }
      return heatLegend(chart, margin + side + 26, most, "B", "per step");
    },

    // The chips of a slice and the two directions of every link.
    torus(chart, { sizes, wraps, chips, links, slices }) {
      const isTall = sizes[1] > sizes[0];  // the longer dimension runs from left to right
      const [X, Y, Z] = isTall ? [sizes[1], sizes[0], sizes[2]] : sizes;
      const panels = Z * slices;
      const columns = Math.max(1, Math.min(panels, Math.floor(chart.width / (X * 46 + 40))));
      const pitch = Math.max(16, Math.min(130, (chart.width / columns - 46) / X));
      const [panelWidth, panelHeight] = [chart.width / columns, Y * pitch + 58];
      const most = Math.max(...links.map((link) => link[4]), 1);
      const sent = new Map();
      const origin = (slice, z) => {
        const at = slice * Z + z;
        return [(at % columns) * panelWidth + 24 + pitch / 2, Math.floor(at / columns) * panelHeight + 34 + pitch / 2];
      };
      const position = (slice, [x, y, z]) => {
        const [a, b] = origin(slice, z);
        return [a + (isTall ? y : x) * pitch, b + (isTall ? x : y) * pitch];
      };
      const names = new Map(chips.map(([slice, x, y, z, devices]) => [`${slice},${x},${y},${z}`, devices]));
      for (let slice = 0; slice < slices; slice += 1) {
        for (let z = 0; z < Z; z += 1) {
          const [x, y] = origin(slice, z);
          const name = [slices > 1 ? `slice ${slice}` : "", Z > 1 ? `z = ${z}` : ""].filter(Boolean).join(", ");
          chart.text(x - pitch / 2, y - pitch / 2 - 16, name, { class: "tick" });
          for (let j = 0; j < Y; j += 1) make("line", { x1: x, x2: x + (X - 1) * pitch, y1: y + j * pitch, y2: y + j * pitch, class: "axis" }, chart.svg);
          for (let i = 0; i < X; i += 1) make("line", { x1: x + i * pitch, x2: x + i * pitch, y1: y, y2: y + (Y - 1) * pitch, class: "axis" }, chart.svg);
        }
      }
      const stub = Math.min(26, pitch * 0.42);
      for (const [slice, from, to, wrap, bytes, seconds] of links) {
        const key = `${slice},${from}`;
        sent.set(key, (sent.get(key) || 0) + bytes);
        const [[x1, y1], [x2, y2]] = [position(slice, from), position(slice, to)];
        const ends = [from, to].map((chip) => names.get(`${slice},${chip}`));
        const description = `link from device ${ends[0]} to device ${ends[1]}${wrap ? " (wraparound)" : ""}\n${format(bytes, "B")} per step${seconds === null ? "" : `, ${format(seconds, "s")} at peak link bandwidth`}`;
        const paths = [];
        const off = Math.min(5, pitch * 0.08);
        if (from[2] !== to[2]) {
          const up = (to[2] > from[2]) !== wrap;
          const d = pitch * 0.34;
          paths.push(up ? `M${x1} ${y1}l${d} ${-d}` : `M${x1} ${y1}l${-d} ${d}`);
        } else if (wrap) {
          const [dx, dy] = [Math.sign(x1 - x2), Math.sign(y1 - y2)];
          const [ox, oy] = [dy ? off * dy : 0, dx ? off * dx : 0];
          paths.push(`M${x1 + ox} ${y1 + oy}l${dx * stub * 1.25} ${dy * stub * 1.25}`);
          paths.push(`M${x2 + ox - dx * stub * 1.25} ${y2 + oy - dy * stub * 1.25}l${dx * stub * 1.25} ${dy * stub * 1.25}`);
        } else {
          const [dx, dy] = [Math.sign(x2 - x1), Math.sign(y2 - y1)];
          const [ox, oy] = [dy ? off * dy : 0, dx ? off * dx : 0];
          paths.push(`M${x1 + ox} ${y1 + oy}L${x2 + ox} ${y2 + oy}`);
        }
        for (const d of paths) {
          const node = make("path", { d, class: "link", "stroke-width": 2 + (Math.min(6, pitch * 0.08) * bytes) / most }, chart.svg);
          node.style.setProperty("--load", `${Math.round(12 + (88 * bytes) / most)}%`);
          chart.mark(node, description);
        }
      }
      const size = Math.min(44, pitch * 0.46);
      for (const [slice, x, y, z, devices] of chips) {
        const [a, b] = position(slice, [x, y, z]);
        const node = make("rect", { x: a - size / 2, y: b - size / 2, width: size, height: size, rx: size / 6, class: "chip" }, chart.svg);
        chart.mark(node, `device ${devices}, chip ${x},${y},${z}${slices > 1 ? ` of slice ${slice}` : ""}\nsends ${format(sent.get(`${slice},${x},${y},${z}`) || 0, "B")} per step over its links`);
        const font = Math.min(15, (size * 1.1) / Math.max(1.6, devices.length * 0.62));
        if (font >= 6) chart.text(a, b + font * 0.36, devices, { class: "chipname", "text-anchor": "middle" }).style.fontSize = `${font}px`;
      }
      const rings = wraps.map((is, i) => (is ? "xyz"[i] : "")).filter(Boolean);
      const bottom = Math.ceil(panels / columns) * panelHeight + 6;
      if (rings.length) chart.text(0, bottom, `Wraparound links in ${rings.join(", ")}, drawn as stubs at the edges of the grid`, { class: "tick" });
      chart.left = 0;
      return heatLegend(chart, bottom + 22, most, "B", "per step over one link");
    },

    // Spans on lanes. Folded loops are unfolded in the visible range.
    timeline(chart, { unit, lanes, spans, labels, colors }) {
      const narrow = chart.width < 520;
      chart.left = narrow ? 4 : 14 + Math.max(...lanes.map((lane) => lane.length)) * 7;
      chart.right = chart.width - 16;
      const [low, high] = chart.range;
      const toX = (t) => chart.left + ((chart.right - chart.left) * (t - low)) / (high - low);
      const pitch = narrow ? 44 : 34;
      const bottom = 8 + lanes.length * pitch;
      chart.scaleX(low, high, bottom, unit, toX, 4);
      const last = lanes.map(() => -1);
      const seen = new Set();
      lanes.forEach((lane, i) => {
        const y = 8 + i * pitch;
        if (narrow) chart.text(chart.left, y + 10, lane, { class: "name" });
        else chart.text(chart.left - 9, y + 17, lane, { class: "name", "text-anchor": "end" });
        make("line", { x1: chart.left, x2: chart.right, y1: y + pitch - 5, y2: y + pitch - 5, class: "grid" }, chart.svg);
      });
      const put = (span, start, length, note) => {
        const [lane, , , label] = span;
        const x = Math.max(toX(start), chart.left);
        const end = Math.min(toX(start + length), chart.right);
        if (end < chart.left || x > chart.right) return;
        if (end - x < 0.4 && x < last[lane] + 0.4) return;
        last[lane] = end;
        const color = colors[label];
        seen.add(color);
        const y = 8 + lane * pitch + (narrow ? 14 : 2);
        const node = make("rect", { x, y, width: Math.max(0.6, end - x), height: 22, class: classOf(color) }, chart.svg);
        chart.mark(node, `${labels[label]}\n${note || `${format(length, unit)} from ${format(start, unit)}`}`);
      };
      for (const span of spans) unfold(span, span[1], 4, put, low, high, (high - low) / (chart.right - chart.left));
      return chart.legend([...seen], bottom + 38);
    },

    // Histogram of payload sizes.
    sizes(chart, { points }) {
      chart.left = 40;
      chart.right = chart.width - 26;
      const [top, bottom] = [26, 210];
      const bytes = points.map((p) => Math.log10(Math.max(1, p[2])));
      const [low, high] = [Math.floor(Math.min(...bytes)), Math.ceil(Math.max(...bytes) + 0.001)];
      const most = Math.max(...points.map((p) => p[3]));
      const toX = (v) => chart.left + ((chart.right - chart.left) * (Math.log10(Math.max(1, v)) - low)) / (high - low);
      const toY = (n) => bottom - ((bottom - top) * Math.log10(n + 1)) / Math.log10(most + 1);
      for (let p = low; p <= high; p += 1) {
        const x = toX(10 ** p);
        make("line", { x1: x, x2: x, y1: top - 8, y2: bottom, class: "grid" }, chart.svg);
        chart.text(x, bottom + 16, format(10 ** p, "B"), { class: "tick", "text-anchor": "middle" });
      }
      make("line", { x1: chart.left, x2: chart.right, y1: bottom, y2: bottom, class: "axis" }, chart.svg);
      chart.text(0, 12, "count per step (log scale)", { class: "tick" });
      const names = [];
      const taken = [];
      for (const [axis, kind, size, count] of points) {
        const name = `${kind} over ${axis}`;
        if (!names.includes(name)) names.push(name);
        let x = toX(size);
        while (taken.some((t) => Math.abs(t - x) < 5)) x += 6;
        taken.push(x);
        const y = toY(count);
        const color = AXIS_COLORS[names.indexOf(name) % AXIS_COLORS.length];
        make("line", { x1: x, x2: x, y1: bottom, y2: y, class: `stem ${color}` }, chart.svg);
        const node = make("circle", { cx: x, cy: y, r: 5, class: color }, chart.svg);
        chart.mark(node, `${count.toLocaleString("en")} x ${format(size, "B")}\n${name}`);
        const isAside = x !== toX(size);
        chart.text(isAside ? x + 8 : x, isAside ? y + 4 : y - 9, count.toLocaleString("en"), { class: "value", "text-anchor": isAside ? "start" : "middle" });
      }
      return chart.legend(names, bottom + 42, (name) => AXIS_COLORS[names.indexOf(name) % AXIS_COLORS.length]);
    },

    // Roofline: FLOP/s over arithmetic intensity, log-log.
    roofline(chart, { peak, hbm, points }) {
      chart.left = 84;
      chart.right = chart.width - 20;
      const [top, bottom] = [20, 290];
      const ridge = peak / hbm;
      const xs = [...points.map((p) => p[3]), ridge];
      const ys = [...points.map((p) => p[4]), peak];
      const [x0, x1] = [Math.floor(Math.log10(Math.min(...xs)) - 0.3), Math.ceil(Math.log10(Math.max(...xs)) + 0.2)];
      const [y0, y1] = [Math.floor(Math.log10(Math.min(...ys)) - 0.1), Math.ceil(Math.log10(Math.max(...ys)) + 0.05)];
      const toX = (v) => chart.left + ((chart.right - chart.left) * (Math.log10(v) - x0)) / (x1 - x0);
      const toY = (v) => bottom - ((bottom - top) * (Math.log10(v) - y0)) / (y1 - y0);
      for (let p = x0; p <= x1; p += 1) {
        make("line", { x1: toX(10 ** p), x2: toX(10 ** p), y1: top, y2: bottom, class: "grid" }, chart.svg);
        chart.text(toX(10 ** p), bottom + 16, format(10 ** p, ""), { class: "tick", "text-anchor": "middle" });
      }
      for (let p = y0; p <= y1; p += 1) {
        make("line", { x1: chart.left, x2: chart.right, y1: toY(10 ** p), y2: toY(10 ** p), class: "grid" }, chart.svg);
        chart.text(chart.left - 8, toY(10 ** p) + 4, format(10 ** p, "FLOP/s"), { class: "tick", "text-anchor": "end" });
      }
      chart.text((chart.left + chart.right) / 2, bottom + 34, "arithmetic intensity (FLOPs per byte of HBM traffic)", { class: "tick", "text-anchor": "middle" });
      const start = Math.max(10 ** x0, 10 ** y0 / hbm);
      const roof = make("path", { d: `M${toX(start)} ${toY(start * hbm)}L${toX(ridge)} ${toY(peak)}H${chart.right}`, class: "roof" }, chart.svg);
      chart.mark(roof, `roofline: HBM ${format(hbm, "B")}/s, bf16 peak ${format(peak, "FLOP/s")}\nridge point: ${three(ridge)} FLOPs/byte`);
      const phases = [...new Set(points.map((p) => p[1]))];
      for (const [source, phase, part, intensity, rate, seconds] of points) {
        const [x, y] = [toX(intensity), toY(rate)];
        const color = `${phases.indexOf(phase) ? "ax1" : "c-compute"}${source === "predicted" ? " hollow" : ""}`;
        const node = phases.indexOf(phase)
          ? make("path", { d: `M${x} ${y - 7}l7 12h-14z`, class: color }, chart.svg)
          : make("circle", { cx: x, cy: y, r: 6, class: color }, chart.svg);
        const roofHere = Math.min(peak, intensity * hbm);
        chart.mark(node, `${part}, ${phase} (${source})\n${format(rate, "FLOP/s")}, ${percent(rate, roofHere)} of the roofline at ${three(intensity)} FLOPs/byte\n${format(seconds, "s")} of compute per step`);
      }
      chart.labels(points.map(([, , part, intensity, rate]) => [part, toX(intensity), toY(rate)]), boxAt(chart.left, top, chart.right - chart.left, bottom - top));
      return chart.legend(phases, bottom + 58, (phase) => (phases.indexOf(phase) ? "ax1" : "c-compute"));
    },

    // Plans by two of their figures, on logarithmic scales; the limits are dashed.
    front(chart, { best, measures, limits, points }) {
      const [across, up] = chart.picked;
      chart.left = 74;
      chart.right = chart.width - 14;
      const [top, bottom] = [14, Math.min(420, 200 + chart.width * 0.2)];
      const field = boxAt(chart.left, top, chart.right - chart.left, bottom - top);
      const scale = (of, from, to) => {
        const logs = [...points.map((p) => p[2][of]), ...(limits[of] ? [limits[of]] : [])].map(Math.log);
        const [low, high] = [Math.min(...logs), Math.max(...logs)];
        const pad = Math.max(0.04 * (high - low), 0.02);
        const toPlace = (v) => from + ((to - from) * (Math.log(v) - low + pad)) / (high - low + 2 * pad);
        return { toPlace, ticks: logTicks(Math.exp(low - pad), Math.exp(high + pad)) };
      };
      const [x, y] = [scale(across, chart.left, chart.right), scale(up, bottom, top)];
      let free = -Infinity;
      for (const tick of x.ticks) {
        const at = x.toPlace(tick);
        make("line", { x1: at, x2: at, y1: top, y2: bottom, class: "grid" }, chart.svg);
        const half = textWidth(format(tick, measures[across][1])) / 2 + 4;
        if (at - half < free) continue;
        free = at + half;
        chart.text(at, bottom + 16, format(tick, measures[across][1]), { class: "tick", "text-anchor": "middle" });
      }
      for (const tick of y.ticks) {
        make("line", { x1: chart.left, x2: chart.right, y1: y.toPlace(tick), y2: y.toPlace(tick), class: "grid" }, chart.svg);
        chart.text(chart.left - 8, y.toPlace(tick) + 4, format(tick, measures[up][1]), { class: "tick", "text-anchor": "end" });
      }
      chart.text((chart.left + chart.right) / 2, bottom + 36, `across: ${measures[across][0]}, up: ${measures[up][0]}`, { class: "tick", "text-anchor": "middle" });
      for (const [of, place] of [[across, x.toPlace], [up, y.toPlace]]) {
        if (!limits[of]) continue;
        const at = place(limits[of]);
        const d = of === across && place === x.toPlace ? `M${at} ${top}V${bottom}` : `M${chart.left} ${at}H${chart.right}`;
        chart.mark(make("path", { d, class: "ideal" }, chart.svg), `limit of ${measures[of][0]}: ${format(limits[of], measures[of][1])}`);
      }
      const groups = [...new Set(points.map((p) => p[3]))];
      const toClass = (group) => (group === best ? "ax0" : `c-compute${group === "best of another plan" ? " hollow" : ""}`);
      const placed = points.map(([name, , values]) => [name, x.toPlace(values[across]), y.toPlace(values[up])]);
      // The best is drawn last, above the others.
      for (const i of [...points.keys()].reverse()) {
        const [, details, values, group] = points[i];
        const [, u, v] = placed[i];
        const node = group === best
          ? make("path", { d: `M${u} ${v - 9}l9 9l-9 9l-9 -9z`, class: toClass(group) }, chart.svg)
          : make("circle", { cx: u, cy: v, r: 5, class: toClass(group) }, chart.svg);
        const figures = measures.map(([name, unit], m) => `${name} ${format(unit ? values[m] : Number(values[m].toPrecision(3)), unit)}`);
        chart.mark(node, `${details} (${group})\n${figures.join(", ")}`);
      }
      chart.labels(placed, field);
      return chart.legend(groups, bottom + 58, toClass);
    },

    // Step times of several runs over the number of devices.
    scaling(chart, { unit, lines }) {
      chart.left = 74;
      chart.right = chart.width - 90;
      const [top, bottom] = [16, 220];
      const every = lines.flatMap((line) => line.points);
      const ns = [...new Set(every.map((p) => p[1]))].sort((a, b) => a - b);
      const [x0, x1] = [Math.log2(ns[0]) - 0.15, Math.log2(ns[ns.length - 1]) + 0.15];
      const most = Math.max(...every.map((p) => p[2]));
      const toX = (n) => chart.left + ((chart.right - chart.left) * (Math.log2(n) - x0)) / (x1 - x0);
      const toY = (v) => bottom - ((bottom - top) * v) / (most * 1.08);
      for (const tick of niceTicks(0, most * 1.08, 4)) {
        make("line", { x1: chart.left, x2: chart.right, y1: toY(tick), y2: toY(tick), class: "grid" }, chart.svg);
        chart.text(chart.left - 8, toY(tick) + 4, format(tick, unit), { class: "tick", "text-anchor": "end" });
      }
      for (const n of ns) chart.text(toX(n), bottom + 17, String(n), { class: "tick", "text-anchor": "middle" });
      chart.text((chart.left + chart.right) / 2, bottom + 36, "devices", { class: "tick", "text-anchor": "middle" });
      lines.forEach((line, i) => {
        const color = i ? "ax1" : "c-compute";
        const best = ns.map((n) => line.points.filter((p) => p[1] === n).sort((a, b) => a[2] - b[2])[0]).filter(Boolean);
        const d = best.map(([, n, v], j) => `${j ? "L" : "M"}${toX(n)} ${toY(v)}`).join("");
        make("path", { d, class: `stem ${color}`, fill: "none" }, chart.svg);
        const [, n0, v0] = best[0];
        const nLast = best[best.length - 1][1];
        make("path", { class: "ideal", d: `M${ns.filter((n) => n >= n0 && n <= nLast).map((n) => `${toX(n)} ${toY((v0 * n0) / n)}`).join("L")}` }, chart.svg);
        for (const [name, n, v] of line.points) {
          chart.mark(make("circle", { cx: toX(n), cy: toY(v), r: 5.5, class: color }, chart.svg), `${name}, ${n} devices\n${line.name}: ${format(v, unit)}`);
          chart.text(toX(n) + 9, toY(v) - 6, name, { class: "value" });
        }
      });
      const names = lines.map((line) => line.name);
      return chart.legend(names, bottom + 58, (name) => (names.indexOf(name) ? "ax1" : "c-compute"));
    },

    // Values over time, each held until the next.
    series(chart, { unit, end, lines }) {
      chart.left = 62;
      chart.right = chart.width - 16;
      const [top, bottom] = [12, 190];
      const most = Math.max(1, ...lines.flatMap((line) => line.points.map((p) => p[1]))) * 1.05;
      const toX = (t) => chart.left + ((chart.right - chart.left) * t) / (end || 1);
      const toY = (v) => bottom - ((bottom - top) * v) / most;
      for (const tick of niceTicks(0, most, 4)) {
        make("line", { x1: chart.left, x2: chart.right, y1: toY(tick), y2: toY(tick), class: "grid" }, chart.svg);
        chart.text(chart.left - 8, toY(tick) + 4, format(tick, unit), { class: "tick", "text-anchor": "end" });
      }
      chart.scaleX(0, end, bottom, "s", toX, top);
      const names = lines.map((line) => line.name);
      const colors = ["c-compute", "ax1", "ax3", "ax4"];
      const toClass = (name) => colors[names.indexOf(name) % colors.length];
      for (const { name, points } of lines) {
        const d = points.map(([t, v], i) => (i ? `H${toX(t)}V${toY(v)}` : `M${toX(t)} ${toY(v)}`)).join("");
        make("path", { d: `${d}H${toX(end)}`, class: `stem ${toClass(name)}` }, chart.svg);
        const highest = points.reduce((a, b) => (b[1] > a[1] ? b : a));
        for (const [point, what] of [[highest, "highest"], [points[points.length - 1], "last change"]]) {
          const [t, v] = point;
          chart.mark(make("circle", { cx: toX(t), cy: toY(v), r: 4, class: toClass(name) }, chart.svg), `${name}, ${what}: ${format(v, unit)}\nat ${format(t, "s")}`);
        }
      }
      return chart.legend(names, bottom + 42, toClass);
    },
  };

  // Draws the visible repetitions of a span. Repetitions narrower than a pixel are merged into one bar.
  function unfold(span, start, depth, put, low, high, pixel) {
    const length = span[2];
    if (depth >= span.length) { put(span, start, length); return; }
    const [times, period] = span[depth];
    if (!(period > 0) || period < pixel * 1.5) {
      put(span, start, (times - 1) * period + length, `${times.toLocaleString("en")} loop iterations, ${format(length, "s")} each; zoom in to see them`);
      return;
    }
    let reach = length;
    for (let i = depth + 1; i < span.length; i += 1) reach += (span[i][0] - 1) * span[i][1];
    const first = Math.max(0, Math.ceil((low - start - reach) / period));
    const end = Math.min(times - 1, Math.floor((high - start) / period));
    for (let k = first; k <= end; k += 1) unfold(span, start + k * period, depth + 1, put, low, high, pixel);
  }

  function heatLegend(chart, y, most, unit, suffix) {
    const width = Math.min(180, chart.width / 3);
    const n = 24;
    for (let i = 0; i < n; i += 1) {
      const node = make("rect", { x: chart.left + (i * width) / n, y, width: width / n + 0.5, height: 10, class: "heat" }, chart.svg);
      node.style.setProperty("--load", `${Math.round(12 + (88 * i) / (n - 1))}%`);
    }
    chart.text(chart.left + width + 8, y + 9, `up to ${format(most, unit)} ${suffix}`, { class: "tick" });
    return y + 22;
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
  const redraw = () => { for (const [figure, chart] of charts) if (isShown(figure)) chart.draw(); };
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
