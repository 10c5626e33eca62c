"""How tensors are handed to native functions."""

import ctypes

import torch

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def dtype_number(dtype: torch.dtype) -> ctypes.c_int32:
    """Return what native functions call an element type. Raises `KeyError` for one that they do not know."""
    return ctypes.c_int32(_DTYPES[dtype])


def address(tensor: torch.Tensor) -> ctypes.c_void_p:
    """Return where a tensor's first number is; the caller keeps the tensor and has checked dtype, shape and strides."""
    assert tensor.is_cpu, tensor.device
    return ctypes.c_void_p(tensor.data_ptr())


def count(number: int) -> ctypes.c_int64:
    """Return a size, stride or index as native functions take it."""
    return ctypes.c_int64(number)
