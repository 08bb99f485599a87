// The flow of one run: its parts as boxes, what goes between them, and where it is held up.

import { h } from "./dom.js";
import { count, number, percent } from "./format.js";

/** The boxes and arrows of a run; `titled`: under its name. */
export function flow(run, titled) {
  const { flow: at } = run, { curator, sampler, buffer, learner } = at;
  return h("article", { class: "flow", "aria-label": `Flow of ${run.name}` },
    titled ? h("h3", {}, run.name) : null,
    h("p", { class: "bottleneck" }, at.sentence, run.state === "running" ? null : h("span", { class: "quiet" }, ` (The run is ${run.state}: these are its last figures.)`)),
    h("ol", { class: "boxes" },
      box("Curator", at.bottleneck === "curator", null, [
        [rate(curator.picks_per_s, "problems"), "picked"],
        [`${count(curator.seen)} of ${count(curator.problems)}`, "problems sampled so far"],
      ]),
      arrow("problems"),
      box(sampler.num_samplers > 1 ? `${sampler.num_samplers} samplers` : "Sampler", at.bottleneck === "sampler", ["busy", sampler.busy_share], [
        [rate(sampler.tokens_per_s, "tokens"), "sampled"],
        [count(sampler.num_running), "sequences running"],
        [percent(sampler.stall_share), "of the time held for new weights"],
      ]),
      arrow(rate(sampler.groups_per_s, "groups")),
      box("Buffer", false, null, [
        [count(buffer.buffered), "groups wait to be trained"],
        [count(buffer.in_flight), "in flight"],
        [count(buffer.leased), "leased"],
      ]),
      arrow(rate(learner.groups_per_s, "groups")),
      box("Learner", at.bottleneck === "learner", ["busy", learner.busy_share], [
        [`${number(learner.steps_per_minute)} steps/min`, ""],
        [rate(learner.tokens_per_s, "tokens"), "trained"],
        [percent(learner.wait_share), "of the time waiting for groups"],
      ])),
    h("ul", { class: "returns" },
      h("li", { class: "outcomes" }, h("b", {}, "outcomes "), `buffer to curator, ${rate(buffer.outcomes_per_s, "groups")}`),
      h("li", { class: "weights" }, h("b", {}, "weights "), `learner to sampler, ${at.versions.length ? `sampling with ${at.versions.join(", ")}` : "none yet"}`)));
}

function box(name, isBottleneck, meter, facts) {
  return h("li", { class: isBottleneck ? "box held" : "box" },
    h("h4", {}, name, isBottleneck ? h("span", { class: "chip" }, "bottleneck") : null),
    meter ? bar(...meter) : null,
    h("ul", { class: "facts" }, ...facts.map(([value, what]) => h("li", {}, h("b", {}, value), ` ${what}`))));
}

function bar(name, share) {
  return h("div", { class: "meter" }, h("meter", { min: 0, max: 1, value: Math.min(1, share ?? 0), "aria-label": name }), h("span", {}, `${name} ${percent(share)}`));
}

function arrow(text) {
  return h("li", { class: "arrow" }, h("span", {}, text));
}

function rate(value, what) {
  return `${number(value)} ${what}/s`;
}
