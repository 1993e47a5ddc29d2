"""Messages between the processes of a mesh as a release writes them, and the descriptors by which it reads others'.

``python -m tests.sluice.wire.recorded`` records those of this tree: once with every release, for the next one to be
tested against. Every field of every message is set, to a value that follows from its name and number.
"""

import base64
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message import Message

FILE: Final = Path(__file__).with_name("recorded.json")
PACKAGE: Final = "sluice.internal.v1"
DEPTH: Final = 3
_ROOT: Final = Path(__file__).parents[3]


def kinds() -> dict[str, type[Message]]:
    """All internal messages of this tree, by their full name."""
    found: dict[str, type[Message]] = {}
    for path in sorted((_ROOT / "sluice/internal/v1").glob("*_pb2.py")):
        file = importlib.import_module(f"{PACKAGE}.{path.stem}").DESCRIPTOR
        for descriptor in file.message_types_by_name.values():
            found[descriptor.full_name] = message_factory.GetMessageClass(descriptor)
    return found


def samples(kind: type[Message]) -> Iterator[Message]:
    """One message for each member of its first oneof that has several; just one without."""
    oneofs = [one for one in kind.DESCRIPTOR.oneofs if len(one.fields) > 1]
    for variant in range(max((len(one.fields) for one in oneofs), default=1)):
        message = kind()
        _fill(message, variant, DEPTH)
        yield message


def _fill(message: Message, variant: int, depth: int) -> None:
    for field in sorted(message.DESCRIPTOR.fields, key=lambda field: field.number):
        if _chosen(field, variant):
            _set(message, field, depth)


def _chosen(field: FieldDescriptor, variant: int) -> bool:
    oneof = field.containing_oneof
    if oneof is None or len(oneof.fields) == 1:
        return True
    members = sorted(oneof.fields, key=lambda member: member.number)
    return members[min(variant, len(members) - 1)] is field


def _set(message: Message, field: FieldDescriptor, depth: int) -> None:
    here: Any = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _set_map(here, field.message_type, depth)
    elif field.message_type is not None:
        if depth:
            inner = here.add() if field.is_repeated else here
            inner.SetInParent()
            _fill(inner, 0, depth - 1)
    elif field.is_repeated:
        here.extend([_value(field)] * 2)
    else:
        setattr(message, field.name, _value(field))


def _set_map(here: Any, entry: Descriptor, depth: int) -> None:
    key, value = _value(entry.fields_by_name["key"]), entry.fields_by_name["value"]
    if value.message_type is None:
        here[key] = _value(value)
    elif depth:
        _fill(here[key], 0, depth - 1)


def _value(field: FieldDescriptor) -> Any:
    if field.enum_type is not None:
        return max(0, min((one.number for one in field.enum_type.values if one.number), default=0))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return field.name.encode()
    return {
        FieldDescriptor.CPPTYPE_STRING: field.name,
        FieldDescriptor.CPPTYPE_BOOL: True,
        FieldDescriptor.CPPTYPE_DOUBLE: 0.5,
        FieldDescriptor.CPPTYPE_FLOAT: 0.5,
    }.get(field.cpp_type, field.number)


def recorded() -> tuple[dict[str, list[bytes]], dict[str, type[Message]]]:
    """The messages of the recorded release by their full name, and the classes by which it reads them."""
    values = json.loads(FILE.read_text(encoding="ascii"))
    messages = {
        name: [base64.b64decode(one) for one in many] for name, many in values["messages"].items()
    }
    files = descriptor_pb2.FileDescriptorSet.FromString(base64.b64decode(values["descriptors"]))
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    find = pool.FindMessageTypeByName
    return messages, {name: message_factory.GetMessageClass(find(name)) for name in messages}


def main() -> None:
    """Records the messages of this tree."""
    files: dict[str, FileDescriptor] = {}
    messages = {}
    for name, kind in kinds().items():
        _collect(kind.DESCRIPTOR.file, files)
        messages[name] = [_text(one.SerializeToString(deterministic=True)) for one in samples(kind)]
    image = descriptor_pb2.FileDescriptorSet()
    for file in files.values():
        file.CopyToProto(image.file.add())
    values = {"messages": messages, "descriptors": _text(image.SerializeToString())}
    FILE.write_text(json.dumps(values, indent=1) + "\n", encoding="ascii")


def _collect(file: FileDescriptor, files: dict[str, FileDescriptor]) -> None:
    """Adds ``file`` behind those that it imports."""
    for one in file.dependencies:
        _collect(one, files)
    files.setdefault(file.name, file)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


if __name__ == "__main__":
    main()
