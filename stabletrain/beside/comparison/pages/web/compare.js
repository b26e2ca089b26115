// Sets up the page of a comparison: the table selects the runs, and the charts draw them.
"use strict";
const DRAWN = 30; // more lines cannot be told apart
const drawn = document.getElementById("drawn");
const by = document.getElementById("by");
const legend = document.getElementById("legend");

/** Selects the best, the worst, and those with incidents among these runs, by the initial order of the table. */
function telling(ids) {
  const there = ids.filter((id) => PAGE.curves[id]).sort((a, b) => a - b);
  if (there.length <= DRAWN) return there;
  const troubled = there.filter((id) => (PAGE.about[id].incidents || []).length).slice(0, 12);
  const picked = new Set([...there.slice(0, 12), ...there.slice(-6), ...troubled]);
  for (const id of there) if (picked.size < DRAWN) picked.add(id);
  return [...picked].sort((a, b) => a - b);
}

function values(ids, field) {
  return ids.map((id) => (field < 0 ? PAGE.about[id].name : PAGE.rows[id][field]));
}

function draw(ids) {
  if (!pictures) return;
  const field = Number(by.value);
  const all = field < 0 ? ids : Object.keys(PAGE.curves).map(Number);
  const styles = Colors.of(values(all, field));
  const runs = ids.map((id) => ({
    ...PAGE.curves[id],
    name: PAGE.about[id].name,
    incidents: PAGE.about[id].incidents,
    group: values([id], field)[0],
    style: styles.get(values([id], field)[0]),
  }));
  pictures.show(runs);
  const groups = [...styles].filter(([value]) => runs.some((run) => run.group === value));
  legend.classList.toggle("long", groups.length > 12);
  legend.replaceChildren(
    ...groups.map(([value, style]) => {
      const count = runs.filter((run) => run.group === value).length;
      const item = make("li", { tabindex: 0 }, Colors.swatch(style), make("span", {}, Numbers.setting(value) + (count > 1 ? ` (${count} runs)` : "")));
      const point = (name) => () => pictures.all().forEach((chart) => chart.point(name));
      for (const [event, name] of [["pointerenter", value], ["focus", value], ["pointerleave", null], ["blur", null]]) item.addEventListener(event, point(name));
      return item;
    }),
  );
}

function choose() {
  const left = table.filtered();
  if (!table.chosen) table.tickOnly(telling(left), false);
  const kept = new Set(left);
  const ids = [...table.ticked].filter((id) => kept.has(id)).sort((a, b) => a - b);
  const total = PAGE.rows.length;
  const there = Object.keys(PAGE.curves).length;
  const rows = left.length === total ? Numbers.count(total, "run") : `${left.length.toLocaleString("en-US")} of ${Numbers.count(total, "run")}`;
  const few = !table.chosen && ids.length < left.filter((id) => PAGE.curves[id]).length ? " (the best, the worst, and those with incidents)" : "";
  const some = there < total ? `; this page contains the curves of ${there.toLocaleString("en-US")}` : "";
  drawn.textContent = `${rows}, ${ids.length} drawn${few}${some}`;
  draw(ids);
}

const place = document.getElementById("pictures");
const pictures = place && new Pictures(place, PAGE.panels); // absent if no run has logged a metric
const table = new Runs(document.getElementById("table"), PAGE, { told: choose, opened: Details.open });
document.getElementById("best").addEventListener("click", () => (table.tickOnly(table.filtered().filter((id) => PAGE.curves[id]).sort((a, b) => a - b).slice(0, 5), true), choose()));
document.getElementById("usual").addEventListener("click", () => ((table.chosen = false), table.table.clearHeaderFilter(), choose()));
document.getElementById("none").addEventListener("click", () => (table.tickOnly([], true), choose()));
if (pictures) {
  by.addEventListener("change", choose);
  document.getElementById("smooth").addEventListener("input", (event) => pictures.smooth(Number(event.target.value)));
}
const grid = document.getElementById("sensitivity");
if (grid && PAGE.sensitivity) sensitivity(grid, PAGE.sensitivity);
table.ready.then(choose);
