"""The number formats once more, from their published formulas: numpy float64 rounded to float32, and ml_dtypes.

Shares no code with the library, and does nothing the way it does there: products and quotients of float32 numbers are
formed in float64, where products are exact and quotients precise enough that rounding twice cannot matter; conversions
are those of ml_dtypes.
"""

import math

import ml_dtypes
import numpy as np

FLT_MAX = np.finfo(np.float32).max
E4M3, E5M2, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn
BFLOAT16 = ml_dtypes.bfloat16
NAN = {np.float32: 0x7FC00000, BFLOAT16: 0x7FC0, np.float16: 0x7E00}

# name: element, largest element, block
FORMATS = {
    "NVFP4": (E2M1, 6.0, (16, 16)),
    "NVFP4_1D": (E2M1, 6.0, (1, 16)),
    "MXFP8": (E4M3, 448.0, (1, 32)),
    "FP8_E4M3": (E4M3, 448.0, None),
    "FP8_E5M2": (E5M2, 57344.0, None),
}
SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]


def f32(x) -> np.ndarray:
    """Rounds float64 to float32, to nearest even."""
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(x, np.float64).astype(np.float32)


def times(a, b) -> np.ndarray:
    with np.errstate(invalid="ignore", over="ignore"):
        return f32(np.asarray(a, np.float64) * np.asarray(b, np.float64))


def over(a, b) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return f32(np.asarray(a, np.float64) / np.asarray(b, np.float64))


def amax(x) -> np.float32:
    """Largest finite magnitude."""
    wide = np.abs(np.asarray(x).astype(np.float32))
    return np.max(wide, where=np.isfinite(wide), initial=np.float32(0))


def tensor_scale(largest: float, whole: np.ndarray) -> np.ndarray:
    usable = (0 < whole) & (whole < np.inf)
    return np.where(usable, np.minimum(over(largest, whole), FLT_MAX), np.float32(1))


def to_grid(x: np.ndarray, element, largest: float) -> np.ndarray:
    """Saturating conversion of finite float32; the codes."""
    return np.clip(x, -largest, largest).astype(element).view(np.uint8)


def e8m0(value: np.ndarray) -> np.ndarray:
    """Biased exponents of positive numbers rounded up to powers of two, from 0 to 254."""
    mantissa, exponent = np.frexp(value.astype(np.float64))
    power = np.where(mantissa == 0.5, exponent - 1, exponent)
    return np.where(value == 0, 0, np.clip(power + 127, 0, 254)).astype(np.uint8)


