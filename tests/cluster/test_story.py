"""The demo's verdict: one wrong answer or one fact that is not true, and it has failed."""

from __future__ import annotations

from dataclasses import replace

from headwater.demo.cluster_story import NODE, SHARED, Fact, as_json, document
from headwater.demo.story import Line

LINE = Line(SHARED, "B", 868, 768, "remote 768", {"remote": 768}, 0.5, 5.0, 0, identical=True)
FACT = Fact(NODE, "it heals", true=True, seconds=0.5, within_s=10.0)


def test_every_answer_and_every_fact_counts() -> None:
    assert as_json("here", [LINE], [FACT])["ok"] is True
    assert as_json("here", [LINE, replace(LINE, identical=False)], [FACT])["ok"] is False
    assert as_json("here", [LINE], [FACT, replace(FACT, true=False)])["ok"] is False
    assert as_json("here", [], [FACT])["ok"] is False


def test_documents_have_no_beginning_in_common() -> None:
    first, second = (document(topic)[0]["content"] for topic in ("oak", "elm"))
    assert first[:20] != second[:20]
    assert document("oak") == document("oak")
