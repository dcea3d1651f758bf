"""What is said of a request is what it was, computed when somebody asks."""

from __future__ import annotations

import json

import pytest

from headwater.conductor.explaining import CANDIDATES
from headwater.fleet import Link, Place
from headwater.fleetfile.model import Slo
from headwater.types import Tier
from tests.conductor.brain.rig import BrainRig, prompt


def test_the_candidates_are_those_of_the_moment() -> None:
    rig = BrainRig(4, quiet=True)
    for number in range(9):
        rig.take(prompt(number, 300 + 100 * number))
    brain, asked = rig.brain, rig.job(prompt(3, 600))
    seen = []
    choose = brain.policy.choose

    def noting(ask, held, fleet):  # type: ignore[no-untyped-def]
        seen[:] = brain.policy.explain(ask, held, fleet)
        return choose(ask, held, fleet)

    brain.policy.choose = noting  # type: ignore[method-assign]
    brain.take(asked, lambda job, target: None, lambda job, refusal: None)
    brain.policy.choose = choose  # type: ignore[method-assign]
    for number in range(20, 60):  # and everything changes
        rig.take(prompt(number))
    said = brain.explained(asked.id)
    assert said is not None
    told = said["tries"][0]["candidates"]
    assert [it["instance"] for it in told] == [f"i{it.instance}" for it in seen]
    for mine, theirs in zip(told, seen, strict=True):
        for name in ("cost_s", "queue_s", "fetch_s", "prefill_s", "decode_s", "cached_tokens"):
            assert mine[name] == pytest.approx(getattr(theirs, name)), name
    assert said["tries"][0]["instance"] == told[0]["instance"]
    assert json.dumps(said)


def test_what_it_took() -> None:
    rig = BrainRig(2, slo=Slo(5.0, 1.0))
    rig.take(prompt(1), output=21)
    client = rig.take(prompt(1), output=21)
    waiting = rig.brain.explained(client.job.id)
    assert waiting is not None and waiting["outcome"] == "sent" and waiting["took"] == {}
    rig.timers.run(5.0)
    said = rig.brain.explained(client.job.id)
    assert said is not None and said["outcome"] == "whole"
    took, tried = said["took"], said["tries"][0]
    assert took["cached_tokens"] == 896 == tried["cached_tokens"] and took["answered_tokens"] == 21
    assert took["first_token_s"] == pytest.approx(tried["estimated"]["ttft_s"], rel=0.3)
    assert 0.004 < took["per_token_s"] < 0.02
    assert tried["verdict"] == "fits" and said["prompt_tokens"] == 900 and said["ttft_slo_s"] == 5.0


def test_retries_and_refusals() -> None:
    rig = BrainRig(3, quiet=True)
    client = rig.take(prompt(1))
    rig.lose(client, "closed")
    said = rig.brain.explained(client.job.id)
    assert said is not None
    first, second = said["tries"]
    assert first["lost"] == "closed" and "lost" not in second and first["instance"] != second["instance"]
    assert first["instance"] not in [it["instance"] for it in second["candidates"]]
    refused = rig.take(prompt(1), model="other")
    said = rig.brain.explained(refused.job.id)
    assert said is not None and said["outcome"] == "model_not_found" and not said["tries"]


def test_where_others_compute_the_same_is_said() -> None:
    rig = BrainRig(8, quiet=True)
    clients = [rig.take(prompt(1)) for _ in range(60)]
    said = rig.brain.explained(clients[-1].job.id)
    assert said is not None and said["tries"][0]["gathered"]


def test_sources_and_links_are_those_of_the_moment() -> None:
    rig = BrainRig(2, quiet=True)
    fleet = rig.brain.fleet
    for number, it in rig.roster.instances().items():
        it.node = number
    fleet.kv_bytes_per_token = 1000
    fleet.links = {(Place(Tier.HOST, source), node): Link(1e-3, 1e9) for source in (0, 1) for node in (0, 1)}
    rig.sight.extra = {Place(Tier.HOST, 1): 800}
    client = rig.take(prompt(1))
    fleet.links = {}
    fleet.kv_bytes_per_token = 0
    said = rig.brain.explained(client.job.id)
    assert said is not None
    tried = said["tries"][0]
    assert tried["source"] == "host:1" and tried["fetched_tokens"] == 800
    assert [it["fetched_tokens"] for it in tried["candidates"]] == [800, 800]
    assert tried["candidates"][0]["fetch_s"] == pytest.approx(tried["estimated"]["fetch_s"])


def test_other_policies_are_explained_by_their_seconds() -> None:
    rig = BrainRig(3, quiet=True, policy="round_robin")
    client = rig.take(prompt(1))
    said = rig.brain.explained(client.job.id)
    assert said is not None and len(said["tries"][0]["candidates"]) == 3


def test_of_many_the_interesting_ones_are_kept() -> None:
    rig = BrainRig(60, quiet=True)
    for number in range(30):
        rig.take(prompt(number))
    client = rig.take(prompt(3))
    said = rig.brain.explained(client.job.id)
    assert said is not None
    tried = said["tries"][0]
    assert tried["left_out"] == 60 - CANDIDATES and len(tried["candidates"]) == CANDIDATES
    assert tried["candidates"][0]["instance"] == tried["instance"]


def test_only_the_last_are_remembered_and_nothing_of_the_prompt() -> None:
    rig = BrainRig(2, quiet=True, explained=5)
    clients = [rig.take(prompt(it)) for it in range(8)]
    assert rig.brain.explained(clients[2].job.id) is None and rig.brain.explained(clients[3].job.id) is not None
    assert len(rig.brain.explanations) == 5
    key = clients[-1].job.lenses[0].keys[0]
    record = rig.brain.explanations._records[clients[-1].job.id]
    kept = [getattr(it, name) for it in (record, *record.tries) for name in it.__slots__]
    assert key.hex() not in repr(kept) and repr(key) not in repr(kept)
    nobody = BrainRig(2, explained=0)
    client = nobody.take(prompt(1))
    assert nobody.brain.explained(client.job.id) is None
