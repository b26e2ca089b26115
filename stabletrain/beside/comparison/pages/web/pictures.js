// All charts over steps of a page. They share the runs, the colours and the range of steps.
"use strict";
class Pictures {
  /** panels: [{ title, note, names, log, far, lines, smooth, one }]; host: their parent element, in which each gets its own figure. */
  constructor(host, panels) {
    this.together = { key: "steps", charts: [] };
    this.smoothing = 0;
    this.panels = panels.map((panel) => this.figure(host, panel));
    const again = () => this.all().forEach((chart) => chart.recolor());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
    addEventListener("beforeprint", () => (document.documentElement.setAttribute("data-paper", ""), again()));
    addEventListener("afterprint", () => (document.documentElement.removeAttribute("data-paper"), again()));
  }

  all() {
    return this.together.charts;
  }

  figure(host, panel) {
    const log = make("button", { type: "button", title: "switch between a logarithmic and a linear axis", "aria-pressed": String(!!panel.log) }, "log");
    const back = make("button", { type: "button", title: "show all steps again" }, "all steps");
    back.style.visibility = "hidden";
    const note = make("p", { class: "note" });
    const plot = make("div", { class: "plot" });
    const head = make("header", {}, make("h3", {}, panel.title), make("span", { class: "end" }, back, log, ...Save.buttons(() => shown.chart)));
    const figure = make("figure", { class: "picture", "data-panel": panel.names[0] }, head, plot, note);
    figure.style.margin = "0";
    host.append(figure);
    const shown = { panel, figure, plot, note, back, pressed: log, log: !!panel.log, chosen: false, chart: null };
    log.addEventListener("click", () => {
      shown.log = !shown.log;
      shown.chosen = true; // from now on the reader decides, and not the losses
      this.draw(shown);
    });
    back.addEventListener("click", () => shown.chart.show(null));
    return shown;
  }

  /** Draws these runs, or means of several: [{ name, group, style, curves, abandoned, marks, skips, mean, marked }]. */
  show(runs) {
    this.runs = runs;
    const ends = (run) => Object.values(run.curves).flatMap((curve) => [curve.x[0], curve.x[curve.x.length - 1]]);
    const marked = (run) => [...(run.skips || []).map(([x]) => x), ...(run.forecasts || []).map((one) => one.step), run.halt && run.halt.step];
    const steps = runs.flatMap((run) => [...ends(run), ...marked(run)]).filter((x) => x != null);
    this.domain = steps.length ? [Math.min(...steps), Math.max(...steps)] : null;
    if (this.domain && this.domain[0] === this.domain[1]) this.domain = [this.domain[0] - 1, this.domain[1] + 1];
    this.panels.forEach((shown) => this.draw(shown));
  }

  /** Adds running means over so many steps; 0 for none. */
  smooth(steps) {
    this.smoothing = steps > 0 ? steps : 0;
    this.panels.filter((shown) => shown.panel.smooth).forEach((shown) => this.draw(shown));
  }

  draw(shown) {
    const { panel } = shown;
    const series = this.runs.flatMap((run) => this.lines(run, panel));
    if (panel.far && !shown.chosen) shown.log = Pictures.far(series, panel.far);
    shown.pressed.setAttribute("aria-pressed", String(shown.log));
    const missing = this.runs.length && !series.length ? "None of the drawn runs has logged this metric." : "";
    const names = series.length > 1 && this.runs.every((run) => run.alone) ? series.filter((one) => !one.faint) : [];
    const lines = names.length > 1 ? names.flatMap((one) => [Colors.swatch(one.style), `${one.name}\u2003`]) : [];
    const kinds = new Set(series.flatMap((one) => (one.gone ? ["faint"] : one.faint ? [] : (one.marks || []).map((mark) => mark.kind))));
    if (series.some((one) => (one.bad || []).length)) kinds.add("bad");
    if (series.some((one) => one.band)) kinds.add("band");
    const marks = Object.entries(Pictures.KINDS).filter(([kind]) => kinds.has(kind)).map(([, text]) => text);
    if (panel.marks && this.runs.some((run) => run.marked)) marks.push("Skips, rollbacks and forecasts of the runs in a mean are not drawn.");
    if (panel.smooth && this.smoothing) marks.push(`Running means over ${Numbers.count(this.smoothing, "step")}; faint: as logged.`);
    if (panel.marks) marks.push(...this.foretold());
    shown.note.replaceChildren(...lines, missing || [panel.note, ...marks].filter(Boolean).join(" "));
    const plan = { title: panel.title, series, log: shown.log, floor: panel.floor, domain: this.domain, lines: panel.lines, together: this.together };
    if (shown.chart) return shown.chart.draw(plan);
    shown.chart = new Chart(shown.plot, plan);
    shown.chart.told = () => (shown.back.style.visibility = shown.chart.zoom ? "visible" : "hidden");
    this.together.charts.push(shown.chart);
  }

