// The table of runs: a click on a heading sorts, the field below it filters, and checkboxes select the runs to draw.
"use strict";
class Runs {
  /** host: the parent element. page: { columns, rows }. told: called when the selection of runs may have changed. */
  constructor(host, page, { told, opened }) {
    this.told = told;
    this.ticked = new Set();
    this.chosen = false; // whether the reader has used a checkbox; until then the filters select the runs
    const rows = page.rows.map((row, i) => Object.fromEntries([["id", i], ...row.map((value, c) => [`c${c}`, value])]));
    const narrow = innerWidth < 700;
    this.columns = page.columns;
    this.ready = new Promise((ready) => {
      this.table = new Tabulator(host, {
        data: rows,
        index: "id",
        columns: [this.tick(), ...page.columns.map((column, c) => this.column(column, c, opened, narrow))],
        height: rows.length > 14 ? 520 : undefined,
        layout: "fitData",
        nestedFieldSeparator: false,
        placeholder: "No run matches these filters.",
        columnHeaderVertAlign: "bottom",
        printAsHtml: true,
        printRowRange: "visible",
        renderHorizontal: "basic",
        rowFormatter: (row) => row.getElement().classList.toggle("best", row.getData().id === page.best),
      });
      this.table.on("tableBuilt", () => (this.reachable(host), ready()));
      this.table.on("dataFiltered", () => setTimeout(() => this.told()));
    });
  }

  tick() {
    return {
      title: "drawn",
      field: "drawn",
      width: 70,
      headerSort: false,
      hozAlign: "center",
      formatter: (cell) => {
        const { id } = cell.getData();
        const there = PAGE.curves[id] !== undefined;
        const title = there ? "draw this run" : "this page does not contain the curves of this run";
        const box = make("input", { type: "checkbox", "aria-label": title, title, disabled: !there });
        box.checked = this.ticked.has(id);
        box.addEventListener("change", () => {
          if (box.checked) this.ticked.add(id);
          else this.ticked.delete(id);
          this.chosen = true;
          this.told();
        });
        return box;
      },
    };
  }

  column(column, c, opened, narrow) {
    const number = column.kind === "number";
    return {
      title: Runs.safe(column.title),
      field: `c${c}`,
      hozAlign: number ? "right" : "left",
      sorter: number ? "number" : "alphanum",
      sorterParams: { alignEmptyValues: "bottom" },
      headerSortStartingDir: column.high ? "desc" : "asc",
      headerFilter: "input",
      headerFilterPlaceholder: number ? "> 1, 2..3" : "",
      headerFilterFunc: (wanted, value) => Runs.fits(wanted, value),
      headerTooltip: column.about || false,
      cssClass: column.setting ? "setting" : "",
      frozen: column.name && !narrow,
      minWidth: number ? 84 : 96,
      maxWidth: column.name ? (narrow ? 190 : 330) : 300,
      formatter: (cell) => this.cell(column, cell, opened),
    };
  }

  cell(column, cell, opened) {
    const value = cell.getValue();
    if (column.name) return make("button", { class: "name", type: "button", title: value, onclick: () => opened(cell.getData().id) }, value);
    if (column.status) return make("span", { class: `status ${Runs.tone(value)}` }, Numbers.short(value));
    const text = column.setting ? Numbers.setting(value) : Numbers.short(value);
    return make("span", { title: text.length > 24 ? text : null, class: value === null ? "soft" : null }, text);
  }

  static tone(status) {
    if (status === "finished") return "good";
    return status === "running" || status === "preempted" ? "warn" : "bad";
  }

  /** Whether a value matches a filter: `> 1`, `<= 0.5` and `2..3` compare numbers; anything else searches the text. */
  static fits(wanted, value) {
    const text = String(wanted).trim().toLowerCase();
    const between = /^(-?[\d.]+(?:e[-+]?\d+)?)\s*\.\.\s*(-?[\d.]+(?:e[-+]?\d+)?)$/.exec(text);
    const beyond = /^(<=|>=|<|>|=|!=)\s*(.+)$/.exec(text);
    if (between) return value !== null && Number(value) >= Number(between[1]) && Number(value) <= Number(between[2]);
    if (beyond) {
      const limit = Number(beyond[2]);
      const same = Number.isNaN(limit) ? String(value ?? "").toLowerCase() === beyond[2] : value !== null && Number(value) === limit;
      if (beyond[1] === "=") return same;
      if (beyond[1] === "!=") return !same;
      if (value === null || Number.isNaN(limit)) return false;
      return { "<": value < limit, "<=": value <= limit, ">": value > limit, ">=": value >= limit }[beyond[1]];
    }
    return [Numbers.short(value), Numbers.setting(value), String(value ?? "")].some((form) => form.toLowerCase().includes(text));
  }

  /** Escapes text for the library, which reads it as HTML. */
  static safe(text) {
    return make("span", {}, text).innerHTML;
  }

  /** Makes the headings reachable by keyboard. */
  reachable(host) {
    for (const column of this.table.getColumns()) {
      const head = column.getElement();
      if (!head.classList.contains("tabulator-sortable")) continue;
      head.tabIndex = 0;
      head.addEventListener("keydown", (event) => {
        if (event.target !== head || (event.key !== "Enter" && event.key !== " ")) return;
        event.preventDefault();
        const [sorted] = this.table.getSorters();
        const up = sorted && sorted.field === column.getField() && sorted.dir === "asc";
        this.table.setSort(column.getField(), up ? "desc" : "asc");
      });
    }
    host.querySelectorAll(".tabulator-header-filter input").forEach((input, i) => input.setAttribute("aria-label", `filter by ${this.columns[i].title}`));
  }

  /** The ids of the rows that match the filters. */
  filtered() {
    return this.table.getData("active").map((row) => row.id);
  }

  /** Selects exactly these runs. */
  tickOnly(ids, chosen) {
    this.ticked = new Set(ids);
    this.chosen = chosen;
    this.table.getRows("visible").forEach((row) => row.reformat());
  }
}
