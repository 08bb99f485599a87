// A picture with its axes, a crosshair for mouse and arrow keys, a legend, and a table that says the same.
//
// What is drawn inside comes from a kind (kinds.js): {xs, domain, draw, read, table}.

import { h, s } from "./dom.js";
import { number } from "./format.js";
import { nearest, scale, ticks } from "./scale.js";

const MARGIN = { top: 8, right: 12, bottom: 26, left: 46 };
const observer = new ResizeObserver((entries) => {
  for (const { target } of entries) target.plot.draw();
});

export class Plot {
  /** `format`: a y value as text, `mark`: as it stands at the axis; `range`: y values that are always shown; `height` in pixels. */
  constructor(kind, { title, note = "", format = number, mark = format, range = [], height = 220, left = MARGIN.left, level = "h3" }) {
    Object.assign(this, { kind, title, format, mark, range, height, data: null, at: null });
    this.margin = { ...MARGIN, left };
    this.svg = s("svg", { "aria-hidden": "true" });
    this.readout = h("output", { class: "readout", hidden: true });
    this.canvas = h("div", {
      class: "canvas", tabindex: "0", role: "img",
      onpointermove: (event) => this.pointAt(event), onpointerleave: () => this.point(null),
      onkeydown: (event) => this.key(event), onblur: () => this.point(null),
    }, this.svg);
    this.canvas.plot = this;
    this.legend = h("ul", { class: "legend", hidden: true });
    this.table = h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": `${title}: table` });
    this.details = h("details", { ontoggle: () => this.fillTable() }, h("summary", {}, "Table"), this.table);
    this.element = h("figure", {},
      h("figcaption", {}, h(level, {}, title), note ? h("p", {}, note) : null),
      this.legend, h("div", { class: "stage" }, this.canvas, this.readout), this.details);
    observer.observe(this.canvas);
  }

  /** Show other data; `key` says whether they differ from what is shown. */
  update(key, data) {
    if (key === this.shown) return;
    Object.assign(this, { shown: key, data });
    this.draw();
    this.fillTable();
  }

  draw() {
    const width = this.canvas.clientWidth;
    if (!this.data || !width) return;
    const { kind, data, margin, height } = this;
    const xs = kind.xs(data);
    this.element.classList.toggle("empty", xs.length === 0);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    const domain = kind.domain(data, this.range);
    domain.x[1] = Math.max(domain.x[1], data.upTo ?? -Infinity);
    const right = width - margin.right, bottom = height - margin.bottom;
    this.x = scale(domain.x, [margin.left, right]);
    this.y = scale(domain.y, [bottom, margin.top]);
    this.cursor = s("line", { class: "cursor", y1: margin.top, y2: bottom, visibility: "hidden" });
    this.svg.replaceChildren(
      this.axes(domain, width, right, bottom),
      s("g", {}, ...kind.draw(data, { x: this.x, y: this.y, left: margin.left, right, top: margin.top, bottom })),
      this.cursor);
    const names = kind.legend(data);
    this.legend.hidden = names.length < 1;
    this.legend.replaceChildren(...names.map(({ name, mark, value }) =>
      h("li", {}, h("span", { class: `swatch ${mark}` }), name, value ? h("b", {}, value) : null)));
    this.canvas.setAttribute("aria-label", `${this.title}. ${this.summary()} Left and right arrow keys read values.`);
    this.point(this.at);
  }

  axes(domain, width, right, bottom) {
    const { margin, data } = this;
    const rows = this.kind.rows?.(data);
    const marks = rows ? [] : ticks(domain.y, this.height > 160 ? 5 : 3.5).map((value) => [
      s("line", { class: "rule", x1: margin.left, x2: right, y1: this.y(value), y2: this.y(value) }),
      s("text", { x: margin.left - 7, y: this.y(value) + 4, class: "end" }, this.mark(value)),
    ]);
    const labels = (rows ?? []).map(({ name, y }) =>
      s("text", { x: margin.left - 7, y: margin.top + y * (bottom - margin.top) + 4, class: "end" }, shortened(name)));
    const along = ticks(domain.x, Math.max(2, Math.floor((right - margin.left) / 90))).map((value) =>
      s("text", { x: this.x(value), y: bottom + 17, class: this.x(value) > right - 14 ? "end" : "middle" },
        number(value)));
    const unit = s("text", { x: margin.left - 7, y: bottom + 17, class: "end unit" }, data.unit);
    return s("g", { class: "axes" }, ...marks.flat(), ...labels, ...along, unit,
      s("line", { class: "base", x1: margin.left, x2: right, y1: bottom, y2: bottom }));
  }

  /** What the picture says, in a sentence for those who do not see it. */
  summary() {
    const xs = this.kind.xs(this.data);
    if (!xs.length) return "Nothing to show yet.";
    const last = xs[xs.length - 1];
    const values = this.kind.read(this.data, last, this.format).map(([name, value]) => `${name} ${value}`);
    return `At ${this.data.unit} ${number(last)}: ${values.join(", ")}.`;
  }

  pointAt(event) {
    if (!this.x) return;
    this.point(this.x.invert(event.clientX - this.canvas.getBoundingClientRect().left));
  }

  key(event) {
    const xs = this.data ? this.kind.xs(this.data) : [];
    if (!xs.length || !["ArrowLeft", "ArrowRight", "Home", "End", "Escape"].includes(event.key)) return;
    event.preventDefault();
    if (event.key === "Escape") return void this.point(null);
    const now = this.at === null ? xs.length : nearest(xs, this.at);
    const stride = event.shiftKey ? 10 : 1;
    const next = { ArrowLeft: now - stride, ArrowRight: now + stride, Home: 0, End: xs.length - 1 }[event.key];
    this.point(xs[Math.min(xs.length - 1, Math.max(0, next))]);
  }

  /** Move the crosshair to an x, or take it away. */
  point(at) {
    const xs = this.data && this.x ? this.kind.xs(this.data) : [];
    this.at = xs.length ? at : null;
    this.readout.hidden = this.at === null;
    this.cursor?.setAttribute("visibility", this.at === null ? "hidden" : "visible");
    if (this.at === null) return;
    const x = xs[nearest(xs, this.at)], place = this.x(x);
    this.cursor.setAttribute("x1", place);
    this.cursor.setAttribute("x2", place);
    this.readout.classList.toggle("left", place > this.canvas.clientWidth / 2);
    this.readout.replaceChildren(h("b", {}, `${this.data.unit} ${number(x)}`),
      ...this.kind.read(this.data, x, this.format).map(([name, value]) => h("span", {}, `${name} `, h("b", {}, value))));
  }

  fillTable() {
    if (!this.details.open || !this.data) return;
    const { head, rows } = this.kind.table(this.data, this.format);
    this.table.replaceChildren(h("table", {},
      h("thead", {}, h("tr", {}, ...[this.data.unit, ...head].map((cell) => h("th", { scope: "col" }, cell)))),
      h("tbody", {}, ...rows.map(([first, ...rest]) => h("tr", {},
        h("th", { scope: "row" }, number(first)), ...rest.map((cell) => h("td", {}, cell)))))));
  }
}

function shortened(name) {
  return name.length > 14 ? `${name.slice(0, 13)}…` : name;
}
