from typing import Any

ffi_version: tuple[int, int]
cuda_architectures: str
cuda_version: str

def handlers() -> dict[str, dict[str, Any]]: ...
def formats() -> list[dict[str, Any]]: ...
