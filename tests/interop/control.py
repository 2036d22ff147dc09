#!/usr/bin/python3
"""Calls a gRPC server that it knows only by reflection: control.py [OPTION…] TARGET [METHOD [JSON]].

TARGET is unix:PATH or HOST:PORT; METHOD is SERVICE/NAME, without it, all methods are listed. Answers are printed as JSON, one
per line; of a stream, the first --answers. A refusal is printed as its code, its message and the types of its details; the exit
code is then 3.
"""

import argparse
import json
import sys

import grpc
from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field

SECONDS = 20


def pool_of_reflection():
    """The part of grpc.reflection.v1 that is used here."""
    file = descriptor_pb2.FileDescriptorProto(name="reflection.proto", package="grpc.reflection.v1", syntax="proto3")

    def message(name, *fields):
        added = file.message_type.add(name=name)
        for number, field, kind, label in fields:
            is_message = not isinstance(kind, int)
            added.field.add(
                name=field,
                number=number,
                label=label,
                type=Field.TYPE_MESSAGE if is_message else kind,
                type_name=f".grpc.reflection.v1.{kind}" if is_message else None,
            )

    one, many = Field.LABEL_OPTIONAL, Field.LABEL_REPEATED
    text, octets = Field.TYPE_STRING, Field.TYPE_BYTES
    message(
        "ServerReflectionRequest",
        (3, "file_by_filename", text, one),
        (4, "file_containing_symbol", text, one),
        (7, "list_services", text, one),
    )
    message("FileDescriptorResponse", (1, "file_descriptor_proto", octets, many))
    message("ServiceResponse", (1, "name", text, one))
    message("ListServiceResponse", (1, "service", "ServiceResponse", many))
    message("ErrorResponse", (2, "error_message", text, one))
    message(
        "ServerReflectionResponse",
        (4, "file_descriptor_response", "FileDescriptorResponse", one),
        (6, "list_services_response", "ListServiceResponse", one),
        (7, "error_response", "ErrorResponse", one),
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


def message_of(pool, name):
    return message_factory.MessageFactory(pool).GetPrototype(pool.FindMessageTypeByName(name))


class Server:
    def __init__(self, channel):
        self.channel = channel
        known = pool_of_reflection()
        self.request = message_of(known, "grpc.reflection.v1.ServerReflectionRequest")
        self.response = message_of(known, "grpc.reflection.v1.ServerReflectionResponse")
        self.pool = descriptor_pool.DescriptorPool()
        self.files = set()

    def ask(self, **question):
        call = self.channel.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            request_serializer=self.request.SerializeToString,
            response_deserializer=self.response.FromString,
        )
        answer = next(call(iter([self.request(**question)]), timeout=SECONDS))
        if answer.HasField("error_response"):
            sys.exit(f"reflection: {answer.error_response.error_message}")
        return answer

    def learn(self, **question):
        """Adds files to the pool, each after the files that it imports."""
        for encoded in self.ask(**question).file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(encoded)
            if file.name not in self.files:
                self.files.add(file.name)
                for imported in file.dependency:
                    if imported not in self.files:
                        self.learn(file_by_filename=imported)
                self.pool.Add(file)

    def methods(self):
        for service in self.ask(list_services="*").list_services_response.service:
            self.learn(file_containing_symbol=service.name)
            for method in self.pool.FindServiceByName(service.name).methods:
                yield f"{service.name}/{method.name}"

    def call(self, name, request):
        service, method = name.split("/")
        self.learn(file_containing_symbol=service)
        method = self.pool.FindServiceByName(service).FindMethodByName(method)
        request_type, answer_type = (message_of(self.pool, kind.full_name) for kind in (method.input_type, method.output_type))
        request = json_format.Parse(request, request_type())
        described = descriptor_pb2.MethodDescriptorProto()
        method.CopyToProto(described)
        open_call = self.channel.unary_stream if described.server_streaming else self.channel.unary_unary
        call = open_call(
            f"/{name}", request_serializer=request_type.SerializeToString, response_deserializer=answer_type.FromString
        )
        answers = call(request, timeout=SECONDS)
        return answers if described.server_streaming else [answers]


def details_of(error):
    """The types of the details of a refusal (google.rpc.Status: each value of its third field is an Any)."""
    status = descriptor_pb2.FileDescriptorProto(name="status.proto", package="google.rpc", syntax="proto3")
    status.dependency.append("google/protobuf/any.proto")
    message = status.message_type.add(name="Status")
    kind, label = Field.TYPE_MESSAGE, Field.LABEL_REPEATED
    message.field.add(name="details", number=3, type=kind, label=label, type_name=".google.protobuf.Any")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(any_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(status)
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for detail in message_of(pool, "google.rpc.Status").FromString(value).details:
                yield detail.type_url.rsplit("/", 1)[-1]


def main():
    parser = argparse.ArgumentParser()
    for option in ("--ca", "--certificate", "--key"):
        parser.add_argument(option, type=lambda path: open(path, "rb").read())
    parser.add_argument("--answers", type=int, default=1)
    parser.add_argument("target")
    parser.add_argument("method", nargs="?")
    parser.add_argument("request", nargs="?", default="{}")
    arguments = parser.parse_args()
    if arguments.ca:
        shown = grpc.ssl_channel_credentials(arguments.ca, arguments.key, arguments.certificate)
        channel = grpc.secure_channel(arguments.target, shown)
    else:
        channel = grpc.insecure_channel(arguments.target)
    server = Server(channel)
    try:
        if not arguments.method:
            print("\n".join(server.methods()))
            return
        answers = iter(server.call(arguments.method, arguments.request))
        for _ in range(arguments.answers):
            print(json.dumps(json_format.MessageToDict(next(answers))))
    except grpc.RpcError as error:
        print(error.code().name, error.details(), *details_of(error))
        sys.exit(3)


main()