def block_scales(name: str, a: np.ndarray, whole: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale bytes and multipliers of blocks with amax `a`."""
    if name.startswith("MXFP8"):
        scales = e8m0(times(a, np.float32(1 / FORMATS[name][1])))
        return scales, f32(2.0 ** (127.0 - scales))
    scale = tensor_scale(2688.0, whole)
    per_step = times(scale, np.array(0x3E2AAAAB, np.uint32).view(np.float32))
    stored = np.clip(np.minimum(times(a, per_step), FLT_MAX), 0, 448).astype(E4M3)
    return stored.view(np.uint8), np.minimum(over(1.0, times(stored, over(1.0, scale))), FLT_MAX)


def quantize_matrices(name: str, x: np.ndarray, whole: np.ndarray, octets=None) -> tuple[np.ndarray, np.ndarray | None]:
    """Row-wise copies of float32 matrices `(n, R, C)` with one amax each: one code an element, and scales."""
    element, largest, block = FORMATS[name]
    n, rows, cols = x.shape
    if block is None:
        bad = ~np.isfinite(x)
        codes = to_grid(times(np.where(bad, 0, x), tensor_scale(largest, whole)[:, None, None]), element, largest)
        return np.where(bad, np.uint8(0x7F), codes), None
    down, across = -(-rows // block[0]), -(-cols // block[1])

    def cut(array: np.ndarray) -> np.ndarray:
        padded = np.zeros((n, down * block[0], across * block[1]), array.dtype)
        padded[:, : array.shape[1], : array.shape[2]] = array
        return padded.reshape(n, down, block[0], across, block[1]).transpose(0, 1, 3, 2, 4)

    blocks = cut(x)
    bad = ~np.isfinite(blocks)
    poisoned = bad.any((3, 4))
    largest_of_block = np.where(bad, 0, np.abs(blocks)).max((3, 4), initial=0)
    scales, multiplier = block_scales(name, largest_of_block, whole[:, None, None])
    product = times(np.where(bad, 0, blocks), multiplier[..., None, None])
    if octets is None:
        codes = to_grid(product, element, largest)
    else:
        codes = to_grid(stochastic(np.abs(product), cut(octets)), element, largest)
        codes = codes | np.where(np.signbit(product), 8, 0)
    codes = np.where(poisoned[..., None, None], 0, codes).astype(np.uint8)
    scales = np.where(poisoned, 0xFF if name.startswith("MXFP8") else 0x7F, scales).astype(np.uint8)
    return codes.transpose(0, 1, 3, 2, 4).reshape(n, down * block[0], across * block[1])[:, :rows, :cols], scales


def stochastic(magnitude: np.ndarray, octets: np.ndarray) -> np.ndarray:
    m = np.minimum(magnitude, np.float32(6))
    step = np.where(m < 2, 0.5, np.where(m < 4, 1.0, 2.0))
    return f32(np.floor(f32(over(m, step).astype(np.float64) + (octets.astype(np.float64) + 0.5) / 256)) * step)


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 on Python integers."""
    (c0, c1, c2, c3), (k0, k1), mask = counter, key, 2**32 - 1
    for _ in range(10):
        p, q = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (q >> 32) ^ c1 ^ k0, q & mask, (p >> 32) ^ c3 ^ k1, p & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return [c0, c1, c2, c3]


def random_octets(matrices: int, rows: int, cols: int, key: list[int], copy: int) -> np.ndarray:
    """The bytes of every element, `(matrices, rows, cols rounded up to 16)`."""
    runs = -(-cols // 16)
    words = [philox([run, 0, copy, 0], key) for run in range(matrices * rows * runs)]
    return np.array(words, "<u4").reshape(-1).view(np.uint8).reshape(matrices, rows, runs * 16)


def hadamard(x: np.ndarray) -> np.ndarray:
    """Along the rows of a float32 matrix, one run and one stage at a time; bfloat16."""
    padded = np.zeros((-(-x.shape[0] // 16) * 16, x.shape[1]), np.float32)
    padded[: x.shape[0]] = x
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(padded), 16):
            run = padded[start : start + 16]
            run *= np.array(SIGNS, np.float32)[:, None]
            for stride in (1, 2, 4, 8):
                for i in range(16):
                    if not i & stride:
                        u, v = run[i].copy(), run[i + stride].copy()
                        run[i], run[i + stride] = u + v, u - v
            run *= np.float32(0.25)
        return padded.astype(BFLOAT16)


def nibbles(codes: np.ndarray) -> np.ndarray:
    """Two codes to a byte."""
    out = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // 2)), np.uint8)
    for col in range(codes.shape[-1]):
        out[..., col // 2] |= codes[..., col] << (4 * (col % 2))
    return out


def quantize(name: str, x: np.ndarray, whole, *, columns=False, use_hadamard=False, key=None):
    """Codes and scales of `(*lead, M, K)` as the library stores them; `whole` is one amax or one a leading index."""
    lead = x.shape[:-2]
    with np.errstate(invalid="ignore"):
        matrices = x.astype(np.float32).reshape(math.prod(lead), *x.shape[-2:])
    if use_hadamard:
        matrices = np.array([hadamard(m).astype(np.float32) for m in matrices])
    if columns:
        matrices = matrices.transpose(0, 2, 1)
    whole = np.asarray(whole, np.float32)
    wholes = np.broadcast_to(whole.reshape((*whole.shape, *[1] * (len(lead) - whole.ndim))), lead).reshape(-1)
    noise = None if key is None else random_octets(*matrices.shape, key, int(columns))
    codes, scales = quantize_matrices(name, matrices, wholes, noise)
    codes = nibbles(codes) if FORMATS[name][0] is E2M1 else codes
    made = []
    for array in (codes, scales):
        if array is not None and columns and name.startswith("MXFP8"):
            array = array.transpose(0, 2, 1)
        made.append(None if array is None else array.reshape(*lead, *array.shape[1:]))
    return tuple(made)


def dequantize(name: str, codes: np.ndarray, scales, whole: np.ndarray, shape, dtype, *, columns=False):
    """Matrices of logical `shape` in `dtype`, from a stack of codes and scales and one amax each; NaN canonical."""
    element, largest, block = FORMATS[name]
    rows, cols = reversed(shape) if columns else shape
    if columns and name.startswith("MXFP8"):
        codes, scales = codes.transpose(0, 2, 1), scales.transpose(0, 2, 1)
    if element is E2M1:
        spread = np.zeros((len(codes), rows, cols), np.uint8)
        for col in range(cols):
            spread[..., col] = codes[..., col // 2] >> (4 * (col % 2)) & 0xF
        codes = spread
    values = np.ascontiguousarray(codes).view(element).astype(np.float32)
    whole = whole[:, None, None]
    if block is None:
        factor = over(1.0, tensor_scale(largest, whole))
    else:
        if name.startswith("MXFP8"):
            factor = f32(np.where(scales == 255, np.nan, 2.0 ** (scales.astype(np.float64) - 127)))
        else:
            stored = np.ascontiguousarray(scales).view(E4M3).astype(np.float32)
            factor = times(times(stored, whole), np.float32(1 / 2688))
        factor = factor.repeat(block[0], 1).repeat(block[1], 2)[:, :rows, :cols]
    wide = times(values, factor)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        out = wide.astype(dtype)
    word = np.uint32 if dtype == np.float32 else np.uint16
    out = np.where(np.isnan(wide), np.array(NAN[dtype], word), out.view(word)).view(dtype)
    return out.transpose(0, 2, 1) if columns else out


def power_of_two_amax(amax: float, form) -> np.float32:
    """The next amax whose scale is a power of two, for matmuls."""
    return np.float32(2.0 ** np.ceil(np.log2(np.float64(amax) / form.largest)) * form.largest)


def rounded(x: np.ndarray, form, scaled_by=None, *, columns=False, transform=False, key=None) -> np.ndarray:
    """Values of a matrix in a format, in float64; the tensor's scale that of an amax, or the next power of two."""
    x = np.asarray(x, np.float32)
    seen = hadamard(x).astype(np.float32) if transform else x
    if scaled_by is None or not form.has_amax:
        scaled_by = power_of_two_amax(amax(seen), form) if form.has_amax else 0
    whole = np.float32(scaled_by)
    codes, scales = quantize(form.name, x[None], whole, columns=columns, use_hadamard=transform, key=key)
    found = dequantize(form.name, codes, scales, whole[None], seen.shape, np.float32, columns=columns)
    return found[0].astype(np.float64)


def pack(name: str, shards: list[np.ndarray], amaxes) -> bytes:
    """The buffer of one slice: matrices `(rows, cols)` already in wire orientation."""

    def section(array: np.ndarray) -> bytes:
        raw = array.tobytes()
        return raw + bytes(16 * math.ceil(len(raw) / 16) - len(raw))

    made = [quantize(name, x, a) for x, a in zip(shards, amaxes, strict=True)]
    return b"".join([section(c) for c, _ in made] + [section(s) for _, s in made if s is not None])


def quantize_blocked(x: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Codes of a matrix in E4M3 blocks, as TransformerEngine scales them, and the inverses of the scales, float32."""
    with np.errstate(invalid="ignore"):
        x = np.asarray(x).astype(np.float32)
    down, across = (-(-size // side) for size, side in zip(x.shape, block, strict=True))
    padded = np.zeros((down * block[0], across * block[1]), np.float32)
    padded[: x.shape[0], : x.shape[1]] = x
    blocks = padded.reshape(down, block[0], across, block[1]).transpose(0, 2, 1, 3)
    top = np.abs(blocks).max((2, 3))  # NaN if there is one
    usable = (0 < top) & (top < np.inf)
    scale = np.where(usable, np.minimum(over(448.0, top), FLT_MAX), np.float32(1))
    scale = (scale.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)  # the mantissa cleared
    bad = ~np.isfinite(blocks)
    codes = np.where(bad, 0x7F, to_grid(times(np.where(bad, 0, blocks), scale[..., None, None]), E4M3, 448.0))
    codes = codes.astype(np.uint8).transpose(0, 2, 1, 3).reshape(padded.shape)[: x.shape[0], : x.shape[1]]
    return codes, over(1.0, scale)


def dequantize_blocked(codes: np.ndarray, inverse: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Values in float64, where they are exact."""
    spread = inverse.astype(np.float64).repeat(block[0], 0).repeat(block[1], 1)[: codes.shape[0], : codes.shape[1]]
    return np.ascontiguousarray(codes).view(E4M3).astype(np.float64) * spread


def rounded_blocked(x: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Values of a matrix in E4M3 blocks, in float64."""
    return dequantize_blocked(*quantize_blocked(x, block), block)
