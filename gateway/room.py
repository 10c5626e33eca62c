"""How much room a placement needs on a decode worker, and whether any could ever have it."""

from collections.abc import Sequence

from common.errors import InvalidRequest
from common.messages.registry import WorkerRecord


def blocks_needed(num_prompt_tokens: int, nums_shown: Sequence[int], block_size: int) -> int:
    """Return the blocks for the prompt, what was shown of each choice, and one step of all.

    Choices share the full blocks of the prompt but the last one, which each has for itself: the logits of the prompt's
    last token are sampled once per choice.
    """
    num_shared = (num_prompt_tokens - 1) // block_size
    return num_shared + sum(-(-(num_prompt_tokens + shown + 1) // block_size) - num_shared for shown in nums_shown)


def check_room(records: Sequence[WorkerRecord], num_prompt_tokens: int, nums_shown: Sequence[int]) -> int:
    """Return the blocks that a placement needs; raise `InvalidRequest` if no worker would have room for it when idle.

    `records`: of all workers that could take it, at least one. Where no pool holds all that was shown, answers take
    turns there, as they did before: then it is what they need to begin, and the longest one to go on.
    """
    num_choices = len(nums_shown)
    max_choices = max(record.max_sequences for record in records)
    if num_choices > max(1, max_choices):
        raise InvalidRequest(f"n is {num_choices}, but no worker generates more than {max_choices} at once.", param="n")
    largest = max(records, key=lambda record: record.num_blocks)
    num_blocks = blocks_needed(num_prompt_tokens, nums_shown, largest.block_size)
    if num_blocks <= largest.num_blocks:
        return num_blocks
    num_to_begin = blocks_needed(num_prompt_tokens, [0] * num_choices, largest.block_size)
    num_of_longest = blocks_needed(num_prompt_tokens, [max(nums_shown)], largest.block_size)
    if max(num_to_begin, num_of_longest) <= largest.num_blocks:
        return max(num_to_begin, num_of_longest)
    capacity = largest.num_blocks * largest.block_size
    num_tokens = num_prompt_tokens + max(nums_shown)
    if num_of_longest > largest.num_blocks:
        what, param = f"The prompt of {num_tokens} tokens exceeds", "prompt"
    else:
        room = num_to_begin * largest.block_size
        what, param = (
            f"{num_choices} answers to a prompt of {num_prompt_tokens} tokens need {room} tokens of room and exceed",
            "n",
        )
    raise InvalidRequest(
        f"{what} the KV capacity of {capacity} tokens of every worker.",
        param=param,
        code="context_length_exceeded",
    )
