// Which line has which colour and which dashes: by the value of one setting, or each run its own.
"use strict";
const Colors = {
  DASHES: [[], [7, 4], [2, 3], [10, 3, 2, 3]],
  /** The value of a CSS colour variable as the page has it now, light or dark. */
  css(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  },
  /** Color (a variable's name) and dashes of the `index`-th of `count` values; numbers in order get a ramp of one hue to the next. */
  style(index, count, ordered) {
    if (ordered && count > 2 && count <= 5) return { color: `r${Math.round((index * 4) / (count - 1))}`, dash: [] };
    if (ordered && count > 5) return { color: `r${index % 5}`, dash: Colors.DASHES[Math.floor(index / 5) % 4] };
    return { color: `c${index % 8}`, dash: Colors.DASHES[Math.floor(index / 8) % 4] };
  },
  /** Styles by value, the values sorted: numbers by size, words as they come. */
  of(values) {
    const distinct = [...new Set(values)];
    const ordered = distinct.length > 2 && distinct.every((value) => typeof value === "number");
    if (ordered) distinct.sort((a, b) => a - b);
    return new Map(distinct.map((value, i) => [value, Colors.style(i, distinct.length, ordered)]));
  },
  /** A line as it is drawn, for a legend. */
  swatch(style) {
    const swatch = make("span", { class: "swatch" });
    swatch.style.borderTopColor = `var(--${style.color})`;
    swatch.style.borderTopStyle = ["solid", "dashed", "dotted", "dashed"][Colors.DASHES.findIndex((d) => d.join() === style.dash.join())];
    return swatch;
  },
};
