"""Bugs in guided answers: what a worker follows, and what a gateway lets through."""

from tests.planted.plant import Plant

PLANTS = (
    Plant(
        name="grammar-of-another-history",
        rule="A matcher that has read other tokens than the sequence's begins again.",
        file="common/runtime/grammar_masks.py",
        text="        if progress is None or known != progress.consumed:\n",
        replacement="        if progress is None:\n",
        tests=("tests/unit/test_grammar_masks.py::TestMasks::test_another_history_is_followed_from_its_beginning",),
    ),
    Plant(
        name="matcher-shared-by-sequences",
        rule="Every sequence has a matcher of its own.",
        file="common/runtime/grammars.py",
        text="        return found.deep_copy()\n",
        replacement="        return found\n",
        tests=("tests/unit/test_grammar_masks.py::TestMasks::test_sequences_of_one_grammar_do_not_disturb_each_other",),
    ),
    Plant(
        name="cancelled-while-its-grammar-compiles",
        rule="What is over while its grammar is compiled is not admitted.",
        file="decode_worker/intake.py",
        text="get(live.key) is not live:\n            return\n        if objection",
        replacement="get(live.key) is not live:\n            pass\n        if objection",
        tests=("tests/integration/test_guided_workers.py::test_what_waits_for_its_grammar_can_be_cancelled",),
    ),
    Plant(
        name="grammar-compiled-by-the-engine",
        rule="A sequence is admitted when its grammar is compiled: one that cannot be is refused.",
        file="decode_worker/intake.py",
        text="        grammar = live.job.sampling.grammar\n        if grammar is None:\n",
        replacement="        grammar = live.job.sampling.grammar\n        if grammar is None or True:\n",
        tests=("tests/integration/test_guided_workers.py::test_b032_a_bad_grammar_fails_its_own_request_alone",),
    ),
    Plant(
        name="schema-sets-its-own-options",
        rule="A schema cannot have its unsupported keywords ignored, or its white space unbounded.",
        file="gateway/guidance/text.py",
        text='{**schema, "x-guidance": JSON_OPTIONS}',
        replacement='{"x-guidance": JSON_OPTIONS, **schema}',
        tests=(
            "tests/unit/test_grammar_text.py::test_b032_keywords_that_cannot_be_kept_are_refused",
            "tests/unit/test_grammar_text.py::test_a_schema_cannot_loosen_white_space",
        ),
    ),
    Plant(
        name="end-of-a-grammar-ignored",
        rule="The end of a complete grammar ends the answer, also for a client that ignores the model's end.",
        file="gateway/sampling.py",
        text="    ends = () if fields.ignore_eos and grammar is None else card.eos_ids\n",
        replacement="    ends = () if fields.ignore_eos else card.eos_ids\n",
        tests=("tests/integration/test_guided_api.py::test_the_end_of_a_grammar_cannot_be_ignored",),
    ),
    Plant(
        name="late-compiler-used-again",
        rule="A compiler that did not answer in time is killed, and never asked again.",
        file="gateway/guidance/grammars.py",
        text="            await compiler.close()\n            raise\n        self._idle.append(compiler)\n",
        replacement="            self._idle.append(compiler)\n            raise\n        self._idle.append(compiler)\n",
        tests=(
            "tests/integration/test_grammar_compilers.py::test_b032_what_cannot_be_compiled_ends_its_process_and_nothing_else",
        ),
    ),
    Plant(
        name="leaver-cancels-the-grammar-of-others",
        rule="Whoever stops waiting for a grammar stops nobody else.",
        file="gateway/guidance/grammars.py",
        text="await asyncio.shield(self._task(key, vocabulary))",
        replacement="await self._task(key, vocabulary)",
        tests=("tests/integration/test_grammar_compilers.py::test_who_leaves_takes_no_answer_from_who_stays",),
    ),
)
