"""Bugs of choices: whose tokens are whose, when each ends, and what a client is told of single tokens."""

from tests.planted.plant import Plant

TEXT = "tests/unit/test_text_stream.py"
ANSWER = "tests/unit/test_answer.py"
CHOICES = "tests/integration/test_openai_choices.py"
LOGPROBS = "tests/integration/test_openai_logprobs.py"

PLANTS = (
    Plant(
        name="numbered-by-choice",
        rule="Choices are numbered prompt by prompt.",
        file="gateway/answer.py",
        text="prompt, [self._choice(prompt, index * num_choices + number) for number in range(num_choices)]\n",
        replacement="prompt, [self._choice(prompt, number * num_choices + index) for number in range(num_choices)]\n",
        tests=(ANSWER,),
    ),
    Plant(
        name="stop-ends-all",
        rule="A stop string ends its own choice alone.",
        file="gateway/answer.py",
        text="        answers.num_open -= 1\n        self._num_open -= 1\n",
        replacement="        self._num_open -= answers.num_open\n        answers.num_open = 0\n",
        tests=(ANSWER,),
    ),
    Plant(
        name="stopped-choice-goes-on",
        rule="The engine is told of a choice that nobody needs more of.",
        file="gateway/answer.py",
        text="        if answers.num_open and isinstance(event, TokenDelta):\n",
        replacement="        if not answers.num_open and isinstance(event, TokenDelta):\n",
        tests=(ANSWER,),
    ),
    Plant(
        name="behind-the-end-of-a-choice",
        rule="Nothing of a choice is shown or counted behind its end.",
        file="gateway/answer.py",
        text="        if not choice.is_open:\n            return\n        if event.num_cached",
        replacement="        if event.num_cached",
        tests=(ANSWER,),
    ),
    Plant(
        name="tokens-held-with-their-text",
        rule="A token is told though its text is held back.",
        file="gateway/answer_choice.py",
        text="        if self._tokens:\n            self._send(self._parser.push(text)",
        replacement="        if self._tokens and text:\n            self._send(self._parser.push(text)",
        tests=(ANSWER,),
    ),
    Plant(
        name="hidden-token-told",
        rule="Nothing is told of tokens that nobody wanted.",
        file="gateway/answer.py",
        text=" = [] if accepted.tells_tokens and not form.hides_tokens else None\n",
        replacement=" = [] if accepted.tells_tokens else None\n",
        tests=(LOGPROBS,),
    ),
    Plant(
        name="end-token-told",
        rule="A token that ends an answer unseen is not told.",
        file="gateway/text_stream.py",
        text='        if self.is_stopped and not self._rules.is_shown:\n            return ""\n',
        replacement="",
        tests=(TEXT,),
    ),
    Plant(
        name="infinite-logprobs",
        rule="An impossible token has the logprob -9999, as JSON knows no infinity.",
        file="gateway/logprobs.py",
        text="    return max(logprob, IMPOSSIBLE)\n",
        replacement="    return logprob\n",
        tests=(LOGPROBS,),
    ),
    Plant(
        name="best-by-sum",
        rule="The best answers are those with the highest mean logprob.",
        file="gateway/answer_choice.py",
        text="        return self._text.sum_logprobs / max(self._text.num_tokens, 1)\n",
        replacement="        return self._text.sum_logprobs\n",
        tests=(CHOICES,),
    ),
    Plant(
        name="one-part-cancelled",
        rule="All prompts of a request are cancelled together.",
        file="gateway/dispatch.py",
        text="if whole_of(part.request.request) == request]\n",
        replacement="if part.request.request == request]\n",
        tests=("tests/integration/test_explicit_cancel.py",),
    ),
)
