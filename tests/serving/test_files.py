"""A simulation over time: its page."""

import json
from pathlib import Path

import pytest

import meshscope
from meshscope.api.serve import ServingRun
from meshscope.errors import RunError, SpecError
from meshscope.reports.html.serving_page import serving_charts

ASK = {"topology": "v6e-4", "plan": "tp=4", "requests": 120}


@pytest.fixture(scope="module")
def served() -> ServingRun:
    return meshscope.serve_sim("Qwen/Qwen3-4B", apart="2:1", rate=40.0, output=32, **ASK)


def test_the_page_has_the_answer_and_its_charts(served: ServingRun, tmp_path: Path) -> None:
    served.save(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "Qwen/Qwen3-4B: 2 x v6e:2x2 tp=4 prefill, 1 x v6e:2x2 tp=4 decode" in text
    for part in (
        "stable: ",
        "Sequences in an engine",
        "Cache in use",
        "Tokens of a step",
        "over DCN",
    ):
        assert part in text
    start = text.index('<script type="application/json" id="data">')
    data = json.loads(text[text.index(">", start) + 1 : text.index("</script>", start)])
    charts = list(serving_charts(served.outcome))
    assert [one["kind"] for one in data["charts"]] == ["series"] * len(charts)
    lines = data["charts"][2]["spec"]["layer"][0]["data"]["values"]
    assert [line["name"] for line in lines] == ["prefill: prompt", "decode: decoded"]


def test_the_page_is_written_once_and_nothing_else_is(served: ServingRun, tmp_path: Path) -> None:
    served.save(tmp_path / "page.html")
    with pytest.raises(RunError, match="Use force=True to replace it"):
        served.save(tmp_path / "page.html")
    served.save(tmp_path / "page.html", force=True)
    with pytest.raises(SpecError, match=r"is no page\. Use the ending \.html"):
        served.save(tmp_path / "p.pdf")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_only_instances_that_decode_reserve_room_for_outputs() -> None:
    served = meshscope.serve_sim(
        "Qwen/Qwen3-4B", apart="1:1", rate=10.0, reserve_output=1.0, **ASK | {"requests": 4}
    )
    assert served.outcome.prefill.pool.policy.reserved_frac == 0.0
    assert served.outcome.main.pool.policy.reserved_frac == 1.0
