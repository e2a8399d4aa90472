// Evaluates the plans of `meshscope explore` in the page. `stepOf` is cost/closed_form.py for one step, with
// the coefficients that serving/explorer.py wrote; a test compares it with `meshscope predict`.
"use strict";
(async () => {
  const packed = Uint8Array.from(atob(document.getElementById("plans").textContent), (c) => c.charCodeAt(0));
  const doc = JSON.parse(await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text());
  const { rules, settings, prices } = doc;
  const [F, C] = ["features", "costs"].map((name) => Object.fromEntries(rules[name].map((one, at) => [one, at])));
  const [N_F, N_C, N_P] = [rules.features.length, rules.costs.length, rules.parts.length];
  const HEAD = rules.parts.indexOf("lm_head"), ATTENTION = rules.parts.indexOf("attn");
  const sum = (values) => values.reduce((a, b) => a + b, 0);

  // ---- the closed form of one step

  function chunksOf(form, nSequences, prompt, chunk) {
    const isWhole = form.is_decode || nSequences * prompt <= chunk;
    const nFitting = isWhole ? nSequences : Math.max(1, Math.floor(chunk / prompt));
    const nGroups = Math.ceil(nSequences / nFitting);
    const nCuts = isWhole ? 1 : Math.ceil(prompt / chunk);
    return { n: nGroups * nCuts, sequences: nSequences / nGroups, positions: form.is_decode ? 1 : prompt / nCuts };
  }

  function splashBlock(prompt) {
    const isPadded = (size) => prompt >= rules.PADDED_FROM && (size - (prompt % size)) % size <= rules.MAX_PADDING_FRAC * prompt;
    return rules.SPLASH_BLOCKS.find((size) => prompt % size === 0) ?? rules.SPLASH_BLOCKS.find(isPadded) ?? 0;
  }

  const causalBlocks = (nRows, width) => (width * (width + 1)) / 2 + (nRows - width) * width;

  // Pairs of blocks that one prompt takes in paged attention; cost/paged.py.
  function pagedBlocks(form, prompt, positions, window) {
    const keys = prompt / form.block_keys, nRows = Math.floor(keys), width = Math.ceil(window / form.block_keys) + 1;
    const pairs = causalBlocks(nRows, Math.min(nRows, width)) + (keys - nRows) * Math.min(nRows + 1, width);
    const ofChunk = Math.ceil(positions / form.block_keys), nChunks = prompt / positions;
    const whole = Math.min((ofChunk * (nChunks + 1)) / 2, ofChunk + width - 1);
    return Math.ceil(positions / form.block_queries) * nChunks * (form.skips_masked ? pairs / keys : whole);
  }

  function hits(form, tokens) {
    const nBlocks = Math.ceil(tokens / form.block_tokens);
    const blockTokens = tokens / Math.max(1, nBlocks);
    const nRouted = blockTokens * form.routed_tokens;
    const miss = form.miss_frac ** nRouted;
    const hit = Math.min(1, 1 - miss + form.hit_spread * Math.sqrt(miss * (1 - miss)));
    const ofTile = Math.min(1, ((blockTokens / form.block_tokens) * rules.FUSED_BLOCK_TOKENS) / rules.TILE_ROWS);
    const filled = (nRouted * (1 - form.miss_frac)) / rules.TILE_ROWS;
    return [nBlocks * hit, nBlocks * Math.max((ofTile * hit) / 2, ofTile * hit - filled)];
  }

  function featuresOf(form, chunks, { prompt, output, hasKernel, isStatic }) {
    const sequences = chunks.sequences / form.n_microbatches, local = chunks.positions / form.cp;
    const nQueries = form.is_decode ? 1 : local, tokens = sequences * nQueries;
    const features = new Float64Array(N_F);
    features[F.ONE] = 1;
    features[F.SEQUENCES] = sequences;
    features[F.TOKENS] = tokens;
    features[F.ALL_SEQUENCES] = chunks.sequences;
    [features[F.HIT_FRAC], features[F.EMPTY_TILES]] = hits(form, tokens);
    const block = splashBlock(local), nParts = form.is_decode ? 1 : prompt / chunks.positions;
    if (form.n_end > 0) {
      const end = form.is_decode ? 0 : (sequences * Math.min(prompt, form.n_end)) / nParts;
      [features[F.END_TOKENS], features[F.END_PAIRS], features[F.END_CHOSEN_PAIRS]] = [end, end * prompt, end * Math.min(prompt, form.chosen)];
      [features[F.END_ONE], features[F.END_SEQUENCES]] = [1 / nParts, chunks.sequences / nParts];
      [features[F.END_HIT_FRAC], features[F.END_EMPTY_TILES]] = hits(form, end);
    }
    if (form.is_decode) {
      const fixed = Math.floor(prompt / form.cp) + Math.ceil(output / form.cp);
      const positions = isStatic ? fixed : (prompt + output / 2) / form.cp;
      for (const [feature, limit] of [["CACHED", rules.NO_LIMIT], ["WINDOW", form.window], ["CHOSEN", form.chosen], ["CANDIDATE", form.candidates]]) {
        features[F[`${feature}_POSITIONS`]] = sequences * (isStatic ? positions : Math.min(positions, limit));
      }
      return features;
    }
    const last = 1 + (form.cp - 1) / form.cp / nParts, keys = (prompt + chunks.positions) / 2;
    features[F.CHOSEN_PAIRS] = tokens * Math.min(keys, form.chosen);
    const perPair = (sequences * nQueries) / prompt;
    for (const [feature, limit] of [["PAGED_BLOCKS", prompt], ["WINDOW_BLOCKS", Math.min(form.window, prompt)]]) {
      features[F[feature]] = perPair * pagedBlocks(form, prompt, chunks.positions, limit) * last;
    }
    if (hasKernel && block > 0) {
      const padded = prompt * ((Math.ceil(local / block) * block) / local);
      const nRows = padded / block;
      const width = Math.min(nRows, Math.ceil((form.window - 1) / block) + 1);
      features[F.CAUSAL_PAIRS] = perPair * block ** 2 * causalBlocks(nRows, nRows) * last;
      features[F.WINDOW_PAIRS] = perPair * block ** 2 * causalBlocks(nRows, width);
    } else {
      features[F.ALL_PAIRS] = tokens * keys;
    }
    return features;
  }

  // Of each collective: its payload, the time of one execution, and its line (the strategy).
  function executions(form, features, chunkFrac) {
    return doc.collectives[form.collectives].map((one) => {
      const payload = sum(one.payload.map(([feature, value]) => value * features[feature]));
      const [few, over, multiple] = one.rule;
      const n = one.once > 0 ? features[F.ALL_SEQUENCES] : features[F.SEQUENCES];
      const isReduced = (n <= few && payload > over) || n % Math.max(multiple, 1) > 0;
      const whole = rounded(payload);
      let seconds = Infinity, line = -1;
      doc.lines[one.lines].forEach(([latency, hops, perByte, least, most, ofReduced], at) => {
        const taken = latency + Math.max(hops, payload * perByte);
        if (whole >= least && whole <= most && Boolean(ofReduced) === isReduced && taken < seconds) [seconds, line] = [taken, at];
      });
      return { one, payload, isReduced, line, seconds: seconds * one.factor * (one.of_end && !form.is_decode ? chunkFrac : 1) };
    });
  }

  // Half to even, as numpy rounds.
  function rounded(value) {
    const floor = Math.floor(value), rest = value - floor;
    return rest < 0.5 || (rest === 0.5 && floor % 2 === 0) ? floor : floor + 1;
  }

  // The seconds that stay exposed of those that overlap compute of `overS`.
  function exposed(seconds, runs, behind, overS) {
    const hidden = sum(seconds.map((s, m) => (runs[m].one.behind === behind ? s : 0)));
    const frac = hidden > 0 ? Math.max(0, hidden - overS) / hidden : 0;
    return seconds.map((s, m) => (runs[m].one.behind === behind ? s * frac : s));
  }

  // A micro-batch in the fullest stage (`tick`), or in all stages (`pass`).
  function tickOf(form, features, runs, rates, coefficients, times) {
    const costs = new Float64Array(N_P * N_C);
    for (const [part, cost, feature, value] of coefficients) costs[part * N_C + cost] += value * features[feature];
    const arrayBytes = features[F.TOKENS] * form.residual_bytes;
    const inVmem = rates.streams && arrayBytes <= rules.VMEM_ARRAY_BYTES;
    const isOneHot = features[F.TOKENS] <= form.one_hot_tokens;
    const seconds = new Float64Array(N_P * N_C), core = [], weights = [];
    const result = { costs, collectives: [], exposed: [], parts: [] };
    let layersS = 0, hidingS = 0;
    for (let part = 0; part < N_P; part++) {
      const at = part * N_C;
      if (inVmem) for (const cost of [C.PASS_BYTES, C.FUSED_BYTES]) costs[at + cost] /= rules.vmem_over_hbm;
      if (arrayBytes <= rules.VMEM_TOKENS_BYTES) costs[at + C.SORTED_S] *= form.vmem_gather_frac;
      if (arrayBytes * form.sorted_rows <= rules.VMEM_RETURNED_BYTES) costs[at + C.RETURNED_S] *= form.vmem_gather_frac;
      costs[at + C.SERVED_S] *= isOneHot ? 0 : 1;
      costs[at + C.ONE_HOT_S] *= isOneHot ? features[F.TOKENS] : 0;
      const readS = costs[at + C.CHOSEN_BYTES] * rates.cost_s[C.CHOSEN_BYTES];
      costs[at + C.CONVERTED_S] = Math.max(0, costs[at + C.CONVERTED_S] - readS);
      for (let cost = 0; cost < N_C; cost++) seconds[at + cost] = costs[at + cost] * rates.cost_s[cost];
      const products = seconds[at + C.MATMUL_FLOPS] + seconds[at + C.NARROW_FLOPS];
      const moved = seconds[at + C.WEIGHT_BYTES] + seconds[at + C.FUSED_BYTES];
      core[part] = (rates.streams ? products : Math.max(products, moved)) + sum(rules.other_costs.map((cost) => seconds[at + cost]));
      weights[part] = rates.streams ? seconds[at + C.WEIGHT_BYTES] : 0;
      if (part === HEAD) continue;
      layersS += core[part];
      hidingS += seconds[at + C.SMALL_OPS] + seconds[at + C.GROUPED_LAYERS] + rates.overlap * products;
    }
    result.collectives = runs.map(({ one, seconds: s }) => s * one[times]);
    result.exposed = exposed(exposed(result.collectives, runs, "attention", core[ATTENTION]), runs, "layers", layersS);
    const isLate = features[F.TOKENS] <= 1 && form.fetches_late;
    const hidden = hidingS + (isLate ? 0 : sum(result.exposed));
    const streamed = sum(weights.filter((_, part) => part !== HEAD));
    const frac = streamed > 0 ? Math.max(0, streamed - hidden) / streamed : 0;
    result.parts = core.map((s, part) => s + weights[part] * (part === HEAD ? 1 : frac));
    result.ticksS = sum(result.parts.filter((_, part) => part !== HEAD)) + sum(result.exposed);
    return result;
  }

  // A step of prefill or decode; `bound` is 0 for the value, 1 for the fast end of the interval and 2 for the slow one.
  function stepOf(plan, form, sizes, bound = 0, factors = null) {
    const stored = doc.rates[form.rates];
    const rates = { cost_s: stored.cost_s[bound], overlap: stored.overlap[bound], streams: stored.streams };
    const chunks = chunksOf(form, sizes.batch / plan.data, sizes.prompt, sizes.chunk || rules.NO_LIMIT);
    const features = featuresOf(form, chunks, sizes), runs = executions(form, features, chunks.positions / sizes.prompt);
    if (factors) runs.forEach((run, m) => { run.seconds *= factors[m]; });
    const tick = tickOf(form, features, runs, rates, doc.costs[form.costs], "tick");
    const { stages } = plan, isPiped = stages > 1;
    const all = isPiped ? tickOf(form, features, runs, rates, doc.costs[form.every], "pass") : tick;
    const mean = (name) => (isPiped ? Array.from(all[name], (value) => value / stages) : Array.from(tick[name]));
    const nBusy = form.n_microbatches * chunks.n;
    const ofPart = (part) => (part === HEAD ? chunks.n : nBusy);
    const parts = mean("parts").map((s, part) => s * ofPart(part));
    const once = runs.map(({ one, seconds }) => seconds * one.once * chunks.n);
    const step = tick.parts[HEAD] * chunks.n + sum(once) + chunks.n * (all.ticksS + (form.n_microbatches - 1) * tick.ticksS);
    const [collectives, exposedS] = ["collectives", "exposed"].map((name) => mean(name).map((s, m) => {
      const { one } = runs[m];
      const inTicks = one.part === "stage" ? stages * s * chunks.n + tick[name][m] * (nBusy - chunks.n) : s * nBusy;
      return inTicks + once[m] / (one.part === "lm_head" ? stages : 1);
    }));
    const costs = mean("costs").map((value, at) => value * ofPart(Math.floor(at / N_C)));
    const compute = sum(parts);
    return { step, compute, bubble: stages > 1 ? step - compute - sum(exposedS) : 0, costs, runs, collectives, exposed: exposedS, chunks, form, stored, plan };
  }

  const isMeasured = (result, m) => !result.collectives[m] || result.runs[m].one.measured.some(([least, most]) => result.runs[m].payload >= least && result.runs[m].payload <= most);

  // The seconds of a step with the ends of its interval; null without one.
  function estimateOf(plan, form, sizes) {
    const result = stepOf(plan, form, sizes), { inside, outside, spread } = result.stored;
    if (result.runs.length && inside === null) return { result, value: result.step, low: null, high: null };
    const factors = result.runs.map((_, m) => (isMeasured(result, m) ? inside : outside));
    const low = stepOf(plan, form, sizes, 1, factors.map((factor) => 1 / factor)).step;
    const high = stepOf(plan, form, sizes, 2, factors).step;
    return { result, value: result.step, low: Math.min(low, result.step / spread), high: Math.max(high, result.step * spread) };
  }

  // Executions of a collective in a step by a device of the mean stage.
  function nExecutions({ form, chunks, plan }, one) {
    const n = (one.pass * form.n_microbatches) / plan.stages + one.once / (one.part === "lm_head" ? plan.stages : 1);
    return n * chunks.n;
  }

  function wireBytes(result, m) {
    const { one, payload, isReduced } = result.runs[m];
    return payload * one.wire[Number(isReduced)] * nExecutions(result, one);
  }

  // What the core does in a step, with the time in which HBM is busy; cost/predicted.py.
  function activitiesOf(result) {
    const { costs, stored } = result, units = new Float64Array(N_C);
    for (let at = 0; at < costs.length; at++) units[at % N_C] += costs[at];
    const seconds = Array.from(units, (value, cost) => value * stored.cost_s[0][cost]);
    const of = (values, group) => sum(rules.groups[group].map((cost) => values[cost]));
    const exposedS = sum(result.exposed), opsS = of(seconds, "SMALL_OPS");
    const matmuls = result.compute - sum(rules.other_costs.map((cost) => seconds[cost]));
    const waits = stored.streams ? matmuls - of(seconds, "PRODUCTS") : 0;
    const waiting = opsS + exposedS, hidden = seconds[C.WEIGHT_BYTES] - waits;
    const streaming = stored.streams && waiting ? Math.min(1, hidden / waiting) : 0;
    const busy = hidden - waiting * streaming + seconds[C.FUSED_BYTES], products = matmuls - waits;
    const kernels = of(seconds, "READS") + of(seconds, "KERNELS");
    const embed = rules.parts.indexOf("embed") * N_C;
    const lookups = sum(rules.groups.GATHERS.map((cost) => costs[embed + cost] * stored.cost_s[0][cost]));
    const list = [
      ["matmul", products, Math.min(busy, products), of(units, "PRODUCTS"), 0],
      ["copy", waits, waits, 0, 0],
      ["kernel", kernels, of(seconds, "READS"), of(units, "KERNEL_FLOPS"), 0],
      ["elementwise", seconds[C.PASS_BYTES], seconds[C.PASS_BYTES], 0, 0],
      ["by_expert", of(seconds, "GATHERS") - lookups, 0, 0, 0],
      ["gather", lookups, 0, 0, 0],
      ["small", opsS, opsS * streaming, 0, 0],
    ];
    for (const axis of new Set(result.runs.map(({ one }) => one.axis))) {
      const ofAxis = result.runs.map((_, m) => m).filter((m) => result.runs[m].one.axis === axis);
      const s = sum(ofAxis.map((m) => result.exposed[m]));
      list.push([axis, s, s * streaming, 0, sum(ofAxis.map((m) => wireBytes(result, m)))]);
    }
    list.push(["bubble", result.bubble, 0, 0, 0]);
    return list.filter(([, s]) => s).sort((a, b) => b[1] - a[1]).map(([key, s, hbm, flops, wire]) => ({
      key, name: rules.activities[key] ?? `exposed ${key} communication`, s, hbm, flops, wire,
    }));
  }

  // The floor of a step and where its time beyond it goes; analysis/roofline.py.
  function floorOf(result, peaks) {
    if (!peaks) return null;
    const total = (group) => sum(result.costs.map((value, at) => (rules.groups[group].includes(at % N_C) ? value : 0)));
    const wire = sum(result.runs.map((_, m) => wireBytes(result, m)));
    const bounds = [["compute", total("FLOPS") / peaks[0]], ["HBM", total("HBM_BYTES") / peaks[1]], ["link", wire / peaks[2]]];
    const [resource, s] = bounds.sort((a, b) => b[1] - a[1])[0];
    const used = { compute: (one) => one.flops / peaks[0], HBM: (one) => one.hbm, link: (one) => one.wire / peaks[2] }[resource];
    const causes = activitiesOf(result).map((one) => ({ name: rules.causes[one.key] ?? one.name, s: Math.max(0, one.s - used(one)) }));
    const beyond = result.step - s, unused = sum(causes.map((one) => one.s));
    const scale = unused ? Math.min(1, beyond / unused) : 1;
    for (const one of causes) one.s *= scale;
    if (resource === "HBM") causes.push({ name: "HBM below peak", s: Math.max(0, beyond - unused) });
    const large = beyond > 0 ? causes.filter((one) => one.s >= 0.01 * result.step).sort((a, b) => b.s - a.s) : [];
    return { resource, s, beyond: Math.max(0, beyond), causes: large.slice(0, 2) };
  }

  // ---- a choice: a slice, a plan, and the sizes of a request

  const AXES = ["weight", "cache", "batch", "prompt", "output"];
  function at(table, cell) {
    const [sizes, values] = doc.tables[table];
    return values[AXES.reduce((place, axis, n) => place * sizes[n] + (sizes[n] > 1 ? cell[axis] : 0), 0)];
  }
  const sizesOf = (plan, cell) => ({
    batch: settings.batches[cell.batch], prompt: settings.prompts[cell.prompt], output: settings.outputs[cell.output],
    chunk: at(plan.chunk, cell), hasKernel: at(plan.kernel, cell), isStatic: at(plan.static, cell),
  });

  function memoryOf(slice, plan, cell) {
    const nLocal = settings.batches[cell.batch] / plan.data;
    const [weights, cache] = [at(plan.weights, cell), at(plan.cache, cell) * nLocal];
    const temps = [at(plan.temp_prefill, cell), at(plan.temp_decode, cell)];
    const hasTemp = temps[0] !== null && temps[1] !== null;
    const padding = hasTemp ? at(plan.padding, cell) + Math.floor(at(plan.cache_padding, cell) * nLocal) : 0;
    const temp = hasTemp ? Math.max(...temps) + (plan.stages > 1 ? rules.N_BRANCH_COPIES * cache : 0) : null;
    const resident = weights + cache + padding, hbm = slice.hbm_bytes;
    let fits = "unknown";
    if (hbm !== null && resident + (hasTemp ? rules.LOW * temp : 0) > hbm) fits = "no";
    else if (hbm !== null && hasTemp) fits = resident + rules.HIGH * temp + rules.SMALL_BYTES <= hbm ? "yes" : "close";
    return { weights, cache, padding, temp, total: hasTemp ? resident + temp : null, hbm, fits, resident };
  }

  function whyNot(plan, cell) {
    if (settings.batches[cell.batch] % plan.data) return `batch ${settings.batches[cell.batch]} is no multiple of its ${plan.data} data-parallel ranks`;
    if (at(plan.chunk, cell) < 0) return "the plan does not take these sizes";
    return state.server && at(plan.served_ttft, cell) === null ? `${doc.server} has no flags for the plan, or no room for a cache` : null;
  }

  // All figures of a choice; the interval only with `isWhole`.
  function figuresOf(slice, plan, cell, isWhole = true) {
    const sizes = sizesOf(plan, cell), forms = ["prefill", "decode"].map((name) => doc.forms[at(plan[name], cell)]);
    const one = isWhole ? estimateOf : (...given) => ({ value: stepOf(...given).step, low: null, high: null });
    const [ttft, tpot] = forms.map((form) => one(plan, form, sizes));
    const combine = (of) => {
      const value = of(ttft.value, tpot.value);
      const ends = ttft.low === null || tpot.low === null ? [null, null] : [of(ttft.low, tpot.low), of(ttft.high, tpot.high)];
      return { value, low: ends[0] === null ? null : Math.min(...ends), high: ends[1] === null ? null : Math.max(...ends) };
    };
    if (state.server) {
      // Simulated, without an interval; the steps below stay those of the device.
      const [ttftS, tpotS, rate] = ["served_ttft", "served_tpot", "served_rate"].map((name) => at(plan[name], cell));
      const served = (value, of = {}) => ({ ...of, value, low: null, high: null });
      return { ttft: served(ttftS, ttft), tpot: served(tpotS, tpot), e2e: served(ttftS + (sizes.output - 1) * tpotS), rate: served(rate),
        hours: served((slice.n_chips * 1e6) / 3600 / rate), sizes };
    }
    const e2e = combine((first, each) => first + (sizes.output - 1) * each);
    const rate = combine((_, each) => sizes.batch / each);
    const tokens = sizes.batch * sizes.output;
    const hours = combine((first, each) => ((first + (sizes.output - 1) * each) * slice.n_chips * 1e6) / 3600 / tokens);
    return { ttft, tpot, e2e, rate, hours, sizes };
  }

  // ---- texts

  const digits = (value) => (Math.abs(value) < 100 ? String(Number(value.toPrecision(3))) : value.toFixed(0));
  const scaled = (value, steps) => {
    const [factor, unit] = steps.find(([size]) => Math.abs(value) >= 0.9995 * size) ?? steps.at(-1);
    return `${digits(value / factor)} ${unit}`;
  };
  const seconds = (s) => scaled(s, [[1, "s"], [1e-3, "ms"], [1e-6, "us"]]);
  const bytes = (n) => (n === 0 ? "0 B" : scaled(n, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]));
  const gib = (n) => `${(n / 2 ** 30).toFixed(2)} GiB`;
  const count = (n) => (n < 999.5 ? String(Number(n.toPrecision(3))) : Math.round(n).toLocaleString("en"));
  const money = (value) => (value < 100 ? `$${value.toPrecision(3)}` : `$${Math.round(value).toLocaleString("en")}`);
  function rangeOf(figure, text) {
    if (figure.low === null) return state.server ? "simulated" : "no interval";
    const [low, high] = [text(figure.low).split(" "), text(figure.high).split(" ")];
    return `${low[1] === high[1] ? low[0] : low.join(" ")} to ${high.join(" ")}`;
  }

  // ---- the page

  const $ = (id) => document.getElementById(id);
  const figure = document.querySelector("figure[data-chart]");
  const SVG = "http://www.w3.org/2000/svg";
  function node(name, attributes = {}, parent = null, text = null, space = null) {
    const one = space ? document.createElementNS(space, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) one.setAttribute(key, value);
    if (text !== null) one.textContent = text;
    if (parent) parent.append(one);
    return one;
  }
  const chips = [...new Set(doc.slices.map((slice) => slice.chip))];
  const state = { slice: 0, plan: 0, weight: 0, cache: 0, batch: 0, prompt: 0, output: 0, server: 0, collective: null, prices: {} };
  const sliceNow = () => doc.slices[state.slice];
  const planNow = () => sliceNow().plans[state.plan];
  const isPriced = () => chips.every((chip) => state.prices[chip] > 0);
  const costOf = (slice, hours) => (isPriced() ? hours * state.prices[slice.chip] : hours);
  const costText = (value) => (isPriced() ? money(value) : `${digits(value)} chip hours`);

  // Everything on the chosen lengths and precisions that fits, with the cost of a million output tokens.
  let [everyKey, everyChoice] = ["", []];
  function every() {
    const key = [state.weight, state.cache, state.prompt, state.output, state.server].join();
    if (key === everyKey) return everyChoice;
    everyKey = key;
    everyChoice = [];
    doc.slices.forEach((slice, s) => slice.plans.forEach((plan, p) => settings.batches.forEach((_, batch) => {
      const cell = { ...state, batch };
      if (whyNot(plan, cell) || memoryOf(slice, plan, cell).fits === "no") return;
      everyChoice.push({ slice: s, plan: p, batch, ...figuresOf(slice, plan, cell, false) });
    })));
    return everyChoice;
  }

  const LATENCIES = { TPOT: (one) => one.tpot.value, TTFT: (one) => one.ttft.value, "request time": (one) => one.e2e.value };
  function frontOf(latency) {
    const [x, y] = [LATENCIES[latency], (one) => costOf(doc.slices[one.slice], one.hours.value)];
    const ordered = [...every()].sort((a, b) => x(a) - x(b) || y(a) - y(b));
    let least = Infinity;
    const front = ordered.filter((one) => y(one) < least && (least = y(one), true));
    return { front, others: ordered, x, y };
  }

  function options(select, values, chosen) {
    select.replaceChildren(...values.map((text, value) => node("option", { value }, null, text)));
    select.value = String(chosen);
  }

  function nameOf(one) {
    const slice = doc.slices[one.slice];
    return `${slice.name}, ${slice.plans[one.plan].plan}, batch ${settings.batches[one.batch]}`;
  }

  function drawFront() {
    const view = figure.chart?.view;
    const latency = view ? view.signal("across") : "TPOT";
    const { front, others, x, y } = frontOf(latency);
    const row = (one) => ({ chip: doc.slices[one.slice].chip, x: x(one), y: y(one), at: [one.slice, one.plan, one.batch] });
    const tip = (one) => `${nameOf(one)}\nTTFT ${seconds(one.ttft.value)}, TPOT ${seconds(one.tpot.value)}\n${costText(y(one))} per million tokens`;
    const chosen = others.find((one) => one.slice === state.slice && one.plan === state.plan && one.batch === state.batch);
    if (view) {
      view.data("others", others.map(row));
      view.data("front", front.map((one) => ({ ...row(one), tip: tip(one) })));
      view.data("chosen", chosen ? [{ ...row(chosen), tip: `chosen: ${tip(chosen)}` }] : []);
      view.signal("cost", isPriced() ? "$ per million output tokens" : "chip hours per million output tokens").run();
      figure.chart.resize();
    }
    const body = $("frontier").closest(".table").querySelector("tbody");
    body.replaceChildren(...front.map((one) => {
      const tr = node("tr", one === chosen ? { class: "best" } : {});
      const slice = doc.slices[one.slice];
      const show = node("button", { type: "button", "aria-label": `Show ${nameOf(one)}` }, null, "show");
      show.addEventListener("click", () => choose(one));
      node("td", {}, tr).append(show);
      for (const text of [slice.name, slice.plans[one.plan].plan]) node("td", {}, tr, text);
      const values = [settings.batches[one.batch], one.ttft.value, one.tpot.value, one.rate.value / slice.n_chips, y(one)];
      [String, seconds, seconds, count, costText].forEach((text, n) => node("td", { class: "figure", "data-v": values[n] }, tr, text(values[n])));
      return tr;
    }));
    const place = chosen && front.includes(chosen) ? "The choice is on the frontier." : chosen ? "The choice is not on the frontier." : "";
    $("front-note").textContent = `${count(others.length)} combinations of slice, plan and batch fit; ${front.length} are on the frontier of cost and ${latency}. ${place}`;
    return { front, chosen };
  }

  function choose(one) {
    Object.assign(state, { slice: one.slice, plan: one.plan, batch: one.batch });
    show();
  }

  function whySentence(name, result) {
    const peaks = sliceNow().peaks[state.weight], floor = floorOf(result, peaks), head = `${name} takes ${seconds(result.step)}`;
    if (!floor?.s) return head;
    const ratio = result.step / floor.s, rest = floor.beyond - sum(floor.causes.map((one) => one.s));
    const clauses = floor.causes.map((one) => `${seconds(one.s)} ${one.name}`);
    if (rest > 0.01 * floor.beyond) clauses.push(`${seconds(rest)} ${clauses.length ? "other" : "of unknown cause"}`);
    const peak = floor.resource === "compute" && peaks[3] !== "bf16" ? ` at the ${peaks[3]} peak` : "";
    return `${head}, ${ratio.toFixed(ratio < 9.995 ? 2 : 1)} x its ${floor.resource} floor of ${seconds(floor.s)}${peak}${clauses.length ? ": " : ""}${clauses.join(", ")}`;
  }

  // What the device does for each reason that a sentence names, and what changes it; analysis/roofline.py.
  const reasonsIn = (said) => Object.entries(rules.reasons).map(([reason, meaning]) => [said.match(new RegExp(`s (${reason})`)), meaning])
    .filter(([match]) => match).sort(([a], [b]) => a.index - b.index).map(([match, meaning]) => `${match[1]}: ${meaning}.`).join("\n");

  function drawSteps(figures) {
    $("binds").hidden = !figures;
    for (const [name, estimate] of [["prefill", figures?.ttft], ["decode", figures?.tpot]]) {
      const holder = $(`${name}-step`);
      holder.hidden = !estimate;
      if (!estimate) continue;
      const { result } = estimate, list = activitiesOf(result);
      const said = holder.querySelector("p").textContent = whySentence(name, result);
      holder.querySelector(".note").textContent = reasonsIn(said);
      const axes = list.filter(({ key }) => !(key in doc.colors)).map(({ key }) => key);
      stack(holder, list.map((one) => [`${one.name} ${seconds(one.s)}`, one.s, doc.colors[one.key] ?? ["orange", "red"][axes.indexOf(one.key) % 2]]), result.step);
    }
  }

  // A bar of segments of `whole`, and their names below it.
  function stack(holder, segments, whole, limit = null) {
    const [svg, list] = [holder.querySelector("svg"), holder.querySelector("ul")];
    svg.replaceChildren();
    list.replaceChildren();
    node("rect", { x: 0, y: 0, width: limit ?? 100, height: 6, class: "room" }, svg, null, SVG);
    let from = 0;
    for (const [name, size, color] of segments) {
      const width = (100 * size) / whole;
      node("rect", { x: from, y: 1, width, height: 4, class: `is-${color}` }, svg, null, SVG);
      from += width;
      const item = node("li", {}, list);
      node("rect", { width: 1, height: 1, class: `is-${color}` }, node("svg", { viewBox: "0 0 1 1", "aria-hidden": "true" }, item, null, SVG), null, SVG);
      item.append(name);
    }
    if (limit === null) return;
    if (limit < 100) node("rect", { x: limit, y: 0, width: 100 - limit, height: 6, class: "beyond" }, svg, null, SVG);
    node("line", { x1: limit, x2: limit, y1: 0, y2: 6, class: "limit" }, svg, null, SVG);
  }

  function drawMemory(memory) {
    const { weights, cache, padding, temp, total, hbm, fits, resident } = memory, holder = $("memory");
    const needed = total ?? resident, of = hbm === null ? "" : ` of ${gib(hbm)}`;
    holder.className = `fit ${fits === "no" ? "bad" : fits === "yes" ? "good" : ""}`;
    const words = { yes: "fits", no: "does not fit", close: "may fit: the estimate contains the limit", unknown: "unknown whether it fits" };
    holder.querySelector("p").textContent = `${words[fits]}: ${gib(needed)}${of}${total === null ? ", without temporary buffers" : ""}`;
    const whole = 1.04 * Math.max(needed, hbm ?? 0);
    const parts = [["weights", weights, "blue"], ["KV cache", cache, "sky"], ["padding", padding, "gray"], ["temporary buffers", temp ?? 0, "pink"]];
    stack(holder, parts.filter(([, n]) => n).map(([name, n, color]) => [`${name} ${gib(n)}`, n, color]), whole, hbm === null ? 100 : (100 * hbm) / whole);
    Object.assign(holder.dataset, { total: needed, fits });
  }

  function drawTorus(figures) {
    const torus = sliceNow().torus, holder = $("torus");
    const runs = ["ttft", "tpot"].flatMap((name, phase) => (figures?.[name].result.runs ?? []).map((run, m) => ({ ...run, phase, m, result: figures[name].result })));
    const shown = runs.filter(({ one, result, m, line }) => line >= 0 && nExecutions(result, one) && doc.links[doc.loads[one.loads][line]]?.length && result.collectives[m]);
    holder.hidden = !torus || !shown.length;
    if (holder.hidden) return;
    const name = ({ one, phase, isReduced }) => `${["prefill", "decode"][phase]}: ${isReduced ? "all_reduce" : one.kind} over ${one.axis}, ${one.part}`;
    const text = (run) => `${name(run)} (${count(nExecutions(run.result, run.one))} x ${bytes(run.payload)}, ${seconds(run.result.collectives[run.m])})`;
    const longest = shown.reduce((a, b) => (b.result.collectives[b.m] > a.result.collectives[a.m] ? b : a));
    const now = shown.find((run) => name(run) === state.collective) ?? longest;
    options($("collective"), shown.map(text), shown.indexOf(now));
    $("collective").onchange = () => { state.collective = name(shown[$("collective").value]); drawTorus(figures); };
    const loads = doc.links[doc.loads[now.one.loads][now.line]].map((share) => share * now.payload * nExecutions(now.result, now.one));
    const most = Math.max(...loads), svg = holder.querySelector("svg");
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${torus.size.join(" ")}`);
    svg.style.maxWidth = `${Math.max(torus.size[0], 520)}px`;
    for (const [link, x1, y1, x2, y2] of torus.links) {
      const opacity = loads[link] ? 0.15 + 0.85 * (loads[link] / most) : 0.05;
      node("title", {}, node("line", { x1, y1, x2, y2, "stroke-opacity": opacity.toFixed(3), "stroke-width": torus.width }, svg, null, SVG), `${bytes(loads[link])} a step`, SVG);
    }
    for (const [x, y, label] of torus.chips) {
      node("rect", { x: x - torus.side / 2, y: y - torus.side / 2, width: torus.side, height: torus.side, rx: torus.side / 8 }, svg, null, SVG);
      if (torus.font >= 6) node("text", { x, y, "font-size": torus.font, dy: ".35em" }, svg, label, SVG);
    }
    for (const [x, y, label] of torus.heads) node("text", { x, y, class: "head", "font-size": Math.min(12, torus.size[0] / 40) }, svg, label, SVG);
    const used = loads.filter((load) => load).length;
    const said = `The busiest link carries ${bytes(most)} one way in a step; ${used} of ${torus.links.length - torus.n_stubs} directions of links carry this collective.`;
    svg.setAttribute("aria-label", `Torus of ${sliceNow().name}. ${said}`);
    holder.querySelector(".about").textContent = `${said}${torus.note}`;
  }

  function commandWords() {
    const words = [...doc.command, "--topology", sliceNow().name, "--plan", planNow().plan];
    for (const [name, axis, values] of [["batch", "batch", settings.batches], ["prompt", "prompt", settings.prompts], ["output", "output", settings.outputs]]) words.push(`--${name}`, values[state[axis]]);
    words.push("--weight-dtype", settings.weights[state.weight], "--cache-dtype", settings.caches[state.cache]);
    if (state.server) words.push("--server", doc.server);
    return words;
  }

  function tile(id, figure, text, note = "") {
    const holder = $(id);
    holder.querySelector("b").textContent = figure ? text(figure.value) : "\u2013";
    holder.querySelector(".range").textContent = figure ? `${rangeOf(figure, text)}${note}` : "";
    for (const end of ["value", "low", "high"]) holder.dataset[end] = figure?.[end] ?? "";
  }

  function show({ keepsHash = false } = {}) {
    const slice = sliceNow(), plan = planNow(), reason = whyNot(plan, state);
    const memory = memoryOf(slice, plan, state);
    const figures = reason || at(plan.chunk, state) < 0 ? null : figuresOf(slice, plan, state);
    options($("slice"), doc.slices.map((one) => `${one.name}, ${one.n_chips} ${one.n_chips === 1 ? "chip" : "chips"}`), state.slice);
    options($("plan"), slice.plans.map((one) => (whyNot(one, state) || memoryOf(slice, one, state).fits === "no" ? `${one.plan} (does not fit)` : one.plan)), state.plan);
    for (const name of ["prompt", "output", "weight", "cache"]) $(name).value = String(state[name]);
    if (doc.server) $("server").value = String(state.server);
    $("rate").querySelector("span").textContent = state.server ? "output tokens/s" : "decode tokens/s";
    $("batch").value = String(state.batch);
    const nSequences = settings.batches[state.batch];
    $("batch-value").textContent = String(nSequences);
    $("batch").setAttribute("aria-valuetext", `${nSequences} ${nSequences === 1 ? "sequence" : "sequences"}`);
    tile("ttft", figures?.ttft, seconds);
    tile("tpot", figures?.tpot, seconds);
    tile("e2e", figures?.e2e, seconds);
    tile("rate", figures?.rate, count, figures ? `; ${count(figures.rate.value / slice.n_chips)} per chip` : "");
    const hours = figures?.hours, cost = hours && { value: costOf(slice, hours.value), low: hours.low === null ? null : costOf(slice, hours.low), high: hours.high === null ? null : costOf(slice, hours.high) };
    tile("cost", cost, costText);
    const load = state.server ? `${nSequences} in flight on ${doc.server}` : `batch ${nSequences}`;
    const fit = { no: `does not fit, needs ${gib(memory.total ?? memory.resident)} of ${gib(memory.hbm ?? 0)}`, yes: "fits", close: "may not fit" }[memory.fits] ?? "unknown whether it fits";
    const times = figures && `TTFT ${seconds(figures.ttft.value)}, TPOT ${seconds(figures.tpot.value)}, ${costText(cost.value)} per million output tokens`;
    const said = [times ?? (memory.fits === "no" ? null : reason), fit].filter((one) => one !== null).join("; ");
    $("answer").textContent = `${slice.name}, ${plan.plan}, ${load}: ${said}.`;
    $("answer").className = memory.fits === "no" || !figures ? "banner bad" : "banner";
    drawMemory(memory);
    drawSteps(figures);
    drawTorus(figures);
    drawFront();
    $("command-text").replaceChildren(...commandWords().flatMap((word, n) => [n ? " " : "", node("span", { class: "word" }, null, word)]));
    if (!keepsHash) writeHash();
  }

  // ---- the choice in the address, so that a page can be shared with it
  function hashText() {
    const theme = new URLSearchParams(location.hash.slice(1)).get("theme");
    const values = { slice: sliceNow().name, plan: planNow().plan, batch: settings.batches[state.batch], prompt: settings.prompts[state.prompt],
      output: settings.outputs[state.output], weights: settings.weights[state.weight], cache: settings.caches[state.cache], ...(state.server ? { server: doc.server } : {}), ...(theme ? { theme } : {}) };
    return new URLSearchParams(values).toString();
  }
  let writing = null;  // browsers refuse many changes of an address in a short time
  function writeHash() {
    clearTimeout(writing);
    writing = setTimeout(() => history.replaceState(null, "", `#${hashText()}`), 400);
  }
  function readHash() {
    const values = new URLSearchParams(location.hash.slice(1));
    const find = (name, list, text = String) => list.findIndex((one) => text(one) === values.get(name));
    const take = (name, place) => { if (place >= 0) state[name] = place; };
    take("slice", find("slice", doc.slices, (one) => one.name));
    state.plan = Math.max(0, find("plan", sliceNow().plans, (one) => one.plan));
    state.server = Number(Boolean(doc.server) && values.get("server") === doc.server);
    for (const [name, key, list] of [["batch", "batch", settings.batches], ["prompt", "prompt", settings.prompts], ["output", "output", settings.outputs], ["weight", "weights", settings.weights], ["cache", "cache", settings.caches]]) take(name, find(key, list));
  }

  function start() {
    for (const name of ["prompt", "output", "weight", "cache"]) options($(name), settings[`${name}s`], state[name]);
    $("batch").max = String(settings.batches.length - 1);
    if (doc.server) {
      const select = node("select", { id: "server" }, node("label", {}, $("prices"), "Server"));
      options(select, ["none: device time", doc.server], 0);
      select.addEventListener("change", () => { state.server = Number(select.value); show(); });
    }
    for (const chip of chips) {
      const label = node("label", {}, $("prices"), `${chip}, $ per chip hour`);
      const input = node("input", { type: "number", min: "0", step: "0.01", inputmode: "decimal", placeholder: "price" }, label);
      if (prices[chip]) input.value = state.prices[chip] = prices[chip];
      input.addEventListener("input", () => { state.prices[chip] = Number(input.value); show(); });
    }
    $("slice").addEventListener("change", () => {
      const wanted = planNow().plan;
      state.slice = Number($("slice").value);
      state.plan = Math.max(0, sliceNow().plans.findIndex((one) => one.plan === wanted));
      if (sliceNow().plans[state.plan].plan !== wanted) best((one) => one.slice === state.slice && one.batch === state.batch, (one) => one.e2e.value);
      show();
    });
    for (const name of ["plan", "prompt", "output", "weight", "cache"]) $(name).addEventListener("change", () => { state[name] = Number($(name).value); show(); });
    $("batch").addEventListener("input", () => { state.batch = Number($("batch").value); show(); });
    const find = (chosen, cost) => () => { best(chosen, cost); show(); };
    $("cheapest").addEventListener("click", find(() => true, (one) => costOf(doc.slices[one.slice], one.hours.value)));
    $("fastest").addEventListener("click", find(() => true, (one) => one.e2e.value));
    $("best-plan").addEventListener("click", find((one) => one.slice === state.slice && one.batch === state.batch, (one) => one.e2e.value));
    figure.chart?.view.addSignalListener("across", () => drawFront());
    const pick = (datum) => { if (datum?.at) choose({ slice: datum.at[0], plan: datum.at[1], batch: datum.at[2] }); };
    figure.chart?.view.addEventListener("click", (_, item) => pick(item?.datum));
    figure.addEventListener("keydown", (event) => { if (event.key === "Enter") pick(figure.chart.active?.__data__?.datum); });
    window.addEventListener("hashchange", () => { readHash(); show({ keepsHash: true }); });
    readHash();
    if (!location.hash.includes("slice=")) {
      state.prompt = Math.floor(settings.prompts.length / 2);
      // The bend of the frontier.
      best(() => true, (one) => one.tpot.value * costOf(doc.slices[one.slice], one.hours.value));
    }
    show();
    document.documentElement.dataset.explorer = "ready";
  }
  function best(isTaken, cost) {
    const found = every().filter(isTaken).reduce((a, b) => (a && cost(a) <= cost(b) ? a : b), null);
    if (found) Object.assign(state, { slice: found.slice, plan: found.plan, batch: found.batch });
  }
  start();
})();
