"""How the next token of one request is chosen; validated at the gateway's edge, obeyed by the workers."""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """Parameters of one choice. Order of application: penalties, temperature, top-k, renormalise, top-p, min-p.

    Before these: `logit_bias`, then the grammar's mask.

    `top_k` 0 is off, `top_p` 1.0 is off, `min_p` 0.0 is off, `temperature` 0.0 is greedy.
    `stop_ids` ends the sequence when sampled (end-of-turn tokens and the client's `stop_token_ids`); stop strings stay
    in the gateway. `max_tokens` counts every token the client receives, tokens shown by an earlier placement included.

    `logit_bias` holds (token id, addend). `num_logprobs` is how many of the most likely tokens are reported beside each
    generated one, None: no logprobs at all. `num_prompt_logprobs` asks the same for the tokens of the prompt.
    Logprobs are of the raw logits: before bias, penalties, mask, temperature and filters. `grammar` is a grammar in
    llguidance's JSON form that the answer must match, from its first token on.
    """

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    grammar: str | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, so that the seed does not matter."""
        return self.temperature == 0.0
