"""Prices of chips: list prices (`prices.toml`) or a user's own, and what a million tokens cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshscope.errors import SpecError
from meshscope.files import own_table
from meshscope.hardware.chips import chip_of
from meshscope.hardware.topology import Topology
from meshscope.serving.simulation import PlacedPool, RequestFigures
from meshscope.units import decimal_number

LIST = "list"
PRICES_HELP = "CHIP=PRICE,...|list: Prices per chip hour, or the list prices of Google Cloud"


_TABLE = own_table("serving/prices.toml")
LIST_PRICES: dict[str, float] = _TABLE["prices"]  # dollars per chip hour
LIST_NOTE = f"prices: list prices on demand of {_TABLE['date']} ({_TABLE['source']})"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrices:
    """Dollars per million tokens.

    Input tokens pay for the time that their prefill takes, output tokens for the rest: together, the whole slice.
    """

    input: float
    output: float

    def __str__(self) -> str:
        return f"${self.input:,.3g}/M input, ${self.output:,.3g}/M output tokens"


def token_prices(
    dollars_per_s: float, *, input_frac: float, input_per_s: float, output_per_s: float
) -> TokenPrices:
    """The prices of tokens at these rates, if `input_frac` of the time is prefill."""
    return TokenPrices(
        input=1e6 * dollars_per_s * input_frac / input_per_s,
        output=1e6 * dollars_per_s * (1 - input_frac) / output_per_s,
    )


def batch_prices(
    topology: Topology, batch: Mapping[str, Any], prices: Mapping[str, float]
) -> TokenPrices | None:
    """What tokens cost with one batch of requests at a time; None without a price of the chip, or times.

    `batch` has the keys `batch`, `prompt`, `output`, `ttft_s` and `e2e_s` of a run's document.
    """
    hour, whole_s = price_per_hour(topology, prices), batch["e2e_s"]
    if hour is None or whole_s is None or batch["ttft_s"] is None:
        return None
    return token_prices(
        hour / 3600,
        input_frac=batch["ttft_s"] / whole_s,
        input_per_s=batch["batch"] * batch["prompt"] / whole_s,
        output_per_s=batch["batch"] * batch["output"] / whole_s,
    )


def served_prices(
    placed: PlacedPool, figures: RequestFigures, prompt: float, prices: Mapping[str, float]
) -> TokenPrices | None:
    """What tokens cost at the rates of a simulated server; None without a price of its chip.

    Prefill takes the time of its chunks alone, on as many engines as there are.
    """
    if (hour := price_per_hour(placed.experiment.topology, prices)) is None:
        return None
    pool, left, prefill_s = placed.pool, round(prompt), 0.0
    while left > 0:
        n_tokens = min(left, pool.policy.max_step_tokens)
        prefill_s += pool.costs.mixed_s(0, 0.0, n_tokens, float(round(prompt) - left))
        left -= n_tokens
    prompts_per_s = figures.requests_per_s
    return token_prices(
        hour * placed.n_instances / 3600,
        input_frac=min(1.0, prompts_per_s / pool.n_engines * prefill_s),
        input_per_s=prompts_per_s * prompt,
        output_per_s=figures.output_tokens_per_s,
    )


def prices_of(text: str | None) -> dict[str, float] | None:
    """The prices per chip hour of an option; None without it."""
    return None if text is None else parse_prices(text)


def parse_prices(text: str) -> dict[str, float]:
    """Prices per chip hour of `v6e=2.7,v5e=1.2`, or the list prices; SpecError for anything else."""
    if text.strip() == LIST:
        return {**LIST_PRICES}
    prices: dict[str, float] = {}
    for item in text.split(","):
        name, _, value = (word.strip() for word in item.partition("="))
        chip = chip_of(name).name
        if chip in prices:
            raise SpecError(f"--prices '{text}': {chip} appears twice. Give it once.")
        try:
            price = decimal_number(value)
        except ValueError:
            price = 0.0
        if not 0 < price < float("inf"):
            raise SpecError(
                f"--prices '{text}': {chip}='{value}' is no positive price. Use for example {chip}=2.7."
            )
        prices[chip] = price
    return prices


def price_per_hour(topology: Topology, prices: Mapping[str, float] | None) -> float | None:
    """The price of a slice per hour, None if its chip has none; its number of chips without prices."""
    price = 1.0 if prices is None else prices.get(topology.chip.name)
    return None if price is None else topology.n_chips * price
