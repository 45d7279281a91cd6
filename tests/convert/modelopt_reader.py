"""Decodes an export with NVIDIA ModelOpt's own classes: `python modelopt_reader.py EXPORT OUT.npz`, float32 values."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from modelopt.torch.quantization.qtensor import MXFP8QTensor, NVFP4QTensor
from safetensors.torch import load_file

folder = Path(sys.argv[1])
algorithm = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]["quant_algo"]
tensors = {}
for file in folder.glob("*.safetensors"):
    tensors.update(load_file(file))

values = {}
for name in [name for name in tensors if f"{name}_scale" in tensors]:
    codes, scale = tensors[name], tensors[f"{name}_scale"]
    if algorithm == "MXFP8":
        weight = MXFP8QTensor(codes.shape, torch.float32, codes)
        values[name] = weight.dequantize(torch.float32, scale=scale)
    else:
        weight = NVFP4QTensor((codes.shape[0], 2 * codes.shape[1]), torch.float32, codes)
        scale_2 = tensors[f"{name}_scale_2"]
        values[name] = weight.dequantize(torch.float32, scale=scale, double_scale=scale_2, block_sizes={-1: 16})
np.savez(sys.argv[2], **{name: value.numpy() for name, value in values.items()})
