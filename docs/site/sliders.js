// Calculators of docs/labs/sliders.md. Every formula is that of the Python function that its comment names, and
// tests/project/test_sliders.py compares the numbers.
(() => {
  // As jaxdist.models.presets: layers, width, heads, key heads, ffn, positions, vocabulary, GPT-2's kind or Llama's.
  const MODELS = {
    "gpt2-124m": [12, 768, 12, 12, 3072, 1024, 50304, "gpt"],
    "gpt2-1.5b": [48, 1600, 25, 25, 6400, 1024, 51200, "gpt"],
    "7b": [32, 4096, 32, 32, 16384, 2048, 50304, "gpt"],
    "llama3-8b": [32, 4096, 32, 8, 14336, 8192, 128256, "llama"],
    "llama3-70b": [80, 8192, 64, 8, 28672, 8192, 128256, "llama"],
    "llama3-405b": [126, 16384, 128, 8, 53248, 8192, 128256, "llama"],
  };
  const RECIPES = { "mixed-adam": [2, 2, 12], "mixed-adam-fp32-gradients": [2, 4, 12], "mixed-lion": [2, 2, 8],
    "mixed-sgd-momentum": [2, 2, 8], "fp32-adam": [4, 4, 8], "fp32-sgd": [4, 4, 0] };
  const CARDS = { "a100-40": 40, "a100-80": 80, "h100": 80, "h200": 141, "b200": 180, "mi300x": 192 }; // GiB
  const PEAK = { "a100-80": 312e12, "h100": 989e12, "h200": 989e12, "b200": 2250e12 }; // bf16 FLOP/s
  const HBM = { "a100-80": 2e12, "h100": 3.35e12, "h200": 4.8e12, "b200": 8e12 }; // bytes/s
  const GIB = 2 ** 30, POWERS = [1, 2, 4, 8, 16, 32, 64];

  const shape = (name) => {
    const [layers, width, heads, keyHeads, ffn, positions, vocabulary, kind] = MODELS[name];
    return { layers, width, heads, keyWidth: (keyHeads * width) / heads, ffn, positions, vocabulary, llama: kind === "llama" };
  };

  // jaxdist.plan.formulas.ModelShape.parameters
  const parameters = (m) => {
    const h = m.width, matrices = 2 * h * h + 2 * h * m.keyWidth + (m.llama ? 3 : 2) * h * m.ffn;
    const layer = matrices + 2 * h + (m.llama ? 0 : 2 * h + (h + 2 * m.keyWidth) + h + m.ffn + h);
    const tables = m.llama ? 2 * m.vocabulary * h : (m.vocabulary + m.positions) * h;
    return m.layers * layer + tables + (m.llama ? 1 : 2) * h;
  };

  // jaxdist.plan.formulas.layer_activation_bytes, 16 bits without dropout, attention that keeps no scores
  const layerBytes = (m, v) => {
    const sharded = v.sp === "on" ? v.tp : 1, positions = (v.rows * m.positions) / v.cp;
    if (v.recompute === "layers") return (positions * (2 * m.width)) / sharded;
    const split = 2 * (2 * m.width + 2 * m.keyWidth + (m.llama ? 4 : 2) * m.ffn);
    return positions * ((8 * m.width) / sharded + split / v.tp);
  };

  // jaxdist.plan.formulas.state_bytes and stage_activation_bytes; ZeRO shards over dp and cp
  const memory = (v) => {
    const m = shape(v.model), local = parameters(m) / (v.tp * v.pp), [weight, grad, optimizer] = RECIPES[v.recipe];
    const over = (stage) => (v.zero >= stage ? v.dp * v.cp : 1);
    const parts = {
      parameters: (local * weight) / over(3),
      gradients: (local * grad) / over(2),
      optimizer: (local * optimizer) / over(1),
      activations: ((layerBytes(m, v) * m.layers) / v.pp) * Math.min(v.microbatches, v.pp),
    };
    const total = Object.values(parts).reduce((a, b) => a + b, 0), card = CARDS[v.card];
    const results = Object.entries(parts).map(([name, bytes]) => [name, bytes / GIB, "GiB", 2]);
    return {
      results: [...results, ["total", total / GIB, "GiB", 2], ["devices", v.dp * v.tp * v.pp * v.cp, "", 0]],
      say: `${total / GIB <= card ? "fits" : "does not fit"} in ${card} GiB (${v.card})`,
      draw: stack(results.map(([name, gib]) => [name, gib]), card),
    };
  };

  // jaxdist.parallel.pipeline.builders: gpipe, interleaved (1f1b with one chunk); labs' solution of less_bubble: zb-h1
  const orders = (v) => {
    const p = v.stages, m = v.microbatches, chunks = v.schedule === "interleaved" ? 2 : 1, all = [...Array(p).keys()];
    const micros = [...Array(m).keys()], both = (micro, chunk) => [["B", micro, chunk], ["W", micro, chunk]];
    if (v.schedule === "gpipe") return all.map(() => [...micros.map((i) => ["F", i, 0]), ...micros.flatMap((i) => both(i, 0))]);
    if (v.schedule === "zb-h1") return all.map((stage) => {
      const ahead = Math.min(p - stage, m), order = micros.slice(0, ahead).map((i) => ["F", i, 0]);
      for (const i of micros) {
        order.push(["B", i, 0], ...(i >= stage ? [["W", i - stage, 0]] : []), ...(i + ahead < m ? [["F", i + ahead, 0]] : []));
      }
      return [...order, ...micros.slice(Math.max(m - stage, 0)).map((i) => ["W", i, 0])];
    });
    const group = p * chunks, count = Math.ceil(m / p) * group;
    const nth = (n, backward) => {
      const chunk = Math.floor((n % group) / p);
      return [Math.floor(n / group) * p + (n % p), backward ? chunks - 1 - chunk : chunk];
    };
    return all.map((stage) => {
      const below = p - 1 - stage, ahead = Math.min(chunks === 1 ? below : 2 * below + (chunks - 1) * p, count);
      const order = [];
      for (let n = 0; n < count + ahead; n++) {
        if (n < count) order.push(["F", ...nth(n, false)]);
        if (n >= ahead) order.push(...both(...nth(n - ahead, true)));
      }
      return order.filter(([, micro]) => micro < m);
    });
  };

  // jaxdist.parallel.pipeline.simulate.simulate(waiting="dependencies") and in_flight
  const pipeline = (v) => {
    const p = v.stages, chunks = v.schedule === "interleaved" ? 2 : 1, fused = v.schedule !== "zb-h1", todo = orders(v);
    const cost = { F: v.forward / chunks, B: v.backward / chunks, W: v.weights / chunks };
    const ended = new Map(), spans = [], free = Array(p).fill(0), at = Array(p).fill(0);
    const end = (phase, micro, part) => (part < 0 || part >= p * chunks ? 0 : ended.get(`${phase} ${micro} ${part}`));
    for (let moved = true; moved; ) {
      moved = false;
      for (let stage = 0; stage < p; stage++) {
        for (; at[stage] < todo[stage].length; at[stage]++, moved = true) {
          const [phase, micro, chunk] = todo[stage][at[stage]], part = chunk * p + stage;
          const needs = { F: [["F", part - 1]], B: [["F", part], [fused ? "W" : "B", part + 1]], W: [["B", part]] }[phase];
          const arrivals = needs.map(([needed, from]) => end(needed, micro, from));
          if (arrivals.includes(undefined)) break;
          const start = Math.max(free[stage], ...arrivals);
          free[stage] = start + cost[phase];
          ended.set(`${phase} ${micro} ${part}`, free[stage]);
          spans.push([stage, start, cost[phase], phase, micro, chunk]);
        }
      }
    }
    const time = Math.max(...free), busy = spans.reduce((sum, span) => sum + span[2], 0);
    const held = todo.map((order) => {
      let now = 0, most = 0;
      for (const [phase] of order) most = Math.max(most, (now += { F: 1, B: 0, W: -1 }[phase]));
      return most;
    });
    return {
      results: [["time", time, "", 2], ["bubble", 100 * (1 - busy / (p * time)), "% of the time", 1],
        ["in flight", Math.max(...held) / chunks, "micro-batches of a stage at most", 1]],
      say: "F forward, B input gradient, W weight gradient; numbers are micro-batches, pale is the second chunk",
      draw: timeline(spans, p, time),
    };
  };

  // jaxdist.plan.collective_cost.collective_cost(...).seconds
  const ring = (v) => {
    const n = v.ranks, size = v.size * 1e6, log = Math.ceil(Math.log2(n)), power = Number.isInteger(Math.log2(n));
    const costs = { ring: [2 * (n - 1), (2 * (n - 1) * size) / n], tree: [2 * log, 2 * size] };
    if (power) costs["halving-doubling"] = [2 * log, (2 * (n - 1) * size) / n];
    const times = Object.entries(costs).map(([name, [steps, bytes]]) => [name, 1e3 * (steps * v.latency * 1e-6 + bytes / (v.bandwidth * 1e9))]);
    const best = times.reduce((a, b) => (b[1] < a[1] ? b : a));
    return {
      results: times.map(([name, ms]) => [name, ms, "ms", 3]),
      say: `${best[0]} is fastest; of the ring's time ${((100 * costs.ring[0] * v.latency * 1e-3) / times[0][1]).toFixed(0)} % is latency`,
      draw: stack(times, Math.max(...times.map(([, ms]) => ms)), true),
    };
  };

  // jaxdist.plan.proof.roofline.Roof.seconds of one matrix product in bf16: x[tokens, width] @ up[width, ffn / tp]
  const roofline = (v) => {
    const m = shape(v.model), columns = m.ffn / v.tp;
    const flops = 2 * v.tokens * m.width * columns, read = 2 * (v.tokens * m.width + m.width * columns), written = 2 * v.tokens * columns;
    const times = [["arithmetic", 1e6 * (flops / PEAK[v.card])], ["memory", 1e6 * ((read + written) / HBM[v.card])]];
    const least = Math.max(...times.map(([, us]) => us));
    return {
      results: [...times.map(([name, us]) => [name, us, "µs", 2]), ["at least", least, "µs", 2], ["intensity", flops / (read + written), "FLOPs a byte", 1]],
      say: `bound by ${times[0][1] >= times[1][1] ? "arithmetic" : "memory"}: the card (${v.card}) has time for ${(PEAK[v.card] / HBM[v.card]).toFixed(0)} FLOPs a byte`,
      draw: stack(times, least, true),
    };
  };

  // jaxdist.plan.formulas.training_days and jaxdist.plan.cost.Cost.dollars
  const deadline = (v) => {
    const flops = (v.recompute === "layers" ? 8 : 6) * parameters(shape(v.model)) * (v.tokens * 1e9);
    const days = flops / (v.devices * (PEAK[v.card] * (v.mfu / 100))) / 86400;
    return {
      results: [["days", days, "days", 2], ["cost", v.devices * v.price * (days * 24), "dollars", 0]],
      say: `for a week it needs ${Math.ceil((v.devices * days) / 7).toLocaleString("en")} devices of this kind`,
      draw: "",
    };
  };

  // ---- what is drawn

  const COLOURS = ["#4c78a8", "#e08214", "#3a9a5b", "#b2569a"];
  const rect = (x, y, w, h, fill, more = "") => `<rect x="${x}" y="${y}" width="${Math.max(w, 0)}" height="${h}" fill="${fill}" ${more}/>`;
  const text = (x, y, words, more = "") => `<text x="${x}" y="${y}" ${more}>${words}</text>`;
  const svg = (w, h, inside, about) => `<svg viewBox="0 0 ${w} ${h}" role="img" aria-label="${about}">${inside}</svg>`;

  // Parts on one bar against a limit, or a bar each.
  function stack(parts, limit, apart = false) {
    const whole = Math.max(limit, apart ? 0 : parts.reduce((sum, [, size]) => sum + size, 0)) || 1;
    let x = 0, inside = "";
    parts.forEach(([name, size], i) => {
      const w = (380 * size) / whole, y = apart ? 26 * i : 0;
      inside += rect(apart ? 0 : x, y, w, 22, COLOURS[i]);
      if (apart) inside += text(4, y + 15, name, 'class="on-bar"');
      else inside += rect((i % 2) * 190, 36 + 18 * Math.floor(i / 2), 10, 10, COLOURS[i]) + text((i % 2) * 190 + 15, 45 + 18 * Math.floor(i / 2), name);
      x += w;
    });
    if (!apart) inside += rect((380 * limit) / whole - 1, -2, 2, 26, "currentColor") + text((380 * limit) / whole - 4, 33, "the card", 'text-anchor="end"');
    return svg(382, apart ? 26 * parts.length : 74, inside, parts.map(([name, size]) => `${name} ${size.toPrecision(3)}`).join(", "));
  }

  function timeline(spans, stages, time) {
    const high = 18, scale = 760 / time;
    const inside = spans.map(([stage, start, cost, phase, micro, chunk]) => {
      const x = 20 + start * scale, w = cost * scale, fill = COLOURS["FBW".indexOf(phase)];
      const number = w > 9 ? text(x + w / 2, stage * (high + 3) + 13, micro, 'text-anchor="middle" class="on-bar"') : "";
      return rect(x, stage * (high + 3), w - 0.5, high, fill, chunk ? 'opacity="0.65"' : "") + number;
    });
    for (let stage = 0; stage < stages; stage++) inside.push(text(0, stage * (high + 3) + 13, stage));
    return svg(780, stages * (high + 3), inside.join(""), `timeline of ${stages} stages`);
  }

  // ---- controls: a list of words is a menu, a list of numbers a slider; the one that is chosen first

  const MODEL = ["model", Object.keys(MODELS), "llama3-8b"];
  const RECOMPUTE = ["recompute", ["nothing", "layers"], "nothing"];
  const CALCULATORS = {
    memory: [memory, [MODEL, ["recipe", Object.keys(RECIPES), "mixed-adam", "precision and optimiser"],
      ["zero", [0, 1, 2, 3], 0, "ZeRO stage"], ["dp", POWERS, 1], ["tp", [1, 2, 4, 8], 1], ["sp", ["off", "on"], "off", "tp splits tokens (sp)"],
      ["pp", [1, 2, 4, 8, 16], 1], ["cp", [1, 2, 4, 8], 1], ["rows", [1, 2, 4, 8, 16], 1, "sequences in a micro-batch"],
      ["microbatches", POWERS, 8, "micro-batches of an update"], RECOMPUTE, ["card", Object.keys(CARDS), "h100"]]],
    pipeline: [pipeline, [["schedule", ["gpipe", "1f1b", "interleaved", "zb-h1"], "1f1b"], ["stages", [2, 3, 4, 6, 8, 12, 16], 4],
      ["microbatches", [1, 2, 3, 4, 6, 8, 12, 16, 24, 32], 8, "micro-batches"], ["forward", [0.5, 1, 1.5, 2, 3, 4], 1, "time of F"],
      ["backward", [0.5, 1, 1.5, 2, 3, 4], 1, "time of B"], ["weights", [0.5, 1, 1.5, 2, 3, 4], 1, "time of W"]]],
    ring: [ring, [["ranks", [2, 3, 4, 6, 8, 16, 32, 64, 128, 256, 1024], 8], ["size", [0.001, 0.01, 0.1, 1, 10, 100, 1000, 10000], 100, "message, MB"],
      ["latency", [1, 2, 5, 10, 20, 50], 5, "latency of a step, µs"], ["bandwidth", [1, 3.125, 12.5, 25, 50, 100, 450, 900], 50, "bandwidth, GB/s"]]],
    roofline: [roofline, [MODEL, ["tokens", [1, 8, 32, 64, 128, 256, 512, 1024, 4096, 16384], 128, "tokens at a time"], ["tp", [1, 2, 4, 8], 1],
      ["card", Object.keys(PEAK), "h100"]]],
    deadline: [deadline, [MODEL, ["tokens", [1, 10, 100, 300, 1000, 3000, 15000], 100, "tokens, billions"], RECOMPUTE, ["card", Object.keys(PEAK), "h100"],
      ["devices", [1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384], 32], ["mfu", [10, 20, 30, 35, 40, 45, 50, 60], 40, "MFU, %"],
      ["price", [1, 2, 3, 4, 6, 8, 12], 3, "dollars an hour and device"]]],
  };

  document.querySelectorAll("[data-calculator]").forEach((place) => {
    const [compute, controls] = CALCULATORS[place.dataset.calculator];
    const label = ([key, list, , words]) => {
      if (typeof list[0] === "string") return `<label>${words || key}<select name="${key}">${list.map((word) => `<option>${word}</option>`).join("")}</select></label>`;
      return `<label>${words || key}<output></output><input type="range" name="${key}" min="0" max="${list.length - 1}" step="1"></label>`;
    };
    place.innerHTML = `<form>${controls.map(label).join("")}</form><div><p class="drawing"></p><dl aria-live="polite"></dl><p class="say"></p></div>`;
    const form = place.querySelector("form");
    const refresh = () => {
      const setting = Object.fromEntries(controls.map(([key, list]) => {
        const control = form.elements[key];
        if (control.type !== "range") return [key, control.value];
        const value = list[control.value];
        control.setAttribute("aria-valuetext", value);
        control.previousElementSibling.textContent = value.toLocaleString("en");
        return [key, value];
      }));
      const { results, say, draw } = compute(setting);
      place.dataset.setting = JSON.stringify(setting);
      place.dataset.results = JSON.stringify(results);
      const shown = (value, digits) => value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
      place.querySelector("dl").innerHTML = results.map(([name, value, unit, digits]) => `<div><dt>${name}</dt><dd>${shown(value, digits)} ${unit}</dd></div>`).join("");
      place.querySelector(".drawing").innerHTML = draw;
      place.querySelector(".say").textContent = say;
    };
    controls.forEach(([key, list, first]) => (form.elements[key].value = typeof list[0] === "string" ? first : list.indexOf(first)));
    form.addEventListener("input", refresh);
    form.addEventListener("submit", (event) => event.preventDefault());
    refresh();
  });
})();
