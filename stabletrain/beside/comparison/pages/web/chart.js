// One chart: lines over a shared axis, marks, a cursor with a tooltip, and zoom by mouse or keyboard.
"use strict";
class Chart {
  /**
   * host: an element of a fixed height. plan: { title, series, log, x: {log, label}, lines, together }.
   * series: [{ name, style, x, y, width, faint, dots, marks: [{x, y, kind, text, to, own}], bad: [[x, word]], band: [low, high] }]
   * own: whether a mark has the colour of its line; bad: where a line stops being finite; floor: the lowest possible y; domain: the range of x; lines: horizontal lines [{y, text}]; together: charts that share their x.
   */
  constructor(host, plan) {
    this.host = host;
    this.tip = make("div", { class: "tip", role: "status" });
    this.active = false;
    this.draw(plan);
    new ResizeObserver(() => this.fit()).observe(host);
    host.tabIndex = 0;
    host.setAttribute("role", "img");
    host.addEventListener("keydown", (event) => this.key(event));
    host.addEventListener("pointermove", (event) => this.touch(event));
    host.addEventListener("pointerdown", (event) => this.touch(event));
    host.addEventListener("pointerenter", () => (this.active = true));
    host.addEventListener("pointerleave", () => this.leave());
    host.addEventListener("blur", () => this.leave());
  }

  /** Redraws the chart and keeps a zoomed range of x. */
  draw(plan) {
    const range = this.zoom ? this.range() : null;
    if (this.u) this.u.destroy();
    this.plan = plan;
    this.full = this.whole();
    this.host.setAttribute("aria-label", `${plan.title}: ${plan.series.length} lines`);
    const rows = plan.series.map((one) => [one.x, plan.log ? one.y.map((v) => (v > 0 ? v : null)) : one.y]);
    const bands = [];
    plan.series.forEach((one, i) => {
      if (one.band) one.band.forEach((edge) => rows.push([one.x, plan.log ? Chart.above(edge, one.y) : edge]));
      if (one.band) bands.push(i);
    });
    const data = rows.length ? uPlot.join(rows) : [[], []];
    const edge = (i) => ({ stroke: "transparent", width: 0, points: { show: false }, scale: "y" });
    const first = plan.series.length + 1;
    this.u = new uPlot(
      {
        ...this.size(),
        legend: { show: false },
        focus: { alpha: 0.25 },
        cursor: {
          drag: { x: true, y: false, dist: 6 },
          bind: { dblclick: () => () => this.show(null) },
          focus: { prox: 1e6 },
          points: { show: false },
          sync: plan.together ? { key: plan.together.key, setSeries: false, scales: ["x", null] } : undefined,
        },
        scales: {
          x: { time: false, distr: plan.x && plan.x.log ? 3 : 1, range: (u, low, high) => (low == null ? this.full : [low, high]) },
          y: { distr: plan.log ? 3 : 1, range: (u, low, high) => this.high(low, high) },
        },
        axes: [
          { ...this.axis(plan.x && plan.x.log), ...(plan.x ? {} : { incrs: Chart.WHOLE }), size: 34 },
          { ...this.axis(plan.log), size: 62 },
        ],
        series: [
          {},
          ...plan.series.map((one) => ({
            label: one.name,
            stroke: () => Colors.css(one.style.color) + (one.faint ? "77" : ""),
            dash: one.style.dash,
            width: one.width || 1.5,
            points: { show: !!one.dots || one.y.filter((v) => v !== null).length === 1, size: 6 },
          })),
          ...bands.flatMap((i) => [edge(i), edge(i)]),
        ],
        bands: bands.map((i, n) => ({
          series: [first + 2 * n + 1, first + 2 * n],
          fill: () => Colors.css(plan.series[i].style.color) + "26",
        })),
        hooks: {
          draw: [(u) => this.decorate(u)],
          setCursor: [(u) => this.hover(u)],
          setScale: [(u, key) => key === "x" && this.zoomed()],
        },
      },
      data,
      this.host,
    );
    this.u.over.append(this.tip);
    const [min, max] = range || this.full;
    this.following = true;
    this.u.setScale("x", { min, max });
    this.following = false;
  }

  /** The distances between the ticks of an axis of steps, which are whole numbers. */
  static WHOLE = Array.from({ length: 10 }, (_, i) => [1, 2, 5].map((lead) => lead * 10 ** i)).flat();

  axis(log) {
    const soft = () => Colors.css("soft");
    const grid = () => Colors.css("grid");
    const font = "12px system-ui, sans-serif";
    const filter = log ? { filter: Numbers.round } : {};
    const splits = log ? { splits: (u, axis, low, high) => Chart.decades(low, high) } : {};
    const lines = { stroke: grid, width: 1, ...filter };
    return { stroke: soft, font, values: Numbers.ticks, grid: lines, ticks: { ...lines, size: 5 }, ...filter, ...splits };
  }

