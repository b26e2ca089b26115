// Sets up the page of a comparison: the table selects the runs, and the charts draw them.
"use strict";
const DRAWN = 30; // more lines cannot be told apart
const SETTING = -2; // colours show the setting: all that differs but the seed
const drawn = document.getElementById("drawn");
const by = document.getElementById("by");
const legend = document.getElementById("legend");

/** Whether seeds are drawn as their mean. */
const folded = () => PAGE.groups.length > 0 && !document.getElementById("each").checked;

/** What is drawn of these runs, in the initial order of the table: settings of which all runs are there, and runs. */
function units(ids) {
  const there = new Set(ids);
  const whole = folded() ? PAGE.groups.filter((group) => group.sound.length > 1 && group.sound.every((id) => there.has(id))) : [];
  const inside = new Set(whole.flatMap((group) => group.sound));
  const alone = ids.filter((id) => PAGE.curves[id] && !inside.has(id)).map((id) => ({ ids: [id] }));
  return [...whole.map((group) => ({ ids: group.sound, group })), ...alone].sort((a, b) => a.ids[0] - b.ids[0]);
}

/** Selects the best, the worst, and those with incidents among these runs, by the initial order of the table. */
function telling(ids) {
  const there = units(ids);
  if (there.length <= DRAWN) return there.flatMap((unit) => unit.ids);
  const troubled = there.filter((unit) => unit.ids.some((id) => (PAGE.about[id].incidents || []).length)).slice(0, 12);
  const picked = new Set([...there.slice(0, 12), ...there.slice(-6), ...troubled]);
  for (const unit of there) if (picked.size < DRAWN) picked.add(unit);
  return [...picked].flatMap((unit) => unit.ids);
}

function values(ids, field) {
  return ids.map((id) => (field < 0 ? PAGE.about[id].name : PAGE.rows[id][field]));
}

/** The group of a run, and its style in a legend of settings. */
function setting(id) {
  return PAGE.groups.findIndex((group) => group.sound.includes(id) || group.others.includes(id));
}

function draw(ids) {
  if (!pictures) return;
  const field = Number(by.value);
  const all = field === -1 ? ids : Object.keys(PAGE.curves).map(Number);
  const styles = field === SETTING ? new Map(PAGE.groups.map((group, i) => [group.name, Colors.style(i, PAGE.groups.length, false)])) : Colors.of(values(all, field));
  const value = (id) => (field === SETTING ? PAGE.groups[setting(id)].name : values([id], field)[0]);
  const runs = units(ids).map(({ ids: [id], group: mean }) => {
    const group = value(id);
    const style = styles.get(group);
    if (mean) return { name: mean.name, group, style, curves: mean.curves, mean: true, marked: mean.marked };
    const about = PAGE.about[id];
    const run = { ...PAGE.curves[id], name: about.name, incidents: about.incidents, group, style };
    // Among means, a run that is in none of them is dashed, and its name says so.
    if (!folded() || setting(id) < 0 || !PAGE.groups[setting(id)].others.includes(id)) return run;
    return { ...run, name: `${about.name} (in no mean)`, apart: true, style: { ...style, dash: [4, 3] } };
  });
  pictures.show(runs);
  const groups = [...styles].filter(([value]) => runs.some((run) => run.group === value));
  const items = groups.map(([value, style]) => {
    const of = runs.filter((run) => run.group === value);
    const count = of.length > 1 ? ` (${Numbers.count(of.length, "line")})` : "";
    return [value, style, Numbers.setting(value) + (field === SETTING ? "" : count)];
  });
  // What broke or is not over has an entry of its own, with its colour and dashes.
  for (const run of runs) if (run.apart) items.push([run.name, run.style, run.name]);
  legend.classList.toggle("long", items.length > 12);
  legend.replaceChildren(
    ...items.map(([value, style, text]) => {
      const item = make("li", { tabindex: 0 }, Colors.swatch(style), make("span", {}, text));
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
  const means = units(ids).filter((unit) => unit.group);
  const inMeans = means.reduce((sum, unit) => sum + unit.ids.length, 0);
  const alone = ids.length - inMeans;
  const others = alone ? `, ${alone} by ${alone === 1 ? "itself" : "themselves"}` : "";
  const how = means.length ? `: ${inMeans} in ${Numbers.count(means.length, "mean")}${others}` : "";
  drawn.textContent = `${rows}, ${ids.length} drawn${how}${few}${some}`;
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
  if (PAGE.groups.length) document.getElementById("each").addEventListener("change", choose);
  document.getElementById("smooth").addEventListener("input", (event) => pictures.smooth(Number(event.target.value)));
}
const grid = document.getElementById("sensitivity");
if (grid && PAGE.sensitivity) sensitivity(grid, PAGE.sensitivity);
table.ready.then(choose);
