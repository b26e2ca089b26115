// The colour and dashes of each line: by the value of one setting, or by run.
"use strict";
const Colors = {
  DASHES: [[], [7, 4], [2, 3], [10, 3, 2, 3]],
  /** The current value of a CSS colour variable, which depends on the light or dark scheme. */
  css(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  },
  /** Colour (the name of a variable) and dashes of value `index` of `count`. Ordered values get a colour ramp. */
  style(index, count, ordered) {
    if (ordered && count > 2 && count <= 5) return { color: `r${Math.round((index * 4) / (count - 1))}`, dash: [] };
    if (ordered && count > 5) return { color: `r${index % 5}`, dash: Colors.DASHES[Math.floor(index / 5) % 4] };
    return { color: `c${index % 8}`, dash: Colors.DASHES[Math.floor(index / 8) % 4] };
  },
  /** Maps each distinct value to a style. More than two distinct numbers are sorted and get a ramp. */
  of(values) {
    const distinct = [...new Set(values)];
    const ordered = distinct.length > 2 && distinct.every((value) => typeof value === "number");
    if (ordered) distinct.sort((a, b) => a - b);
    return new Map(distinct.map((value, i) => [value, Colors.style(i, distinct.length, ordered)]));
  },
  /** A sample of a line for the legend. */
  swatch(style) {
    const swatch = make("span", { class: "swatch" });
    swatch.style.borderTopColor = `var(--${style.color})`;
    swatch.style.borderTopStyle = ["solid", "dashed", "dotted", "dashed"][Colors.DASHES.findIndex((d) => d.join() === style.dash.join())] || "dashed";
    return swatch;
  },
};
