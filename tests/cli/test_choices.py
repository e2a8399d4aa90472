"""`meshscope topologies` and `meshscope models`: what a user can choose from."""

import json

import pytest
from tables import table

from meshscope.hardware.chips import CHIPS, GIB
from meshscope.hardware.topology import cloud_name, every_slice, parse_topology, standard_slices
from meshscope.model.catalog import catalog


@pytest.mark.parametrize("arguments", [("topologies",), ("topologies", "v5p"), ("models",)])
def test_a_list_fits_80_columns(meshscope, monkeypatch, arguments) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = meshscope(*arguments)
    assert (outcome.status, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)


def test_every_model_has_a_line_with_its_whole_id(meshscope, monkeypatch) -> None:
    """An id can be copied from a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    words = [line.split(" ")[0] for line in meshscope("models", "--full").out.splitlines()]
    assert set(catalog()) <= set(words)


def test_a_slice_has_the_memory_and_peaks_of_its_chips(meshscope) -> None:
    slices = {row["cloud_name"]: row for row in json.loads(meshscope("topologies", "--json").out)}
    assert slices["v6e-8"]["name"] == "v6e:2x4"
    assert slices["v6e-8"]["hbm_bytes"] == 8 * 31.25 * GIB
    assert slices["tpu7x-8"]["n_devices"] == 8  # four chips of two devices
    assert slices["tpu7x-8"]["bf16_flops_per_s"] == 4 * 2.307e15
    assert (slices["v6e-128"]["wraps"], slices["v5p-64"]["wraps"]) == (["y"], [])
    assert slices["v5p-128"]["wraps"] == ["x", "y", "z"]


def test_slices_reach_from_a_host_or_chip_to_the_pod_and_have_cloud_names() -> None:
    """cloud.google.com/tpu/docs, pages of v5e and v6e: 1x1 to 16x16."""
    assert [t.name for t in standard_slices(CHIPS["v6e"])][::7] == ["v6e:1x1", "v6e:16x16"]
    sizes = [t.n_chips for t in standard_slices(CHIPS["v4"])]
    assert (sizes[0], sizes[-1]) == (4, 4096)
    for topology in every_slice():
        assert parse_topology(cloud_name(topology.chip, topology.n_chips)) == topology


def test_models_lists_the_whole_catalog_by_owner_family_and_size(meshscope) -> None:
    rows = json.loads(meshscope("models", "--json").out)
    assert sorted(row["id"] for row in rows) == sorted(catalog())
    (llama,) = (row for row in rows if row["id"] == "meta-llama/Llama-3.1-8B")
    assert llama["n_parameters"] == 8_030_261_248  # the checkpoint's, as the Hub counts them
    assert llama["n_active_parameters"] == llama["n_parameters"]
    assert llama["weight_bytes"] == 2 * llama["n_parameters"]
    rows = json.loads(meshscope("models", "--json").out)
    places = [(row["id"].split("/")[0].lower(), row["family"], row["n_parameters"]) for row in rows]
    assert places == sorted(places)


@table
def test_a_search_finds_ids_aliases_and_families(meshscope, search, model) -> None:
    assert model in [row["id"] for row in json.loads(meshscope("models", search, "--json").out)]
