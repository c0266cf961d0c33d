// Curves that one can point at and switch off. The data of a figure is JSON beside it; names are set as text, never as HTML.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const WIDTH = 360, HEIGHT = 240, LEFT = 46, RIGHT = 8, TOP = 24, BOTTOM = 38;
  const DASHES = { "-": "none", "--": "6 3", "-.": "6 2 1.5 2" };
  const off = new Set(); // agents

  const make = (name, attributes, parent) => {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    parent.append(node);
    return node;
  };
  const write = (text, attributes, parent) => { make("text", attributes, parent).textContent = text; };
  const short = value => {
    for (const [unit, letter] of [[1e9, " G"], [1e6, " M"], [1e3, " k"]])
      if (Math.abs(value) >= unit) return +(value / unit).toPrecision(3) + letter;
    return String(+value.toPrecision(3));
  };
  const ticks = (low, high, whole) => {
    const rough = (high - low) / 5 || 1, power = 10 ** Math.floor(Math.log10(rough));
    let step = [1, 2, 5, 10].find(each => each * power >= rough) * power;
    if (whole) step = Math.max(1, Math.round(step));
    const found = [];
    for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(at);
    return found;
  };
  const colourOf = line => line.colour === "#000000" ? "currentColor" : line.colour; // black is invisible at night

  function panelOf(panel, chart, parent) {
    const svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" }, parent);
    write(`${panel.title}: ${chart.y}`, { x: LEFT, y: 15, class: "title" }, svg);
    const every = name => panel.lines.flatMap(line => line[name]).filter(Number.isFinite);
    const left = Math.min(...every("x")), right = Math.max(...every("x"));
    const low = Math.min(0, ...every("y")), high = Math.max(...every("y"), ...every("high").filter(v => v <= chart.top), low + 1e-9);
    const x = value => LEFT + (WIDTH - LEFT - RIGHT) * (right > left ? (value - left) / (right - left) : 0.5);
    const y = value => TOP + (HEIGHT - TOP - BOTTOM) * (1 - (Math.min(Math.max(value, low), high) - low) / (high - low));
    for (const at of ticks(low, high, false)) {
      make("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(at), y2: y(at), class: "grid" }, svg);
      write(short(at), { x: LEFT - 5, y: y(at) + 4, "text-anchor": "end" }, svg);
    }
    for (const at of ticks(left, right, chart.whole)) {
      write(short(at), { x: x(at), y: HEIGHT - BOTTOM + 15, "text-anchor": "middle" }, svg);
    }
    write(chart.x, { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 5, "text-anchor": "middle" }, svg);
    const path = (line, values, from, to) => {
      let d = "";
      for (let i = from; i < to; i++)
        if (Number.isFinite(values[i])) d += `${d ? "L" : "M"}${x(line.x[i]).toFixed(1)} ${y(values[i]).toFixed(1)}`;
      return d;
    };
    for (const line of panel.lines) {
      const group = make("g", { class: "line", style: `color: ${colourOf(line)}` }, svg);
      group.dataset.agent = line.agent;
      const known = line.x.map((_, i) => i).filter(i => Number.isFinite(line.low[i]));
      if (known.length > 1) {
        const up = known.map(i => `${x(line.x[i]).toFixed(1)} ${y(line.high[i]).toFixed(1)}`);
        const down = known.reverse().map(i => `${x(line.x[i]).toFixed(1)} ${y(line.low[i]).toFixed(1)}`);
        make("path", { d: `M${up.join("L")}L${down.join("L")}Z`, class: "band" }, group);
      }
      const dash = DASHES[line.dash] || "none", end = line.x.length;
      make("path", { d: path(line, line.y, 0, line.solid), class: "mean", "stroke-dasharray": dash }, group);
      if (line.solid < end)
        make("path", { d: path(line, line.y, Math.max(0, line.solid - 1), end), class: "mean", "stroke-dasharray": "1 3" }, group);
      if (end === 1) make("circle", { cx: x(line.x[0]), cy: y(line.y[0]), r: 3, fill: "currentColor" }, group);
    }
    const cursor = make("line", { y1: TOP, y2: HEIGHT - BOTTOM, class: "cursor", visibility: "hidden" }, svg);
    const show = event => {
      const box = svg.getBoundingClientRect();
      const part = ((event.clientX - box.left) / box.width * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT);
      const at = left + (right - left) * Math.min(Math.max(part, 0), 1);
      tip.replaceChildren();
      const head = document.createElement("b");
      head.textContent = `${panel.title}, ${chart.x} `;
      tip.append(head);
      let shown = null;
      const rows = [];
      for (const line of panel.lines) {
        if (off.has(line.agent) || !line.x.length) continue;
        let near = 0;
        line.x.forEach((value, i) => { if (Math.abs(value - at) < Math.abs(line.x[near] - at)) near = i; });
        if (!Number.isFinite(line.y[near])) continue;
        if (shown === null || Math.abs(line.x[near] - at) < Math.abs(shown - at)) shown = line.x[near];
        const interval = Number.isFinite(line.low[near]) ? ` [${short(line.low[near])}, ${short(line.high[near])}]` : "";
        rows.push([line, near, `${line.agent}: ${short(line.y[near])}${interval}`]);
      }
      rows.sort((one, other) => other[0].y[other[1]] - one[0].y[one[1]]);
      for (const [line, , text] of rows) {
        const row = document.createElement("div");
        row.style.color = colourOf(line);
        row.textContent = text;
        tip.append(row);
      }
      if (shown === null) return hide();
      head.textContent += short(shown);
      cursor.setAttribute("x1", x(shown));
      cursor.setAttribute("x2", x(shown));
      cursor.setAttribute("visibility", "visible");
      tip.hidden = false;
      const wide = tip.offsetWidth, tall = tip.offsetHeight;
      tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - wide - 4))}px`;
      tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - tall - 4))}px`;
    };
    const hide = () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); };
    svg.addEventListener("pointermove", show);
    svg.addEventListener("pointerdown", show);
    svg.addEventListener("pointerleave", hide);
  }

  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);
  for (const place of document.querySelectorAll(".chart")) {
    const chart = JSON.parse(place.querySelector("script").textContent, (_, value) => value === null ? NaN : value);
    for (const panel of chart.panels) panelOf(panel, chart, place);
  }
  const update = () => {
    for (const line of document.querySelectorAll("g.line")) line.style.display = off.has(line.dataset.agent) ? "none" : "";
    for (const each of document.querySelectorAll(".legend button"))
      each.setAttribute("aria-pressed", String(!off.has(each.dataset.agent)));
  };
  for (const legend of document.querySelectorAll(".legend")) legend.hidden = false;
  for (const button of document.querySelectorAll(".legend button"))
    button.addEventListener("click", () => {
      const agent = button.dataset.agent;
      if (!off.delete(agent)) off.add(agent);
      update();
    });
})();
