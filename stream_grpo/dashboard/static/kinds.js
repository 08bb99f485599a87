// The kinds of picture: lines with bands, stacked areas, heat maps. Pure: data in, shapes, values and tables out.

import { s } from "./dom.js";
import { number, percent } from "./format.js";
import { extent, nearest } from "./scale.js";

const TABLE_ROWS = 25;

function sampled(length) {
  const stride = Math.max(1, Math.ceil(length / TABLE_ROWS));
  const found = [];
  for (let i = length - 1; i >= 0; i -= stride) found.unshift(i);
  return found;
}

function padded([low, high], range) {
  const [from, to] = [Math.min(low, ...range), Math.max(high, ...range)];
  const room = (to - from || Math.abs(to) || 1) * 0.06;
  return [range.includes(from) ? from : from - room, range.includes(to) ? to : to + room];
}

/** A path through points; a value that is missing parts it. */
function path(xs, ys, x, y) {
  let open = false, d = "";
  for (let i = 0; i < xs.length; i += 1) {
    if (ys[i] === null || ys[i] === undefined) { open = false; continue; }
    d += `${open ? "L" : "M"}${x(xs[i]).toFixed(1)} ${y(ys[i]).toFixed(1)}`;
    open = true;
  }
  return d;
}

/** The area between two curves; where either is missing it is parted. */
function area(xs, lows, highs, x, y) {
  let d = "";
  const close = (from, to) => {
    let piece = "";
    for (let i = from; i < to; i += 1) piece += `${i === from ? "M" : "L"}${x(xs[i]).toFixed(1)} ${y(highs[i]).toFixed(1)}`;
    for (let i = to - 1; i >= from; i -= 1) piece += `L${x(xs[i]).toFixed(1)} ${y(lows[i]).toFixed(1)}`;
    return `${piece}Z`;
  };
  let from = 0;
  for (let i = 0; i <= xs.length; i += 1) {
    if (i < xs.length && lows[i] !== null && highs[i] !== null) continue;
    if (i > from) d += close(from, i);
    from = i + 1;
  }
  return d;
}

function valueAt({ y, low, high }, i, format) {
  return format(y[i]) + (low?.[i] != null ? ` (${format(low[i])} to ${format(high[i])})` : "");
}

/** {unit, series: [{name, mark, x, y, low?, high?, looks?, value?}]}; `looks`: line, dots, faint or level. */
export const lines = {
  xs({ series }) {
    const all = series.filter(({ looks }) => looks !== "level").flatMap(({ x }) => x);
    return [...new Set(all)].sort((a, b) => a - b);
  },
  domain({ series }, range) {
    const ys = series.flatMap(({ y, low, high }) => [y, low ?? [], high ?? []]);
    return { x: extent(series.map(({ x }) => x)), y: padded(extent(ys), range) };
  },
  draw({ series }, { x, y }) {
    return series.flatMap((one) => {
      const { mark, looks = "line" } = one, found = [];
      if (one.low && looks !== "dots") found.push(s("path", { class: `band ${mark}`, d: area(one.x, one.low, one.high, x, y) }));
      found.push(s("path", { class: `line ${looks} ${mark}`, d: path(one.x, one.y, x, y) }));
      if (looks === "dots") for (let i = 0; i < one.x.length; i += 1) {
        if (one.y[i] === null) continue;
        const at = x(one.x[i]);
        if (one.low?.[i] != null) found.push(s("line", { class: `whisker ${mark}`, x1: at, x2: at, y1: y(one.low[i]), y2: y(one.high[i]) }));
        found.push(one.whole?.[i]
          ? s("rect", { class: `dot ${mark}`, x: at - 4, y: y(one.y[i]) - 4, width: 8, height: 8, transform: `rotate(45 ${at} ${y(one.y[i])})` })
          : s("circle", { class: `dot ${mark}`, cx: at, cy: y(one.y[i]), r: one.x.length > 80 ? 2 : 3.5 }));
      }
      return found;
    });
  },
  legend({ series }) {
    const named = series.filter(({ looks }) => looks !== "faint");
    return named.length > 1 ? named.map(({ name, mark, looks = "line", value }) => ({ name, mark: `${mark} ${looks}`, value })) : [];
  },
  read({ series }, at, format) {
    return series.filter(({ x, looks }) => x.length && looks !== "faint").map((one) => {
      const i = nearest(one.x, at);
      // Points are few: the nearest one may be some way off.
      return [one.looks === "dots" && one.x[i] !== at ? `${one.name}, at ${number(one.x[i])}` : one.name, valueAt(one, i, format)];
    });
  },
  table({ series }, format) {
    const shown = series.filter(({ looks }) => looks !== "faint" && looks !== "level");
    const points = shown.filter(({ looks }) => looks === "dots").flatMap(({ x }) => sampled(x.length).map((i) => x[i]));
    const all = lines.xs({ series: shown });
    const xs = [...new Set([...sampled(all.length).map((i) => all[i]), ...points])].sort((a, b) => a - b);
    const rows = xs.map((at) => [at, ...shown.map((one) => {
      const i = one.x.length ? nearest(one.x, at) : -1;
      return i < 0 || (one.looks === "dots" && one.x[i] !== at) ? "–" : valueAt(one, i, format);
    })]);
    return { head: shown.map(({ name }) => name), rows };
  },
};

