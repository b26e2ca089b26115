// Learning-rate sensitivity: final loss and largest attention logit against the peak learning rate, one line per arm.
"use strict";
function sensitivity(host, found) {
  const style = (i) => Colors.style(i, found.arms.length, false);
  const legend = make("ul", { class: "legend" });
  const charts = [];
  found.arms.forEach((arm, i) => {
    const index = make("span", { class: "soft" }, ` ${arm.index}`);
    const item = make("li", { tabindex: 0 }, Colors.swatch(style(i)), make("span", {}, `${arm.name} (n=${arm.n})`, index));
    const point = (name) => () => charts.forEach((chart) => chart.point(name));
    for (const [event, name] of [["pointerenter", arm.name], ["focus", arm.name], ["pointerleave", null], ["blur", null]]) item.addEventListener(event, point(name));
    legend.append(item);
  });
  const pictures = make("div", { class: "pictures" });
  host.append(legend, pictures);
  const panel = (title, note, values, log, lines, marks) => {
    const plot = make("div", { class: "plot" });
    const at = charts.length;
    const head = make("header", {}, make("h3", {}, title), make("span", { class: "end" }, ...Save.buttons(() => charts[at])));
    const figure = make("figure", { class: "picture", "data-panel": title }, head, plot, make("p", { class: "note" }, note));
    figure.style.margin = "0";
    pictures.append(figure);
    const series = found.arms.map((arm, i) => ({
      name: `${arm.name} (n=${arm.n})`,
      group: arm.name,
      style: style(i),
      x: arm.rates,
      y: arm[values],
      band: arm[`${values}_range`],
      width: 2,
      dots: true,
      marks: marks ? arm.diverged.map(([x, y, text]) => ({ x, y, kind: "cross", text })) : [],
    }));
    charts.push(new Chart(plot, { title, series, log, lines, x: { log: true, label: "learning rate" } }));
  };
  panel("Final loss, at most the loss at init (nats)", "Line: mean over n seeds. Band: lowest to highest. Cross: a run diverged, and counts as its loss at init.", "loss", false, [], true);
  if (found.arms.some((arm) => arm.logit.some((v) => v !== null)))
    panel("Largest attention logit", "The largest over the seeds.", "logit", true, [{ y: 1e4, text: "10,000: runs above it diverged in arXiv 2309.14322" }], false);
  const again = () => charts.forEach((chart) => chart.recolor());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  addEventListener("beforeprint", again);
  addEventListener("afterprint", again);
}
