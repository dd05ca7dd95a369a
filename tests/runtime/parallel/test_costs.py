"""Bytes and operations of the messages among ranks follow from the sizes of a model."""

from decoder_configs import decoder_config

from runtime.parallel.costs import LINKS, Link, logits_traffic, stages_traffic, step_traffic, sums_traffic

LAYERS, HIDDEN = 3, 64


def test_sums_after_each_mixer_and_mlp() -> None:
    spec = decoder_config(4, 2, 16, LAYERS).spec
    two, four = (sums_traffic(spec, ranks, 5, 2) for ranks in (2, 4))
    assert two.operations == four.operations == 1 + 2 * LAYERS
    assert (two.steps, four.steps) == (2 * two.operations, 6 * two.operations)
    assert two.nbytes == two.operations * 5 * HIDDEN * 2
    assert four.nbytes == 1.5 * two.nbytes


def test_stages_pass_each_hidden_state_once() -> None:
    spec = decoder_config(4, 2, 16, LAYERS).spec
    assert stages_traffic(spec, 3, 5, 2).nbytes == 3 * 5 * HIDDEN * 2
    assert stages_traffic(spec, 3, 5, 2).operations == 3


def test_one_process_sends_nothing_and_slow_links_take_longer() -> None:
    spec = decoder_config(4, 2, 16, LAYERS).spec
    assert not any(part.nbytes or part.operations for part in step_traffic(spec, 1, 1, 64, 8, 2))
    fast, slow = Link("", 2e9, 1.0), Link("", 1e9, 2.0)
    logits = logits_traffic(spec, 2, 8, 2)
    assert logits.microseconds(slow) > logits.microseconds(fast) > 0
    sums, stages, _ = step_traffic(spec, 2, 2, 64, 8, 2)
    assert all(sums.microseconds(link) > stages.microseconds(link) for link in LINKS)
