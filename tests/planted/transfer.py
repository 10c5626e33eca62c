"""Bugs of the transports that move pages."""

from tests.planted.plant import Plant

TRANSFER = "tests/contract/test_transfer.py"
MEMORY = "tests/unit/test_pool_memory.py"
FRAMES = "tests/property/test_page_frames.py"

PLANTS = (
    Plant(
        name="NO_GEN",
        rule="The generation is checked again after the copy (shared memory).",
        file="common/transfer/shm_peer.py",
        text="source_start : source_start + num_bytes])\n    _check(run, current, expected)\n",
        replacement="source_start : source_start + num_bytes])\n",
        tests=(f"{TRANSFER}::TestSharedMemory::test_a_page_reused_during_the_copy_is_stale",),
    ),
    Plant(
        name="NO_GEN-tcp",
        rule="The generation is checked again after the copy (TCP).",
        file="common/transfer/tcp_peer.py",
        text="        return page_frames.unpack_generations(tail) == [ref.generation for ref in pages]\n",
        replacement="        return bool(page_frames.unpack_generations(tail))\n",
        tests=("tests/contract/test_page_reuse.py::test_a_page_reused_on_its_way_through_tcp_is_stale",),
    ),
    Plant(
        name="generation-unchecked",
        rule="A page whose generation has changed is stale before anything is copied.",
        file="common/transfer/tcp_source.py",
        text="            if any(self._memory.generations[ref.page] != ref.generation for ref in pages):\n",
        replacement="            if False:\n",
        tests=("tests/contract/test_page_reuse.py::test_a_page_that_is_stale_is_not_copied",),
    ),
    Plant(
        name="NO_EPOCH_IN_REF",
        rule="A page reference names the incarnation of its pool: another one has other pages of that number.",
        file="common/transfer/handshake.py",
        text="    if epoch != pool.epoch:\n        return _Verdict.OTHER_EPOCH\n",
        replacement="",
        tests=(
            f"{TRANSFER}::TestTransfer::test_another_epoch_is_refused",
            f"{TRANSFER}::TestTransfer::test_a_restarted_peer_serves_its_new_epoch_only",
        ),
    ),
    Plant(
        name="writable-for-peers",
        rule="Peers get the pool's memory read-only.",
        file="common/transfer/pool_memory.py",
        text='os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)',
        replacement='os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)',
        tests=(f"{MEMORY}::test_a_peer_cannot_write_resize_or_unseal",),
    ),
    Plant(
        name="resizable-by-peers",
        rule="No peer can shrink the memory under another one that maps it.",
        file="common/transfer/pool_memory.py",
        text="fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL",
        replacement="fcntl.F_SEAL_SEAL",
        tests=(f"{MEMORY}::test_a_peer_cannot_write_resize_or_unseal",),
    ),
    Plant(
        name="written-after-cancel",
        rule="Nothing is written into our pages once a cancelled pull has returned.",
        file="common/transfer/copy_thread.py",
        text="            interrupt()\n            await _ended(waiter)\n",
        replacement="            interrupt()\n",
        tests=("tests/unit/test_copy_thread.py::test_a_cancelled_copy_returns_when_its_thread_has_ended",),
    ),
    Plant(
        name="stranger-served",
        rule="Only who knows the cluster's secret gets pages.",
        file="common/transfer/handshake.py",
        text='    if not hmac.compare_digest(proof, secret.proof(b"puller", transport, nonce, puller_nonce, claim)):\n',
        replacement="    if False:\n",
        tests=("tests/contract/test_transfer_strangers.py::test_a_puller_without_the_secret_gets_no_answer",),
    ),
    Plant(
        name="unbounded-request",
        rule="A page server reads no more than a bounded number of references before it has checked anything.",
        file="common/transfer/page_frames.py",
        text="    if not 0 < num_pages <= MAX_PAGES:\n",
        replacement="    if not 0 < num_pages:\n",
        tests=(FRAMES,),
    ),
    Plant(
        name="reply-of-another-length",
        rule="A reply for another number of pages than were asked for is malformed.",
        file="common/transfer/page_frames.py",
        text="    if num_pages != num_requested:\n",
        replacement="    if False:\n",
        tests=(FRAMES,),
    ),
)
