import math

import pytest
import torch

from runtime.backends.torch.ops import gumbel_noise

WORD = 2**64
IDS = torch.arange(2000)


def noise(seed: int, position: int, ids: torch.Tensor = IDS) -> torch.Tensor:
    return gumbel_noise(torch.tensor([seed]), torch.tensor([position]), ids)[0]


def plain_python_noise(seed: int, position: int, token_id: int) -> float:
    """SplitMix64 with Python's integers."""

    def mix(word: int) -> int:
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
        return word ^ (word >> 31)

    gamma = 0x9E3779B97F4A7C15
    stream = mix(mix((seed + gamma) % WORD) ^ ((position + 1) * gamma % WORD))
    word = mix((stream + (token_id + 1) * gamma) % WORD)
    return -math.log(-math.log(((word >> 12) + 0.5) / 2**52))


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**63 - 1])
@pytest.mark.parametrize("position", [0, 7, 10**6])
def test_is_the_documented_hash(seed, position):
    found = noise(seed, position, torch.tensor([0, 1, 5, 151_935]))
    expected = [plain_python_noise(seed, position, token) for token in (0, 1, 5, 151_935)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_first_output_of_splitmix64():
    """The published generator, seeded with 0, begins with 0xE220A8397B1DCDAF: token 0 of stream 0."""
    from runtime.backends.torch.ops import GAMMA, _mix

    assert int(_mix(torch.tensor([0]) + GAMMA)) % WORD == 0xE220A8397B1DCDAF


def test_a_row_depends_on_its_own_seed_position_and_ids_only():
    seeds, positions = torch.tensor([3, 9, 3]), torch.tensor([5, 5, 6])
    rows = gumbel_noise(seeds, positions, IDS)
    for row in range(3):
        assert torch.equal(rows[row], noise(int(seeds[row]), int(positions[row])))
    some = torch.tensor([[9, 4], [0, 1999], [7, 7]])
    assert torch.equal(gumbel_noise(seeds, positions, some), rows.gather(1, some))


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Gumbel noise back to what should be uniform in (0, 1)."""
    return (-(-gumbel_noise(seeds, positions, ids)).exp()).exp()


STREAMS = {
    "tokens of one stream": (torch.tensor([1]), torch.tensor([2]), torch.arange(100_000)),
    "positions of one seed": (torch.zeros(100_000, dtype=torch.int64), torch.arange(100_000), torch.tensor([5])),
    "seeds one after the other": (torch.arange(100_000), torch.zeros(100_000, dtype=torch.int64), torch.tensor([5])),
}


@pytest.mark.parametrize("name", STREAMS)
def test_is_uniform_and_uncorrelated_along(name):
    u = uniforms(*STREAMS[name]).flatten()
    n = len(u)
    counts = torch.histc(u, bins=256, min=0, max=1)
    chi_square = ((counts - n / 256) ** 2 / (n / 256)).sum().item()
    assert abs(chi_square - 255) < 6 * math.sqrt(2 * 255)
    for lag in (1, 2, 64):
        correlation = torch.corrcoef(torch.stack((u[lag:], u[:-lag])))[0, 1].item()
        assert abs(correlation) < 5 / math.sqrt(n)


def test_moments_and_range():
    g = noise(7, 7, torch.arange(400_000))
    assert g.dtype == torch.float64
    assert g.isfinite().all()
    assert abs(g.mean().item() - 0.5772156649) < 5 * math.pi / math.sqrt(6 * 400_000)
    assert abs(g.var().item() - math.pi**2 / 6) < 0.03


def test_every_input_bit_matters():
    base = noise(0, 0)
    for bit in range(0, 63, 7):
        assert not torch.equal(noise(1 << bit, 0), base)
        assert not torch.equal(noise(0, 1 << bit), base)