  size() {
    return { width: Math.max(120, this.host.clientWidth), height: Math.max(120, this.host.clientHeight) };
  }

  fit() {
    const size = this.size();
    if (this.u && (size.width !== this.u.width || size.height !== this.u.height)) this.u.setSize(size);
  }

  /** The visible range of x, or null if nothing is drawn yet. */
  range() {
    const x = this.u && this.u.scales.x;
    return x && x.min != null ? [x.min, x.max] : null;
  }

  /** The full range of x. */
  whole() {
    if (this.plan.domain) return this.plan.domain;
    const steps = this.plan.series.flatMap((one) => one.x);
    if (!steps.length) return [0.1, 1];
    const [low, high] = [Math.min(...steps), Math.max(...steps)];
    return this.plan.x && this.plan.x.log ? [low / 1.3, high * 1.3] : [low - (low === high), high + (low === high)];
  }

  /** The edge of a band for a logarithmic axis: what is not above 0 is just below the lowest value. */
  static above(edge, values) {
    const lowest = Math.min(...values.filter((v) => v > 0)) / 1.2;
    return edge.map((v) => (v === null ? null : v > 0 ? v : lowest));
  }

  /** The ticks of a logarithmic axis: 1 to 9 times each power of ten. uPlot's own begin anywhere, and may never end. */
  static decades(low, high) {
    const powers = Array.from({ length: Math.ceil(Math.log10(high / low)) + 2 }, (_, i) => Math.floor(Math.log10(low)) + i);
    const ticks = powers.flatMap((power) => [1, 2, 3, 4, 5, 6, 7, 8, 9].map((lead) => Number(`${lead}e${power}`)));
    return ticks.filter((tick) => tick >= low && tick <= high);
  }

  high(low, high) {
    for (const line of this.plan.lines || []) if (line.always) [low, high] = [Math.min(low ?? line.y, line.y), Math.max(high ?? line.y, line.y)];
    const heights = this.heights();
    if (low == null && !heights.length) return this.plan.log ? [0.1, 1] : [0, 1];
    [low, high] = [Math.min(low ?? Infinity, ...heights), Math.max(high ?? -Infinity, ...heights)];
    if (this.plan.log) {
      const room = high / low < 4 ? 2 : 1.2; // a narrow range of values may contain no round number
      return [low / room, high * room];
    }
    const room = (high - low || Math.abs(high) || 1) * 0.05;
    const floor = this.plan.floor == null ? -Infinity : this.plan.floor;
    return [Math.max(low - room, floor), high + room];
  }

  /** The heights of the marks in the visible range of x. */
  heights() {
    const [from, to] = this.range() || this.full;
    const marks = this.plan.series.flatMap((one) => one.marks || []).filter((mark) => mark.x >= from && mark.x <= to);
    return marks.map((mark) => mark.y).filter((y) => y != null && (y > 0 || !this.plan.log));
  }

  /** Shows a range of x, or all of it for null. Charts that share their x follow. */
  show(range) {
    const [min, max] = range || this.full;
    this.zoom = !!range;
    this.u.setScale("x", { min, max });
  }

  zoomed() {
    if (this.following) return;
    const now = this.range();
    this.zoom = now[0] !== this.full[0] || now[1] !== this.full[1];
    this.told(now);
    for (const other of this.plan.together ? this.plan.together.charts : []) {
      if (other === this || !other.u) continue;
      other.following = true;
      other.zoom = this.zoom;
      other.u.setScale("x", this.zoom ? { min: now[0], max: now[1] } : { min: other.full[0], max: other.full[1] });
      other.following = false;
      other.told(now);
    }
  }

  /** Called when the range of x has changed; the owner of the chart may replace it. */
  told() {}

