// From what is known of a run to what a picture draws. Pure.

import { count } from "./format.js";

export const AGES = ["0", "1", "2", "3-4", "5-8", "9-16", "17-32", ">32"];
const ENDS = ["trained", "no_signal", "stale", "baseline_only", "masked", "evaluation", "invalid", "refused"];
const FATE_MARKS = { trained: "m2", no_signal: "m1", stale: "m3", baseline_only: "m4", masked: "m5", evaluation: "m0", invalid: "m6", refused: "m7" };

/** The x of a table's buckets: learner steps, or hours since the first line. */
export function along(run, table, axis) {
  return axis === "step" ? table.x : table.columns.time_s.map((time) => (time - run.first_s) / 3600);
}

/** Mean over a window that grows with the curve, so that the eye sees the trend. */
export function smooth(values, width = Math.max(1, Math.round(values.length / 25))) {
  const found = [];
  let sum = 0, known = 0;
  for (let i = 0; i < values.length; i += 1) {
    if (values[i] !== null) { sum += values[i]; known += 1; }
    const gone = i - width >= 0 ? values[i - width] : null;
    if (gone !== null) { sum -= gone; known -= 1; }
    found.push(known ? sum / known : null);
  }
  return found;
}

export function column(table, name) {
  return table.columns[name] ?? table.x.map(() => null);
}

export function has(table, name) {
  return column(table, name).some((value) => value !== null);
}

/** What a run is called in a legend; alone it needs no name. */
function of(run, runs, what) {
  return runs.length > 1 ? `${run.name}: ${what}` : what;
}

/** Held-out scores with the large evaluations before and after, in their order. */
export function heldout(run, axis) {
  const { evaluations, heldout: ends, steps } = run;
  const points = along(run, evaluations, axis).map((x, i) => ({
    x, y: evaluations.columns.pass_at_1[i], low: evaluations.columns.low[i], high: evaluations.columns.high[i], whole: false,
  }));
  const last = along(run, steps, axis).at(-1) ?? 0;
  if (ends.before) points.unshift({ x: 0, y: ends.before.pass_at_1, low: ends.before.low, high: ends.before.high, whole: true });
  if (ends.after) points.push({ x: last, y: ends.after.pass_at_1, low: ends.after.low, high: ends.after.high, whole: true });
  const pick = (name) => points.map((point) => point[name] ?? null);
  return { x: pick("x"), y: pick("y"), low: pick("low"), high: pick("high"), whole: points.map(({ whole }) => whole) };
}

export function reward(runs, axis, unit) {
  const series = runs.flatMap((run) => {
    const x = along(run, run.steps, axis), y = column(run.steps, "reward_mean");
    const own = runs.length > 1 ? run.mark : "m1";
    const scores = heldout(run, axis);
    return [
      ...(runs.length > 1 ? [] : [{ name: "", looks: "faint", mark: own, x, y, low: column(run.steps, "reward_mean/low"), high: column(run.steps, "reward_mean/high") }]),
      { name: of(run, runs, "training reward, smoothed"), mark: own, x, y: smooth(y) },
      ...(scores.x.length ? [{ name: of(run, runs, "held-out pass@1, 95% interval"), looks: "dots", mark: runs.length > 1 ? run.mark : "m0", ...scores }] : []),
    ];
  });
  return { unit, series };
}

/** One figure of the steps, a curve a run. */
export function figure(runs, axis, unit, name) {
  const series = runs.filter((run) => has(run.steps, name)).map((run) => (
    { name: of(run, runs, "smoothed"), mark: run.mark, x: along(run, run.steps, axis), y: smooth(column(run.steps, name)) }));
  const raw = runs.filter((run) => has(run.steps, name)).map((run) => (
    { name: "", looks: "faint", mark: run.mark, x: along(run, run.steps, axis), y: column(run.steps, name) }));
  return { unit, series: [...raw, ...series] };
}

