// A browser of rollouts: filters, a list of groups, and one group with its completions, token ages as colour and number.

import { h } from "./dom.js";
import { clock, count, number } from "./format.js";

const FATES = ["accepted", "leased", "trained", "stale", "no_signal", "invalid"];
const SHADES = 6;

export class Rollouts {
  constructor(body) {
    this.runs = [];
    this.run = h("select", { name: "run" });
    this.form = h("form", { class: "filters", onsubmit: (event) => { event.preventDefault(); this.list(); } },
      this.runField = field("Run", this.run),
      field("Fate", h("select", { name: "fate" }, h("option", { value: "" }, "any"), ...FATES.map((fate) => h("option", { value: fate }, fate.replace("_", " "))))),
      field("Problem", h("input", { name: "problem", placeholder: "id, * and ? for any", autocomplete: "off" })),
      field("Trained in step", h("input", { name: "step", inputmode: "numeric", size: 7, autocomplete: "off" })),
      field("Reward from", h("input", { name: "min_reward", inputmode: "decimal", size: 5, autocomplete: "off" })),
      field("to", h("input", { name: "max_reward", inputmode: "decimal", size: 5, autocomplete: "off" })),
      h("button", { type: "submit" }, "Show"));
    this.status = h("p", { role: "status", class: "quiet" });
    this.groups = h("ul", { class: "groups" });
    this.detail = h("div", { class: "detail", tabindex: "-1" }, h("p", { class: "quiet" }, "Choose a group to read it."));
    body.append(this.form, this.status, h("div", { class: "browser" }, this.groups, this.detail));
    // A list is read from disk: not before somebody comes near it.
    new IntersectionObserver(([entry], observer) => {
      if (!entry.isIntersecting || !this.runs.length) return;
      observer.disconnect();
      this.list();
    }, { rootMargin: "200px" }).observe(body);
  }

  update(runs) {
    if (this.runs.length === runs.length) { this.runs = runs; return; }
    this.runs = runs;
    this.run.replaceChildren(...runs.map(({ name }) => h("option", { value: name }, name)));
    this.runField.hidden = runs.length < 2;
  }

  async list() {
    const query = new URLSearchParams(new FormData(this.form));
    query.delete("run");
    this.status.textContent = "Reading the journal…";
    const found = await ask(`/api/runs/${encodeURIComponent(this.run.value)}/groups?${query}`);
    if (found.error) { this.status.textContent = found.error; this.groups.replaceChildren(); return; }
    this.status.textContent = [found.groups.length ? `The newest ${found.groups.length} groups that pass, the newest first.` : "No such group has come in, or its segment has left the disk.", found.is_cut ? "Older ones were not looked at: that would have taken too long." : "", ...found.missing].join(" ");
    this.groups.replaceChildren(...found.groups.map((group) => this.row(this.run.value, group)));
  }

  row(run, group) {
    const rewards = group.rewards, mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
    const button = h("button", { type: "button", onclick: () => this.show(run, group.group_id, button) },
      h("span", { class: "problem" }, group.problem_id),
      h("span", { class: `fate ${group.state}` }, group.state.replace("_", " "), group.reason ? ` (${group.reason.replaceAll("_", " ")})` : ""),
      h("span", { class: "quiet" }, [`reward ${number(mean)}`, `${group.num_passed} of ${group.num_passed + group.num_failed + group.num_unscored} right`, group.age === null ? null : `age ${group.age}`, group.made ? `step ${group.made[1]}` : null].filter(Boolean).join(" · ")));
    return h("li", {}, button);
  }

  async show(run, id, button) {
    for (const chosen of this.groups.querySelectorAll("[aria-current]")) chosen.removeAttribute("aria-current");
    button.setAttribute("aria-current", "true");
    this.detail.replaceChildren(h("p", { class: "quiet" }, "Reading…"));
    const group = await ask(`/api/runs/${encodeURIComponent(run)}/groups/${encodeURIComponent(id)}`);
    const bound = this.runs.find(({ name }) => name === run)?.settings.max_policy_age ?? 4;
    this.detail.replaceChildren(...(group.error ? [h("p", {}, group.error)] : page(group, Math.max(1, bound))));
    this.detail.focus({ preventScroll: true });
    if (this.detail.getBoundingClientRect().top > window.innerHeight * 0.6) this.detail.scrollIntoView();
  }
}

async function ask(url) {
  try {
    return await (await fetch(url)).json();
  } catch (error) {
    return { error: `No answer: ${error.message}` };
  }
}

function field(name, control) {
  return h("label", {}, h("span", {}, name), control);
}

function shade(age, bound) {
  return age === null ? "unknown" : `a${Math.min(SHADES, Math.round((age / bound) * SHADES))}`;
}

function page(group, bound) {
  const ages = [...new Set(group.rollouts.flatMap(({ spans }) => spans.map(({ age }) => age)))].filter((age) => age !== null).sort((a, b) => a - b);
  const isMixed = group.rollouts.some(({ spans }) => spans.some(({ mixed }) => mixed));
  const hasTrunk = group.rollouts.some(({ spans }) => spans.some(({ version, is_trained }) => version !== null && !is_trained));
  return [
    h("h3", {}, group.problem_id),
    h("p", { class: "quiet" }, [group.group_id, group.domain || null, group.state.replace("_", " "), group.reason || null, `learner ${group.learner}`, group.sampler_id, clock(group.came_at_s), `${number(group.seconds)} s`].filter(Boolean).join(" · ")),
    h("h4", {}, "Prompt"), h("pre", { tabindex: "0", "aria-label": "prompt" }, group.prompt),
    group.is_text ? null : h("p", { class: "quiet" }, "The tokenizer of this run is not on this machine: token ids are shown."),
    h("p", { class: "ages" }, "Age of tokens, in learner steps: ", ...ages.flatMap((age) => [h("span", { class: `age ${shade(age, bound)}` }, String(age)), " "]), "The small number stands where an age begins.", isMixed ? " Dotted: sampled on a cache of older weights." : "", hasTrunk ? " In italics: the trunk of its group, sampled and not trained." : ""),
    ...group.rollouts.map((rollout, i) => completion(rollout, i, bound)),
  ].filter(Boolean);
}

function completion(rollout, i, bound) {
  const components = Object.entries(rollout.components).map(([name, value]) => `${name} ${number(value)}`);
  return h("article", { class: "completion", "aria-label": `completion ${i}` },
    h("h4", {}, h("span", { class: `decision ${rollout.decision}` }, rollout.decision.replace("_", " ")), ` reward ${number(rollout.reward)}`,
      h("span", { class: "quiet" }, ` ${count(rollout.num_tokens)} tokens, ended by ${rollout.end_reason}, mean logprob ${number(rollout.logprob_mean)}`)),
    h("pre", { tabindex: "0", "aria-label": `completion ${i}, with ages` }, ...rollout.spans.flatMap((span) => stretch(span, bound))),
    h("p", { class: "evidence" }, h("b", {}, `${rollout.verifier}: `), rollout.evidence || "no evidence given", components.length ? ` (${components.join(", ")})` : ""));
}

function stretch({ text, age, version, mixed, is_trained }, bound) {
  if (version === null) return [h("span", { class: "context", title: "context, not sampled" }, text)];
  const title = `version ${version}, age ${age ?? "unknown"}${mixed ? ", on a cache of older weights" : ""}${is_trained ? "" : ", trunk of its group, not trained"}`;
  return [h("sup", { title }, String(age ?? "?")), h("span", { class: `age ${shade(age, bound)}${mixed ? " mixed" : ""}${is_trained ? "" : " trunk"}`, title }, text)];
}
