from runtime.core.batch import build_sampling_metadata
from runtime.core.request import Request, SamplingParams, Sequence
from runtime.core.step import ScheduledSequence


class Ascending:
    """Allows tokens larger than the last one; its mask is the last token's number."""

    def __init__(self) -> None:
        self.said = [10]
        self.is_complete = False

    def mask(self) -> bytes:
        return bytes([self.said[-1]])

    def accept(self, token_ids: list[int]) -> int:
        for count, token_id in enumerate(token_ids):
            if token_id <= self.said[-1]:
                return count
            self.said.append(token_id)
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        self.said = self.said[: len(self.said) - num_tokens]


def entry(draft: list[int], num_kept: int, **options) -> ScheduledSequence:
    request = Request("r", (1, 2, 3), SamplingParams(**options), seed=7)
    sequence = Sequence(request, [1, 2, 3, 4, 5], num_computed_tokens=4, draft_token_ids=draft)
    return ScheduledSequence(sequence, 4, 1 + num_kept)


def test_one_row_without_draft():
    (draw,) = build_sampling_metadata(entry([], 0))
    assert (draw.seed, draw.position, draw.mask) == (7, 5, None)
    assert (draw.prompt_token_ids, draw.output_token_ids) == ((), ())


def test_each_row_has_said_the_draft_before_it():
    draws = build_sampling_metadata(entry([6, 7, 8], 2, presence_penalty=1.0))
    assert [draw.position for draw in draws] == [5, 6, 7]
    assert [draw.output_token_ids for draw in draws] == [[4, 5], [4, 5, 6], [4, 5, 6, 7]]


def test_only_the_repetition_penalty_wants_the_prompt():
    assert not build_sampling_metadata(entry([], 0, frequency_penalty=1.0))[0].prompt_token_ids
    (draw,) = build_sampling_metadata(entry([], 0, repetition_penalty=1.1))
    assert (draw.prompt_token_ids, draw.output_token_ids) == ((1, 2, 3), [4, 5])


def test_masks_follow_the_draft_until_a_forbidden_token():
    planned = entry([12, 15, 3, 20], 4)
    constraint = planned.sequence.constraint = Ascending()
    draws = build_sampling_metadata(planned)
    assert [draw.mask for draw in draws] == [bytes([10]), bytes([12]), bytes([15]), None, None]
    assert constraint.said == [10]
