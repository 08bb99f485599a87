// What is known of the runs: asked for every two seconds, only what has come since.

const POLL_MS = 2000;

/** Put what has come in place of what there was from `from` on. */
export function merged(known, sent) {
  const keep = (list = []) => list.slice(0, sent.from);
  const columns = {};
  for (const [name, values] of Object.entries(sent.columns)) {
    const before = keep(known?.columns[name]);
    while (before.length < sent.from) before.push(null);
    columns[name] = before.concat(values);
  }
  return { x: keep(known?.x).concat(sent.x), columns };
}

export class Store {
  /** `changed(runs)` is called after each answer, `failed(message)` where none comes; null once it does again. */
  constructor(changed, failed) {
    Object.assign(this, { changed, failed, runs: [] });
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.poll(); });
  }

  async poll() {
    clearTimeout(this.timer);
    if (this.busy) return;
    this.busy = true;
    let wait = POLL_MS;
    try {
      const since = this.runs.map(({ cursor }) => cursor).join(",");
      const answer = await fetch(`/api/runs?since=${encodeURIComponent(since)}`);
      if (!answer.ok) throw new Error(answer.status === 401 ? "this link lacks its token" : `the server says ${answer.status}`);
      const { runs } = await answer.json();
      this.runs = runs.map((sent, i) => {
        const known = this.runs[i];
        const tables = {};
        for (const name of ["steps", "pool", "evaluations"]) tables[name] = merged(known?.[name], sent[name]);
        return { ...sent, ...tables };
      });
      if (runs.some(({ complete }) => !complete)) wait = 0;
      this.failed(null);
      this.changed(this.runs);
    } catch (error) {
      this.failed(`No answer: ${error.message}. What is shown may be old.`);
    } finally {
      this.busy = false;
    }
    if (!document.hidden) this.timer = setTimeout(() => this.poll(), wait);
  }
}
