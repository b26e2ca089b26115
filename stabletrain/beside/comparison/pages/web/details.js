// The details of one run in a dialog: all values, why it ended, its incidents, and its sample.
"use strict";
const Details = {
  open(id) {
    const about = PAGE.about[id] || {};
    const close = make("button", { class: "close", type: "button" }, "close");
    const values = PAGE.columns.map((column, c) => [column, PAGE.rows[id][c]]).filter(([, value]) => value !== null);
    const dialog = make("dialog", { "aria-label": "one run" }, close, make("h2", {}, about.name || PAGE.rows[id][0]));
    if (about.page) dialog.append(make("p", {}, make("a", { href: about.page }, "report of this run")));
    if (about.reason) dialog.append(make("p", { class: "bad" }, about.reason));
    dialog.append(Details.list(values.map(([column, value]) => [column.title, column.setting ? Numbers.setting(value) : Numbers.short(value)])));
    if ((about.incidents || []).length) dialog.append(make("h3", {}, "Incidents"), make("ul", {}, ...about.incidents.map(Details.incident)));
    if (about.sample) dialog.append(make("h3", {}, "Sample"), make("pre", { class: "sample" }, about.sample));
    close.addEventListener("click", () => dialog.close());
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
    dialog.addEventListener("close", () => dialog.remove());
    document.body.append(dialog);
    dialog.showModal();
  },
  list(pairs) {
    const list = make("dl", { class: "settings" });
    for (const [name, value] of pairs) list.append(make("div", {}, make("dt", {}, name), make("dd", {}, value)));
    return list;
  },
  incident(one) {
    const said = [one.cause || one.kind, one.verdict].filter(Boolean).join(": ");
    const fix = one.fix && one.fix.length ? ` Fix: ${one.fix[0]}` : "";
    const step = `step ${Numbers.short(one.step)}`;
    return make("li", {}, one.link ? make("a", { href: one.link }, step) : step, ` ${said}.${fix}`);
  },
};
