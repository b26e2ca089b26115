// Sets up the page of a what-if: all arms in each chart, and a legend that points one out. Arms that broke are grey.
"use strict";
const place = document.getElementById("pictures");
const pictures = place && new Pictures(place, PAGE.panels);
if (pictures) {
  const broke = new Map(PAGE.arms.filter((arm) => arm.broke !== null).map((arm) => [arm.name, arm.broke]));
  const alive = Colors.of(PAGE.arms.map((arm) => arm.name).filter((name) => !broke.has(name)));
  const styles = new Map([...alive, ...[...broke.keys()].map((name) => [name, { color: "soft", dash: Colors.DASHES[2] }])]);
  pictures.show(PAGE.arms.map((arm) => ({ ...arm, group: arm.name, style: styles.get(arm.name) })));
  document.getElementById("legend").replaceChildren(
    ...[...styles].map(([name, style]) => {
      const item = make("li", { tabindex: 0 }, Colors.swatch(style), make("span", broke.has(name) ? { class: "soft" } : {}, broke.has(name) ? `${name} (broke at step ${broke.get(name)})` : name));
      const point = (group) => () => pictures.all().forEach((chart) => chart.point(group));
      for (const [event, group] of [["pointerenter", name], ["focus", name], ["pointerleave", null], ["blur", null]]) item.addEventListener(event, point(group));
      return item;
    }),
  );
  document.getElementById("smooth").addEventListener("input", (event) => pictures.smooth(Number(event.target.value)));
}