  /** A run's lines in a panel: all metrics that it has logged, or only the first one if several runs are drawn. */
  lines(run, panel) {
    const there = panel.names.filter((name) => run.curves[name] && run.curves[name].x.length);
    const names = run.alone ? there : there.slice(0, 1);
    const lines = names.map((name, i) => {
      const curve = run.curves[name];
      const style = run.alone ? Colors.style(i, names.length, false) : run.style;
      const called = run.alone ? name : run.name;
      const width = run.alone || run.mean ? 1.7 : 1.4;
      return { name: called, group: run.group, style, x: curve.x, y: curve.y, bad: curve.bad, band: curve.band, dots: panel.dots, width };
    });
    if (panel.smooth && this.smoothing) {
      for (const one of [...lines]) {
        lines.push({ ...one, name: `${one.name}, as logged`, bad: [], band: null, faint: true, width: 0.7 });
        const smoothed = (values) => Pictures.mean(one.x, values, this.smoothing);
        Object.assign(one, { y: smoothed(one.y), band: one.band && one.band.map(smoothed) });
      }
    }
    if (panel.marks) {
      const marks = Pictures.marks(run, run.curves[panel.names[0]] || { x: [], y: [] });
      if (lines.length) lines[0].marks = marks;
      // A run that was halted before it applied a step has no curve, but it has marks.
      else if (marks.length) lines.push({ name: run.name, group: run.group, style: run.style, x: [], y: [], marks });
    } else if (panel.signals && lines.length) {
      lines[0].marks = Pictures.forecasts(run).filter((mark) => panel.signals.includes(mark.signal));
    }
    for (const [x, y] of panel.marks && run.abandoned ? run.abandoned : []) {
      lines.push({ name: `${run.name}, rolled back`, group: run.group, style: lines.length ? lines[0].style : run.style, x, y, faint: true, gone: true, width: 0.8 });
    }
    return lines;
  }

  /** What the marks mean, for the note below the chart. */
  static KINDS = {
    band: "Line: mean over n seeds; band: ± 1 standard deviation (n - 1).",
    cross: "Cross: skipped step.",
    incident: "Triangle: incident.",
    faint: "Faint line: rolled back.",
    rollback: "Dotted vertical line: rollback.",
    heal: "Dash-dotted vertical line: halted, and went on with a fix.",
    forecast: "Dashed vertical line: forecast, with a band to the steps at which a signal reaches its threshold.",
    halt: "Vertical line: halted.",
    bad: "Cross with a word: NaN or infinite from this step on.",
  };

  /** Whose forecasts are drawn, if there are several runs. */
  foretold() {
    const told = this.runs.filter((run) => !run.alone && (run.forecasts || []).length);
    const words = told.slice(0, 3).map((run) => `${run.name}, ${run.forecasts.length > 1 ? "steps" : "step"} ${run.forecasts.map((one) => Numbers.short(one.step)).join(", ")}`);
    return told.length ? [`Forecast for ${words.join("; ")}${told.length > 3 ? ` and ${Numbers.count(told.length - 3, "more run")}` : ""}.`] : [];
  }

  /** The marks of a run. A skipped step has one mark: a triangle if it is an incident, or else a cross. */
  static marks(run, curve) {
    const skipped = new Map(run.skips || []); // with the loss of the step, if it is known and finite
    const incidents = new Set((run.incidents || []).map((one) => one.step));
    const height = (x) => (skipped.has(x) ? skipped.get(x) : curve.y[Chart.index(curve.x, x)]);
    const skip = (x, y) => `skipped${y == null ? "" : `, loss ${Numbers.short(y)}`}`;
    const where = (x) => `${run.alone ? "" : `${run.name}, `}step ${Numbers.short(x)}: `;
    const told = (one) => [
      skipped.has(one.step) ? skip(one.step, height(one.step)) : "",
      [one.cause || one.kind, one.verdict].filter(Boolean).join(": "),
    ];
    const marks = [
      ...Pictures.forecasts(run),
      ...(run.rollbacks || []).map((x) => ({ x, kind: "rollback", text: `${where(x)}rolled back` })),
      ...(run.healings || []).map(([x, text]) => ({ x, kind: "heal", text: `${where(x)}${text}` })),
      ...(run.skips || []).filter(([x]) => !incidents.has(x)).map(([x, y]) => ({ x, y, kind: "cross", text: where(x) + skip(x, y) })),
      ...(run.incidents || []).map((one) => ({ x: one.step, y: height(one.step), kind: "incident", text: where(one.step) + told(one).filter(Boolean).join("; ") })),
      ...(run.halt ? [{ x: run.halt.step, kind: "halt", text: `${where(run.halt.step)}halted: ${run.halt.reason}` }] : []),
    ];
    return marks.map((mark) => ({ ...mark, own: !run.alone }));
  }

  /** The marks of a run's forecasts: each from its step to the interval `to` of the crossing, if that is known. */
  static forecasts(run) {
    const name = run.alone ? "" : `${run.name}, `;
    return (run.forecasts || []).map((one) => ({ x: one.step, to: one.to, signal: one.signal, kind: "forecast", own: !run.alone, text: `${name}step ${Numbers.short(one.step)}: forecast: ${one.text}` }));
  }

  /** Whether a value is more than `times` the lowest first one, so that a linear axis would flatten the other lines. */
  static far(series, times) {
    const starts = series.map((one) => one.y.find((v) => v !== null)).filter((v) => v !== undefined);
    const values = series.flatMap((one) => [...one.y, ...(one.marks || []).map((mark) => mark.y)]).filter((v) => v != null);
    return starts.length > 0 && Math.min(...values) > 0 && Math.max(...values) > times * Math.min(...starts);
  }

  /** Bias-corrected exponential running means: a value weighs less by a factor of e for every `over` steps. */
  static mean(steps, values, over) {
    let total = 0;
    let mass = 0;
    let before = steps[0];
    return values.map((value, i) => {
      if (value === null) return null;
      const kept = Math.exp((before - steps[i]) / over);
      before = steps[i];
      total = kept * total + value;
      mass = kept * mass + 1;
      return total / mass;
    });
  }
}