/** {unit, x, layers: [{name, mark, y, value?}]}, from the bottom up. */
export const stack = {
  xs: ({ x, layers }) => (layers.length ? x : []),
  domain({ x, layers }, range) {
    const totals = x.map((_, i) => layers.reduce((sum, { y }) => sum + (y[i] ?? 0), 0));
    const [, high] = extent([totals]);
    return { x: extent([x]), y: [0, Math.max(high * (range.includes(high) ? 1 : 1.04), ...range)] };
  },
  draw({ x: xs, layers }, { x, y }) {
    let below = xs.map(() => 0);
    return layers.map(({ y: ys, mark }) => {
      const above = below.map((value, i) => value + (ys[i] ?? 0));
      const shape = s("path", { class: `layer ${mark}`, d: area(xs, below, above, x, y) });
      below = above;
      return shape;
    });
  },
  legend: ({ layers }) => [...layers].reverse().map(({ name, mark, value }) => ({ name, mark: `${mark} block`, value })),
  read({ x, layers }, at, format) {
    const i = nearest(x, at);
    return [...layers].reverse().map(({ name, y }) => [name, format(y[i])]);
  },
  table({ x, layers }, format) {
    return {
      head: layers.map(({ name }) => name),
      rows: sampled(x.length).map((i) => [x[i], ...layers.map(({ y }) => format(y[i]))]),
    };
  },
};

/** {unit, x, rowsOf: [{name, values}], overlay?: [{name, mark, y}]}; values from 0 to 1, rows from the top down. */
export const heat = {
  xs: ({ x, rowsOf }) => (rowsOf.length ? x : []),
  rows: ({ rowsOf }) => rowsOf.map(({ name }, i) => ({ name, y: (i + 0.5) / rowsOf.length })),
  domain: ({ x }) => ({ x: extent([x]), y: [0, 1] }),
  draw({ x: xs, rowsOf }, { x, left, right, top, bottom }) {
    const columns = Math.min(xs.length, Math.max(1, Math.floor((right - left) / 5)));
    const tall = (bottom - top) / rowsOf.length, found = [];
    for (let c = 0; c < columns; c += 1) {
      const [from, to] = [Math.floor((c * xs.length) / columns), Math.floor(((c + 1) * xs.length) / columns)];
      const start = xs.length === 1 ? left : x(xs[Math.max(0, from - 1)]);
      const end = xs.length === 1 ? Math.min(right, left + 12) : x(xs[to - 1]);
      if (end <= start) continue;
      rowsOf.forEach(({ values }, r) => {
        const known = values.slice(from, to).filter((value) => value !== null);
        if (!known.length) return;
        const mean = known.reduce((sum, value) => sum + value, 0) / known.length;
        found.push(s("rect", {
          class: "heat", x: start.toFixed(1), y: (top + r * tall + 0.5).toFixed(1),
          width: (end - start + 0.4).toFixed(1), height: Math.max(1, tall - 1).toFixed(1), "fill-opacity": mean.toFixed(3),
        }));
      });
    }
    return found;
  },
  legend: ({ ends }) => (ends ? [{ name: ends[0], mark: "ramp low" }, { name: ends[1], mark: "ramp high" }] : []),
  read({ x, rowsOf }, at) {
    const i = nearest(x, at);
    return rowsOf.map(({ name, values }) => [name, percent(values[i])]);
  },
  table({ x, rowsOf }) {
    return {
      head: rowsOf.map(({ name }) => name),
      rows: sampled(x.length).map((i) => [x[i], ...rowsOf.map(({ values }) => percent(values[i]))]),
    };
  },
};
