"""`meshscope plan`: options of the search, its page, and options without effect."""

import json

import pytest

SMALL = ("plan", "Qwen/Qwen3-4B", "--topology", "v6e-4", "--batch", "8")


def test_the_page_and_the_picture_are_written_beside_the_answer(meshscope, tmp_path) -> None:
    files = [tmp_path / "plan.html", tmp_path / "front.png"]
    words = ("--report", str(files[0]), "--plot", str(files[1]))
    answer = meshscope(*SMALL, *words)
    assert "best for request tokens/s per chip" in answer.out
    assert all(path.stat().st_size > 1000 for path in files)
    before = files[0].read_bytes()
    refused = meshscope(*SMALL, *words)
    assert refused.status == 1
    assert "--force" in refused.err
    assert files[0].read_bytes() == before
    meshscope(*SMALL, *words, "--force")


def test_fewer_layers_take_less_time(meshscope) -> None:
    whole, half = (
        json.loads(meshscope(*SMALL, *words, "--json").out)["winner"]
        for words in ((), ("--layers", "18"))
    )
    assert half["tpot_s"] < 0.7 * whole["tpot_s"]
    refused = meshscope(*SMALL, "--layers", "99")
    assert refused.status == 1
    assert "Use 1 to 36" in refused.err


@pytest.mark.parametrize(
    ("chunk", "expected"), [("off", {None}), ("2048", {2048}), ("auto", {None, 2048, 8192})]
)
def test_prefill_chunk_chooses_the_chunks_to_try(meshscope, chunk, expected) -> None:
    document = json.loads(meshscope(*SMALL, "--prefill-chunk", chunk, "--json").out)
    assert {choice["prefill_chunk"] for choice in document["front"]} <= expected
    plans = {choice["plan"] for choice in document["best"]}
    assert any("pp=" in plan for plan in plans) is (chunk != "2048")


def test_plans_without_the_chunk_are_counted_with_the_reason(meshscope) -> None:
    document = json.loads(meshscope(*SMALL, "--prefill-chunk", "2048", "--json").out)
    assert document["space"]["n_refused"]["prefill cannot run in chunks of --prefill-chunk"] > 0


def test_if_every_plan_is_refused_the_answer_does_not_blame_the_memory(meshscope, tmp_path) -> None:
    page = tmp_path / "plan.html"
    answer = meshscope(*SMALL, "--prefill-chunk", "777", "--report", str(page))
    assert "no plan is left" in answer.out
    assert "as prefill cannot run in chunks of --prefill-chunk" in " ".join(answer.out.split())
    assert "does not fit" not in page.read_text(encoding="utf-8").partition("</header>")[0]


def test_dtype_is_that_of_activations_and_of_what_is_not_quantized(meshscope) -> None:
    document = json.loads(meshscope(*SMALL, "--dtype", "f32", "--json").out)
    choices = [*document["front"], document["unquantized"]]
    assert {choice["weight_dtype"] for choice in choices} == {"f32", "s8"}
    assert document["unquantized"]["cache_dtype"] == "f32"
