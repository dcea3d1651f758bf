"""One real vLLM in a cluster: its prefix goes to another node, comes back from there, and may be out of reach."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.demo.beginning import MODEL
from headwater.demo.cluster_stage import Stage, open_network
from headwater.demo.cluster_story import Story
from headwater.demo.processes import Children
from headwater.types import Tier

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A directory, nodes A and C, and an engine on A."""
    with open_network(loopback=False) as network, Children() as children:
        stage = Stage(children, network, MODEL.resolve(), "256MiB", tmp_path, tmp_path)
        stage.start_directory()
        for name in ("A", "C"):
            stage.start_node(name)
        stage.start_engines(["A"])
        yield stage


def test_a_prefix_comes_from_another_node_and_a_cut_link_costs_little(stage: Stage) -> None:
    story = Story(stage, print)
    story.warm_up("A")
    story.move_to_c("oak")
    line = story.ask_peers("here", "A", "oak")
    assert all(it.identical for it in story.lines)
    assert line.tiers == {Tier.REMOTE.value: line.reused_tokens}, story.lines
    assert line.reused_tokens > line.prompt_tokens // 2

    stage.evict("A", story.keys["oak"])
    for pair in (("A", "C"), ("C", "A")):
        stage.network.cut(*pair)
    line = story.ask("cut", "A", "oak")
    assert (line.identical, line.reused_tokens) == (True, 0)
    story.say_in_time("cut", "computed in time", line)
    assert story.facts[-1].true, story.facts[-1]
