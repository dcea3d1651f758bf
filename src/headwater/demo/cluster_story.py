"""The acts of the cluster's demo: what is asked, what is broken meanwhile, and what must be true of it.

Theory of operation. Each act has documents of its own, so that nobody has them from before. Every request is made twice
on its instance, first without any cache: the answers must be equal, whatever is broken.

    shared      A computes, B finds it on A
    node        C alone holds a document: B finds it there. C holds another one and is killed: B computes it
    directory   it is killed: B still finds on A what it has located before. It comes back empty: the nodes tell it all
                again, and B finds what A has computed meanwhile
    link        what A and B send to each other is lost: B computes; the link is mended: B finds it on A again
    drain       A hands over what it alone holds, and ends; B finds it elsewhere
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from headwater.demo.cluster_stage import Stage
from headwater.demo.requests import Answer, Chat, ask
from headwater.demo.story import Line, ask_with_cache, wait_for_rest
from headwater.errors import UnavailableError
from headwater.types import ChunkKey, Tier

SHARED, NODE, DIRECTORY, LINK, DRAIN = "shared", "node", "directory", "link", "drain"
ENGINES = ("A", "B")
FACTS = 32
BUDGET_S = 5.0
"""What the cache may cost a request at most when all that it relies on is broken."""
NOISE = 1.5
TRIES = 3
HEAL_S = 10.0
ANNOUNCED_S = 5.0


@dataclass(frozen=True)
class Fact:
    """What must be true, and after how long it was: `within_s` is what is allowed, None where no time matters."""

    act: str
    text: str
    true: bool
    seconds: float | None = None
    within_s: float | None = None


def document(topic: str) -> Chat:
    """About 600 tokens that no other document begins with, and a question."""
    rings = " ".join(
        f"The {topic} number {n} stands in row {n * 7 % 41} and has {n * n % 89} rings." for n in range(1, FACTS + 1)
    )
    text = f"Notes on every {topic} of the garden, to be used as the only source. {rings}"
    return [{"role": "system", "content": text}, {"role": "user", "content": f"How many rings has {topic} 12?"}]


class Story:
    """Plays all acts on a stage; `lines` and `facts` are what came of them."""

    def __init__(self, stage: Stage, begin: Callable[[str], None]) -> None:
        self._stage, self._begin = stage, begin
        self.lines: list[Line] = []
        self.facts: list[Fact] = []
        self._plain: dict[tuple[str, str], Answer] = {}
        self.keys: dict[str, list[ChunkKey]] = {}
        """Of each document that was asked about."""

    def play(self) -> None:
        """All of it; raises UnavailableError if a request fails."""
        for name in ENGINES:
            self.warm_up(name)
        self._share()
        self._lose_node()
        self._lose_directory()
        self._lose_link()
        self._drain()

    # ---- acts -----------------------------------------------------------------------------------------

    def _share(self) -> None:
        self._begin("A computes a document")
        self.ask(SHARED, "A", "oak")
        self._settle("oak")
        self._begin("B is asked the same")
        line = self.ask_peers(SHARED, "B", "oak")
        self._say(SHARED, "B took A's prefix from A's node", from_peers(line))

    def _lose_node(self) -> None:
        stage = self._stage
        self._begin("C alone holds the next document")
        self.move_to_c("elm")
        line = self.ask_peers(NODE, "B", "elm")
        self._say(NODE, "B took it from C's node", from_peers(line))
        self._begin("C alone holds a third one, and is killed")
        self.move_to_c("ash")
        stage.kill_node("C")
        line = self.ask(NODE, "B", "ash")
        self.say_in_time(NODE, "C is dead: B computes, with little loss of time", line)
        self._begin("another replica serves what C had, too")
        stage.evict("A", self.keys["elm"])
        line = self.ask_peers(NODE, "A", "elm")
        self._say(NODE, "A took C's other document from B, who had read it", from_peers(line))

    def _lose_directory(self) -> None:
        stage = self._stage
        self._begin("the directory is killed")
        stage.evict("B", self.keys["oak"])
        stage.kill_directory()
        line = self.ask_peers(DIRECTORY, "B", "oak")
        self._say(DIRECTORY, "without a directory, B found on A what it had located before", from_peers(line))
        line = self.ask(DIRECTORY, "A", "yew")
        self.say_in_time(DIRECTORY, "without a directory, A computed and kept a new document", line)
        self._begin("the directory comes back, empty")
        stage.start_directory()
        expected = self.keys["oak"] + self.keys["elm"] + self.keys["yew"]
        took_s = stage.wait_until(lambda: stage.listed(expected) == len(expected), HEAL_S)
        self._say(DIRECTORY, "the nodes told the empty directory every key again", took_s <= HEAL_S, took_s, HEAL_S)
        line = self.ask_peers(DIRECTORY, "B", "yew")
        self._say(DIRECTORY, "B found on A what A had computed meanwhile", from_peers(line))

    def _lose_link(self) -> None:
        stage = self._stage
        self._begin("the link between A and B is cut")
        self.ask(LINK, "A", "fir")
        self._settle("fir")
        for pair in (("A", "B"), ("B", "A")):
            stage.network.cut(*pair)
        line = self.ask(LINK, "B", "fir")
        self.say_in_time(LINK, "the link is cut: B computes, within the budget", line)
        self._begin("the link is mended")
        stage.evict("B", self.keys["fir"])
        for pair in (("A", "B"), ("B", "A")):
            stage.network.mend(*pair)
        count = len(self.keys["fir"])
        took_s = stage.wait_until(lambda: stage.pull("B", self.keys["fir"], 1.0) == count, HEAL_S)
        self._say(LINK, "B reads from A again", took_s <= HEAL_S, took_s, HEAL_S)
        stage.evict("B", self.keys["fir"])
        line = self.ask_peers(LINK, "B", "fir")
        self._say(LINK, "B's engine took the document from A", from_peers(line))

    def _drain(self) -> None:
        stage = self._stage
        self._begin("C comes back; A is drained and ends")
        stage.start_node("C")
        self.ask(DRAIN, "A", "bay")
        self._settle("bay")
        drained = stage.drain_node("A")
        line = self.ask(DRAIN, "B", "bay")
        local = sum(line.tiers.get(it.value, 0) for it in (Tier.HOST, Tier.REMOTE))
        self._say(DRAIN, "A is gone, and B has what only A had", drained and local > line.prompt_tokens // 2)

    # ---- steps ----------------------------------------------------------------------------------------

    def warm_up(self, name: str) -> None:
        """An engine that has computed nothing yet is slow at first, and cannot say what fetching would have to beat."""
        self._begin(f"{name} warms up")
        ask(self._stage.servers[name], document(f"weed{name}"), without_cache=True)

    def ask(self, act: str, name: str, topic: str) -> Line:
        """Ask about a document, once without any cache if that was not done yet, and then with it."""
        server, chat = self._stage.servers[name], document(topic)
        if (name, topic) not in self._plain:
            self._plain[name, topic] = ask(server, chat, without_cache=True)
        line, _ = ask_with_cache(act, server, self._stage.socket(name), chat, self._plain[name, topic])
        if topic not in self.keys:
            self.keys[topic] = self._stage.keys(name, chat)
        self.lines.append(line)
        return line

    def ask_peers(self, act: str, name: str, topic: str) -> Line:
        """The same for what other nodes have, and not this one; again, if the node gave up reading it.

        A node waits for its peers a tenth of what computing would take: on a machine that is busy with other things the
        first reads over a link, whose speed is not known yet, may take longer.
        """
        for _ in range(TRIES):
            line = self.ask(act, name, topic)
            if from_peers(line):
                break
            self._stage.evict(name, self.keys[topic])
        return line

    def _settle(self, topic: str) -> None:
        """Wait until the directory has a document."""
        keys = self.keys[topic]
        if self._stage.wait_until(lambda: self._stage.listed(keys) == len(keys), ANNOUNCED_S) > ANNOUNCED_S:
            raise UnavailableError(f"the directory does not list what was computed within {ANNOUNCED_S:.0f} s")

    def move_to_c(self, topic: str) -> None:
        """A computes a document, C reads it, A forgets it."""
        self.ask(NODE, "A", topic)
        self._settle(topic)
        keys = self.keys[topic]
        if self._stage.pull("C", keys) != len(keys):
            raise UnavailableError("C could not read from A")
        self._stage.evict("A", keys)
        wait_for_rest(self._stage.socket("C"))

    def _say(
        self, act: str, text: str, true: bool, seconds: float | None = None, within_s: float | None = None
    ) -> None:
        self.facts.append(Fact(act, text, true, None if seconds is None else round(seconds, 3), within_s))

    def say_in_time(self, act: str, text: str, line: Line) -> None:
        """It must be true that a request cost hardly more than computing."""
        allowed_s = line.ttft_uncached_s * NOISE + BUDGET_S
        self._say(act, text, line.ttft_s <= allowed_s, line.ttft_s, round(allowed_s, 2))


def from_peers(line: Line) -> bool:
    """Whether a request took most of its prompt from other nodes."""
    return line.tiers.get(Tier.REMOTE.value, 0) > line.prompt_tokens // 2


def as_json(words: str, lines: list[Line], facts: list[Fact]) -> dict[str, object]:
    """The contract of `headwater demo-cluster --json`."""
    ok = bool(lines) and all(it.identical for it in lines) and all(it.true for it in facts)
    return {"ok": ok, "network": words, "requests": [asdict(it) for it in lines], "facts": [asdict(it) for it in facts]}
