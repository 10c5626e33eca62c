"""Bugs of native kernels, of the weights that workers of a host share, and of the cores that they lend."""

from tests.planted.plant import Plant

TEAM = "tests/kernels/test_team.py"
LINEAR = "tests/kernels/test_linear.py"
SHARED = "tests/integration/test_shared_weights.py"

PLANTS = (
    Plant(
        name="borrower-that-stays",
        rule="Who has borrowed a core leaves when its owner begins to use it.",
        file="kernels/native/team.h",
        text="            if (is_in_use_ && is_in_use_->load(std::memory_order_relaxed)) is_late_ = true;\n",
        replacement="",
        tests=(f"{TEAM}::test_an_idle_core_is_borrowed_and_one_in_use_is_not",),
    ),
    Plant(
        name="idle-worker-that-keeps-its-cores",
        rule="A worker that waits for commands says that its cores are idle.",
        file="common/runtime/engine.py",
        text="        if self._board is not None:\n            self._board.vacate()\n        try:\n",
        replacement="        try:\n",
        tests=("tests/unit/test_engine_thread.py::test_the_board_shows_whether_it_has_anything_to_do",),
    ),
    Plant(
        name="crash-that-keeps-cores",
        rule="An engine that fails says that its cores are idle.",
        file="common/runtime/engine.py",
        text="            finally:\n                if self._board is not None:\n",
        replacement="            finally:\n                if False:\n",
        tests=("tests/unit/test_engine_thread.py::test_the_board_shows_whether_it_has_anything_to_do",),
    ),
    Plant(
        name="successor-that-clears-nothing",
        rule="A worker that starts clears what a killed one has left on the board.",
        file="common/lifecycle/core_board.py",
        text="        self._numbers = (_NUMBER * MAX_CORES).from_buffer(self._memory)\n        self.vacate()\n",
        replacement="        self._numbers = (_NUMBER * MAX_CORES).from_buffer(self._memory)\n",
        tests=("tests/unit/test_core_board.py::test_the_successor_of_a_killed_worker_clears_what_that_left",),
    ),
    Plant(
        name="torn-weights-believed",
        rule="Shared weights are used only with a header that fits them.",
        file="common/model/shared_weights.py",
        text=" and os.pread(fd, len(header), 0) == header\n",
        replacement="\n",
        tests=(
            f"{SHARED}::test_a_damaged_header_is_never_believed",
            f"{SHARED}::test_a_filler_that_is_killed_leaves_its_place_to_one_that_waits",
        ),
    ),
    Plant(
        name="weights-of-a-stranger",
        rule="A file of weights that others may write is not used.",
        file="common/model/shared_weights.py",
        text=" or status.st_mode & 0o077:\n",
        replacement=":\n",
        tests=(f"{SHARED}::test_a_link_or_a_file_open_to_others_is_not_used",),
    ),
    Plant(
        name="weights-that-stay",
        rule="The last process that uses shared weights removes them.",
        file="common/model/shared_weights.py",
        text="        _remove_if_unused(path, fd)\n    finally:\n",
        replacement="        pass\n    finally:\n",
        tests=(f"{SHARED}::test_the_second_finds_what_the_first_has_filled_and_the_last_removes_it",),
    ),
    Plant(
        name="tiles-without-the-rest",
        rule="Tiles multiply rows of any length to their end.",
        file="kernels/linear/tiled.cpp",
        text="    if (const int64_t depth = num_in % kStepDepth) {\n",
        replacement="    if (const int64_t depth = num_in % kStepDepth; depth > 8) {\n",
        tests=(f"{LINEAR}::test_equals_reference",),
    ),
)
