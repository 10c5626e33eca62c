"""Bugs in the choice between our own steps and a prefill worker."""

from tests.planted.plant import Plant

PRICES = "tests/property/test_placing.py"
CORE = "tests/unit/test_decode_core.py"

PLANTS = (
    Plant(
        name="prefill-queue-ignored",
        rule="What waits at the prefill workers counts in the price of a prefill there.",
        file="decode_worker/placing.py",
        text="    num_all = num_own + there.backlog.tokens_before(num_own) // there.num_workers\n",
        replacement="    num_all = num_own\n",
        tests=(PRICES,),
    ),
    Plant(
        name="delay-of-others-free",
        rule="What running sequences are delayed beyond their target counts in the price of a prefill.",
        file="decode_worker/placing.py",
        text="        return self.first_token_s + self.delay_s\n",
        replacement="        return self.first_token_s\n",
        tests=(PRICES,),
    ),
    Plant(
        name="target-forgotten",
        rule="A step with running sequences computes no more of prompts than their target allows.",
        file="decode_worker/placing.py",
        text="    if cost is None or not num_decoding:\n",
        replacement="    if cost is not None:\n",
        tests=(PRICES,),
    ),
    Plant(
        name="sent-prompts-forgotten",
        rule="Prompts that were sent away count before a heartbeat tells of them.",
        file="decode_worker/core.py",
        text="backlog=there.backlog.or_more(demand.there))",
        replacement="backlog=there.backlog)",
        tests=(f"{CORE}::test_what_was_sent_away_counts_before_a_heartbeat_tells_it",),
    ),
)