  /** Draws horizontal lines, marks, and crosses for values that are not finite. */
  decorate(u, dpr = uPlot.pxRatio) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.beginPath();
    const beside = 5 * dpr; // a mark at the first or last step is drawn whole
    ctx.rect(bbox.left - beside, bbox.top - 1, bbox.width + 2 * beside, bbox.height + 2);
    ctx.clip();
    ctx.font = `${11 * dpr}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    ctx.textBaseline = "alphabetic";
    for (const line of this.plan.lines || []) {
      const y = Math.round(u.valToPos(line.y, "y", true));
      if (!(y >= bbox.top && y <= bbox.top + bbox.height)) continue;
      ctx.strokeStyle = ctx.fillStyle = Colors.css("soft");
      ctx.setLineDash([4 * dpr, 4 * dpr]);
      ctx.lineWidth = dpr;
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      ctx.setLineDash([]);
      const above = y - 4 * dpr;
      ctx.fillText(line.text, bbox.left + 6 * dpr, above - 11 * dpr < bbox.top ? y + 13 * dpr : above);
    }
    this.plan.series.forEach((one) => {
      const color = Colors.css(one.style.color);
      for (const [x, word] of one.bad || []) {
        const at = u.valToPos(x, "x", true);
        this.cross(ctx, at, bbox.top + 7 * dpr, 4 * dpr, color, dpr);
        ctx.fillStyle = color;
        const left = at + 46 * dpr > bbox.left + bbox.width;
        ctx.textAlign = left ? "right" : "left";
        ctx.fillText(word, at + (left ? -7 : 7) * dpr, bbox.top + 11 * dpr);
      }
      if (one.band && one.x.length === 1 && one.band[0][0] !== null) {
        const [low, high] = one.band.map((edge) => u.valToPos((this.plan.log ? Chart.above(edge, one.y) : edge)[0], "y", true));
        const at = u.valToPos(one.x[0], "x", true);
        ctx.strokeStyle = color;
        ctx.lineWidth = 1.5 * dpr;
        ctx.beginPath();
        ctx.moveTo(at, low);
        ctx.lineTo(at, high);
        ctx.stroke();
      }
      for (const mark of one.marks || []) this.mark(ctx, u, mark, color, dpr);
    });
    ctx.restore();
  }

  mark(ctx, u, mark, color, dpr) {
    const { bbox } = u;
    const x = u.valToPos(mark.x, "x", true);
    const inside = (y) => Math.min(Math.max(y, bbox.top + 7 * dpr), bbox.top + bbox.height - 7 * dpr);
    const y = mark.y == null ? bbox.top + 7 * dpr : inside(u.valToPos(mark.y, "y", true));
    if (mark.kind === "cross") return this.cross(ctx, x, y, 3.5 * dpr, color, dpr);
    ctx.fillStyle = ctx.strokeStyle = mark.own ? color : Colors.css("mark");
    ctx.lineWidth = dpr;
    if (mark.to) this.band(ctx, u, mark);
    if (["rollback", "heal", "halt", "forecast"].includes(mark.kind)) {
      ctx.setLineDash({ halt: [], rollback: [2 * dpr, 3 * dpr], heal: [7 * dpr, 3 * dpr, 2 * dpr, 3 * dpr], forecast: [7 * dpr, 4 * dpr] }[mark.kind]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.setLineDash([]);
      return;
    }
    const s = 6 * dpr;
    ctx.strokeStyle = Colors.css("page");
    ctx.beginPath();
    ctx.moveTo(x, y - s);
    ctx.lineTo(x + s, y + s * 0.8);
    ctx.lineTo(x - s, y + s * 0.8);
    ctx.closePath();
    ctx.fill();
    ctx.stroke();
  }

  /** A band from a mark to the end of its interval `to`, darker within the interval. */
  band(ctx, u, mark) {
    const { bbox } = u;
    const [from, low, high] = [mark.x, ...mark.to].map((x) => Math.min(Math.max(u.valToPos(x, "x", true), bbox.left), bbox.left + bbox.width));
    ctx.globalAlpha = 0.08;
    ctx.fillRect(from, bbox.top, high - from, bbox.height);
    ctx.fillRect(low, bbox.top, high - low, bbox.height);
    ctx.globalAlpha = 1;
  }

  cross(ctx, x, y, s, color, dpr) {
    ctx.strokeStyle = color;
    ctx.lineWidth = 1.5 * dpr;
    ctx.beginPath();
    ctx.moveTo(x - s, y - s);
    ctx.lineTo(x + s, y + s);
    ctx.moveTo(x - s, y + s);
    ctx.lineTo(x + s, y - s);
    ctx.stroke();
  }

  /** Shows a tooltip with the nearest line and all marks at the cursor. */
  hover(u) {
    const { left, top } = u.cursor;
    if (!this.active || left == null || left < 0 || !this.plan.series.length) return this.hide();
    const found = this.nearest(u, left, top);
    const marks = this.marked(u, left).map((text) => make("div", { class: "bad" }, text));
    if (!found && !marks.length) return this.hide();
    this.tip.replaceChildren(...(found ? this.pointLines(found) : []), ...marks);
    const width = this.tip.offsetWidth;
    const x = found ? u.valToPos(found.one.x[found.i], "x") : left;
    this.tip.style.left = `${Math.max(0, Math.min(x + 14 + width > u.over.clientWidth ? x - width - 14 : x + 14, u.over.clientWidth - width))}px`;
    this.tip.style.top = `${Math.min(Math.max(0, top - 20), Math.max(0, u.over.clientHeight - this.tip.offsetHeight))}px`;
    this.tip.style.visibility = "visible";
    const series = found ? this.plan.series.indexOf(found.one) + 1 : 0;
    if (series && this.plan.series.length > 1 && this.focused !== series) u.setSeries((this.focused = series), { focus: true });
  }

  /** The lines of the tooltip for a point: the name of its line, its step and its value. */
  pointLines({ one, i }) {
    const at = this.plan.x ? `${this.plan.x.label} ${Numbers.setting(one.x[i])}` : `step ${Numbers.short(one.x[i])}`;
    const value = Numbers.short(one.y[i]) + (one.band ? ` (${Numbers.short(one.band[0][i])} to ${Numbers.short(one.band[1][i])})` : "");
    return [make("div", {}, make("b", {}, Colors.swatch(one.style), one.name)), make("div", {}, `${at} · ${value}`)];
  }

  /** Series and index of the point nearest to a position in the chart. */
  nearest(u, left, top) {
    const at = u.posToVal(left, "x");
    let best = null;
    for (const one of this.plan.series) {
      const i = Chart.index(one.x, at);
      for (const near of [i, i - 1, i + 1, i - 2, i + 2]) {
        const y = one.y[near];
        if (y == null || (this.plan.log && y <= 0)) continue;
        const distance = Math.hypot(u.valToPos(one.x[near], "x") - left, u.valToPos(y, "y") - top) + (one.faint ? 6 : 0);
        if (!best || distance < best.distance) best = { one, i: near, distance };
        break;
      }
    }
    return best;
  }

  /** The texts of all marks near a position along x. */
  marked(u, left) {
    const texts = [];
    for (const one of this.plan.series) {
      for (const mark of one.marks || []) if (mark.text && Math.abs(u.valToPos(mark.x, "x") - left) < 8) texts.push(mark.text);
      for (const [x, word] of one.bad || []) if (Math.abs(u.valToPos(x, "x") - left) < 8) texts.push(`${one.name}, step ${Numbers.short(x)}: ${word}`);
    }
    return [...new Set(texts)].slice(0, 4);
  }

  static index(values, wanted) {
    let low = 0;
    let high = values.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (values[middle] < wanted) low = middle;
      else high = middle;
    }
    return Math.abs(values[low] - wanted) <= Math.abs(values[high] - wanted) ? low : high;
  }

  hide() {
    this.tip.style.visibility = "hidden";
    if (this.focused) this.u.setSeries(null, { focus: true });
    this.focused = null;
  }

  leave() {
    this.active = false;
    this.hide();
  }

  /** Highlights the lines named `name`; null ends the highlight. */
  point(name) {
    const i = name === null ? -1 : this.plan.series.findIndex((one) => one.group === name || one.name === name);
    this.u.setSeries(i < 0 ? null : i + 1, { focus: true });
  }

  /** A finger moves the cursor but does not zoom, because it also scrolls the page. */
  touch(event) {
    this.active = true;
    if (event.pointerType === "mouse") return;
    const box = this.u.over.getBoundingClientRect();
    this.u.setCursor({ left: event.clientX - box.left, top: event.clientY - box.top });
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { u } = this;
    const width = u.over.clientWidth;
    const at = u.cursor.left >= 0 ? u.cursor.left : width / 2;
    const moves = { ArrowLeft: -1, ArrowRight: 1 };
    this.active = true;
    if (event.key in moves) {
      const left = Math.min(Math.max(at + (moves[event.key] * width) / 60, 0), width);
      const near = this.nearest(u, left, u.cursor.top >= 0 ? u.cursor.top : u.over.clientHeight / 2);
      u.setCursor({ left, top: near ? u.valToPos(near.one.y[near.i], "y") : 0 });
    } else if (event.key === "+" || event.key === "-" || event.key === "=") this.scale(event.key === "-" ? 2 : 0.5, at);
    else if (event.key === "0" || event.key === "Escape") this.show(null);
    else return;
    event.preventDefault();
  }

  /** Scales the visible range of x by `factor` around a position in the chart. */
  scale(factor, at) {
    const width = this.u.over.clientWidth;
    const place = (left) => this.u.posToVal(left, "x");
    const low = Math.max(this.full[0], place(at - at * factor));
    const high = Math.min(this.full[1], place(at + (width - at) * factor));
    if (high > low) this.show(low <= this.full[0] && high >= this.full[1] ? null : [low, high]);
  }

  /** Redraws with the current colours of the page. */
  recolor() {
    this.u.redraw(false, true);
  }
}
