// Numbers, times and shares as a person reads them.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

/** Three significant digits; large ones compact, small ones with an exponent. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 10000) return COMPACT.format(value);
  if (size >= 100 || Number.isInteger(value)) return WHOLE.format(value);
  if (size > 0 && size < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

/** A count, in full. */
export function count(value) {
  return value === null || value === undefined ? "–" : WHOLE.format(value);
}

/** A share as per cent. */
export function percent(value, digits = 0) {
  return value === null || value === undefined || Number.isNaN(value) ? "–" : `${(100 * value).toFixed(digits)}%`;
}

/** Seconds as the one or two largest units. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 90) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** Local date and time, to the minute. */
export function clock(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleString("en-GB", { dateStyle: "short", timeStyle: "short" });
}

/** A name of the metrics as words. */
export function words(name) {
  return name.replaceAll("_", " ");
}
