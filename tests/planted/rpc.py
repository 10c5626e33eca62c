"""Bugs of gRPC for clients and of TLS: who gets in, what calls hold, and what reaches a slow client."""

from tests.planted.plant import Plant

LIFETIMES = "tests/integration/test_rpc_lifetimes.py"
GENERATE = "tests/integration/test_rpc_generate.py"
HOSTILE = "tests/integration/test_rpc_hostile.py"
HEALTH = "tests/integration/test_rpc_health.py"
TLS = "tests/integration/test_tls.py"
FILES = "tests/unit/test_tls_files.py"

PLANTS = (
    Plant(
        name="tokenised-in-vain",
        rule="A request can be cancelled by its id while it is tokenised.",
        file="gateway/serving.py",
        text="                with service.under_way.stay(visit.request, visit.caller.tenant):\n",
        replacement="                if True:\n",
        tests=(
            "tests/integration/test_explicit_cancel.py::test_a_request_of_http_that_is_being_tokenised_ends_at_once",
            "tests/integration/test_explicit_cancel.py::test_a_call_that_is_being_tokenised_ends_at_once",
        ),
    ),
    Plant(
        name="messages-without-bound",
        rule="What waits for a slow reader of gRPC is bounded in bytes, and so is a message.",
        file="gateway/rpc/generation.py",
        text="Outbox(settings.ping_interval_s, CAPACITY_BYTES, weigh=_size)",
        replacement="Outbox(settings.ping_interval_s)",
        tests=(
            "tests/integration/test_rpc_lifetimes.py"
            "::test_b107_what_has_waited_for_a_slow_reader_comes_in_messages_that_it_can_read",
        ),
    ),
    Plant(
        name="quota-untold",
        rule="A call tells what its key has left per minute, also when it is refused.",
        file="gateway/rpc/calls.py",
        text="            await _abort(context, status, () if call is None else call.trailing)\n",
        replacement="            await _abort(context, status, ())\n",
        tests=("tests/integration/test_rpc_quota.py::test_a_call_that_is_refused_is_told_what_is_left",),
    ),
    Plant(
        name="end-lost-to-slow-clients",
        rule="What becomes ready while something is brought to a client is brought as well.",
        file="gateway/delivery.py",
        text="            if is_over:\n",
        replacement="            if answer.is_over:\n",
        tests=("tests/unit/test_delivery.py::test_what_becomes_ready_meanwhile_is_carried_too",),
    ),
    Plant(
        name="slow-call-held",
        rule="A call whose client takes nothing for too long holds nothing any more.",
        file="gateway/rpc/message_carrier.py",
        text="            with self._patience:\n",
        replacement="            if True:\n",
        tests=(f"{LIFETIMES}::test_a_reader_that_takes_nothing_for_too_long_is_dropped",),
    ),
    Plant(
        name="client-outlasts-server",
        rule="No deadline of a client is longer than the server's own.",
        file="gateway/rpc/generation.py",
        text="    return own_s if default_s is None else min(own_s, default_s)\n",
        replacement="    return own_s\n",
        tests=(f"{LIFETIMES}::test_a_longer_deadline_than_the_servers_own_counts_for_nothing",),
    ),
    Plant(
        name="calls-taken-while-leaving",
        rule="A gateway that leaves takes no more calls.",
        file="gateway/server.py",
        text="    on_closed()\n",
        replacement="",
        tests=(f"{LIFETIMES}::test_a_drain_lets_calls_end_and_takes_no_new_ones",),
    ),
    Plant(
        name="bombs-opened",
        rule="Compressed messages are refused before they are opened.",
        file="gateway/rpc/listener.py",
        text='    ("grpc.compression_enabled_algorithms_bitset", 1),',
        replacement='    ("grpc.keepalive_permit_without_calls", 1),',
        tests=(f"{HOSTILE}::test_b141_compressed_messages_are_refused_unopened",),
    ),
    Plant(
        name="nonsense-is-our-mistake",
        rule="A message that cannot be read is its client's fault.",
        file="gateway/rpc/calls.py",
        text="    except DecodeError as error:\n",
        replacement="    except KeyError as error:\n",
        tests=(f"{HOSTILE}::test_messages_that_are_none_are_refused",),
    ),
    Plant(
        name="reflection-open",
        rule="Where keys are needed, reflection needs one too.",
        file="gateway/rpc/authenticating.py",
        text="        if handler_call_details.method in OPEN_METHODS:\n",
        replacement='        if not handler_call_details.method.startswith("/tandem."):\n',
        tests=(f"{HEALTH}::test_where_keys_are_needed_health_is_open_and_reflection_is_not",),
    ),
    Plant(
        name="floats-of-32-bits",
        rule="A number over gRPC is the one that its client wrote.",
        file="gateway/rpc/requests.py",
        text="        if _as_float32(shorter) == value:\n",
        replacement="        if shorter == value:\n",
        tests=(f"{GENERATE}::test_both_ways_ask_the_workers_for_the_same",),
    ),
    Plant(
        name="http-without-client-certificate",
        rule="With authorities for clients, HTTP lets nobody in without a certificate.",
        file="common/tls/server_files.py",
        text="            context.verify_mode = ssl.CERT_REQUIRED\n",
        replacement="            context.verify_mode = ssl.CERT_OPTIONAL\n",
        tests=(f"{TLS}::test_only_clients_with_a_certificate_are_let_in", FILES),
    ),
    Plant(
        name="rpc-without-client-certificate",
        rule="With authorities for clients, gRPC lets nobody in without a certificate.",
        file="gateway/certificates.py",
        text="        asks_clients = self._files.client_ca is not None\n",
        replacement="        asks_clients = False\n",
        tests=(f"{TLS}::test_only_clients_with_a_certificate_are_let_in",),
    ),
    Plant(
        name="old-certificate-shown",
        rule="A renewed certificate, and renewed authorities, count from the next handshake on.",
        file="gateway/certificates.py",
        text="            handshake.context = self._look().context\n",
        replacement="            self._look()\n",
        tests=(f"{TLS}::test_renewed_files_are_taken_without_a_restart",),
    ),
    Plant(
        name="files-of-two-times",
        rule="Files that changed while they were read are not used together.",
        file="gateway/certificates.py",
        text="        if self._files.signature() == signature:\n",
        replacement="        if True:\n",
        tests=(f"{FILES}::test_files_that_change_while_they_are_read_are_read_again",),
    ),
)
