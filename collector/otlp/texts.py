"""Repair of protobuf bodies whose texts are not UTF-8: one text must not cost a request with the spans of many agents.

In: a body that protobuf refuses for a text. Out: the same with U+FFFD in place of what is no UTF-8. Invariant: nothing else of a body
changes, bytes such as token ids included; a body that is broken otherwise stays refused.

Senders that cut texts leave such bytes (JavaScript's halves of surrogate pairs, C++ texts in other encodings), and a Collector passes them
on. A body is read once more, by a copy of the schema in which texts are bytes, only after it was refused.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.message import Message


def with_utf8_texts(message: type[Message], body: bytes) -> bytes:
    """Return a body with all its texts in UTF-8.

    Raises:
        DecodeError: it is no such message, whatever its texts.
    """
    read = _with_bytes(message).FromString(body)
    _repair(read)
    return read.SerializeToString()


def _repair(message: Message) -> None:
    known = descriptor_pool.Default()
    for field, value in message.ListFields():
        if field.message_type:
            for each in (value,) if isinstance(value, Message) else value:
                _repair(each)
        elif known.FindFieldByName(field.full_name).type != FieldDescriptor.TYPE_STRING:
            continue
        elif isinstance(value, bytes):
            setattr(message, field.name, _utf8(value))
        else:
            value[:] = map(_utf8, value)


def _utf8(text: bytes) -> bytes:
    return text.decode("utf-8", "replace").encode()


@cache
def _with_bytes(message: type[Message]) -> type[Message]:
    """Return the class of the same message whose texts are bytes."""
    pool = descriptor_pool.DescriptorPool()
    _add(pool, message.DESCRIPTOR.file, set())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(message.DESCRIPTOR.full_name))


def _add(pool: Any, file: Any, added: set[str]) -> None:
    """Add a copy of a file's schema to a pool, after those that it needs."""
    for dependency in file.dependencies:
        if dependency.name not in added:
            _add(pool, dependency, added)
    added.add(file.name)
    copy = FileDescriptorProto()
    file.CopyToProto(copy)
    for message in copy.message_type:
        _turn_texts_into_bytes(message)
    pool.Add(copy)


def _turn_texts_into_bytes(message: DescriptorProto) -> None:
    for field in message.field:
        if field.type == FieldDescriptorProto.TYPE_STRING:
            field.type = FieldDescriptorProto.TYPE_BYTES
    for nested in message.nested_type:
        _turn_texts_into_bytes(nested)
