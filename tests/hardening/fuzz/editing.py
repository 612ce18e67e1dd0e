"""Edits of files as plain data, and making them: JSON by path, safetensors by header and by number, any file by byte."""

import json
import shutil
import struct

import torch

_TYPES = {f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)} | {"BF16": torch.bfloat16}
_TYPES |= {f"I{bits}": getattr(torch, f"int{bits}") for bits in (16, 32, 64)}
_TYPES |= {"U8": torch.uint8, "U16": torch.uint16}


def edited_copy(source, folder, edits):
    """A copy with edits made in their order; one that no longer finds its place does nothing.

    An edit has a ``file``, and one of: ``set`` (path) and ``to``; ``drop`` (path); ``header`` (tensor), ``field`` and ``to``, or
    without a field the tensor is dropped; ``tensor``, ``at`` and ``to`` (one number; all where ``at`` is None); ``cut`` (bytes
    left); ``put`` (byte number, text); ``remove``.
    """
    shutil.copytree(source, folder)
    for edit in edits:
        path = folder / edit["file"]
        if not path.is_file():
            continue
        if edit.get("remove"):
            path.unlink()
        elif "cut" in edit:
            path.write_bytes(path.read_bytes()[: edit["cut"]])
        elif "put" in edit:
            at, text = edit["put"]
            raw = path.read_bytes()
            at %= len(raw) + 1
            path.write_bytes(raw[:at] + text.encode("latin-1") + raw[at + len(text) :])
        elif "set" in edit or "drop" in edit:
            _edit_json(path, edit)
        else:
            _edit_tensors(path, edit)
    return folder


def _edit_json(path, edit):
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return
    where = edit["set"] if "set" in edit else edit["drop"]
    try:
        holder = holder_of(value, where)
        if "drop" in edit:
            del holder[where[-1]]
        else:
            holder[where[-1]] = edit["to"]
    except (KeyError, IndexError, TypeError):
        return
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def holder_of(value, path):
    """The list or mapping in plain data that holds the end of a path."""
    for part in path[:-1]:
        value = value[part]
    return value


def read_header(raw):
    """Header and data of a safetensors file, read by hand."""
    (size,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def read_plain(path):
    """The tensors of a sound safetensors file, read by hand."""
    header, data = read_header(path.read_bytes())
    found = {}
    for name, told in header.items():
        if name != "__metadata__":
            first, last = told["data_offsets"]
            kind = _TYPES[told["dtype"]]
            raw = bytearray(data[first:last])
            flat = torch.frombuffer(raw, dtype=kind) if raw else torch.empty(0, dtype=kind)
            found[name] = flat.reshape(told["shape"])
    return found


def _edit_tensors(path, edit):
    try:
        header, data = read_header(path.read_bytes())
        name = edit["header"] if "header" in edit else edit["tensor"]
        told = header[name]
        if "tensor" in edit:
            data = _with_number(told, data, edit["at"], edit["to"])
        elif edit["field"] == "name":
            header[edit["to"]] = header.pop(name)
        elif edit["field"] is None:
            del header[name]
            data = _packed(header, data)
        else:
            told[edit["field"]] = edit["to"]
    except (KeyError, ValueError, RuntimeError, TypeError, OverflowError, struct.error):
        return
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _with_number(told, data, at, value):
    first, last = told["data_offsets"]
    numbers = torch.frombuffer(bytearray(data[first:last]), dtype=_TYPES[told["dtype"]]).clone()
    numbers[slice(None) if at is None else at % len(numbers)] = value
    raw = numbers.view(torch.uint8).numpy().tobytes()
    return data[:first] + raw + data[last:]


def _packed(header, data):
    """The data of the tensors that are left, without holes, which safetensors refuses."""
    parts, at = [], 0
    for name in sorted((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"]):
        first, last = header[name]["data_offsets"]
        parts.append(data[first:last])
        header[name]["data_offsets"] = [at, at + last - first]
        at += last - first
    return b"".join(parts)


def places(value, before=()):
    """Every path into plain data, and what stands there."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, held in inner:
        yield (*before, key), held
        yield from places(held, (*before, key))
