"""The numbers by which GGUF names types of metadata values and of tensors (ggml.h, gguf.h)."""

from __future__ import annotations

STRING, ARRAY, BOOL = 8, 9, 7
# Value types of the metadata: id -> (name, struct code, numpy dtype).
SCALARS: dict[int, tuple[str, str, str]] = {
    0: ("u8", "<B", "u1"),
    1: ("i8", "<b", "i1"),
    2: ("u16", "<H", "<u2"),
    3: ("i16", "<h", "<i2"),
    4: ("u32", "<I", "<u4"),
    5: ("i32", "<i", "<i4"),
    6: ("f32", "<f", "<f4"),
    7: ("bool", "<B", "u1"),
    10: ("u64", "<Q", "<u8"),
    11: ("i64", "<q", "<i8"),
    12: ("f64", "<d", "<f8"),
}
# Tensor types we read: id -> (name, elements of a block, bytes of a block).
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
# Types that exist and that we refuse by name.
OTHER_TYPES: dict[int, str] = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16",
    26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8",
    34: "TQ1_0", 35: "TQ2_0", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 39: "MXFP4",
    40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
