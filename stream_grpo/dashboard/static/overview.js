// Each run on a card, and what there is to look at: alarms and warnings.

import { h, replace } from "./dom.js";
import { clock, count, duration, number, percent } from "./format.js";

const STATES = {
  running: "running", finished: "finished", quiet: "running, no line lately", stopped: "stopped",
};

/** The cards; `toggle(name, shown)` is called where a run is taken in or out. */
export class Overview {
  constructor(body, toggle) {
    Object.assign(this, { body, toggle, cards: new Map() });
  }

  update(runs) {
    for (const run of runs) {
      if (!this.cards.has(run.name)) this.body.append(this.card(run, runs.length > 1));
      const facts = this.cards.get(run.name);
      replace(facts, JSON.stringify(factsOf(run)), () => show(run));
    }
  }

  card(run, isChoice) {
    const facts = h("div", { class: "facts" });
    this.cards.set(run.name, facts);
    const name = h("span", { class: "name" }, h("span", { class: `swatch block ${run.mark}` }), run.name);
    const box = h("input", { type: "checkbox", onchange: (event) => this.toggle(run.name, event.target.checked) });
    box.checked = run.isShown;
    return h("article", { class: "card", "aria-label": run.name }, h("h3", {}, isChoice ? h("label", {}, box, name) : name), facts);
  }
}

function left(run) {
  const { x, columns } = run.steps, n = x.length, total = run.settings.num_steps;
  if (run.state !== "running" || !total || n < 2 || run.step >= total) return null;
  const from = Math.max(0, n - 50);
  return ((total - run.step) * (columns.time_s[n - 1] - columns.time_s[from])) / Math.max(1, x[n - 1] - x[from]);
}

function factsOf(run) {
  const newest = run.heldout.after ?? scoreAt(run.evaluations, run.evaluations.x.length - 1);
  return [run.state, run.step, run.settings, run.heldout, newest, run.num_alarms, run.complete, Math.round(100 * run.share_read), left(run), run.num_unreadable, run.last_s];
}

function scoreAt({ columns }, i) {
  return i < 0 ? null : { pass_at_1: columns.pass_at_1[i], low: columns.low[i], high: columns.high[i] };
}

function show(run) {
  const { settings } = run, total = settings.num_steps, eta = left(run);
  const first = run.heldout.before ?? scoreAt(run.evaluations, Math.min(0, run.evaluations.x.length - 1));
  const newest = run.heldout.after ?? scoreAt(run.evaluations, run.evaluations.x.length - 1);
  return [
    run.complete ? null : h("p", { class: "reading" }, `Shown from some of its lines; ${percent(run.share_read)} of all are read.`),
    newest
      ? h("p", { class: "score" }, h("strong", {}, percent(newest.pass_at_1, 1)), h("span", {}, ` held-out pass@1, ${percent(newest.low, 1)} to ${percent(newest.high, 1)}`,
        first && first.pass_at_1 !== newest.pass_at_1 ? `; it began at ${percent(first.pass_at_1, 1)}` : ""))
      : h("p", { class: "score" }, h("span", {}, "not evaluated yet")),
    h("progress", { max: total || 1, value: run.step, "aria-label": "learner steps" }),
    h("p", {}, h("span", { class: `state ${run.state}` }, run.state === "quiet" && !run.last_s ? "starting" : STATES[run.state]), ` step ${count(run.step)}${total ? ` of ${count(total)}` : ""}`,
      run.last_s ? `, ${duration(run.last_s - run.first_s)}` : "", eta === null ? "" : `, ${duration(eta)} left`),
    h("p", { class: "quiet" }, [
      settings.preset, `${number(settings.groups_per_step)} groups × ${number(settings.group_size)}`, `age ≤ ${number(settings.max_policy_age)}`,
      run.last_s ? `newest line ${clock(run.last_s)}` : null,
      run.num_unreadable ? `${count(run.num_unreadable)} unreadable lines` : null,
    ].filter(Boolean).join(" · ")),
  ].filter(Boolean);
}

/** The alarms of the runs, the newest first, and their warnings. */
export function alarms(runs) {
  const all = (name) => runs.flatMap((run) => run[name].map((note) => ({ ...note, run }))).sort((a, b) => b.time_s - a.time_s);
  const raised = all("alarms"), warned = all("warnings");
  const where = (run) => (runs.length > 1 ? `${run.name}, ` : "");
  return [
    raised.length
      ? h("ul", { class: "alarms" }, ...raised.map(({ run, name, sentence, cause, step, time_s }) => h("li", {},
        h("h3", {}, name.replaceAll("_", " ")), h("p", {}, sentence), cause ? h("p", {}, h("b", {}, "Likely cause: "), cause) : null,
        h("p", { class: "quiet" }, `${where(run)}${step === null ? "" : `step ${count(step)}, `}${clock(time_s)}`))))
      : runs.every(({ complete }) => complete) ? h("p", { class: "fine" }, "No alarm has been raised.") : h("p", { class: "quiet" }, "None so far; still reading."),
    warned.length
      ? h("details", {}, h("summary", {}, `Warnings: ${count(runs.reduce((sum, run) => sum + run.num_warnings, 0))}`),
        h("ul", { class: "warnings" }, ...warned.map(({ run, source, message, time_s }) => h("li", {},
          h("span", { class: "quiet" }, `${clock(time_s)} ${where(run)}${source} `), message))))
      : null,
  ].filter(Boolean);
}
