"""A request as the brain keeps it, from when it was taken until it ended or was refused."""

from __future__ import annotations

from headwater.conductor.explaining import Record
from headwater.conductor.job import Job, Refused, Sent
from headwater.conductor.timers import Timer
from headwater.fleet import Ask, Choice


class Flight:
    """One job. `name` is its name in book, admission and shares: ours, so that no two are the same whatever clients
    call theirs."""

    __slots__ = (
        "answered",
        "ask",
        "asked",
        "choice",
        "computed_s",
        "counted_tokens",
        "decoders",
        "excluded",
        "first_s",
        "handed",
        "handing",
        "job",
        "losses",
        "name",
        "presumed_s",
        "pushed_s",
        "queued",
        "record",
        "refused",
        "sent",
        "taught",
        "waits",
    )

    def __init__(self, name: str, job: Job, ask: Ask, sent: Sent, refused: Refused) -> None:
        self.name, self.job, self.ask, self.sent, self.refused = name, job, ask, sent, refused
        self.asked = ask
        """As it was asked at first; in `ask` of one that goes on elsewhere, the prompt has what was answered."""
        self.choice: Choice | None = None
        """None while it is at no instance."""
        self.excluded: set[int] = set()
        """Instances that it was lost with."""
        self.waits = False
        self.pushed_s = 0.0
        self.first_s = 0.0
        """When its first token came from this instance; 0 if it has not."""
        self.answered = False
        """Whether a first token came from anywhere."""
        self.presumed_s = 0.0
        """When it is taken to have begun, where nobody says so; 0 if somebody does, or it has."""
        self.handed = False
        """Of a pair: whether its first leg is over."""
        self.computed_s = 0.0
        """When that had computed the prompt; 0 if it has not."""
        self.handing: Timer | None = None
        """When the prompt's KV is looked for next."""
        self.taught = False
        """Whether its first token has taught how fast its instance is."""
        self.losses = 0
        self.queued = (0, 0)
        """Requests and tokens that waited there when it was sent."""
        self.decoders = (0, 0)
        """Requests and KV tokens that decoded there at its first token, itself included."""
        self.counted_tokens = 0
        """What of its answer is in the book."""
        self.record: Record | None = None
