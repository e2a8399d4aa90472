"""Pages of `meshscope explore` for twenty widely served models: `make explorers`, into the documentation site.

    python experiments/explorers.py build/site/explore              write the pages that are missing, and their index
    python experiments/explorers.py build/site/explore Qwen/Qwen3-8B   some of them

A page takes some 70 seconds of a core, and has 1.0 to 1.2 MB. The choice of models is ours: open weights that vLLM and SGLang have recipes
for, of each large family and of every size from 4 billion parameters on.
"""

import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from html import escape
from importlib.resources import files
from multiprocessing import get_context
from pathlib import Path

import meshscope

MODELS = (
    *(
        "Qwen/Qwen3-4B",
        "Qwen/Qwen3-8B",
        "Qwen/Qwen3-32B",
        "Qwen/Qwen3-30B-A3B",
        "Qwen/Qwen3-235B-A22B",
    ),
    *("Qwen/Qwen3-Coder-480B-A35B", "Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen2.5-72B"),
    *(
        "meta-llama/Llama-3.1-8B",
        "meta-llama/Llama-3.3-70B",
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    ),
    *(
        "openai/gpt-oss-20b",
        "openai/gpt-oss-120b",
        "deepseek-ai/DeepSeek-V3.1-Base",
        "deepseek-ai/DeepSeek-R1",
    ),
    *(
        "google/gemma-3-27b-it",
        "mistralai/Mixtral-8x7B-v0.1",
        "mistralai/Mistral-Small-24B-Instruct-2501",
    ),
    *("microsoft/phi-4", "zai-org/GLM-4.5-Air"),
)
TOPOLOGY = "v6e,tpu7x"


def write_page(model: str, folder: Path) -> str:
    """Writes the page of a model if it is missing, and returns its name."""
    path = folder / f"{model.replace('/', '--')}.html"
    if not path.exists():
        meshscope.explore(model, topology=TOPOLOGY, out=path)
    return path.name


def write_index(folder: Path) -> None:
    """Writes index.html, with a link to the page of every model that is there."""
    style = files("meshscope.reports.html").joinpath("page.css").read_text("utf-8")
    named = {
        path.name.removesuffix(".html").replace("--", "/"): path.name
        for path in sorted(folder.glob("*--*.html"))
    }
    items = "\n".join(
        f'<li><a href="{escape(page)}">{escape(model)}</a></li>' for model, page in named.items()
    )
    text = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>meshscope: plans of {len(named)} models</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>{style}</style></head><body><header><h1>Plans of {len(named)} models</h1>
<p class="lead">Pages in which you change slice, plan, batch, lengths, precision and price. Figures are predicted, as by
meshscope predict: device time, with intervals. <a href="../plan.html#explore-in-a-page">What they rest on</a></p></header>
<main><ul>
{items}
</ul></main></body></html>
"""
    (folder / "index.html").write_text(text, "utf-8")


def main(folder: str, *models: str) -> None:
    """Writes the pages on all cores, then the index."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(write_page, one, place) for one in models or MODELS]):
            sys.stdout.write(f"{done.result()}\n")
    write_index(place)


if __name__ == "__main__":
    main(*sys.argv[1:])
