"""What is owed to long prompts, so that they are not starved by short ones at overload.

That short ones go first is right while all cannot be served: a long prompt costs the work of many. But of the long work
that is turned away a share is owed, and when it is enough for one, it is paid in one of two ways:

    queue    room is made on the instance where one was turned away: everybody there is tested as if as long as the
             longest, so that its queue gets short enough. No work is lost by that, as it does not get empty
    crowd    the next one may push those who decode over their TPOT SLO. Making room there as well would mean to leave
             the instance all but idle, which costs more
"""

from __future__ import annotations

LONG_SHARE = 0.1
"""What long prompts are owed: so much of what is turned away of them, but not more than so much of the time of all
instances. At four times the load that fits, that costs a tenth of the goodput or less. 0 lets them starve."""
ROOM_MOST_S = 10.0
"""For so long room is made for a long prompt that may not come; a queue at its SLO empties in less."""
LONG_TIMES = 3.0
"""A prompt is long that costs so many times what those cost who get in; others need nobody to stand back for them."""
USUAL_GAIN = 0.02
"""The share of each who got in, in what they cost: the mean of about the last fifty."""
LONG_HALF_S = 60.0
"""How fast it is forgotten how long a long prompt is."""


class Owed:
    """What long prompts are owed, in seconds of prefill, and the instances where room is made for one."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.credit_s = self.longest_s = self.usual_s = self.at_s = 0.0
        self.rooms: dict[int, tuple[float, float]] = {}
        """How long a prompt room is made for, and until when."""

    def room_s(self, instance: int, now: float) -> float:
        """What everybody is taken to need there at the least."""
        room = self.rooms.get(instance) if self.rooms else None
        return room[0] if room is not None and now < room[1] else 0.0

    def pays(self, own_s: float) -> bool:
        """Whether it is a long prompt, and owed for."""
        return self.credit_s >= own_s and self.long(own_s)

    def long(self, own_s: float) -> bool:
        """Whether it is among the longest, and those who get in are much shorter."""
        return own_s >= self.longest_s / 2 and own_s > LONG_TIMES * self.usual_s

    def refused(self, instance: int, own_s: float, now: float, instances: int, *, queued: bool) -> None:
        """One was turned away that would have fitted an idle instance; `queued`: because of the queue."""
        past_s, self.at_s = now - self.at_s, now
        self.longest_s = max(own_s, self.longest_s * 2.0 ** (-past_s / LONG_HALF_S))
        if not self.long(own_s):
            return
        earned_s = self.share * min(own_s, past_s * instances)
        self.credit_s = min(self.credit_s + earned_s, self.longest_s * max(self.share * instances, 1.0))
        if queued and self.pays(own_s) and not self.room_s(instance, now):
            self.credit_s -= own_s
            self.rooms[instance] = self.longest_s, now + ROOM_MOST_S

    def admitted(self, instance: int, own_s: float, *, pays: bool) -> None:
        """One got in that took so long of its own; `pays`: because it was owed for."""
        self.usual_s += USUAL_GAIN * (own_s - self.usual_s)
        if pays:
            self.credit_s = max(self.credit_s - own_s, 0.0)
        room = self.rooms.get(instance)
        if room is not None and own_s >= room[0] / 2:
            del self.rooms[instance]
