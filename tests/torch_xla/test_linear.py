"""The gated delta rule in chunks gives what it gives position by position."""

import pytest

pytest.importorskip("torch_xla.core", reason="the extra 'torchxla' has an environment of its own")
torch = pytest.importorskip("torch")

from meshscope.programs.torchxla.linear import (  # noqa: E402
    chunked_delta_rule,
    delta_step,
    unit_lower_inverse,
)


@pytest.mark.parametrize("n_positions", [1, 63, 64, 130])
@pytest.mark.parametrize("is_repeated", [False, True])
def test_chunks_equal_steps(n_positions: int, *, is_repeated: bool) -> None:
    """Also with one key in all positions, where powers of the products would overflow float32."""
    torch.manual_seed(0)
    q, k = (torch.randn(2, n_positions, 3, 8) for _ in range(2))
    if is_repeated:
        k = k[:, :1].expand_as(k)
    q, k = (y / y.norm(dim=-1, keepdim=True) for y in (q, k))
    v, log_decay = torch.randn(2, n_positions, 3, 4), -0.1 * torch.rand(2, n_positions, 3)
    rate, state = torch.rand(2, n_positions, 3), torch.randn(2, 3, 8, 4)

    out, last = chunked_delta_rule(q, k, v, log_decay, rate, state)

    outputs = []
    for at in range(n_positions):
        given = (y[:, at : at + 1] for y in (q, k, v, log_decay, rate))
        step, state = delta_step(*given, state)
        outputs.append(step)
    torch.testing.assert_close(out, torch.cat(outputs, dim=1), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(last, state, atol=2e-5, rtol=2e-5)


def test_the_inverse_of_a_triangle_is_exact() -> None:
    torch.manual_seed(0)
    lower = torch.tril(torch.rand(2, 1, 1, 64, 64, dtype=torch.float64), diagonal=-1)
    product = unit_lower_inverse(lower) @ (lower + torch.eye(64, dtype=torch.float64))
    torch.testing.assert_close(product, torch.eye(64, dtype=torch.float64).expand_as(product))
