"""A process that uses shared weights: `python -m tests.support.weight_user FOLDER NAME NUM_BYTES`.

It obeys lines on its standard input and answers each event by a line:

    obtain BYTE       fill with this byte, or find filled: "filling" when it begins, then "go" lets it end (or dies);
                      "has BYTE SHARED" when it has them: their common byte, "mixed" if they differ
    leave             close and end
"""

import sys
from pathlib import Path

from common.model.shared_weights import Report, obtain_weights


def main() -> None:
    """Live by the lines of the standard input."""
    folder, name, num_bytes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

    def fill(memory: memoryview, report: Report) -> None:
        report(0.5)
        half = len(memory) // 2
        memory[:half] = byte * half
        _say("filling")
        assert sys.stdin.readline().strip() == "go"
        memory[half:] = byte * (len(memory) - half)

    _, number = sys.stdin.readline().split()
    byte = bytes([int(number)])
    weights = obtain_weights(name, num_bytes, fill, lambda _: None, folder)
    found = set(bytes(weights.memory))
    _say(f"has {found.pop() if len(found) == 1 else 'mixed'} {'shared' if weights.is_shared else 'private'}")
    assert sys.stdin.readline().strip() == "leave"
    weights.close()


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
