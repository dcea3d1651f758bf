"""What all workers say, as one fleet: pure functions from their states to what /fleet and /metrics answer.

Rows of the same thing (instances, sources of events, prefixes, tenants) are joined by its name. What each worker
counts for itself is added up (SUMMED). What is measured is averaged (AVERAGED). Any other number is something that
all of them know of the same thing (a load, a key count, gaps in the same events): the largest, since who lags behind
knows less. Of words that differ all are named.

A worker's /state has `brain`, `sight`, `tenants`, `tokens` and `counts`: what these say of themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

State = dict[str, Any]

SUMMED = frozenset(
    (
        "under_way",
        "waiting",
        "own_requests",
        "ended_requests",
        "prompt_tokens",
        "device_tokens",
        "fetched_tokens",
        "hits",
        "in_progress",
        "spent_tokens",
        "refused",
        "unknown_keys",
        "careless",
        "remembered",
        "remembered_bytes",
    )
)
AVERAGED = frozenset(("share", "prefill_tokens_s", "decode_step_s"))
NEEDED = frozenset(("alive", "up", "settled", "registered", "verified"))
"""What is so only if it is at every worker; other words of yes or no are so if they are at one."""
NAMES = ("name", "tenant", "key")
PARTS = ("brain", "sight", "tenants", "tokens")
HOTTEST = 16
WORDS = 3
RETIRED = -1


def merged(states: Sequence[State]) -> State:
    """The states of several workers as one, in PARTS."""
    found = {part: _join([it[part] for it in states if isinstance(it.get(part), dict)], False) for part in PARTS}
    hottest = found["sight"].get("hottest")
    if isinstance(hottest, list):
        rows = [row for row in hottest if isinstance(row, dict) and isinstance(row.get("hits"), int)]
        found["sight"]["hottest"] = sorted(rows, key=lambda row: -row["hits"])[:HOTTEST]
    return found


def _join(several: Sequence[State], summing: bool) -> State:
    """Dictionaries with the same meaning as one."""
    names = dict.fromkeys(name for it in several for name in it)
    return {
        name: _value(name, [it[name] for it in several if it.get(name) is not None], summing or name in SUMMED)
        for name in names
    }


def _value(name: str, values: Sequence[Any], summing: bool) -> Any:
    if not values:
        return None
    if all(isinstance(it, dict) for it in values):
        return _join(values, summing)
    if all(isinstance(it, list) for it in values):
        return _rows([row for it in values for row in it])
    if all(isinstance(it, bool) for it in values):
        return all(values) if name in NEEDED else any(values)
    if all(isinstance(it, int | float) for it in values):
        if name in AVERAGED:
            return sum(values) / len(values)
        return sum(values) if summing else max(values)
    words = list(dict.fromkeys(map(str, values)))
    return values[0] if len(words) == 1 else "/".join(words[:WORDS])


def _rows(rows: Sequence[Any]) -> list[Any]:
    """Rows with the same name as one; what has no name once each."""
    by_name: dict[str, list[State]] = {}
    others: list[Any] = []
    for row in rows:
        name = next((row[name] for name in NAMES if name in row), None) if isinstance(row, dict) else None
        if isinstance(name, str):
            by_name.setdefault(name, []).append(row)
        elif row not in others:
            others.append(row)
    return [_join(several, False) for several in by_name.values()] + others


class Counted:
    """What each worker counted, by its row, and under RETIRED what those counted that have ended since: so no sum ever
    goes back, whether a worker is busy or gone. What it counted between the last look and its end is lost."""

    def __init__(self) -> None:
        self.by_row: dict[int, State] = {}
        self.ended = 0
        self._pids: dict[int, Any] = {}

    def take(self, states: Mapping[int, State], running: Collection[int]) -> None:
        """The workers that answered. Those that only run stay as they were."""
        for row in [row for row in self._pids if row not in running]:
            self._retire(row)
        for row, state in states.items():
            if row in self._pids and self._pids[row] != state.get("pid"):
                self._retire(row)
            self._pids[row] = state.get("pid")
            if isinstance(state.get("counts"), dict):
                self.by_row[row] = state["counts"]

    def sums(self) -> State:
        """All of it as the counts of one."""
        found: State = {}
        for counts in self.by_row.values():
            found = _added(found, counts)
        return found

    def _retire(self, row: int) -> None:
        del self._pids[row]
        self.ended += 1
        self.by_row[RETIRED] = _added(self.by_row.get(RETIRED, {}), self.by_row.pop(row, {}))


def _added(one: State, other: State) -> State:
    """The sums of two states of counts."""
    numbers: dict[tuple[str, str], float] = {}
    histograms: dict[tuple[str, str], list[float]] = {}
    for counts in (one, other):
        for name, label, value in counts.get("numbers", ()):
            numbers[name, label] = numbers.get((name, label), 0) + value
        for name, label, row in counts.get("histograms", ()):
            known = histograms.get((name, label), [0.0] * len(row))
            histograms[name, label] = [a + b for a, b in zip(known, row, strict=True)]
    return {
        "numbers": [[name, label, value] for (name, label), value in numbers.items()],
        "histograms": [[name, label, row] for (name, label), row in histograms.items()],
    }


def percentiles(counts: State, name: str, bounds: Sequence[float]) -> dict[str, float] | None:
    """How many durations there were, and the bucket bounds that half and 90 % of them stayed within; None without any.
    What is longer than the last bound is told as that."""
    rows = [row for known, _, row in counts.get("histograms", ()) if known == name]
    buckets = [sum(column) for column in zip(*(row[:-1] for row in rows), strict=True)]
    total = sum(buckets)
    if not total:
        return None
    found = {"count": float(total)}
    for word, part in (("p50_s", 0.5), ("p90_s", 0.9)):
        seen, place = 0.0, 0
        while place < len(buckets) and seen + buckets[place] < part * total:
            seen += buckets[place]
            place += 1
        found[word] = bounds[min(place, len(bounds) - 1)]
    return found
