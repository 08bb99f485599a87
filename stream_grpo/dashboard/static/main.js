// The page: what is asked for, which runs are shown, and which pictures they make.

import { h, replace } from "./dom.js";
import { flow } from "./flow.js";
import { number, percent } from "./format.js";
import { heat, lines, stack } from "./kinds.js";
import { Overview, alarms } from "./overview.js";
import { Plot } from "./plot.js";
import { Rollouts } from "./rollouts.js";
import * as series from "./series.js";
import { Store } from "./store.js";

const MARKS = ["m0", "m1", "m2", "m3", "m4", "m5", "m6", "m7"];
const MAX_SHOWN = 3;
const THEMES = ["system", "light", "dark"];
const body = (id) => document.querySelector(`#${id} .body`);
const hidden = new Map();
const axis = document.getElementById("axis");
let known = [];

/** A picture over all shown runs. */
class Shared {
  constructor(place, kind, options, make) {
    this.plot = new Plot(kind, options);
    this.make = make;
    place.append(this.plot.element);
  }

  update(runs, by, unit, key) {
    const data = this.make(runs, by, unit);
    // A recipe without a trust region says nothing of clipping: then there is no such picture.
    this.plot.element.hidden = data.series.length === 0;
    this.plot.update(key, data);
  }
}

/** A picture for each shown run, side by side. */
class PerRun {
  constructor(place, kind, options, make) {
    Object.assign(this, { kind, options, make, plots: new Map() });
    this.place = h("div", { class: "grid" });
    place.append(this.place);
  }

  update(runs, by, unit, key) {
    const titled = runs.length > 1;
    for (const [id, plot] of this.plots) if (!runs.some(({ name }) => id === `${name}/${titled}`)) { plot.element.remove(); this.plots.delete(id); }
    const made = runs.map((run) => this.make(run, by, unit));
    // Pictures that stand next to each other have one axis.
    const upTo = Math.max(...made.map((data) => this.kind.xs(data).at(-1) ?? 0));
    runs.forEach((run, i) => {
      const id = `${run.name}/${titled}`;
      if (!this.plots.has(id)) {
        const title = titled ? `${this.options.title}: ${run.name}` : this.options.title;
        const plot = new Plot(this.kind, { ...this.options, title });
        this.plots.set(id, plot);
        this.place.append(plot.element);
      }
      this.plots.get(id).update(key, { ...made[i], upTo });
    });
  }
}

const FIGURES = [
  ["entropy", "Entropy", "Of the policy, in nats a token."],
  ["k3", "KL to the behavior policy", "k3, a token: how far the weights that sampled are from those trained."],
  ["ess", "Effective sample size", "As a share of the tokens; low: a few tokens have all the weight."],
  ["mask_share", "Masked tokens", "Share that the correction takes out.", percentish, [0]],
  ["clip_share_high", "Clipped tokens", "Share that the trust region stops.", percentish, [0]],
  ["grad_norm", "Gradient norm", "Before it is cut."],
  ["response_tokens_mean", "Response length", "Mean, in tokens."],
];

const pictures = [
  new Shared(body("reward"), lines, { title: "Held-out pass@1 and training reward", height: 320, format: (value) => percent(value, 1), mark: percent, range: [1], note: "Points: held-out pass@1 with its 95% interval; diamonds: the large evaluations before and after. Curves: mean reward of what was trained." }, series.reward),
  new PerRun(body("flow"), stack, { title: "Seconds of a learner step", note: "Computing, and waiting for groups that may be trained on.", height: 170 }, series.learnerTime),
  new PerRun(body("ages"), heat, { title: "Trained tokens by age", note: "Each column is a stretch of steps, each row an age: the stronger, the more of its tokens." }, series.ageShares),
  new PerRun(body("ages"), lines, { title: "Age of groups", note: "At lease; no token above the bound is trained on.", range: [0], height: 190 }, series.ages),
  new PerRun(body("ages"), stack, { title: "Where age comes from", note: "Mean learner steps that passed in each part.", height: 190 }, series.ageParts),
  new PerRun(body("pool"), stack, { title: "Problems by difficulty", note: "Solved, useful and too hard: of those sampled, by their sliding success rate." }, series.difficulty),
  new PerRun(body("pool"), heat, { title: "Success rate by domain", note: "Each row is a domain: the stronger, the more often its problems are solved.", left: 92 }, series.domains),
  new PerRun(body("tokens"), stack, { title: "Tokens a learner step, by fate", note: "With the share of all tokens that were sampled.", height: 240 }, series.fates),
  ...FIGURES.map(([name, title, note, format = number, range = []]) =>
    new Shared(body("updates"), lines, { title, note, format, range, height: 150 }, (runs, by, unit) => series.figure(runs, by, unit, name))),
];

function percentish(value) {
  return percent(value, value === 0 ? 0 : value < 0.01 ? 2 : 1);
}

const overview = new Overview(document.querySelector("#runs .cards"), (name, isShown) => { hidden.set(name, !isShown); show(); });
const rollouts = new Rollouts(body("rollouts"));
const flows = h("div", { class: "flows" });
body("flow").prepend(flows);

function show() {
  const runs = known.map((run, i) => ({ ...run, mark: MARKS[i % MARKS.length], isShown: !(hidden.get(run.name) ?? i >= MAX_SHOWN) }));
  const shown = runs.filter(({ isShown }) => isShown);
  const by = axis.value, unit = by === "step" ? "step" : "hour";
  const key = JSON.stringify([by, shown.map(({ name, cursor, step, heldout, last_s }) => [name, cursor, step, heldout, last_s])]);
  document.title = runs.length === 1 ? `${runs[0].name}: stream-grpo` : `${runs.length} runs: stream-grpo`;
  document.body.classList.toggle("several", shown.length > 1);
  overview.update(runs);
  replace(body("alarms"), JSON.stringify(shown.map(({ name, num_alarms, num_warnings, complete }) => [name, num_alarms, num_warnings, complete])), () => alarms(shown));
  replace(flows, JSON.stringify(shown.map(({ name, state, flow: at }) => [name, state, at])), () => shown.map((run) => flow(run, runs.length > 1)));
  for (const picture of pictures) picture.update(shown, by, unit, key);
  rollouts.update(runs);
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  document.getElementById("theme").textContent = `Theme: ${name}`;
  try { localStorage.setItem("theme", name); } catch { /* a browser may keep nothing */ }
}

function keptTheme() {
  try { return localStorage.getItem("theme"); } catch { return null; }
}

document.getElementById("theme").addEventListener("click", () => {
  setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
});
axis.addEventListener("change", show);
setTheme(THEMES.includes(keptTheme()) ? keptTheme() : "system");

const connection = document.getElementById("connection");
new Store((runs) => { known = runs; show(); document.body.dataset.ready = runs.every(({ complete }) => complete) ? "true" : "partly"; }, (message) => {
  connection.hidden = message === null;
  connection.textContent = message ?? "";
}).poll();
