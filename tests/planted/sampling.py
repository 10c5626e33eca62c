"""Bugs of what a step computes beside keys and values: tokens, logprobs, copies."""

from tests.planted.plant import Plant

BIAS = "tests/unit/test_logit_bias.py"
LOGPROBS = "tests/golden/test_logprobs.py"
PROMPTS = "tests/unit/test_prompt_logprobs.py"
PREFILL = "tests/integration/test_prefill_logprobs.py"
MACHINE = "tests/property/test_sampling.py"

NATIVE = "tests/kernels/test_sampling.py"

PLANTS = (
    Plant(
        name="bias-ignored",
        rule="The bias that a client asks for is added before anything else changes the logits.",
        file="kernels/sampling/logits.py",
        text="        _add_bias(logits, controls.logit_bias)\n",
        replacement="        pass\n",
        tests=(f"{BIAS}::TestLogitBias::test_b076_a_banned_token_occurs_in_no_choice", MACHINE),
    ),
    Plant(
        name="bias-outside-the-vocabulary",
        rule="A bias for an id outside the vocabulary changes nothing.",
        file="kernels/sampling/logits.py",
        text="    inside = [(token, addend) for token, addend in bias if 0 <= token < len(logits)]\n",
        replacement="    inside = [(token % len(logits), addend) for token, addend in bias]\n",
        tests=(f"{BIAS}::TestOutsideTheVocabulary::test_no_logit_moves", MACHINE),
    ),
    Plant(
        name="stop-id-outside-the-vocabulary",
        rule="A stop id outside the vocabulary forbids nothing.",
        file="kernels/sampling/logits.py",
        text="(token for token in controls.stop_ids if 0 <= token < len(logits))",
        replacement="(token % len(logits) for token in controls.stop_ids)",
        tests=(f"{BIAS}::TestOutsideTheVocabulary::test_no_logit_moves", MACHINE),
    ),
    Plant(
        name="mask-ignored",
        rule="A token that the grammar does not allow is never sampled.",
        file="kernels/sampling/logits.py",
        text="        _forbid_others(logits, row.allowed)\n",
        replacement="        pass\n",
        tests=(f"{BIAS}::TestMask::test_what_is_drawn_is_allowed", MACHINE),
    ),
    Plant(
        name="bad-logits-behind-a-mask",
        rule="Bad logits fail a sequence, whatever its mask hides.",
        file="kernels/sampling/op.py",
        text="    raw_maxima = maxima if adjusted is logits else logits.amax(dim=-1)\n",
        replacement="    raw_maxima = maxima\n",
        tests=(f"{BIAS}::TestMask::test_bad_logits_are_found_behind_a_mask", MACHINE),
    ),
    Plant(
        name="choice-ignored",
        rule="Each choice draws numbers of its own.",
        file="common/runtime/runner.py",
        text="            choice=sequence.key.choice,\n",
        replacement="",
        tests=(f"{LOGPROBS}::test_each_choice_draws_its_own",),
    ),
    Plant(
        name="choice-lost-at-the-hand-over",
        rule="A prefill worker samples for the choice that its task names.",
        file="prefill_worker/holdings.py",
        text="self.task.try_number, self.task.choice)",
        replacement="self.task.try_number)",
        tests=(f"{PREFILL}::test_a_choice_other_than_the_first",),
    ),
    Plant(
        name="copied-too-late",
        rule="Pages are copied before anything is computed.",
        file="common/runtime/runner.py",
        text=(
            "            copy_pages(self._pages, plan.copies)\n"
            "            hidden = self._model.forward(batch, self._pages)\n"
        ),
        replacement=(
            "            hidden = self._model.forward(batch, self._pages)\n"
            "            copy_pages(self._pages, plan.copies)\n"
        ),
        tests=(
            f"{LOGPROBS}::TestCopies::test_copies_come_before_anything_is_computed",
            f"{LOGPROBS}::TestCopies::test_a_choice_goes_on_from_copied_pages",
        ),
    ),
    Plant(
        name="bad-logits-within-a-prompt",
        rule="Bad logits of any scored position fail the prompt.",
        file="common/runtime/runner.py",
        text=" | _keys_of(prompts, None)\n",
        replacement="\n",
        tests=(f"{LOGPROBS}::test_bad_logits_within_a_prompt",),
    ),
    Plant(
        name="scored-from-the-cache",
        rule="A prompt whose logprobs are wanted is computed to its last token.",
        file="common/scheduling/blocks.py",
        text="        max_tokens = 0 if sequence.wants_prompt_logprobs else sequence.num_tokens - 1\n",
        replacement="        max_tokens = sequence.num_tokens - 1\n",
        tests=(
            f"{PROMPTS}::test_a_cached_prompt_is_computed_again_and_serves_others",
            f"{PREFILL}::test_a_cached_prompt_is_computed_again_for_its_logprobs",
            "tests/property/test_prefill_scheduler.py",
        ),
    ),
    Plant(
        name="scored-twice",
        rule="Where a prompt is computed again before its logprobs are complete, they begin again.",
        file="common/scheduling/blocks.py",
        text="            sequence.prompt_logprobs.clear()\n",
        replacement="            pass\n",
        tests=(f"{PROMPTS}::test_a_prompt_that_was_half_scored_begins_again",),
    ),
    Plant(
        name="early-copy-before-the-prompt",
        rule="No early copy is sent where the client wants logprobs of its prompt first.",
        file="prefill_worker/announcer.py",
        text="            if holding.task.sampling.num_prompt_logprobs is None:\n",
        replacement="            if True:\n",
        tests=(f"{PREFILL}::test_logprobs_of_the_prompt_come_with_the_commit_and_no_early_copy_before_them",),
    ),
    Plant(
        name="mask-ignored-natively",
        rule="A token that the grammar does not allow is never sampled by the native kernel either.",
        file="kernels/sampling/adjust.h",
        text="    if (row.has_mask) adjusting::forbid_others(logits, vocab, row.allowed, row.num_words);\n",
        replacement="",
        tests=(
            f"{BIAS}::TestMask::test_what_is_drawn_is_allowed",
            f"{NATIVE}::test_logits_change_to_the_last_bit_as_torch_changes_them",
        ),
    ),
    Plant(
        name="bad-logits-behind-a-native-mask",
        rule="Bad logits fail a sequence in the native kernel too, whatever its mask hides.",
        file="kernels/sampling/cpu.h",
        text="    if (!std::isfinite(raw.best())) return kInvalid;\n",
        replacement="    if (!std::isfinite(raw.best())) return row.has_mask ? kViolated : kInvalid;\n",
        tests=(f"{BIAS}::TestMask::test_bad_logits_are_found_behind_a_mask",),
    ),
    Plant(
        name="native-draws-of-their-own",
        rule="The native kernel draws with the random number that torch's operators draw with.",
        file="kernels/sampling/draw.h",
        text="{row.seed, row.choice, row.position}",
        replacement="{row.choice, row.seed, row.position}",
        tests=(f"{NATIVE}::test_whatever_the_logits_and_demands_are",),
    ),
    Plant(
        name="all-equal-logits-at-the-border",
        rule="Where top-p ends within equal logits, the lowest ids are kept.",
        file="kernels/sampling/wide_nucleus.h",
        text="each.key < border && each.logit() == least",
        replacement="false && each.key < border && each.logit() == least",
        tests=(f"{NATIVE}::test_large_vocabularies",),
    ),
)
