// Saves a chart as it is shown: as SVG, and as PNG drawn from that SVG. Needs no network, also from file://.
"use strict";
/** The part of a canvas that `Chart.decorate` draws on, as elements of an SVG. */
class Paper {
  constructor() {
    Object.assign(this, { parts: [], path: "", dash: [], strokeStyle: "#000", fillStyle: "#000", lineWidth: 1, globalAlpha: 1, textAlign: "left" });
  }
  beginPath() {
    this.path = "";
  }
  moveTo(x, y) {
    this.path += `M${Paper.short(x)} ${Paper.short(y)}`;
  }
  lineTo(x, y) {
    this.path += `L${Paper.short(x)} ${Paper.short(y)}`;
  }
  closePath() {
    this.path += "Z";
  }
  setLineDash(dash) {
    this.dash = dash;
  }
  stroke() {
    const dash = this.dash.length ? ` stroke-dasharray="${this.dash.join(" ")}"` : "";
    this.add(`<path d="${this.path}" fill="none" stroke="${Paper.safe(this.strokeStyle)}" stroke-width="${this.lineWidth}"${dash}/>`);
  }
  fill() {
    this.add(`<path d="${this.path}" fill="${Paper.safe(this.fillStyle)}"/>`);
  }
  fillRect(x, y, width, height) {
    this.add(`<rect x="${x}" y="${y}" width="${Math.max(0, width)}" height="${Math.max(0, height)}" fill="${Paper.safe(this.fillStyle)}"/>`);
  }
  fillText(text, x, y, size = 11, weight = "normal") {
    const anchor = { left: "start", center: "middle", right: "end" }[this.textAlign];
    this.add(`<text x="${x}" y="${y}" font-size="${size}" font-weight="${weight}" text-anchor="${anchor}" fill="${Paper.safe(this.fillStyle)}">${Paper.safe(text)}</text>`);
  }
  add(part) {
    this.parts.push(this.globalAlpha === 1 ? part : `<g opacity="${this.globalAlpha}">${part}</g>`);
  }
  // The whole chart is clipped to its axes where it is put together, and the font is set there.
  save() {}
  restore() {}
  rect() {}
  clip() {}
  static short(value) {
    return Number(value.toFixed(2));
  }
  /** A text without what would end an attribute or an element, and without control characters, which XML has not. */
  static safe(text) {
    const known = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
    return String(text)
      .replace(/[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]/g, "\ufffd")
      .replace(/[&<>"]/g, (letter) => known[letter]);
  }
}

const Save = {
  /** Two buttons that save the chart that `chart()` returns. */
  buttons(chart) {
    return ["SVG", "PNG"].map((kind) => {
      const save = async () => {
        const svg = Save.svg(chart());
        const name = `${chart().plan.title.replace(/[^\w]+/g, "_").toLowerCase()}.${kind.toLowerCase()}`;
        Save.download(kind === "SVG" ? new Blob([svg], { type: "image/svg+xml" }) : await Save.png(svg), name);
      };
      return make("button", { type: "button", title: `save this chart as ${kind}`, onclick: save }, kind);
    });
  },

  /** The chart as SVG: its title, axes, lines, marks, and below it the names of the lines and the note. */
  svg(chart) {
    const { u, plan } = chart;
    const dpr = uPlot.pxRatio;
    const top = 26;
    const width = Math.round(u.width);
    const paper = new Paper();
    const text = Colors.css("text");
    const box = { left: u.bbox.left / dpr, top: u.bbox.top / dpr, width: u.bbox.width / dpr, height: u.bbox.height / dpr };
    const at = (value, scale) => u.valToPos(value, scale) + (scale === "x" ? box.left : box.top);
    Save.axes(paper, u, box, at);
    const axes = paper.parts.splice(0);
    for (const one of plan.series) Save.line(paper, plan, one, at);
    // The marks are drawn by the chart itself, on this paper, in CSS pixels.
    chart.decorate({ ctx: paper, bbox: box, valToPos: (value, scale) => at(value, scale) }, 1);
    const inside = paper.parts.splice(0);
    let y = u.height + top + 14;
    const shown = plan.series.filter((one) => !one.faint);
    for (const one of shown) {
      Object.assign(paper, { strokeStyle: Colors.css(one.style.color), lineWidth: 2.5 });
      paper.setLineDash(one.style.dash);
      paper.beginPath();
      paper.moveTo(12, y - 4);
      paper.lineTo(36, y - 4);
      paper.stroke();
      paper.fillStyle = text;
      paper.fillText(one.name, 44, y, 12);
      y += 17;
    }
    const note = chart.host.parentElement.querySelector(".note").textContent;
    paper.fillStyle = Colors.css("soft");
    for (const line of Save.lines(note, Math.floor(width / 6.5))) paper.fillText(line, 12, (y += 3), 11), (y += 11);
    const below = paper.parts.splice(0);
    paper.fillStyle = text;
    paper.fillText(plan.title, 12, 17, 14, "600");
    const height = Math.ceil(y + 6);
    const edge = 6;
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" font-family="system-ui, sans-serif">
<rect width="100%" height="100%" fill="${Colors.css("page")}"/>
<clipPath id="axes"><rect x="${box.left - edge}" y="${box.top - 1}" width="${box.width + 2 * edge}" height="${box.height + 2}"/></clipPath>
${paper.parts.join("\n")}
<g transform="translate(0 ${top})">${axes.join("\n")}
<g clip-path="url(#axes)">${inside.join("\n")}</g></g>
${below.join("\n")}
</svg>`;
  },

  /** The grid and the ticks, as uPlot has placed them. */
  axes(paper, u, box, at) {
    paper.lineWidth = 1;
    u.axes.forEach((axis, i) => {
      const flat = i === 0;
      (axis._splits || []).forEach((split, n) => {
        const word = axis._values[n];
        const place = at(split, flat ? "x" : "y");
        if (word === null || word === "" || !(flat ? place >= box.left - 1 && place <= box.left + box.width + 1 : place >= box.top - 1 && place <= box.top + box.height + 1)) return;
        paper.strokeStyle = Colors.css("grid");
        paper.beginPath();
        paper.moveTo(flat ? place : box.left, flat ? box.top : place);
        paper.lineTo(flat ? place : box.left + box.width, flat ? box.top + box.height : place);
        paper.stroke();
        Object.assign(paper, { fillStyle: Colors.css("soft"), textAlign: flat ? "center" : "right" });
        paper.fillText(word, flat ? place : box.left - 8, flat ? box.top + box.height + 18 : place + 4, 12);
      });
    });
    paper.textAlign = "left";
  },

  /** A line with its band. It has a gap where a value is missing, and a dot at a point without neighbours. */
  line(paper, plan, one, at) {
    const values = (list) => one.x.map((x, i) => [x, list[i]]).map(([x, v]) => (v == null || (plan.log && v <= 0) ? null : [at(x, "x"), at(v, "y")]));
    const color = Colors.css(one.style.color);
    const trace = (points) => points.forEach(([x, y], i) => (i ? paper.lineTo(x, y) : paper.moveTo(x, y)));
    if (one.band) {
      const [low, high] = one.band.map((edge) => values(plan.log ? Chart.above(edge, one.y) : edge));
      const both = low.map((each, i) => [each, high[i]]).filter(([a, b]) => a && b);
      paper.beginPath();
      if (both.length) trace([...both.map(([a]) => a), ...both.map(([, b]) => b).reverse()]);
      Object.assign(paper, { globalAlpha: 0.15, fillStyle: color });
      paper.closePath();
      paper.fill();
      paper.globalAlpha = 1;
    }
    const runs = [[]];
    for (const point of values(one.y)) {
      if (point) runs.at(-1).push(point);
      else if (runs.at(-1).length) runs.push([]);
    }
    Object.assign(paper, { strokeStyle: color, fillStyle: color, lineWidth: one.width || 1.5, globalAlpha: one.faint ? 0.47 : 1 });
    paper.setLineDash(one.style.dash);
    for (const points of runs.filter((each) => each.length)) {
      paper.beginPath();
      trace(points);
      if (points.length > 1) paper.stroke();
      if (one.dots || points.length === 1) for (const [x, y] of points) paper.add(`<circle cx="${Paper.short(x)}" cy="${Paper.short(y)}" r="3" fill="${Paper.safe(color)}"/>`);
    }
    paper.setLineDash([]);
    paper.globalAlpha = 1;
  },

  /** Breaks a text into lines of at most so many letters. */
  lines(text, most) {
    const found = [""];
    for (const word of text.split(/\s+/)) {
      if (found.at(-1) && found.at(-1).length + word.length >= most) found.push("");
      found[found.length - 1] += `${found.at(-1) ? " " : ""}${word}`;
    }
    return found.filter(Boolean);
  },

  /** Draws an SVG at twice its size, and returns it as PNG. */
  async png(svg) {
    const image = new Image();
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
    await image.decode();
    const canvas = make("canvas", { width: 2 * image.naturalWidth, height: 2 * image.naturalHeight });
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return new Promise((done) => canvas.toBlob(done, "image/png"));
  },

  download(blob, name) {
    const link = make("a", { href: URL.createObjectURL(blob), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  },
};
