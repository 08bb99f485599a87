// From values to places, and round numbers for the marks on an axis.

/** A straight scale; a domain without width gets some. */
export function scale([from, to], [start, end]) {
  const width = to - from || 1;
  const place = (value) => start + ((value - from) / width) * (end - start);
  place.invert = (at) => from + ((at - start) / (end - start || 1)) * width;
  return place;
}

/** About `wanted` round numbers that lie within a domain. */
export function ticks([from, to], wanted) {
  if (!(to > from)) return [from];
  const rough = (to - from) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.9);
  const found = [];
  for (let k = Math.ceil(from / step - 1e-9); k * step <= to + step * 1e-9; k += 1) found.push(Number((k * step).toPrecision(12)));
  return found;
}

/** Smallest and largest of many numbers, those that are none left out. */
export function extent(lists) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) for (const value of list) {
    if (value === null || value === undefined) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low > high ? [0, 1] : [low, high];
}

/** The index in a rising list whose value is nearest. */
export function nearest(list, value) {
  let low = 0, high = list.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && value - list[low - 1] < list[low] - value ? low - 1 : low;
}
