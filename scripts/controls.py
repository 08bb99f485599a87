"""Judges three finished runs, PREFIX-as-it-is, -learning-rate-0 and -shuffled-rewards: only the first may rise."""

import json
import sys
from pathlib import Path

LEAST_RISE, LEAST_LOW = 0.18, 0.12
MOST_RISE = 0.02


def main() -> None:
    prefix = sys.argv[1]
    failed = False
    for name in ("as-it-is", "learning-rate-0", "shuffled-rewards"):
        summary = json.loads((Path(f"{prefix}-{name}") / "summary.json").read_text())
        before, after = summary["heldout_before"]["headline"], summary["heldout_after"]["headline"]
        rise = summary["heldout_rise"]
        if name == "as-it-is":
            is_right = rise["mean"] >= LEAST_RISE and rise["low"] > LEAST_LOW
        else:
            is_right = rise["mean"] <= MOST_RISE
        failed |= not is_right
        interval = f"[{rise['low']:+.3f}, {rise['high']:+.3f}]"
        print(
            f"{name:16} before {before['pass_at_1']:.3f}  after {after['pass_at_1']:.3f}  rise {rise['mean']:+.3f} "
            f"{interval}  {rise['num_problems']} problems  {'ok' if is_right else 'WRONG'}"
        )
    sys.exit(failed)


if __name__ == "__main__":
    main()
