"""Whatever logits, demands and neighbours a row has, its token is one that the plain reference could have drawn, and it
has none exactly when nothing is left.

Kills the planted bugs bad-logits-behind-a-mask, bias-ignored, bias-outside-the-vocabulary, mask-ignored and
stop-id-outside-the-vocabulary.
"""

import math

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.messages.sampling import SamplingParams
from kernels.sampling import reference
from kernels.sampling.logits import adjust_logits
from kernels.sampling.op import NoToken
from kernels.sampling.row import SamplingRow
from tests.support.samplers import SAMPLERS, Sampler

VOCAB = 40

ids = st.integers(0, VOCAB - 1)
any_ids = st.one_of(ids, st.sampled_from([-1, -VOCAB, VOCAB, VOCAB + 1, 2**31]))
levels = st.sampled_from([0.0, 0.0, 1.0, -2.0, 3.5, 20.0, -math.inf])  # many ties


@st.composite
def controls(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        max_tokens=100,
        temperature=draw(st.sampled_from([0.0, 0.1, 1.0, 2.0])),
        top_p=draw(st.sampled_from([1.0, 0.9, 1e-9])),
        top_k=draw(st.sampled_from([0, 1, 3, VOCAB + 1])),
        min_p=draw(st.sampled_from([0.0, 0.3, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 1.5, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.7])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
        stop_ids=tuple(draw(st.lists(any_ids, max_size=3))),
        min_tokens=draw(st.sampled_from([0, 2])),
        logit_bias=tuple(
            draw(st.dictionaries(any_ids, st.sampled_from([-100.0, -1.0, 2.0, 100.0]), max_size=4)).items()
        ),
    )


@st.composite
def sampling_rows(draw: st.DrawFn) -> tuple[SamplingRow, list[float]]:
    """Return a row and its logits."""
    prompt, generated = draw(st.lists(ids, min_size=1, max_size=4)), draw(st.lists(ids, max_size=4))
    words = draw(st.none() | st.lists(st.integers(-(2**31), 2**31 - 1), max_size=2))
    allowed = None if words is None else torch.tensor(words, dtype=torch.int32)
    row = SamplingRow([*prompt, *generated], len(prompt), draw(controls()), draw(st.integers(0, 3)), allowed)
    return row, draw(st.lists(levels, min_size=VOCAB, max_size=VOCAB))


@pytest.mark.parametrize("sample", SAMPLERS)
@given(batch=st.lists(sampling_rows(), min_size=1, max_size=4))
def test_a_token_is_one_that_the_reference_may_draw(
    sample: Sampler, batch: list[tuple[SamplingRow, list[float]]]
) -> None:
    rows = [row for row, _ in batch]
    logits = torch.tensor([values for _, values in batch])
    before = logits.clone()
    tokens = sample(logits, rows)
    assert torch.equal(logits, before)
    for token, row, raw in zip(tokens, rows, logits, strict=True):
        adjusted = reference.adjusted(raw, within_vocabulary(row))
        if not raw.max().isfinite():
            assert token is NoToken.INVALID
        elif not adjusted.max().isfinite():
            assert token is NoToken.VIOLATED
        elif row.controls.temperature == 0.0:
            assert token == int(adjusted.argmax())
        else:
            assert isinstance(token, int)
            assert reference.probabilities(adjusted, row.controls)[token] > 0.0


@pytest.mark.parametrize("sample", SAMPLERS)
@given(batch=st.lists(sampling_rows(), min_size=2, max_size=4))
def test_neighbours_change_nothing(sample: Sampler, batch: list[tuple[SamplingRow, list[float]]]) -> None:
    rows = [row for row, _ in batch]
    logits = torch.tensor([values for _, values in batch])
    together = adjust_logits(logits, rows)
    for index, row in enumerate(rows):
        assert torch.equal(adjust_logits(logits[index : index + 1], [row])[0], together[index])
        torch.testing.assert_close(reference.adjusted(logits[index], within_vocabulary(row)), together[index])
    alone = [sample(logits[index : index + 1], [row])[0] for index, row in enumerate(rows)]
    assert sample(logits, rows) == alone


def within_vocabulary(row: SamplingRow) -> SamplingRow:
    """Return the row without the ids that are none: the reference knows no other ones."""
    assert isinstance(row.controls, SamplingParams)
    kept = msgspec.structs.replace(
        row.controls,
        stop_ids=tuple(token for token in row.controls.stop_ids if 0 <= token < VOCAB),
        logit_bias=tuple((token, addend) for token, addend in row.controls.logit_bias if 0 <= token < VOCAB),
    )
    return SamplingRow(row.token_ids, row.num_prompt, kept, row.choice, row.allowed)
