"""What our documents ask of `grpcurl`, in place of that program: every message is known by reflection alone.

    python -m tests.support.grpcurl [-plaintext] [-cacert FILE -cert FILE -key FILE] [-H HEADER]... [-d JSON] \
        ADDRESS list | SERVICE/METHOD
"""

import argparse
import sys
from pathlib import Path

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

TIMEOUT_S = 60.0


def main() -> None:
    """Make one call and print its answer as JSON, or print the names of the services."""
    given = _parse(sys.argv[1:])
    with _channel(given) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        if given.target == "list":
            sys.stdout.writelines(f"{name}\n" for name in sorted(database.get_services()))
            return
        service, name = given.target.split("/")
        method = DescriptorPool(database).FindServiceByName(service).methods_by_name[name]
        call: grpc.UnaryStreamMultiCallable[Message, Message] = channel.unary_stream(
            f"/{given.target}",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        request = json_format.Parse(given.d, GetMessageClass(method.input_type)())
        metadata = tuple((name, value.strip()) for name, _, value in (header.partition(":") for header in given.H))
        for answer in call(request, timeout=TIMEOUT_S, metadata=metadata):
            sys.stdout.write(json_format.MessageToJson(answer) + "\n")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("grpcurl", allow_abbrev=False)
    parser.add_argument("-plaintext", action="store_true")
    for name in ("-cacert", "-cert", "-key"):
        parser.add_argument(name, type=Path)
    parser.add_argument("-H", action="append", default=[])
    parser.add_argument("-d", default="{}")
    parser.add_argument("address")
    parser.add_argument("target")
    return parser.parse_args(arguments)


def _channel(given: argparse.Namespace) -> grpc.Channel:
    if given.plaintext:
        return grpc.insecure_channel(given.address)
    files = (given.cacert, given.key, given.cert)
    return grpc.secure_channel(
        given.address, grpc.ssl_channel_credentials(*(file and file.read_bytes() for file in files))
    )


if __name__ == "__main__":
    main()
