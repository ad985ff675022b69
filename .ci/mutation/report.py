"""What became of the mutants, in Markdown."""

from __future__ import annotations

from collections import Counter

from mutation.settings import DEAD, Config, Session


def table(session: Session, config: Config) -> tuple[list[str], dict[int, str], float]:
    """Return the lines of the table, the reason of every survivor, and the score in percent."""
    rows: dict[str, Counter[str]] = {}
    reasons = {}
    for number, result in sorted(session.results.items()):
        made = session.mutants[number]
        outcome = result["outcome"]
        row = rows.setdefault(made.module, Counter())
        if outcome not in DEAD:
            reasons[number] = config.equivalent.get(made.key, "")
            outcome = "equivalent" if reasons[number] else "survived"
        row[outcome] += 1
    lines = ["| module | mutants | killed | no import | timed out | survived | equivalent | % |",
             "| --- | --: | --: | --: | --: | --: | --: | --: |"]  # fmt: skip
    total: Counter[str] = Counter()
    for module, row in sorted(rows.items()):
        total += row
        lines.append(one_row(f"`{module}`", row))
    lines.append(one_row("all", total))
    return lines, reasons, score(total)


def score(row: Counter[str]) -> float:
    """Return the percentage of mutants that are not equivalent and that tests noticed."""
    dead = sum(row[outcome] for outcome in DEAD)
    return 100.0 * dead / max(dead + row["survived"], 1)


def one_row(name: str, row: Counter[str]) -> str:
    """Return a line of the table."""
    counts = (sum(row.values()), row["killed"], row["does not import"] + row["crashed"],
              row["timeout"], row["survived"], row["equivalent"])  # fmt: skip
    return f"| {name} | {' | '.join(map(str, counts))} | {score(row):.1f} |"
