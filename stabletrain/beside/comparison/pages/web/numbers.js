// Formats values: numbers have four significant digits.
"use strict";
const Numbers = {
  /** A value in short form; a dash for null, which also stands for NaN in the page's data. */
  short(value) {
    if (value === null || value === undefined || value === "") return "–";
    if (typeof value === "boolean") return value ? "yes" : "no";
    if (typeof value !== "number") return String(value);
    const size = Math.abs(value);
    if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en-US");
    if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
    if (size >= 1e4) return Math.round(value).toLocaleString("en-US");
    return String(Number(value.toPrecision(4)));
  },
  /** A setting, such as a learning rate, with all its digits. */
  setting(value) {
    if (typeof value !== "number") return Numbers.short(value);
    const size = Math.abs(value);
    return size !== 0 && (size < 1e-3 || size >= 1e7) ? value.toExponential().replace("e+", "e") : String(value);
  },
  /** The ticks of an axis, with as many digits as are needed to make all of them different. */
  ticks(u, values) {
    const known = values.filter((value) => value !== null);
    const text = (value, digits) => {
      const size = Math.abs(value);
      if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(digits).replace("e+", "e");
      return String(Number(value.toPrecision(digits + 6)));
    };
    let digits = 0;
    while (digits < 9 && new Set(known.map((value) => text(value, digits))).size < new Set(known).size) digits += 1;
    return values.map((value) => (value === null ? "" : text(value, digits)));
  },
  /** The ticks of a logarithmic axis that get a label: powers of ten; if these are few, also 2 and 5; then 1 to 9. */
  round(u, values, axis) {
    const known = values.filter((value) => value > 0);
    const few = known.length && Math.log10(Math.max(...known) / Math.min(...known)) < 1.7;
    const lead = (value) => (value > 0 ? Number((value / 10 ** Math.floor(Math.log10(value) + 1e-9)).toPrecision(6)) : 0);
    const { min, max } = u.scales[u.axes[axis].scale];
    const ticks = (leads) => values.map((value) => (leads.includes(lead(value)) ? value : null));
    const chosen = ticks(few ? [1, 2, 5] : [1]);
    const seen = chosen.filter((value) => value !== null && value >= min && value <= max);
    return seen.length > 1 ? chosen : ticks([1, 2, 3, 4, 5, 6, 7, 8, 9]);
  },
  /** A count with its noun in the singular or plural. */
  count(number, word, many) {
    return `${number.toLocaleString("en-US")} ${number === 1 ? word : many || `${word}s`}`;
  },
};
/** Creates an element with attributes and children. A text child is never read as HTML. */
function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}
/** The data of the page. */
const PAGE = JSON.parse(document.getElementById("data").textContent);
