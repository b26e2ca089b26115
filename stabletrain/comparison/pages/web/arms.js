// Sets up the page of a what-if: all arms in each chart, and a legend that points one out.
"use strict";
const place = document.getElementById("pictures");
const pictures = place && new Pictures(place, PAGE.panels);
if (pictures) {
  const styles = Colors.of(PAGE.arms.map((arm) => arm.name));
  pictures.show(PAGE.arms.map((arm) => ({ ...arm, group: arm.name, style: styles.get(arm.name) })));
  document.getElementById("legend").replaceChildren(
    ...[...styles].map(([name, style]) => {
      const item = make("li", { tabindex: 0 }, Colors.swatch(style), make("span", {}, name));
      const point = (group) => () => pictures.all().forEach((chart) => chart.point(group));
      for (const [event, group] of [["pointerenter", name], ["focus", name], ["pointerleave", null], ["blur", null]]) item.addEventListener(event, point(group));
      return item;
    }),
  );
  document.getElementById("smooth").addEventListener("input", (event) => pictures.smooth(Number(event.target.value)));
}