/** Trained tokens by age bucket, as shares of each stretch; the oldest on top. */
export function ageShares(run, axis, unit) {
  const columns = AGES.map((age) => column(run.steps, `age/${age}`));
  const totals = run.steps.x.map((_, i) => columns.reduce((sum, values) => sum + (values[i] ?? 0), 0));
  const rowsOf = AGES.map((age, r) => ({ name: age, values: columns[r].map((value, i) => (totals[i] ? (value ?? 0) / totals[i] : null)) }))
    .filter(({ values }) => values.some((value) => value > 0)).reverse();
  return { unit, x: along(run, run.steps, axis), rowsOf, ends: ["no token", "all tokens of the step"] };
}

export function ages(run, axis, unit) {
  const x = along(run, run.steps, axis), bound = run.settings.max_policy_age;
  const series = [
    { name: "largest", mark: "m3", x, y: column(run.steps, "age_max") },
    { name: "mean", mark: "m0", x, y: column(run.steps, "age_mean") },
  ];
  if (bound !== null && x.length) series.push({ name: `bound ${bound}`, looks: "level", mark: "ink", x: [x[0], x.at(-1)], y: [bound, bound] });
  return { unit, series };
}

export function ageParts(run, axis, unit) {
  const parts = [["in flight", "age_in_flight_mean", "m0"], ["in the queue", "age_in_queue_mean", "m1"], ["until published", "age_publish_lag_mean", "m3"]];
  return {
    unit, x: along(run, run.steps, axis),
    layers: parts.map(([name, key, mark]) => ({ name, mark, y: smooth(column(run.steps, key)) })),
  };
}

export function learnerTime(run, axis, unit) {
  return {
    unit, x: along(run, run.steps, axis),
    layers: [
      { name: "computing", mark: "m2", y: smooth(column(run.steps, "step_s")) },
      { name: "waiting for groups", mark: "m1", y: smooth(column(run.steps, "waited_s")) },
    ],
  };
}

export function difficulty(run, axis, unit) {
  const { pool } = run, seen = column(pool, "seen");
  const unseen = column(pool, "problems").map((all, i) => (all === null ? null : Math.max(0, all - seen[i])));
  const layers = [["solved", "m2"], ["useful", "m0"], ["too_hard", "m3"]].map(([name, mark]) => (
    { name: name.replace("_", " "), mark, y: column(pool, name), value: count(column(pool, name).at(-1)) }));
  layers.push({ name: "never sampled", mark: "grey", y: unseen, value: count(unseen.at(-1)) });
  return { unit, x: along(run, pool, axis), layers: pool.x.length ? layers : [] };
}

export function domains(run, axis, unit) {
  const names = Object.keys(run.pool.columns).filter((name) => name.startsWith("rate/"));
  const rowsOf = names.map((name) => ({ name: name.slice(5) || "no domain", values: column(run.pool, name) }))
    .sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
  return { unit, x: along(run, run.pool, axis), rowsOf, ends: ["never right", "always right"] };
}

/** Tokens a step by what became of them: what the counters gained over a window. */
export function fates(run, axis, unit) {
  const { steps } = run, x = steps.x, window = Math.max(1, Math.round(x.length / 40));
  const generated = run.tokens.generated || 1;
  const layers = ENDS.map((fate) => {
    const total = column(steps, `tokens/${fate}`);
    const y = total.map((value, i) => {
      const j = Math.max(0, i - window);
      if (value === null || i === 0) return i === 0 && x.length ? (value ?? 0) / Math.max(1, x[0]) : null;
      return Math.max(0, value - (total[j] ?? 0)) / Math.max(1, x[i] - x[j]);
    });
    return { name: fate.replace("_", " "), mark: FATE_MARKS[fate], y, value: `${((100 * (run.tokens[fate] ?? 0)) / generated).toFixed(1)}%` };
  }).filter(({ y }) => y.some((value) => value > 0));
  return { unit, x: along(run, steps, axis), layers };
}
