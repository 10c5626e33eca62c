"""What sampling knows about one row of logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class SamplingControls(Protocol):
    """Parameters of one choice. Off: `top_k` <= 0, `top_p` 1.0, `min_p` 0.0, penalties 0.0 and repetition 1.0.

    `temperature` 0.0 takes the most likely token. `logit_bias` holds (token id, addend).
    """

    @property
    def seed(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def min_p(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def stop_ids(self) -> tuple[int, ...]: ...
    @property
    def min_tokens(self) -> int: ...
    @property
    def logit_bias(self) -> tuple[tuple[int, float], ...]: ...


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """`token_ids` is the prompt (`num_prompt` ids), then what was generated before this row.

    `allowed` [num_words] int32 is a bit set, None if every token is allowed: token t may come if bit `t % 32` of word
    `t // 32` is set. Tokens behind the last word are forbidden, bits behind the vocabulary mean nothing.
    """

    token_ids: Sequence[int]
    num_prompt: int
    controls: SamplingControls
    choice: int = 0
    allowed: torch.Tensor | None = None

    @property
    def position(self) -> int:
        """Index of the token to sample among the generated ones."""
        return len(self.token_ids) - self.num_prompt

    @property
    def must_continue(self) -> bool:
        """Whether tokens that would end the sequence are still forbidden."""
        return self.position < self.controls.min_tokens and bool(self.controls.stop_ids)

    @property
    def is_penalised(self) -> bool:
        """Whether earlier tokens change the logits."""
        controls = self.controls
        return controls.repetition_penalty != 1.0 or bool(controls.presence_penalty or controls.frequency_penalty)

    @property
    def is_adjusted(self) -> bool:
        """Whether anything changes the logits before temperature."""
        return self.is_penalised or self.must_continue or bool(self.controls.logit_bias) or self.allowed is not None
