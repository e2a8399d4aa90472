"""An indexer chooses the same positions on all devices of cp as on one."""

from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="the extra 'torchxla' has an environment of its own")
pytest.importorskip("torch_xla", reason="the extra 'torchxla' has an environment of its own")

from meshscope.programs.torchxla.indexer import best, best_of_all  # noqa: E402  after the skip


@pytest.mark.parametrize("n_best", [1, 5, 12, 30])
def test_split_scores_have_the_same_best(n_best: int) -> None:
    """Also if many scores are equal, and if a device has fewer than `n_best` of them."""
    torch.manual_seed(0)
    scores = torch.randint(0, 4, (2, 3, 24)).float()
    parts = scores.split(8, dim=-1)

    def gathered(_: object) -> object:
        return torch.cat([torch.topk(x, min(n_best, 8), dim=-1).values for x in parts], dim=-1)

    choose = partial(best_of_all, n_best=n_best, gathered=gathered)
    chosen = [choose(part, rank=torch.tensor([rank])) for rank, part in enumerate(parts)]

    assert torch.equal(torch.cat(chosen, dim=-1), best(scores, n_best))
