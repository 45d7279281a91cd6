"""Opens arrays in orbax's files: zarr arrays in an OCDBT database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore as ts


class OwnArrays(ocp.type_handlers.TypeHandler):
    """An orbax handler of arrays that are not in memory as they are stored. It only writes."""

    def typestr(self) -> str:
        return "jax.Array"

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        raise NotImplementedError("arrays are described by the manifest")

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        raise NotImplementedError("arrays are restored as `jax.Array`, by orbax's own handler")


async def new_array(info: Any, shape: Sequence[int], chunks: Sequence[int], dtype: Any, *, database: str = "") -> Any:
    """Creates or opens an array in a database of this process; orbax merges those of all processes in the end.

    Args:
        info: orbax's description of the array.
        shape: the shape of the array.
        chunks: the shape of a chunk.
        dtype: the dtype of the elements.
        database: the end of the database's name.
    """
    await info.await_path_creation()
    path = f"{info.parent_dir}/ocdbt.process_{jax.process_index()}{database}/"
    metadata = {"shape": shape, "chunks": chunks, "compressor": {"id": "zstd", "level": 1}}
    spec = _spec({"driver": "file", "path": path}, info.name)
    spec |= {"metadata": metadata, "store_data_equal_to_fill_value": True}
    return await ts.open(spec, dtype=dtype, create=True, open=True, context=info.ts_context)


def stored_array(directory: Any, name: str) -> Any:
    """Opens an array to read it, given the directory of a step's arrays and the path of the array in the state."""
    where = str(directory)
    base = where.rstrip("/") + "/" if "://" in where else {"driver": "file", "path": where + "/"}
    # Chunks are not cached, because a reader that goes through an array needs each chunk once.
    return ts.open(_spec(base, name.replace("/", ".")), open=True, read=True).result()


def _spec(base: Any, name: str) -> dict[str, Any]:
    return {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
