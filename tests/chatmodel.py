"""Tiny models with a chat template."""

import gguf
import numpy as np
import tinymodels

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]\n{{ m.content }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]\n{% endif %}"
)


def write(folder, arch, template=TEMPLATE, seed=0):
    """The path of a model of an architecture, with a template."""
    reader = gguf.GGUFReader(tinymodels.write(folder / "base.gguf", arch, seed=seed))
    path = folder / f"{arch}.gguf"
    writer = gguf.GGUFWriter(path, arch)
    tinymodels._copy_metadata(writer, reader)
    writer.add_chat_template(template)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    tinymodels._finish(writer)
    return path
