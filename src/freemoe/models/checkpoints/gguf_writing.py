"""Write a model as a GGUF file, by the package gguf.

Where the base was a GGUF file, its key-values, tokenizer, tensor names and their order are copied from it, and the
tensors' values are the model's. Each is compared with the one that it replaces: but for the weights that are switched off
they must be the same, so that a convention of llama.cpp's that is not known here is found, not guessed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freemoe.core.errors import DataError, NumericError
from freemoe.models.checkpoints.gguf_header import require_package

FILE_TYPES = ("f32", "f16", "q8_0")
"""What the matrices can be stored as; vectors stay in fp32."""

_FILE_TYPE_NUMBERS = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0"}
# The writer puts these three in itself.
_OWN_KEYS = ("general.architecture", "general.file_type", "general.quantization_version")
# Block of q8_0: one scale for so many weights of a row.
_BLOCK = 32


def require_file_type(file_type: str) -> None:
    """Say early that there is no such file type.

    Raises:
        DataError: It is none of ``FILE_TYPES``.
    """
    if file_type not in FILE_TYPES:
        raise DataError(f"The GGUF file type is {file_type!r}; allowed: {', '.join(FILE_TYPES)}.")


def write_gguf(model: Any, path: Path, file_type: str, like: Path) -> None:
    """Write a model that was read from a GGUF file as another one.

    Zeros stay exact zeros in all three types. A matrix whose rows are no multiple of 32 long is stored in f16 where q8_0
    was asked for, as llama.cpp does.

    Raises:
        DataError: The file type is unknown, or the base's tensors are laid out in a way that cannot be written.
        NumericError: A weight is too large for f16.
        OSError: The disk is full or refuses.
    """
    require_file_type(file_type)
    require_package(like)
    import gguf

    reader = gguf.GGUFReader(like)
    architecture = reader.fields["general.architecture"].contents()
    tensors = _GGUFTensors(model, architecture)
    tensors.require_in({t.name for t in reader.tensors})
    writer = gguf.GGUFWriter(path, architecture)
    try:
        _copy_values(writer, reader.fields, file_type)
        for old in reader.tensors:
            if old.name in tensors:
                shape = tuple(tensors.tensors[old.name].shape)
                _add_tensor_info(writer, old.name, shape, _stored_as(shape, file_type))
            else:
                writer.add_tensor_info(old.name, old.data.shape, old.data.dtype, old.data.nbytes, old.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for old in reader.tensors:
            if old.name not in tensors:
                writer.write_tensor_data(old.data)
                continue
            values, before = tensors.tensor_values(old.name), gguf.dequantize(old.data, old.tensor_type)
            seen = values.numpy()
            if seen.shape != before.shape or not ((seen == before) | (seen == 0)).all():
                raise _unknown_layout(architecture, old.name)
            writer.write_tensor_data(_quantize_tensor(values, _stored_as(tuple(values.shape), file_type), old.name))
    finally:
        writer.close()


class _GGUFTensors:
    """A model's tensors under their GGUF names, in llama.cpp's layout."""

    def __init__(self, model: Any, architecture: str) -> None:
        import gguf

        numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        if architecture not in numbers:
            raise DataError(f"The package gguf knows no architecture {architecture!r}; merge without --gguf.")
        self.config, self.architecture = model.config, architecture
        names = gguf.get_tensor_name_map(numbers[architecture], self.config.num_hidden_layers)
        self.tensors: dict[str, Tensor] = {}
        for key, value in model.state_dict().items():
            name = names.get_name(key, try_suffixes=(".weight", ".bias"))
            if name is None:
                raise _unknown_layout(architecture, key)
            if not (name == "output.weight" and self.config.tie_word_embeddings):
                self.tensors[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def require_in(self, names: set[str]) -> None:
        """Raise unless a file has a place for every tensor; one without values here is copied, if it is no weight."""
        for name in sorted(self.tensors.keys() ^ names):
            # Factors of the rotary embedding are computed from the config, and not part of the model's state.
            if not name.startswith("rope_"):
                raise _unknown_layout(self.architecture, name)

    def tensor_values(self, name: str) -> Tensor:
        """A tensor in fp32 on the CPU; a Llama's queries and keys with every rotary pair side by side."""
        values = self.tensors[name].detach().float().cpu()
        if self.architecture != "llama" or not (".attn_q." in name or ".attn_k." in name):
            return values
        heads = self.config.num_attention_heads if ".attn_q." in name else self.config.num_key_value_heads
        # Head, half, place -> head, place, half.
        return values.view(heads, 2, -1, *values.shape[1:]).transpose(1, 2).reshape(values.shape)


def _unknown_layout(architecture: str, tensor: str) -> DataError:
    return DataError(
        f"This model cannot be written as a GGUF of architecture {architecture!r}: {tensor!r} is laid out in a way that "
        "freemoe does not know. Merge without --gguf, and convert the folder with llama.cpp's convert_hf_to_gguf.py."
    )


def _copy_values(writer: Any, fields: dict[str, Any], file_type: str) -> None:
    """Metadata and tokenizer of the base; what is said of the storing is the new file's."""
    import gguf

    for key, field in fields.items():
        value = None if key.startswith("GGUF.") or key in _OWN_KEYS else field.contents()
        if value is None or value == []:
            continue
        array = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(key, value, field.types[0], sub_type=field.types[-1] if array else None)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPE_NUMBERS[file_type]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _stored_as(shape: tuple[int, ...], file_type: str) -> Any:
    """A tensor's type in the file."""
    from gguf import GGMLQuantizationType

    if len(shape) == 1:
        return GGMLQuantizationType.F32
    if file_type == "q8_0" and shape[-1] % _BLOCK:
        return GGMLQuantizationType.F16
    return GGMLQuantizationType[file_type.upper()]


def _add_tensor_info(writer: Any, name: str, shape: tuple[int, ...], stored: Any) -> None:
    """Put a tensor into the file's table; its values come later, one tensor at a time."""
    import numpy as np
    from gguf import GGMLQuantizationType, quant_shape_to_byte_shape

    kinds = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
    dtype = np.dtype(kinds.get(stored, np.uint8))
    held = shape if stored in kinds else quant_shape_to_byte_shape(shape, stored)
    writer.add_tensor_info(name, held, dtype, int(np.prod(held)) * dtype.itemsize, stored)


def _quantize_tensor(values: Tensor, stored: Any, name: str) -> Any:
    """A tensor's values as they are stored."""
    import gguf

    largest = torch.finfo(torch.float16).max
    if stored == gguf.GGMLQuantizationType.F16 and not bool((values.abs() <= largest).all()):
        raise NumericError(
            f"{name!r} holds {float(values.abs().max()):.3g}; f16 ends at {largest:.0f}. Write it with --gguf f32."
        )
    return gguf.quantize(values.contiguous().numpy(), stored)
