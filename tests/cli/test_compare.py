"""`compare` between runs: what differs in the asking and in the doing."""

import json
import re

ASK = ("Qwen/Qwen3-32B", "--topology", "v6e-8", "--layers", "3")


def keep(meshscope, name: str, *options: str) -> None:
    assert meshscope("predict", *ASK, *options, "--out", name).status == 0


def test_equal_runs(meshscope) -> None:
    keep(meshscope, "a", "--plan", "tp=8")
    keep(meshscope, "b", "--plan", "tp=8")
    status, out, err = meshscope("compare", "a", "b")
    assert (status, err) == (0, "")
    assert "collectives: A = B" in out.splitlines()[:12]


def test_conditions_that_differ_stand_side_by_side(meshscope) -> None:
    keep(meshscope, "a", "--plan", "tp=8")
    keep(meshscope, "b", "--plan", "tp=8,sp")
    lines = [re.split("  +", line) for line in meshscope("compare", "a", "b").out.splitlines()]
    assert ["plan", "tp=8 on the mesh (tp=8)", "tp=8,sp on the mesh (tp=8)"] in lines
    assert ["run", "a", "b"] in lines
    assert not any(line[0] == "model" for line in lines)


def test_sequence_parallelism_is_told_as_changed_and_extra(meshscope) -> None:
    """Each all-reduce of prefill becomes a reduce-scatter, and an all-gather is added."""
    keep(meshscope, "a", "--plan", "tp=8")
    keep(meshscope, "b", "--plan", "tp=8,sp")
    document = json.loads(meshscope("compare", "a", "b", "--json").out)
    prefill = [
        (row["verdict"], row["right"]["part"], row["layers"], row["note"])
        for row in document["rows"]
        if (row["right"] or row["left"])["phase"] == "prefill" and row["verdict"] != "equal"
    ]
    changed = "all_reduce -> reduce_scatter"
    assert ("changed", "attn", [0, 1, 2], changed) in prefill
    assert ("changed", "mlp", [0, 1, 2], changed) in prefill
    assert ("extra", "attn", [0, 1, 2], None) in prefill
    assert ("extra", "mlp", [0, 1, 2], None) in prefill
    side = {"source": "predicted", "other_operations": []}
    assert document["left"] == {"name": "A", "run": "a", **side}
    assert document["verdict"] == "different"


def test_requests_of_different_length_differ_in_the_request_only(meshscope) -> None:
    keep(meshscope, "a", "--plan", "tp=8", "--output", "10")
    keep(meshscope, "b", "--plan", "tp=8", "--output", "20")
    assert "collectives: A = B" in meshscope("compare", "a", "b").out.splitlines()[:12]


def test_a_prediction_alone_has_nothing_to_compare_with(meshscope) -> None:
    keep(meshscope, "a", "--plan", "tp=8")
    status, out, err = meshscope("compare", "a")
    assert (status, out) == (1, "")
    assert err.endswith("Give a second run.\n")


def test_a_run_that_is_missing_is_named(meshscope) -> None:
    keep(meshscope, "a", "--plan", "tp=8")
    status, _, err = meshscope("compare", "a", "none")
    assert (status, err) == (
        1,
        "meshscope: no run at 'none'. Give the folder of a run, as compile prints it.\n",
    )


def test_the_difference_is_explained_in_sentences_and_as_json(meshscope) -> None:
    """Sequence parallelism sends as many bytes for a layer of prefill, in twice the collectives."""
    keep(meshscope, "a", "--plan", "tp=8", "--batch", "2")
    keep(meshscope, "b", "--plan", "tp=8,sp", "--batch", "2")
    out = " ".join(meshscope("compare", "a", "b").out.split())
    assert "decode: B and A send the same bytes per step" in out
    assert "3 all-gathers and 3 reduce-scatters in B, 3 all-reduces in A" in out
    document = json.loads(meshscope("compare", "a", "b", "--json").out)
    places = {
        (p["axis"], p["part"]): p for p in document["explanation"]["phases"]["prefill"]["places"]
    }
    assert places["tp", "mlp"]["right"]["kinds"] == {"all_gather": 3, "reduce_scatter": 3}
    assert places["tp", "mlp"]["wire_bytes_change"] == 0
    assert document["explanation"]["sentences"]
