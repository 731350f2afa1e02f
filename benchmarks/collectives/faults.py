"""The fault campaign: at a random moment of random calls, ranks die, stall, raise, make a different call or leave; it
checks the errors of the other ranks.

    python -m benchmarks.collectives.faults --trials 1000 --write
    python -m benchmarks.collectives.faults --seed 0 --trial 17      # one of them again

Every survivor must raise the right error in time, and the error must name the rank. Nothing may hang, no call may
return a wrong value, and nothing may be left behind.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.faults import plan, trials
from tests.support.faults.trials import PROBLEMS, Verdict

RESULTS = Path(__file__).resolve().parents[1] / "results" / "faults.txt"


def numbers(a: argparse.Namespace) -> Iterator[int]:
    """Returns the numbers of the trials to run."""
    if a.trial is not None:
        yield a.trial
        return
    kinds = plan.KINDS if a.only is None else (a.only,)
    number = made = 0
    while made < a.trials:
        if plan.trial_of(a.seed, number).fault.kind in kinds:
            made += 1
            yield number
        number += 1


def table(verdicts: Sequence[Verdict]) -> list[str]:
    """Returns a row for each kind of fault."""
    heads: tuple[str, ...] = ("kind", "trials", "right", *PROBLEMS)
    rows = [heads]
    for kind in (*plan.KINDS, "all"):
        of_kind = [v for v in verdicts if kind in (v.trial.fault.kind, "all")]
        if of_kind:
            found = Counter(name for v in of_kind for name in {name for name, _ in v.problems})
            right = sum(not v.problems for v in of_kind)
            rows.append((kind, *map(str, (len(of_kind), right, *(found[name] for name in PROBLEMS)))))
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    return [
        f"{row[0]:<{widths[0]}}  " + "  ".join(f"{c:>{w}}" for c, w in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]


def latencies(verdicts: Sequence[Verdict]) -> list[str]:
    """Returns how long the survivors took to raise, for each kind."""
    lines = []
    for kind in plan.KINDS:
        ms = sorted(1e3 * s for v in verdicts if v.trial.fault.kind == kind for s in v.latencies)
        if ms and kind != "none":
            since = "beyond the limit of the call" if kind == "stalled" else "since the fault"
            p99 = ms[min(len(ms) - 1, int(0.99 * len(ms)))]
            lines.append(
                f"{kind:<8} median {statistics.median(ms):.1f} ms, p99 {p99:.1f} ms, max {ms[-1]:.1f} ms {since} "
                f"({len(ms)} survivors)"
            )
    return lines


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--trials", type=int, default=1000)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--only", choices=plan.KINDS, help="trials of one kind")
    p.add_argument("--trial", type=int, metavar="N", help="that one alone")
    p.add_argument("--write", action="store_true", help=f"put the table into {RESULTS.name} of the results")
    a = p.parse_args()
    context = trials.prepare()
    verdicts: list[Verdict] = []
    for number in numbers(a):
        verdict = trials.run(plan.trial_of(a.seed, number), context)
        verdicts.append(verdict)
        if verdict.problems or a.trial is not None:
            print(f"{verdict.trial}", *(f"    {kind}: {text}" for kind, text in verdict.problems), sep="\n", flush=True)
    command = f"$ python -m benchmarks.collectives.faults {' '.join(sys.argv[1:])}"
    lines = [command, "", *table(verdicts), "", *latencies(verdicts)]
    print(*lines, sep="\n")
    if a.write:
        RESULTS.write_text("\n".join(lines) + "\n")
    raise SystemExit(any(v.problems for v in verdicts))


if __name__ == "__main__":
    main()
